"""The speed model: expected tokens a verify call, speed-up, the best depth, break-even, trees and batches.

Leviathan et al. 2211.17192, section 3: every draft is accepted independently with probability alpha, a verify of
N+1 rows costs one decode step, and a draft step costs c of it. The general forms take a measured acceptance by depth
and measured times; the simple model is the general one with `Times.simple(c)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from scipy.optimize import brentq, isotonic_regression

from conf.errors import UserError


@dataclass(frozen=True)
class Times:
    """Seconds of a decode loop, or any other unit. verify_by_width: rows of a verify call -> seconds, one or more."""

    decode: float
    verify_by_width: dict[int, float]
    draft_first: float
    draft: float
    other: float

    @classmethod
    def simple(cls, c: float, by_width: dict[int, float] | None = None) -> Times:
        """In units of a verify of one row. c: a draft step. by_width: a verify's cost by rows; None: all the same.

        Raises UserError for a negative or missing number.
        """
        if not c >= 0:
            raise UserError(f"c, the cost of a draft step over a verify call, must be 0 or more, found {c}")
        by_width = {1: 1.0} if by_width is None else by_width
        good = isinstance(by_width, dict) and all(isinstance(rows, int) and rows > 0 for rows in by_width)
        good = good and all(isinstance(cost, int | float) and cost > 0 for cost in by_width.values())
        if not good or 1 not in by_width:
            raise UserError(
                f"expected widths, the cost of a verify call by its rows, one row among them: {{1:1,16:1.3}} (in "
                f"quotes), found {by_width}"
            )
        return cls(1.0, {rows: cost / by_width[1] for rows, cost in by_width.items()}, c, c, 0.0)

    @classmethod
    def of_record(cls, times: dict) -> Times:
        """From `times` of an alpha.json. Raises UserError where a time is missing that can't be zero."""
        by_width = {int(rows): seconds for rows, seconds in times["t_verify"].items()}
        if not times["t_decode"] > 0 or not by_width or not min(by_width.values()) > 0:
            raise UserError("expected times of a decoding step and of verify calls above zero: measure the run anew")
        return cls(times["t_decode"], by_width, times["t_draft_first"], times["t_draft"], times["t_other"])

    @property
    def widest(self) -> int:
        """The most rows whose cost is known rather than reckoned."""
        return max(self.verify_by_width)

    def verify(self, width: int) -> float:
        """Seconds of a verify of `width` rows: straight lines between the measured widths.

        Past the last, on from there with the slope of the line fitted to all, never downwards.
        """
        past = max(0, width - self.widest)
        return float(np.interp(width, *self._line)) + past * self._slope

    def round(self, depth: int, width: int | None = None) -> float:
        """Seconds of a round of `depth` draft steps and a verify of `width` rows, by default a chain's depth + 1."""
        verify = self.verify(depth + 1 if width is None else width)
        return verify + self.draft_first + (depth - 1) * self.draft + self.other

    @cached_property
    def _line(self) -> tuple[list[int], list[float]]:
        widths = sorted(self.verify_by_width)
        return widths, [self.verify_by_width[width] for width in widths]

    @cached_property
    def _slope(self) -> float:
        widths, seconds = self._line
        return max(0.0, float(np.polyfit(widths, seconds, 1)[0])) if len(widths) > 1 else 0.0


@dataclass(frozen=True)
class Outlook:
    """expected and speedup by depth 1, 2, ...; n_star is 0 where no depth is faster than plain decoding."""

    expected_by_n: list[float]
    speedup_by_n: list[float]

    @property
    def n_star(self) -> int:
        best = int(np.argmax(self.speedup_by_n))
        return best + 1 if self.speedup_by_n[best] > 1 else 0

    @property
    def speedup(self) -> float:
        return self.speedup_by_n[self.n_star - 1] if self.n_star else 1.0

    def to_dict(self) -> dict:
        return {
            "n_star": self.n_star,
            "speedup": self.speedup,
            "expected_by_n": {str(n): e for n, e in enumerate(self.expected_by_n, 1)},
            "speedup_by_n": {str(n): s for n, s in enumerate(self.speedup_by_n, 1)},
        }


def expected_tokens(profile: Sequence[float]) -> float:
    """E = 1 + sum over k of a_1 * ... * a_k: tokens a verify call emits, its own correction or bonus included.

    `profile`: a_k = P(draft k accepted | drafts before it accepted), k = 1..N. With a_k = alpha for all k this is
    (1 - alpha^(N+1)) / (1 - alpha). Of a tree: a_k = P(some node of level k accepted | one of level k-1 was).
    """
    return 1.0 + float(np.cumprod(np.asarray(profile, float)).sum())


def outlook(profile: Sequence[float], c: float) -> Outlook:
    """E and S = E / (1 + N c) for N = 1..len(profile). c: cost of a draft step over a verify call."""
    return measured_outlook(profile, Times.simple(c))


def measured_outlook(profile: Sequence[float], times: Times) -> Outlook:
    """From measured times: S = E t_decode / (t_verify(N+1) + t_draft_first + (N-1) t_draft + t_other)."""
    check_profile(profile)
    expected = (1 + np.cumprod(profile).cumsum()).tolist()
    return Outlook(expected, [e * times.decode / times.round(n) for n, e in enumerate(expected, 1)])


def check_profile(profile: Sequence[float], name: str = "acceptances") -> None:
    """Raises `UserError` unless there is at least one acceptance, each a probability."""
    if not len(profile) or any(not 0 <= a <= 1 for a in profile):
        raise UserError(f"{name} must be numbers from 0 to 1, at least one; found {sorted(set(profile))}")


def conditional(by_position: Sequence[float]) -> list[float]:
    """n-alpha from P(draft n accepted), as engines log it, which never rises. Raises UserError."""
    check_profile(by_position, "by_position")
    steps = list(pairwise([1.0, *by_position]))
    if any(later > earlier for earlier, later in steps):
        raise UserError(f"by_position is the share of calls that accept draft n: it never rises, found {by_position}")
    return [later / earlier if earlier else 0.0 for earlier, later in steps]


def equal_alpha(expected: float, depth: int) -> float | None:
    """The acceptance that, the same at every depth, gives `expected` tokens a call with `depth` drafts.

    None when even certain acceptance (depth + 1 tokens) gives less.
    """
    if expected <= 1 or math.isclose(expected, depth + 1):
        return 0.0 if expected <= 1 else 1.0
    return float(brentq(lambda a: expected_tokens([a] * depth) - expected, 0, 1)) if expected < depth + 1 else None


def break_even(depth: int, times: Times, width: int | None = None) -> float | None:
    """The acceptance, the same at every depth, from which drafting is faster than plain decoding; None: never.

    A round must emit as many tokens as plain decoding would in its time. In the simple model and at depth 1 this is c.
    """
    return equal_alpha(times.round(depth, width) / times.decode, depth)


@dataclass(frozen=True)
class Tree:
    """What a tree of a fixed shape is worth, by the hit rates of its levels. break_even: as `break_even`, for a hit."""

    nodes: int
    levels: int
    expected: float
    speedup: float
    break_even: float | None


def tree_outlook(children: Sequence[int], hits: Sequence[float], times: Times) -> Tree:
    """children: of each node, level by level, [2, 2, 2]. hits: a_k of `expected_tokens`, one a level.

    A level is one draft step, whatever its width; all nodes and the pending token are rows of one verify call.
    Raises UserError.
    """
    check_profile(hits, "hits")
    if not children or any(not isinstance(count, int) or count < 1 for count in children):
        raise UserError(f"expected a tree as children a level, e.g. shape=[2,2,2], found {list(children)}")
    if len(hits) != len(children):
        raise UserError(f"expected a hit rate for each of {len(children)} levels, found {len(hits)}: hits=[h1,h2,...]")
    nodes, levels, expected = int(np.cumprod(children).sum()), len(children), expected_tokens(hits)
    speedup = expected * times.decode / times.round(levels, nodes + 1)
    return Tree(nodes, levels, expected, speedup, break_even(levels, times, nodes + 1))


def batch_times(times: Times, batch: int, depth: int) -> Times:
    """Times of one sequence -> of a call for `batch` of them, with chains of up to `depth` drafts.

    Their verify costs what as many rows of one sequence do: weights are read once for all, and that each sequence has
    a cache of its own isn't counted. All the rest grows as a decode step does. A wider call is never taken to be
    cheaper: where it was measured so, both get their mean (isotonic regression).
    """
    if batch == 1:
        return times
    widths, seconds = times._line
    rising = replace(times, verify_by_width=dict(zip(widths, isotonic_regression(seconds).x.tolist(), strict=True)))
    verify = {rows: rising.verify(batch * rows) for rows in range(1, depth + 2)}
    grown = verify[1] / rising.verify(1)
    return Times(times.decode * grown, verify, times.draft_first * grown, times.draft * grown, times.other * grown)
