"""The one error type for mistakes a user can mend, and words of others made harmless for a terminal."""

import re

# What a terminal obeys, what ends a line, what turns its direction, and halves of characters that no file can hold.
CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LONGEST = 1200  # characters of a message; of a longer one, the middle is left out


def printable(text: str, keep: str = "") -> str:
    """`text` with every control character written as its escape, but for those in `keep`."""
    return CONTROL.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


class UserError(ValueError):
    """One line: what was expected, what was found, what to do. Commands print it and exit with 2."""

    def __init__(self, message: str):
        line = printable(re.sub(r"\s*[\r\n]\s*", " ", str(message)))
        if len(line) > LONGEST:
            line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
        super().__init__(line)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does, but with exit code 143."""
