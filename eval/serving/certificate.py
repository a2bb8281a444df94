"""The replay certificate: does an engine draft what our head drafts, token for token, over the very same prefixes?

Stronger than agreement of tau in the mean. The engine's texts and drafts are taken as they are; behind each prefix that
it drafted from, our head drafts too, led along the engine's own drafts, so that every (round, depth) is a comparison of
its own. Where they differ, the known faults (eval.serving.faults) are run in turn, and the one that drafts what the
engine drafted is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.measure import TIE
from eval.serving.engine import EngineRun
from eval.serving.faults import Reading, possible

MOST_TIES = 0.01  # of all drafts; more would say that the head's logits are flat
SAMPLE = 300  # comparisons that a cause is looked for in
NEAR = 0.5  # logits; drafts that differ at closer ones are explained by a coarser dtype
EXPLAINS = 0.9  # share of the engine's drafts that a fault must reproduce to be named


@dataclass(frozen=True)
class Pair:
    """One draft of an engine beside ours. depth: 1 is the first. gap: how much higher our best logit is than that of
    the engine's token; None when that token can't be drafted."""

    prompt: int
    round: int
    depth: int
    theirs: int
    ours: int
    gap: float | None

    @property
    def equal(self) -> bool:
        """The same token, chosen by a logit that is a number."""
        return self.theirs == self.ours and self.finite

    @property
    def finite(self) -> bool:
        """Whether the two logits are numbers; infinite ones and NaN have no distance."""
        return self.gap is not None and math.isfinite(self.gap)

    @property
    def tie(self) -> bool:
        """Another token, and as good a one to rounding."""
        return self.theirs != self.ours and self.finite and self.gap < TIE


@dataclass(frozen=True)
class Certificate:
    """compared: drafts. equal_by_depth: (equal, compared). ties: unequal ones whose logits differ by less than TIE.

    first: the first other draft that is no tie; cause: why they differ, None when they don't.
    """

    compared: int
    equal: int
    ties: int
    equal_by_depth: list[tuple[int, int]]
    first: Pair | None
    cause: str | None

    @property
    def holds(self) -> bool:
        """Every draft is equal, but for ties, which are rare where logits mean anything."""
        few = self.ties <= MOST_TIES * self.compared
        return self.compared > 0 and self.equal + self.ties == self.compared and few


def certify(verifier, head, prompts: Sequence[Sequence[int]], run: EngineRun) -> Certificate:
    """verifier: captures at least the head's layers, and one more on either side to name a layer fault."""
    pairs = [pair for pairs in compare(verifier, head, prompts, run, Reading()) for pair in pairs]
    depths = range(1, 1 + max((pair.depth for pair in pairs), default=0))
    by_depth = [[pair.equal for pair in pairs if pair.depth == depth] for depth in depths]
    other = [pair for pair in pairs if not pair.equal]
    real = [pair for pair in other if not pair.tie]
    return Certificate(
        len(pairs),
        len(pairs) - len(other),
        len(other) - len(real),
        [(sum(row), len(row)) for row in by_depth],
        real[0] if real else None,
        cause_of(verifier, head, prompts, run, real) if real else None,
    )


def cause_of(verifier, head, prompts, run: EngineRun, others: Sequence[Pair]) -> str:
    """The fault that drafts what the engine drafted; else rounding, where all gaps are small; else that none does."""
    shares = {}
    for name, reading in {"": Reading(), **possible(head, verifier.num_layers)}.items():
        if not set(reading.layers(head.config.aux_layers)) <= set(verifier.aux_layers):
            continue
        pairs: list[Pair] = []
        for some in compare(verifier, head, prompts, run, reading):
            pairs += some
            if len(pairs) >= SAMPLE:
                break
        shares[name] = sum(pair.equal for pair in pairs) / len(pairs)
    healthy = shares.pop("")
    best = max(shares, key=shares.get, default=None)
    if best is not None and shares[best] >= EXPLAINS and 1 - shares[best] <= (1 - healthy) / 2:
        return f"{best} ({shares[best]:.1%} of the engine's drafts come out so, {healthy:.1%} as trained)"
    if healthy >= EXPLAINS and all(pair.finite and pair.gap < NEAR for pair in others):
        return (
            f"rounding, if the engine computes in a coarser dtype: {healthy:.1%} are equal, the others' logits at most "
            f"{max(pair.gap for pair in others):.2g} apart"
        )
    return (
        f"none of {len(shares)} known faults drafts so (as trained: {healthy:.1%} equal; nearest: {best}, "
        f"{shares[best] if best else 0:.1%}): look at tensors that the engine did not load, its dtype, its verifier"
    )


@torch.no_grad()
def compare(verifier, head, prompts: Sequence[Sequence[int]], run: EngineRun, reading: Reading):
    """Yields for each prompt its list of Pair, rounds ascending."""
    place = [verifier.aux_layers.index(layer) for layer in reading.layers(head.config.aux_layers)]
    token_R = reading.tokens(head.vocab)
    column = {token: column for column, token in enumerate(token_R.tolist())}
    for index, (prompt, text, rounds) in enumerate(zip(prompts, run.texts, run.rounds, strict=True)):
        # A cut text ends before the last calls' drafts do; only prefixes count, and those are all there.
        ids, drafts = [*prompt, *text], [drafted for _, drafted in rounds]
        aux_1TAD = states_along(verifier, ids)[:, :, place]
        starts = [len(prompt) + emitted for emitted, _ in rounds]
        pairs = []
        for r, logits_KR in enumerate(logits_along(head, reading, aux_1TAD, ids, starts, drafts)):
            for depth, (logits_R, theirs) in enumerate(zip(logits_KR, drafts[r], strict=True), start=1):
                top = int(logits_R.argmax())
                gap = float(logits_R[top] - logits_R[column[theirs]]) if theirs in column else None
                pairs.append(Pair(index, r, depth, theirs, int(token_R[top]), gap))
        yield pairs


def states_along(verifier, ids: Sequence[int]) -> Tensor:
    """The captured states [1, T, A, D] of one sequence."""
    ids_1T = torch.tensor([list(ids)])
    return verifier.capture(ids_1T, torch.zeros_like(ids_1T), torch.arange(len(ids))[None]).aux_BTAD


def logits_along(
    head, reading: Reading, aux_1TAD: Tensor, ids: Sequence[int], starts: Sequence[int], drafts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Draft logits [K, R] behind each prefix of starts[r] tokens, ascending, led along the K tokens of drafts[r].

    A draft of -1 follows the head's own choice instead. One pass over all true rows gives every first draft. The others
    are made from the last prefix to the first: a cache that is cut back to a prefix still holds the true rows of all
    shorter ones.
    """
    if not starts:
        return []
    if head.config.kind == "medusa":  # reads the last processed row alone
        outs = [head.outputs(head.fuse(aux_1TAD[:, n - 2]), len(row)) for n, row in zip(starts, drafts, strict=True)]
        return [torch.cat([head.logits(out_1D) for out_1D in row]) for row in outs]
    read, rows, token_R = reading.of(head), max(starts) - 1, reading.tokens(head.vocab)
    cache = read.new_cache(1, rows + max(map(len, drafts)))
    token_1T = torch.tensor([list(ids)[reading.pairing : rows + reading.pairing]], device=aux_1TAD.device)
    out_1TD = read.step(token_1T, read.fuse(aux_1TAD[:, :rows]), cache)
    found = []
    for start, drafted in reversed(list(zip(starts, drafts, strict=True))):
        cache.truncate(start - 1)
        out_11D = out_1TD[:, start - 2 : start - 1]
        logits = [read.logits(out_11D)[0, 0]]
        for depth, token in enumerate(drafted[:-1], start=1):
            read.rotary.back = depth if reading.still else 0
            token = int(token_R[logits[-1].argmax()]) if token < 0 else token
            token_11 = torch.tensor([[token]], device=aux_1TAD.device)
            out_11D = read.step(token_11, read.feedback(out_11D), cache)
            logits.append(read.logits(out_11D)[0, 0])
        read.rotary.back = 0
        found.append(torch.stack(logits))
    return found[::-1]
