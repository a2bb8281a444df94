"""What is shown on a terminal is text: what a model or a file says is never taken for markup or control codes."""

from __future__ import annotations

import logging
import os
import sys

from rich.console import Console
from rich.text import Text

from conf.errors import printable

KEPT = "\n\t"


def say(text: str) -> None:
    """A line to standard output; that its reader has left (`| head -1`) is no mistake."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nobody_reads()


def nobody_reads() -> None:
    """Standard output leads nowhere from here on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class TextConsole(Console):
    """A rich console for words of others: brackets and :names: are shown as they are, control codes as escapes."""

    def __init__(self, **options):
        super().__init__(**({"markup": False, "emoji": False, "highlight": False} | options))

    def on_broken_pipe(self) -> None:
        """The work goes on: what is written does not hang on who watches."""
        nobody_reads()

    def render_str(self, text: str, **options) -> Text:
        return super().render_str(printable(text, KEPT), **options)


class LineFormatter(logging.Formatter):
    """The bare message, harmless."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), KEPT)
