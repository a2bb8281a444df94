"""Which known fault would give the acceptance that a server shows: each is run over our own texts and counted.

A server tells counts, not drafts, so this is weaker than the replay certificate: faults that leave nothing accepted
look alike, and are named together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eval.counts import ratio
from eval.serving.certificate import logits_along, states_along
from eval.serving.faults import Reading, possible

MOST = 6  # texts that are replayed for each fault
CLOSE = 0.02  # of a position's acceptance, beside twice its standard error


def suspects(
    verifier, head, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], rates: Sequence[float | None]
) -> list[str]:
    """The faults under which drafts are accepted as often as `rates` says, by position; none where all are as trained,
    or where nothing was drafted, there or here.

    verifier: captures the head's layers and their neighbours.  texts: the verifier's greedy ones.
    """
    if None in rates:
        return []
    pairs = list(zip(prompts, texts, strict=True))[:MOST]
    states = [states_along(verifier, [*prompt, *text]) for prompt, text in pairs]

    def explains(reading: Reading) -> bool:
        expected, calls = acceptance(verifier, head, pairs, states, reading, len(rates))
        near = (abs(a - b) <= CLOSE + 2 * (b * (1 - b) / calls) ** 0.5 for a, b in zip(rates, expected, strict=True))
        return calls > 0 and all(near)

    if explains(Reading()):
        return []
    here = set(verifier.aux_layers)
    faults = possible(head, verifier.num_layers).items()
    return [name for name, fault in faults if set(fault.layers(head.config.aux_layers)) <= here and explains(fault)]


@torch.no_grad()
def acceptance(verifier, head, pairs, states, reading: Reading, depth: int) -> tuple[list[float], int]:
    """(P(draft n accepted) by position, verify calls) of greedy chains by a head that is read so."""
    place = [verifier.aux_layers.index(layer) for layer in reading.layers(head.config.aux_layers)]
    token_R = reading.tokens(head.vocab)
    hits, calls = [0] * depth, 0
    for (prompt, text), aux_1TAD in zip(pairs, states, strict=True):
        ids, n = [*prompt, *text], len(prompt)
        starts = list(range(n + 1, len(ids) - depth))  # prefixes with a whole draft's tokens behind them
        along = logits_along(head, reading, aux_1TAD[:, :, place], ids, starts, [[-1] * depth] * len(starts))
        drafts = {start: token_R[logits_KR.argmax(-1)].tolist() for start, logits_KR in zip(starts, along, strict=True)}
        at = n + 1
        while at in drafts:
            accepted = 0
            while accepted < depth and drafts[at][accepted] == ids[at + accepted]:
                hits[accepted] += 1
                accepted += 1
            at, calls = at + accepted + 1, calls + 1
    return [ratio(hit, calls) or 0.0 for hit in hits], calls
