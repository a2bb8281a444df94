"""Medusa (2401.10774): heads that each predict one position further, all from the verifier's last hidden state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import UserError
from models.heads.config import HeadConfig
from models.heads.start import check_vocab, copy_rows
from models.states import VerifierStates
from models.vocab import DraftVocab


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadConfig):
    """heads: how many tokens are drafted at once.  blocks: residual blocks in each. aux_layers is (L,)."""

    kind: ClassVar[str] = "medusa"

    heads: int = 5
    blocks: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.aux_layers) != 1:
            raise UserError(
                f"Medusa heads read the last hidden state alone, found layers {list(self.aux_layers)}: "
                "leave verifier.aux_layers unset"
            )
        if self.heads < 1 or self.blocks < 1:
            raise UserError(f"expected 1 or more heads and blocks, found {self.heads} and {self.blocks}")


class Block(nn.Module):
    """x + SiLU(Wx + b); W and b start at zero, so that an untrained head is the verifier's own output."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """Head k reads the post-norm last hidden state at t and drafts x_{t+2+k}, not knowing the drafts before it.

    Trainable: the blocks, and unless frozen the LM head over R draft tokens that all of them share.

    Raises UserError when sizes don't agree with the config.
    """

    softcap: float | None = None
    survival = None

    def __init__(self, config: MedusaConfig, vocab: DraftVocab) -> None:
        super().__init__()
        check_vocab(config, vocab)
        self.config, self.vocab = config, vocab
        D = config.hidden_size
        self.register_buffer("inverse_V", vocab.inverse_V, persistent=False)
        heads = (nn.Sequential(*(Block(D) for _ in range(config.blocks))) for _ in range(config.heads))
        self.blocks = nn.ModuleList(heads)
        self.lm_head = nn.Linear(D, config.draft_vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    @classmethod
    def over(cls, config: MedusaConfig, verifier, vocab: DraftVocab) -> Self:
        """On a models.verifier.Verifier."""
        return cls(config, vocab)

    @property
    def lm_weight(self) -> Tensor:
        return self.lm_head.weight

    def fuse(self, aux: Tensor) -> Tensor:
        """The one captured state [.., 1, D] -> [.., D]."""
        return aux.squeeze(-2).to(self.lm_head.weight.dtype)

    def outputs(self, hidden: Tensor, steps: int) -> list[Tensor]:
        """Last hidden state [.., D] -> what the LM head reads for each of the first `steps` heads."""
        assert steps <= self.config.heads, f"{steps} drafts of {self.config.heads} heads"
        return [blocks(hidden) for blocks in self.blocks[:steps]]

    def unroll(self, states: VerifierStates, steps: int) -> Iterator[Tensor]:
        """Yields out_PD of heads 0..steps-1 at the anchors."""
        hidden_PD = self.fuse(states.aux_BTAD.flatten(0, 1)[states.layout.anchor_P])
        yield from self.outputs(hidden_PD, steps)

    def final(self, out: Tensor) -> Tensor:
        return out

    def logits(self, out: Tensor) -> Tensor:
        """[.., D] -> draft logits [.., R]."""
        return self.lm_head(out)

    @torch.no_grad()
    def start(self, verifier, layer: int | None, lm_head: bool) -> None:
        """The verifier's LM head rows; `layer` means nothing here."""
        if lm_head:
            copy_rows(self.lm_head.weight, verifier.lm_head_rows(self.vocab.ids_R))
