"""Packed batches: whole documents in one row without pads, in an order that depends on seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from data.corpus import Corpus
from data.documents import Document
from models.states import VerifierStates

BLOCK = 65536  # documents whose lengths are plain numbers at a time
SHOWN = 3  # changed files that are named
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
        self.documents = Corpus.of(documents)

    def states(self, indices: Sequence[int]) -> VerifierStates:
        return self.verifier.states(*packed_rows([self.documents[index] for index in indices]))


class Plan(Sequence[list[int]]):
    """Batches of document indices, eight bytes a document.

    order_N: the indices, batch after batch; edges: int64, where each begins, and the end; rows: which, in which order.
    """

    def __init__(self, order_N: np.ndarray, edges: np.ndarray, rows: np.ndarray):
        self.order_N, self.edges, self.rows = order_N, edges, rows

    def take(self, places: np.ndarray) -> Plan:
        """The batches at these places."""
        return Plan(self.order_N, self.edges, self.rows[places])

    def sums(self, counts_N: np.ndarray) -> np.ndarray:
        """int64, of each batch: the sum of its documents' counts."""
        return np.add.reduceat(counts_N[self.order_N], self.edges[:-1])[self.rows] if len(self) else self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place):
        row = self.rows[place]
        return self.order_N[self.edges[row] : self.edges[row + 1]].tolist()


def pack(lengths: Sequence[int] | np.ndarray, tokens_per_step: int, seed: int, epoch: int) -> Plan:
    """The batches of one epoch: each document that fits exactly once.

    First-fit over a shuffled order; a row is closed when it is the oldest of `OPEN_ROWS` open ones. A document longer
    than `tokens_per_step` is in no batch (PackedLoader counts them).
    """
    rng, lengths_N = np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), epoch])), np.asarray(lengths)
    order_N = rng.permutation(len(lengths_N))
    order_N = order_N[lengths_N[order_N] <= tokens_per_step]
    row_N = np.empty(len(order_N), dtype=np.int64)
    room: list[int] = []  # of the open rows, oldest first
    closed = 0
    for first in range(0, len(order_N), BLOCK):
        block: list[int] = []
        for length in lengths_N[order_N[first : first + BLOCK]].tolist():
            for place, free in enumerate(room):
                if free >= length:
                    room[place] = free - length
                    break
            else:
                if len(room) == OPEN_ROWS:
                    del room[0]
                    closed += 1
                place = len(room)
                room.append(tokens_per_step - length)
            block.append(closed + place)
        row_N[first : first + BLOCK] = block
    rows = closed + len(room)
    edges = np.concatenate(([0], np.cumsum(np.bincount(row_N, minlength=rows))))
    # First-fit leaves the emptiest rows at the end: shuffle so that they come at any time.
    return Plan(order_N[np.argsort(row_N, kind="stable")], edges, rng.permutation(rows))


def deal(labels: Sequence[int] | np.ndarray, world: int) -> np.ndarray:
    """int64 [steps, world]: which batch each rank takes in each step of an epoch; of one step, about equal label rows.

    labels: label rows of each batch, in an order that is random already; that of the steps follows from it. One rank
    keeps the order. Where `world` does not divide the batches, the first are dealt again to fill up (at most
    world - 1 of them). Tokens need no look: rows are full. Without this, ranks waited for 3 to 19 % more label rows
    than they had (SmolLM2's answers, 2 to 8 ranks, 8192 to 1024 tokens a step).
    """
    filled = np.arange(-(-len(labels) // world) * world) % len(labels)
    steps = filled[np.argsort(np.asarray(labels)[filled], kind="stable")].reshape(-1, world)
    return steps[np.argsort(steps.min(1), kind="stable")]


def require_same_documents(state: Mapping, documents: Corpus, files: Mapping[str, list[int]]) -> None:
    """UserError, naming what became of the files, when a PackedLoader's `state` is of other documents than these."""
    if state.get("data_hash") != documents.content_hash:
        raise UserError(
            f"cannot resume on other documents: {_changes(state.get('files') or {}, files)}; put back what the run was "
            "trained on, or begin a new one (head.start=RUN goes on from this one's head)"
        )


def _changes(before: Mapping[str, list[int]], now: Mapping[str, list[int]]) -> str:
    found = [f"{name} is not read any more" for name in before if name not in now]
    found += [f"{name} is new" for name in now if name not in before]
    for name in (name for name in now if name in before):
        (had, then), (has, since) = before[name], now[name]
        if had != has:
            found.append(f"{name} had {had:,} bytes, has {has:,}")
        elif then != since:
            found.append(f"{name} has changed")
    if not found:
        return "no file has changed, but a setting of data=, a dataset of the hub, or what the verifier wrote"
    return ", ".join(found[:SHOWN]) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")


class PackedLoader:
    """Endless iterator over batches, epoch after epoch; resumes exactly.

    Every rank gets the same number of batches per epoch, and those of one step have about as many label rows (`deal`).

    The place is `epoch` and `step` (batches this rank has been given in the epoch). A loop that fetches ahead must keep
    the state dict that belongs to the last batch it has used, not one taken while another was in flight.

    files: the bytes and the time of change of each file that the documents come from, for whoever resumes with others.
    dropped: documents longer than `tokens_per_step`.
    """

    def __init__(
        self,
        source: StateSource,
        tokens_per_step: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        files: Mapping[str, list[int]] | None = None,
    ):
        assert 0 <= rank < world
        self.source, self.tokens_per_step, self.seed, self.rank, self.world = source, tokens_per_step, seed, rank, world
        self.documents, self.files = Corpus.of(source.documents), dict(files or {})
        self.lengths = self.documents.lengths_N
        self.dropped = int((self.lengths > tokens_per_step).sum())
        if self.dropped == len(self.lengths):
            shortest = min(self.lengths.tolist(), default=0)
            raise UserError(
                f"expected documents of at most trainer.tokens_per_step={tokens_per_step} tokens, found none "
                f"among {len(self.lengths)} (shortest {shortest}); raise it, or lower data.max_length"
            )
        self.data_hash = self.documents.content_hash
        self.epoch = self.step = 0
        self._plan: tuple[int, Plan] | None = None

    def plan(self, epoch: int) -> Plan:
        """This rank's batches of an epoch, as document indices."""
        if self._plan is None or self._plan[0] != epoch:
            batches = pack(self.lengths, self.tokens_per_step, self.seed, epoch)
            steps = deal(batches.sums(self.documents.labels_N), self.world)
            self._plan = (epoch, batches.take(steps[:, self.rank]))
        return self._plan[1]

    def __iter__(self) -> Iterator[VerifierStates]:
        while True:
            batch = self.plan(self.epoch)[self.step]
            self.step += 1
            if self.step == len(self.plan(self.epoch)):
                self.epoch, self.step = self.epoch + 1, 0
            yield self.source.states(batch)

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "step": self.step, "files": self.files, **self._fingerprint()}

    def load_state_dict(self, state: dict) -> None:
        """Continue after the batch that was yielded last; UserError when data or layout differ from then."""
        require_same_documents(state, self.documents, self.files)
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
