"""What a simulation found: numbers beside their exact answers, tables, and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

SIGMAS = 4.0  # a simulated mean further off than this many standard errors contradicts the exact one


@dataclass(frozen=True)
class Check:
    """A simulated number and the exact one. error: the standard error of the first; 0: they must be equal."""

    what: str
    simulated: float
    exact: float
    error: float = 0.0

    @property
    def agrees(self) -> bool:
        return abs(self.simulated - self.exact) <= SIGMAS * self.error

    def to_dict(self) -> dict:
        return {
            "what": self.what,
            "simulated": float(self.simulated),
            "exact": float(self.exact),
            "error": float(self.error),
            "agrees": bool(self.agrees),
        }


@dataclass(frozen=True)
class Finding:
    """values: for simulate.json. shown: rich tables and lines. draw: writes the plot."""

    values: dict
    checks: list[Check]
    shown: list
    draw: Callable[[Path], Path]

    @property
    def agrees(self) -> bool:
        return bool(all(check.agrees for check in self.checks))

    def to_dict(self) -> dict:
        return self.values | {"checks": [check.to_dict() for check in self.checks], "agrees": self.agrees}


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], bold: int | None = None) -> Table:
    """All columns but the first to the right; row number `bold` stands out."""
    made = Table(title=title or None, title_justify="left")
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i else "left")
    for i, row in enumerate(rows):
        made.add_row(*row, style="bold" if i == bold else "")
    return made


def verdict(checks: Sequence[Check]) -> list:
    """A line for all that agree within their errors; each exact claim and each disagreement in a table."""
    random = [check for check in checks if check.error]
    agree = sum(check.agrees for check in random)
    off = max((abs(check.simulated - check.exact) / check.error for check in random), default=0.0)
    lines = [f"{agree} of {len(random)} simulated numbers agree with the exact ones; the furthest is off by {off:.1f} "
             "standard errors"] if random else []  # fmt: skip
    rows = [
        (check.what, f"{check.simulated:.6g}", f"{check.exact:.6g}", "yes" if check.agrees else "NO")
        for check in checks
        if not check.error or not check.agrees
    ]
    return [*lines, table("", ("", "found", "exact", "agree"), rows)] if rows else lines
