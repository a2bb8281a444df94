"""Packed batches: whole documents in one row without pads, in an order that depends on seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from data.documents import Document, content_hash
from models.states import VerifierStates

OPEN_ROWS = 64  # rows that first-fit looks at; more would pack tighter by a per cent and cost time


class StateSource(Protocol):
    """Anything that gives the packed record of chosen documents: `data.store.StateStore` or `OnlineStates`."""

    documents: Sequence[Document]

    def states(self, indices: Sequence[int]) -> VerifierStates: ...


def packed_rows(documents: Sequence[Document]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(input_ids_BT, document_BT, position_BT, span_BT), int64, B = 1: the documents one after another, no pads."""
    ids, document, position, span, spans = [], [], [], [], 0
    for index, item in enumerate(documents):
        length = len(item.input_ids)
        ids += item.input_ids
        document += [index] * length
        position += range(length)
        own = [-1] * length
        for start, end in item.spans:
            own[start:end] = [spans] * (end - start)
            spans += 1
        span += own
    return tuple(torch.tensor([row], dtype=torch.int64) for row in (ids, document, position, span))


class OnlineStates:
    """States straight from the verifier, the same record as the store gives."""

    def __init__(self, verifier, documents: Sequence[Document]):
        self.verifier = verifier
        self.documents = list(documents)

    def states(self, indices: Sequence[int]) -> VerifierStates:
        return self.verifier.states(*packed_rows([self.documents[index] for index in indices]))


def pack(lengths: Sequence[int], tokens_per_step: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch as lists of document indices: each document that fits exactly once.

    First-fit over a shuffled order; a row is closed when it is the oldest of `OPEN_ROWS` open ones. A document longer
    than `tokens_per_step` is in no batch (PackedLoader counts them).
    """
    rng = np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), epoch]))
    closed: list[list[int]] = []
    rows: list[list[int]] = []
    room: list[int] = []
    for index in rng.permutation(len(lengths)).tolist():
        length = lengths[index]
        if length > tokens_per_step:
            continue
        place = next((row for row, free in enumerate(room) if free >= length), None)
        if place is None:
            if len(rows) == OPEN_ROWS:
                closed.append(rows.pop(0))
                room.pop(0)
            rows.append([])
            room.append(tokens_per_step)
            place = len(rows) - 1
        rows[place].append(index)
        room[place] -= length
    closed += rows
    # First-fit leaves the emptiest rows at the end: shuffle so that they come at any time.
    return [closed[row] for row in rng.permutation(len(closed)).tolist()]


def deal(labels: Sequence[int], world: int) -> list[tuple[int, ...]]:
    """Which batch each rank takes in each step of an epoch: `world` batches with about equal numbers of label rows.

    labels: label rows of each batch, in an order that is random already; that of the steps follows from it. One rank
    keeps the order. Where `world` does not divide the batches, the first are dealt again to fill up (at most
    world - 1 of them). Tokens need no look: rows are full. Without this, ranks waited for 3 to 19 % more label rows
    than they had (SmolLM2's answers, 2 to 8 ranks, 8192 to 1024 tokens a step).
    """
    filled = [i % len(labels) for i in range(-(-len(labels) // world) * world)]
    filled.sort(key=labels.__getitem__)
    return sorted((tuple(filled[i : i + world]) for i in range(0, len(filled), world)), key=min)


class PackedLoader:
    """Endless iterator over batches, epoch after epoch; resumes exactly.

    Every rank gets the same number of batches per epoch, and those of one step have about as many label rows (`deal`).

    The place is `epoch` and `step` (batches this rank has been given in the epoch). A loop that fetches ahead must keep
    the state dict that belongs to the last batch it has used, not one taken while another was in flight.

    dropped: documents longer than `tokens_per_step`.
    """

    def __init__(self, source: StateSource, tokens_per_step: int, seed: int = 0, rank: int = 0, world: int = 1):
        assert 0 <= rank < world
        self.source, self.tokens_per_step, self.seed, self.rank, self.world = source, tokens_per_step, seed, rank, world
        self.lengths = [len(document.input_ids) for document in source.documents]
        self.dropped = sum(length > tokens_per_step for length in self.lengths)
        if self.dropped == len(self.lengths):
            shortest = min(self.lengths, default=0)
            raise UserError(
                f"expected documents of at most trainer.tokens_per_step={tokens_per_step} tokens, found none "
                f"among {len(self.lengths)} (shortest {shortest}); raise it, or lower data.max_length"
            )
        self.data_hash = content_hash(source.documents)
        self.epoch = self.step = 0
        self._plan: tuple[int, list[list[int]]] = (-1, [])

    def plan(self, epoch: int) -> list[list[int]]:
        """This rank's batches of an epoch, as document indices."""
        if self._plan[0] != epoch:
            batches = pack(self.lengths, self.tokens_per_step, self.seed, epoch)
            labels = [sum(self.source.documents[index].labels for index in batch) for batch in batches]
            self._plan = (epoch, [batches[step[self.rank]] for step in deal(labels, self.world)])
        return self._plan[1]

    def __iter__(self) -> Iterator[VerifierStates]:
        while True:
            batch = self.plan(self.epoch)[self.step]
            self.step += 1
            if self.step == len(self.plan(self.epoch)):
                self.epoch, self.step = self.epoch + 1, 0
            yield self.source.states(batch)

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "step": self.step, **self._fingerprint()}

    def load_state_dict(self, state: dict) -> None:
        """Continue after the batch that was yielded last; UserError when data or layout differ from then."""
        for key, value in self._fingerprint().items():
            if (was := state.get(key)) != value:
                raise UserError(f"cannot resume the batch order: {key} was {was}, is now {value}; use the same")
        self.epoch, self.step = state["epoch"], state["step"]

    def _fingerprint(self) -> dict:
        return {
            "seed": self.seed,
            "tokens_per_step": self.tokens_per_step,
            "world": self.world,
            "data_hash": self.data_hash,
            **({"dealt": "by labels"} if self.world > 1 else {}),  # in turn, in checkpoints of earlier versions
        }
