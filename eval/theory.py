"""What acceptance is worth: expected tokens a verify call, speed-up, and the best depth.

    python -m eval.theory alpha=0.8 c=0.05
    python -m eval.theory profile=[0.7,0.6,0.55] c=0.05 json=true

The simple model (Leviathan et al. 2211.17192, section 3): every draft is accepted independently with
probability alpha, a verify of N+1 rows costs one decode step, and a draft step costs c of it. The general
forms take a measured acceptance by depth and measured times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conf.cli import Outcome, main
from conf.errors import UserError

DEEPEST = 64  # how far the best depth is looked for


@dataclass(frozen=True)
class Times:
    """Measured seconds of a decode loop. verify_by_width: rows of a verify call -> seconds, at least one entry."""

    decode: float
    verify_by_width: dict[int, float]
    draft_first: float
    draft: float
    other: float

    def verify(self, width: int) -> float:
        """Seconds of a verify of `width` rows; straight lines between the measured widths, flat past the last."""
        widths = sorted(self.verify_by_width)
        return float(np.interp(width, widths, [self.verify_by_width[w] for w in widths]))


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

    `profile`: a_k = P(draft k accepted | drafts before it accepted), k = 1..N. With a_k = alpha for all k
    this is (1 - alpha^(N+1)) / (1 - alpha).
    """
    return 1.0 + float(np.cumprod(np.asarray(profile, float)).sum())


def outlook(profile: Sequence[float], c: float) -> Outlook:
    """E and S = E / (1 + N c) for N = 1..len(profile). c: cost of a draft step over a verify call."""
    check_profile(profile)
    if not c >= 0:
        raise UserError(f"c, the cost of a draft step over a verify call, must be 0 or more, found {c}")
    expected = [expected_tokens(profile[:n]) for n in range(1, len(profile) + 1)]
    return Outlook(expected, [e / (1 + n * c) for n, e in enumerate(expected, 1)])


def measured_outlook(profile: Sequence[float], times: Times) -> Outlook:
    """As `outlook`, from measured times: S = E t_decode / (t_verify(N+1) + t_draft_first + (N-1) t_draft + t_other)."""
    check_profile(profile)
    expected = [expected_tokens(profile[:n]) for n in range(1, len(profile) + 1)]
    seconds = [
        times.verify(n + 1) + times.draft_first + (n - 1) * times.draft + times.other
        for n in range(1, len(profile) + 1)
    ]
    return Outlook(expected, [e * times.decode / s for e, s in zip(expected, seconds, strict=True)])


def check_profile(profile: Sequence[float]) -> None:
    """Raises `UserError` unless there is at least one acceptance, each a probability."""
    if not len(profile) or any(not 0 <= a <= 1 for a in profile):
        raise UserError(f"acceptances must be numbers from 0 to 1, at least one; found {sorted(set(profile))}")


def answer(alpha: float | None, profile: Sequence[float] | None, c: float, max_n: int = DEEPEST) -> Outlook:
    """The command's answer: from one alpha (depths to `max_n`) or from a profile (depths to its length)."""
    if (alpha is None) == (profile is None):
        raise UserError("give either alpha=A or profile=[a1,a2,...]: e.g. python -m eval.theory alpha=0.8 c=0.05")
    if max_n < 1:
        raise UserError(f"max_n must be 1 or more, found {max_n}")
    return outlook([alpha] * max_n if profile is None else list(profile), c)


def table(result: Outlook, c: float, rows: int = 16):
    """The answer as a rich table: depths up to `rows` and the best one, which is marked."""
    from rich.table import Table

    view = Table(title=f"draft step / verify: c = {c:g}")
    for name in ("N", "tokens per verify", "drafts accepted", "speed-up"):
        view.add_column(name, justify="right")
    for n, (e, s) in enumerate(zip(result.expected_by_n, result.speedup_by_n, strict=True), 1):
        if n <= rows or n == result.n_star:
            best = n == result.n_star
            view.add_row(str(n), f"{e:.4f}", f"{e - 1:.4f}", f"{s:.4f}" + (" *" if best else ""), style="bold" * best)
    return view


def run(cfg) -> Outcome:
    """The command: a table; with json=true one JSON object, and the table goes to standard error."""
    from rich.console import Console

    result = answer(cfg.alpha, cfg.profile, cfg.c, cfg.max_n)
    Console(stderr=cfg.json).print(table(result, cfg.c))
    return Outcome(values=result.to_dict() | {"c": cfg.c})


if __name__ == "__main__":
    main("theory")(run)()
