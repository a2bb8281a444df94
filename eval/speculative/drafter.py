"""What proposes tokens: one protocol, and the record of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from eval.speculative.acceptance import DraftLaw, Nodes
from models.tree import TreeRows


@dataclass(frozen=True)
class Features:
    """The verifier's states at rows of each sequence: captured layers [B, T, A, D] and post-norm last hidden [B, T, D].

    Rows past the number of a sequence's tokens are junk.
    """

    aux_BTAD: Tensor
    last_BTD: Tensor


@dataclass(frozen=True)
class Draft:
    """Candidates of one round for B sequences.

    tokens_BN:     [B, N] int64 on the verifier's device; N may be 0.
    parents_BN:    index of each node's parent, -1 for the root (the pending token), parents first.
    rows:          how a verify call sees them (`shapes.verify_rows`); None: each sequence's nodes are a chain.
    laws:          the laws that they were drawn from, None for point masses.
    live_BN:       which nodes are candidates; the others fill up a batch, or are there to be looked at. None: all.
    first_seconds: time of the pass over all new rows, which gives the first level.
    step_seconds:  mean time of each later level; None when there was none.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    rows: TreeRows | None = None
    laws: DraftLaw | None = None
    live_BN: Tensor | None = None
    first_seconds: float | None = None
    step_seconds: float | None = None

    @cached_property
    def nodes_B(self) -> list[Nodes]:
        """(parent, token) of each candidate of each sequence; this waits for the device, once."""
        B, N = self.tokens_BN.shape
        live_BN = self.tokens_BN.new_ones(B, N) if self.live_BN is None else self.live_BN.to(self.tokens_BN.dtype)
        parents_BN = self.parents_BN.to(self.tokens_BN.device).expand(B, N)
        lists = torch.stack([parents_BN, self.tokens_BN, live_BN]).tolist()
        return [
            [(parent, token) if live else None for parent, token, live in zip(*row, strict=True)]
            for row in zip(*lists, strict=True)
        ]


class Drafter(Protocol):
    """Proposes candidates for B sequences at once; `start` begins the next batch.

    name: what a record calls it. ids_R: the tokens that it can propose, None for all. nodes: the most that a draft
    holds. depth: its levels.
    """

    name: str
    ids_R: Tensor | None
    nodes: int
    depth: int

    def start(self, prompts: list[list[int]], pending: list[int], features: Features, capacity: int) -> None:
        """The verifier processed each prompt x_0..x_{n-1} (features: n rows) and emitted x_n = `pending`.

        No sequence will have more than `capacity` tokens, drafts apart.
        """

    def draft(self, uniform_BN: Tensor | None) -> Draft:
        """Candidates after the last emitted token. uniform_BN: `nodes` numbers in [0, 1), None: nothing is drawn."""

    def accepted(self, tokens: list[list[int]], features: Features, logits_BMV: Tensor) -> None:
        """tokens: of each sequence the accepted candidates, then the verifier's own.

        features: of the rows before each of them. logits_BMV: of the whole verify call, row 0 the pending token.
        """

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Sequence i becomes old sequence rows[i]; the others have ended."""


def pad(rows: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """Rows of token ids, [B, T]; shorter ones are filled up with 0, which stands for junk."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int64, device=device)
