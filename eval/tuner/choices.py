"""Chains and trees with what they are worth, and the best of them within limits."""

from __future__ import annotations

from dataclasses import dataclass

from eval.theory.model import equal_alpha, expected_tokens
from eval.tuner.costs import Costs
from eval.tuner.published import WIDER, WIDER_HIGH, Profile

LEVELS = range(2, 9)
NODES = (4, 6, 8, 12, 16, 24, 32, 48, 60)
MOST_CHILDREN = 10
WORTH = 1.02  # a tree is taken where it gains more than this on the chain


@dataclass(frozen=True)
class Choice:
    """depth: drafts of a chain, levels of a tree. nodes: drafts in all. rows: of a sequence in the verify call.

    expected: tokens a round. low, high: of the speed-up. seconds: of a round. even_tau: tokens a round from which it
    pays.
    """

    shape: str
    depth: int
    nodes: int
    branch: int
    expected: float
    speedup: float
    low: float
    high: float
    seconds: float
    even_tau: float
    origin: str = ""

    @property
    def rows(self) -> int:
        return self.nodes + 1

    @property
    def pays_from(self) -> float | None:
        """The acceptance, the same at every depth, from which it is faster than plain decoding; None: never."""
        return equal_alpha(self.even_tau, self.depth)


@dataclass(frozen=True)
class Limits:
    """The most rows of a sequence that memory holds, and the longest that a round may take, in seconds."""

    rows: int | None = None
    seconds: float | None = None

    def allow(self, choice: Choice) -> bool:
        return (self.rows is None or choice.rows <= self.rows) and (
            self.seconds is None or choice.seconds <= self.seconds
        )


def chain(profile: Profile, costs: Costs, depth: int) -> Choice:
    return _choice("chain", depth, depth, 1, costs, *(a[:depth] for a in (profile.point, profile.low, profile.high)))


def chains(profile: Profile, costs: Costs) -> list[Choice]:
    """Of every depth that the profile knows."""
    return [chain(profile, costs, depth) for depth in range(1, len(profile.point) + 1)]


def tree(profile: Profile, costs: Costs, levels: int, nodes: int) -> Choice:
    """A dynamic tree, whose levels are hit as `published.WIDER` says; the low end gains nothing by its width."""
    width = nodes / levels
    hits = (
        [1 - (1 - a) * width**-wider for a in values[:levels]]
        for values, wider in ((profile.point, WIDER), (profile.low, 0.0), (profile.high, WIDER_HIGH))
    )
    branch = min(MOST_CHILDREN, max(2, -(-nodes // levels)))
    return _choice("tree", levels, nodes, branch, costs, *hits)


def trees(profile: Profile, costs: Costs) -> list[Choice]:
    deepest = len(profile.point)
    return [
        tree(profile, costs, levels, nodes)
        for levels in LEVELS
        if levels <= deepest
        for nodes in NODES
        if levels < nodes <= MOST_CHILDREN * levels
    ]


def measured_tree(profile: Profile, costs: Costs, nodes: int) -> Choice:
    """A tree whose levels' hit rates were measured."""
    levels = len(profile.point)
    branch = min(MOST_CHILDREN, max(2, -(-nodes // levels)))
    return _choice("tree", levels, nodes, branch, costs, profile.point, profile.low, profile.high, "measured")


def best(choices: list[Choice], limits: Limits = Limits()) -> Choice | None:
    """The fastest that is allowed, the smaller one of equals; None where none is."""
    return max((c for c in choices if limits.allow(c)), key=lambda c: (c.speedup, -c.rows), default=None)


def around(choices: list[Choice], depth: int) -> list[Choice]:
    """Three depths with `depth` in their middle, or as near to it as there are."""
    first = max(0, min(depth - 2, len(choices) - 3))
    return choices[first : first + 3]


def _choice(shape, depth, nodes, branch, costs: Costs, point, low, high, origin="") -> Choice:
    rows = nodes + 1
    expected = expected_tokens(point)
    return Choice(
        shape, depth, nodes, branch, expected,
        speedup=costs.speedup(expected, depth, rows),
        low=costs.speedup(expected_tokens(low), depth, rows, 1),
        high=costs.speedup(expected_tokens(high), depth, rows, -1),
        seconds=costs.round(depth, rows),
        even_tau=costs.round(depth, rows) / costs.times.decode,
        origin=origin or ("assumption" if shape == "tree" else ""),
    )  # fmt: skip
