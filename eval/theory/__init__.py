"""What acceptance is worth: model.py is the arithmetic, command.py `python -m eval.theory`."""

from eval.theory.model import Outlook, Times, expected_tokens, measured_outlook, outlook

__all__ = ["Outlook", "Times", "expected_tokens", "measured_outlook", "outlook"]
