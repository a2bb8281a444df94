"""How an engine may misread a head: each known fault as a way of computing drafts that can be run and compared.

The faults are those that users met (captured layers off by one, a map read as ids, ...); `READINGS` names them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.vocab import DraftVocab


@dataclass(frozen=True)
class Reading:
    """What an engine makes of a head; the defaults are what the head was trained with.

    shift: the captured layers are this many later.  backwards: they are joined in the reverse order.
    pairing: row i takes token x_{i + pairing}.  still: drafts stay at the position of the first.
    other_feedback: later drafts read the state after the final norm, or before it, and not the one in training.
    norm_first: the residual is the normed hidden state.  map: how draft ids become tokens: by adding d2t's "offsets",
    not at all ("none"), by taking its offsets for "ids", or its ids for offsets, which adds the draft id "twice".
    """

    shift: int = 0
    backwards: bool = False
    pairing: int = 1
    still: bool = False
    other_feedback: bool = False
    norm_first: bool = False
    map: str = "offsets"

    def layers(self, aux_layers: Sequence[int]) -> tuple[int, ...]:
        """The captured layers that this reading takes of a head with `aux_layers`."""
        layers = tuple(layer + self.shift for layer in aux_layers)
        return layers[::-1] if self.backwards else layers

    def tokens(self, vocab: DraftVocab) -> Tensor:
        """The token that each column of the draft logits becomes; one past the vocabulary's end stays at its end."""
        ids_R, column_R = vocab.ids_R, torch.arange(len(vocab))
        read = {"offsets": ids_R, "none": column_R, "ids": vocab.d2t, "twice": column_R + ids_R}
        return read[self.map].clamp_max(vocab.vocab_size - 1)

    def of(self, head: torch.nn.Module) -> torch.nn.Module:
        """An EAGLE head that computes as this reading does; weights are shared with `head`."""
        read = copy.copy(head)
        read.rotary = Standing(head.rotary)
        if self.other_feedback:
            # Functions, not modules: a module set here would join those of `head`, which are shared.
            read.feedback = (lambda out: out) if head.config.norm_output else (lambda out: head.norm(out))
        if self.norm_first:
            plain = head.project
            read.project = lambda part, hidden: replace(plain(part, hidden), residual=head.layer.hidden_norm(hidden))
        return read


class Standing:
    """Rotary positions of another Rotary, `back` positions earlier."""

    def __init__(self, rotary) -> None:
        self.rotary, self.back = rotary, 0

    def __call__(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.rotary(position - self.back, dtype)


# The name of each fault: what it is, and what to do about it.
READINGS: dict[str, Reading] = {
    "the captured layers are one too late: ids are read as a layer's output; lower them by one": Reading(shift=1),
    "the captured layers are one too early: ids are read as a layer's input; raise them by one": Reading(shift=-1),
    "the captured layers are joined in the reverse order": Reading(backwards=True),
    "d2t is not applied: draft ids are taken as tokens; is d2t in the file?": Reading(map="none"),
    "d2t's offsets are taken for token ids": Reading(map="ids"),
    "d2t holds token ids where the engine adds offsets": Reading(map="twice"),
    "each row takes its own token instead of the next one": Reading(pairing=0),
    "drafts stand at one position instead of advancing": Reading(still=True),
    "later drafts read the state on the other side of the final norm (norm_output)": Reading(other_feedback=True),
    "the residual is taken after the norm (norm_before_residual)": Reading(norm_first=True),
}


def possible(head: torch.nn.Module, num_layers: int) -> dict[str, Reading]:
    """The faults that can befall this head."""
    kind, layers = head.config.kind, head.config.aux_layers
    found = {}
    for name, reading in READINGS.items():
        inside = all(0 <= layer <= num_layers for layer in reading.layers(layers))
        if not inside or (reading.backwards and len(layers) < 2):
            continue
        if reading.map != "offsets" and head.vocab.is_identity:
            continue
        if kind == "medusa" and reading.shift == 0 and reading.map == "offsets":
            continue
        if kind == "eagle1" and (reading.other_feedback or reading.norm_first):
            continue
        found[name] = reading
    return found
