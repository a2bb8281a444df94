"""How far a run has come, and the learning rate there: pure functions of steps and seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = 0.1  # of the job's minutes that training gets, however late it starts


@dataclass(frozen=True)
class Limits:
    """Where a run ends: after `steps` optimizer steps or `seconds` of training, whichever comes first."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        assert self.steps or self.seconds, "a run needs an end"

    def progress(self, steps: float, seconds: float) -> float:
        """0 at the start, 1 at the end: the larger of the two shares, so a clock ends where the cosine ends."""
        by_steps = steps / self.steps if self.steps else 0.0
        by_seconds = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_steps, by_seconds))

    def reached(self, steps: int, seconds: float) -> bool:
        return self.progress(steps, seconds) >= 1.0


def training_minutes(cap: float | None, whole: float | None, spent: float, reserve: float) -> float | None:
    """Minutes of training: `cap`, and no more than a job of `whole` minutes leaves after `spent` and `reserve`.

    A job that is late still trains for a tenth of `whole`: a head of a short training says more than an error.
    None when neither clock is set.
    """
    if whole is None:
        return cap
    left = max(whole - spent - reserve, LEAST * whole)
    return left if cap is None else min(cap, left)


def lr_scale(progress: float, warmup_ratio: float, final_ratio: float) -> float:
    """Linear warm-up over the first `warmup_ratio` of the run, then half a cosine from 1 to `final_ratio`."""
    if progress < warmup_ratio:
        return progress / warmup_ratio
    done = (progress - warmup_ratio) / (1 - warmup_ratio) if warmup_ratio < 1 else 1.0
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * done))
