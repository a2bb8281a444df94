"""The one look of progress bars: on stderr, with rate and time left, silent where stderr is no terminal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

LOG_EVERY = 30.0  # seconds between log lines where there is no terminal for a bar


def progress_bar() -> Progress:
    """A rich Progress: a context manager; `add_task(label, total=.. or None, rate="")`, `update(task, rate=..)`."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


class Meter:
    """How a generation goes: a bar on a terminal, elsewhere a log line every LOG_EVERY seconds. A context manager,
    which may be entered again for the next part.

    total: finished requests to come, or what `more` counts to.
    more:  gives (completed, text) in place of the number of finished requests.
    """

    def __init__(self, label: str, total: int | None = None, more: Callable[[], tuple[float, str]] | None = None):
        self.label, self.total, self.more = label, total, more
        self.tokens, self.finished = 0, 0
        self.began = self.logged = time.monotonic()

    def __enter__(self) -> Meter:
        self.bar = progress_bar()
        self.bar.start()
        self.task = self.bar.add_task(self.label, total=self.total, rate="")
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def step(self, tokens: int, live: int, finished: int) -> None:
        """Count new tokens and finished requests; live: requests in the batch that made the tokens."""
        self.tokens += tokens
        self.finished += finished
        now = time.monotonic()
        if self.bar.disable and now - self.logged < LOG_EVERY:
            return
        rate = f"{self.tokens / max(now - self.began, 1e-9):,.0f} tokens/s, {live} live"
        completed, text = (self.finished, f"{self.finished:,} finished") if self.more is None else self.more()
        if self.bar.disable:
            self.logged = now
            log.info(f"{self.label}: {text}, {rate}")
        else:
            self.bar.update(self.task, completed=completed, rate=rate if self.more is None else f"{rate}, {text}")
