"""The draft vocabulary: the R most frequent target tokens, that a head's LM head can propose (2503.01840)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from conf.errors import UserError

# 8192 ids cover 99.24 % of SmolLM2's answer labels (V = 49,152), and a larger LM head would be most of a draft step.
# Published heads for Llama 3 (V = 128,256) take 32000. 65,536 parts the two kinds, so that verifiers of 32k tokens
# draft over a quarter of them and not over all.
DEFAULT_SIZE, DEFAULT_SIZE_LARGE, LARGE = 8192, 32000, 65536


def draft_vocab_size(wanted: int | None, vocab_size: int) -> int:
    """R: `wanted`, or 8192 for verifiers of up to 64k tokens and 32000 above, at most V. UserError for more or none."""
    if wanted is None:
        return min(DEFAULT_SIZE if vocab_size <= LARGE else DEFAULT_SIZE_LARGE, vocab_size)
    if not 1 <= wanted <= vocab_size:
        raise UserError(
            f"head.draft_vocab_size must lie in 1..{vocab_size}, the verifier's tokens, found {wanted}: leave it "
            "out for the usual size"
        )
    return wanted


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """A strictly ascending subset of the verifier's token ids; draft id i stands for target id `ids_R[i]`.

    ids_R: int64 target ids, ascending, on the CPU.  vocab_size: V, the verifier's.
    Raises UserError when ids are not ascending, repeated or outside 0..V-1, or when there are none.
    """

    ids_R: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.ids_R.detach().to("cpu", torch.int64)
        object.__setattr__(self, "ids_R", ids)
        if ids.dim() != 1 or not 1 <= len(ids) <= self.vocab_size:
            raise UserError(
                f"a draft vocabulary needs a list of 1 to {self.vocab_size} ids, found shape {tuple(ids.shape)}"
            )
        if not bool((ids[1:] > ids[:-1]).all()):
            raise UserError(
                "draft vocabulary ids must ascend without repeats; sort them, with the LM head's rows alike"
            )
        if int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
            raise UserError(
                f"draft vocabulary ids must lie in 0..{self.vocab_size - 1}, found {int(ids[0])}..{int(ids[-1])}: "
                "is the map absolute, or from another verifier?"
            )

    def __len__(self) -> int:
        return len(self.ids_R)

    @property
    def is_identity(self) -> bool:
        """R == V: draft ids are target ids, and exports leave the map out."""
        return len(self) == self.vocab_size

    @cached_property
    def d2t(self) -> Tensor:
        """int64 [R], the checkpoint's form: an offset, target id minus draft id."""
        return self.ids_R - torch.arange(len(self), device="cpu")

    @cached_property
    def t2d(self) -> Tensor:
        """bool [V]: is the target id in the draft vocabulary?"""
        return self.inverse_V >= 0

    @cached_property
    def inverse_V(self) -> Tensor:
        """int64 [V]: draft id of each target id, -1 outside the draft vocabulary."""
        inverse = torch.full((self.vocab_size,), -1, dtype=torch.int64, device="cpu")
        inverse[self.ids_R] = torch.arange(len(self), device="cpu")
        return inverse

    @cached_property
    def hash(self) -> str:
        """sha256 over V and the ids (little-endian int64): binds a head's checkpoint to its map."""
        header = self.vocab_size.to_bytes(8, "little")
        return hashlib.sha256(header + self.ids_R.numpy().astype("<i8").tobytes()).hexdigest()

    @classmethod
    def from_counts(cls, counts_V: Tensor, size: int) -> DraftVocab:
        """The `size` most frequent ids; ties go to the lower id, and unseen ids fill up from the lowest."""
        if not 1 <= size <= len(counts_V):
            raise UserError(f"draft_vocab_size must lie in 1..{len(counts_V)} (the verifier's), found {size}")
        order = torch.sort(counts_V.to("cpu"), descending=True, stable=True).indices
        return cls(order[:size].sort().values, len(counts_V))

    @classmethod
    def from_d2t(cls, d2t: Tensor, vocab_size: int) -> DraftVocab:
        """From a checkpoint's offsets. UserError when they don't give an ascending set of ids inside 0..V-1."""
        if d2t.dim() != 1:
            raise UserError(f"d2t must have one axis, found shape {tuple(d2t.shape)}")
        return cls(d2t.to("cpu", torch.int64) + torch.arange(len(d2t)), vocab_size)

    @classmethod
    def identity(cls, vocab_size: int) -> DraftVocab:
        """Every target id: R == V."""
        return cls(torch.arange(vocab_size), vocab_size)
