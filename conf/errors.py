"""The one error type for mistakes a user can mend."""


class UserError(ValueError):
    """One line: what was expected, what was found, what to do. Commands print it and exit with 2."""
