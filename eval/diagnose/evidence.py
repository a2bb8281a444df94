"""What is known of every tested draft on the verifier's recorded text: what it was, and what it would have been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.replay import Recording, replay
from eval.speculative.drafter import Drafter, Features
from models.heads.eagle import EagleHead

ROWS = 256  # rows of full-vocabulary logits that exist at once


@dataclass(frozen=True)
class Checked:
    """One draft that the verifier compared with its own token; every draft before it in its call was accepted.

    position: of the token, in the answer. depth: from 1. token: the verifier's. drafted: the head's.
    proposable: the drafter could have proposed the token.
    with_true_features, with_template: whether the draft would have been right with the verifier's features in place of
    the head's own, or with the prompt in the head's template; None where that isn't asked (a first draft reads true
    features anyway).
    best: the probability of the verifier's likeliest token. of_drafted: that of the draft. entropy: in nats.
    context: ids of the tokens before, for people.
    """

    prompt: str
    category: str
    position: int
    depth: int
    token: int
    drafted: int
    proposable: bool
    with_true_features: bool | None
    with_template: bool | None
    best: float
    of_drafted: float
    entropy: float
    context: tuple[int, ...] = ()

    @property
    def hit(self) -> bool:
        return self.token == self.drafted


@dataclass(frozen=True)
class Calls:
    """The verify calls of one text: where in the answer each begins, and how many there are without a tested draft."""

    starts: list[int]
    undrafted: int


@torch.no_grad()
def examine(
    verifier,
    drafter: Drafter,
    head,
    recording: Recording,
    states: Features,
    temperature: float,
    other: tuple[Recording, Features] | None = None,
) -> tuple[list[Checked], Calls]:
    """The drafts of one recorded text, as the greedy loop makes them.

    head: None for what is no head. temperature: of the law by which `best` and `entropy` are told. other: the same
    text with the prompt in the head's template, and its states.
    """
    rounds, text = replay(drafter, recording, states).rounds, recording.tokens
    starts, at = [], 1
    for call in rounds:
        starts.append(at)
        at += len(call.emitted)
    places = [
        (call_index, start + k, k + 1)
        for call_index, (call, start) in enumerate(zip(rounds, starts, strict=True))
        for k in range(call.tested)
    ]
    if not places:
        return [], Calls(starts, len(rounds))
    position_N = [position for _, position, _ in places]
    drafted_N = [rounds[call].drafted[depth - 1] for call, _, depth in places]
    laws = law_of(verifier, recording, states, position_N, drafted_N, temperature)
    true_N = true_choices(head, recording, states, position_N) if isinstance(head, EagleHead) else None
    led = drafts_along(drafter, *other, starts) if other else None
    ids_R = None if drafter.ids_R is None else set(drafter.ids_R.tolist())
    before = [*recording.prompt.input_ids, *text]
    rows, found = len(recording.prompt.input_ids), []
    for n, (call, position, depth) in enumerate(places):
        token, start = text[position], starts[call]
        writable = before[: rows + start] if ids_R is None else ids_R  # without ids it copies
        found.append(
            Checked(
                prompt=recording.prompt.id,
                category=recording.prompt.category,
                position=position,
                depth=depth,
                token=token,
                drafted=drafted_N[n],
                proposable=token in writable,
                with_true_features=None if true_N is None or depth == 1 else true_N[n] == token,
                with_template=None if led is None else led[call][:depth] == list(text[start : position + 1]),
                best=laws[n][0],
                of_drafted=laws[n][1],
                entropy=laws[n][2],
                context=tuple(before[max(0, rows + position - 12) : rows + position]),
            )
        )
    return found, Calls(starts, sum(not call.tested for call in rounds))


def law_of(
    verifier,
    recording: Recording,
    states: Features,
    positions: Sequence[int],
    tokens: Sequence[int],
    temperature: float,
) -> list[tuple[float, float, float]]:
    """Of the verifier's law for each position of the answer: its largest probability, that of a token, its entropy."""
    row_N = torch.tensor(positions) + len(recording.prompt.input_ids) - 1
    token_N, found = torch.tensor(tokens), []
    for rows, wanted in zip(row_N.split(ROWS), token_N.split(ROWS), strict=True):
        hidden_ND = states.last_BTD[0, rows.to(states.last_BTD.device)]
        logp_NV = (verifier.logits(hidden_ND) / temperature).log_softmax(-1)
        p_NV = logp_NV.exp()
        entropy_N = -(p_NV * logp_NV.clamp_min(-1e4)).sum(-1)
        of_token_N = p_NV.gather(1, wanted.to(p_NV.device)[:, None]).squeeze(1)
        found += zip(p_NV.amax(-1).tolist(), of_token_N.tolist(), entropy_N.tolist(), strict=True)
    return found


def true_choices(head: EagleHead, recording: Recording, states: Features, positions: Sequence[int]) -> list[int]:
    """What the head drafts for each position of the answer when every row it reads has the verifier's features."""
    ids = torch.tensor([[*recording.prompt.input_ids, *recording.tokens]], device=states.aux_BTAD.device)
    cache = head.new_cache(1, ids.shape[1])
    out_TD = head.step(ids[:, 1:], head.fuse(states.aux_BTAD[:, :-1]), cache)[0]
    row_N = torch.tensor(positions, device=out_TD.device) + len(recording.prompt.input_ids) - 2  # row i drafts i + 2
    column_N = torch.cat([_best(head, part) for part in out_TD[row_N].split(ROWS)])
    return head.vocab.ids_R.to(column_N.device)[column_N].tolist()


def _best(head: EagleHead, out_ND: Tensor) -> Tensor:
    return head.logits(out_ND).argmax(-1)


def drafts_along(drafter: Drafter, recording: Recording, states: Features, starts: Sequence[int]) -> list[list[int]]:
    """The draft before each of these positions of the answer, when the loop is led from one to the next."""
    prompt, text, rows = list(recording.prompt.input_ids), list(recording.tokens), len(recording.prompt.input_ids)

    def between(start: int, stop: int) -> Features:
        return Features(states.aux_BTAD[:, start:stop], states.last_BTD[:, start:stop])

    drafter.start([prompt], text[:1], between(0, rows), rows + len(text))
    drafts = []
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        nodes = drafter.draft(None).nodes_B[0]
        drafts.append([node[1] for node in nodes if node is not None])
        if end is not None:
            done = rows + start - 1
            drafter.accepted([text[start:end]], between(done, done + end - start), None)
    return drafts
