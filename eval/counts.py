"""What a speculative run is counted by, and the statistics on those counts. Pooled, never averages of averages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from eval.speculative.loop import Round


@dataclass
class Counts:
    """Sums over verify calls; lists are by depth, depth 1 first.

    drafted counts proposed tokens (every node of a tree); the *_by_depth lists follow the accepted path: a
    depth is drafted when the call's draft reached it, tested when all before it was accepted as well and the path goes
    on, and accepted when it passed. A depth that a draft didn't reach is neither drafted nor a miss.
    """

    verify_calls: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    tested_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    def add(self, call: Round) -> None:
        """Counts one verify call; the prefill is no verify call."""
        assert not call.prefill and len(call.emitted) == call.accepted + 1
        assert call.accepted <= call.tested <= min(call.depth, call.accepted + 1), call
        self.verify_calls += 1
        self.drafted += len(call.drafted)
        self.accepted += call.accepted
        self.emitted += len(call.emitted)
        self._deepen(call.depth)
        for k in range(call.depth):
            self.drafted_by_depth[k] += 1
            self.tested_by_depth[k] += k < call.tested
            self.accepted_by_depth[k] += k < call.accepted

    def __iadd__(self, other: Counts) -> Counts:
        self.verify_calls += other.verify_calls
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.emitted += other.emitted
        self._deepen(len(other.drafted_by_depth))
        for name in ("drafted_by_depth", "tested_by_depth", "accepted_by_depth"):
            mine = getattr(self, name)
            for k, count in enumerate(getattr(other, name)):
                mine[k] += count
        return self

    def _deepen(self, depth: int) -> None:
        for counts in (self.drafted_by_depth, self.tested_by_depth, self.accepted_by_depth):
            counts.extend([0] * (depth - len(counts)))

    @property
    def tau(self) -> float | None:
        """Emitted tokens a verify call, the verifier's own included."""
        return 1 + self.accepted / self.verify_calls if self.verify_calls else None

    @property
    def tested(self) -> int:
        return sum(self.tested_by_depth)

    @property
    def alpha(self) -> float | None:
        """Accepted over tested drafts."""
        return ratio(self.accepted, self.tested)

    @property
    def alpha_by_depth(self) -> list[float | None]:
        """n-alpha: P(draft n accepted | drafts 1..n-1 accepted)."""
        return [ratio(a, t) for a, t in zip(self.accepted_by_depth, self.tested_by_depth, strict=True)]

    @property
    def accepted_by_position(self) -> list[float | None]:
        """P(draft n accepted), as the engines log it."""
        return [ratio(a, d) for a, d in zip(self.accepted_by_depth, self.drafted_by_depth, strict=True)]


def pool(counts: Iterable[Counts]) -> Counts:
    """The sum of all of them."""
    total = Counts()
    for part in counts:
        total += part
    return total


def ratio(part: float, whole: float) -> float | None:
    """part / whole, None where there was nothing to count."""
    return part / whole if whole else None


def wilson(hits: int, trials: int, z: float = 1.959964) -> list[float] | None:
    """Wilson's score interval of a proportion, 95 % by default; None without trials."""
    if not trials:
        return None
    share, spread = hits / trials, z * z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = z * np.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return [max(0.0, float(middle - half)), min(1.0, float(middle + half))]


def bootstrap_tau(counts: Sequence[Counts], resamples: int = 2000, seed: int = 0) -> list[float] | None:
    """95 % interval of tau when whole prompts are drawn anew, with replacement; None for fewer than two."""
    if len(counts) < 2 or not pool(counts).verify_calls:
        return None
    accepted = np.array([c.accepted for c in counts])
    calls = np.array([c.verify_calls for c in counts])
    rows = np.random.default_rng(seed).integers(len(counts), size=(resamples, len(counts)))
    total = calls[rows].sum(1)
    taus = 1 + accepted[rows].sum(1)[total > 0] / total[total > 0]
    return [float(x) for x in np.percentile(taus, [2.5, 97.5])]


def paired_bootstrap(
    ours: Sequence[Counts], base: Sequence[Counts], resamples: int = 2000, seed: int = 0
) -> list[float] | None:
    """95 % interval of tau(ours) - tau(base) on the same prompts, drawn anew together; None for fewer than two."""
    assert len(ours) == len(base), f"{len(ours)} and {len(base)} prompts are no pairs"
    if len(ours) < 2 or not pool(ours).verify_calls or not pool(base).verify_calls:
        return None
    rows = np.random.default_rng(seed).integers(len(ours), size=(resamples, len(ours)))
    differences = np.zeros(resamples)
    for sign, counts in ((1, ours), (-1, base)):
        accepted = np.array([c.accepted for c in counts])[rows].sum(1)
        calls = np.array([c.verify_calls for c in counts])[rows].sum(1)
        differences += sign * accepted / np.maximum(calls, 1)
    return [float(x) for x in np.percentile(differences, [2.5, 97.5])]


def repeated_tokens(tokens: Sequence[int], n: int = 8) -> int:
    """How many tokens lie in an n-gram that occurs more than once in this text."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    often = {gram for gram, count in Counter(grams).items() if count > 1}
    covered = {i + j for i, gram in enumerate(grams) if gram in often for j in range(n)}
    return len(covered)
