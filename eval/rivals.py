"""Rivals measured in turns: the only way to a ratio on a machine whose load changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from statistics import median
from typing import TypeVar

Result = TypeVar("Result")


def in_turns(
    rivals: dict[Hashable, Callable[[int], Result]], repeats: int, warm_up: bool = True
) -> dict[Hashable, list[Result]]:
    """What each rival returns in each round, after one round to warm up. They get the round's number."""
    results: dict[Hashable, list[Result]] = {name: [] for name in rivals}
    for turn in range(-1 if warm_up else 0, repeats):
        for name, run in rivals.items():
            result = run(max(turn, 0))
            if turn >= 0:
                results[name].append(result)
    return results


def against(rates: list[float], base: list[float]) -> float:
    """Median over the rounds of the ratio within each round: a round's load hits both."""
    return median(rate / other for rate, other in zip(rates, base, strict=True))
