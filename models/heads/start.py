"""What every head begins with: sizes that fit, and weights at random or from the verifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conf.errors import UserError
from models.heads.config import HeadConfig
from models.vocab import DraftVocab


def check_embedding(config: HeadConfig, embedding_VD: Tensor) -> None:
    """UserError when the verifier's embedding is not of the config's sizes."""
    expected, found = (config.vocab_size, config.hidden_size), tuple(embedding_VD.shape)
    if found != expected:
        raise UserError(f"expected an embedding of shape {expected}, found {found}: is the head for another verifier?")


def check_vocab(config: HeadConfig, vocab: DraftVocab) -> None:
    """UserError when the map is not of the config's sizes."""
    if (len(vocab), vocab.vocab_size) != (config.draft_vocab_size, config.vocab_size):
        raise UserError(
            f"expected a draft vocabulary of {config.draft_vocab_size} of {config.vocab_size} ids, "
            f"found {len(vocab)} of {vocab.vocab_size}"
        )


def init_weights(module: nn.Module) -> None:
    """Normal weights of the usual width for every linear layer, zero biases, and a survival output of one half."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    if getattr(module, "survival", None) is not None:
        nn.init.zeros_(module.survival.weight)


@torch.no_grad()
def copy_rows(weight_RD: Tensor, rows_RD: Tensor) -> None:
    """The verifier's LM head rows into an LM head; UserError when the shapes differ."""
    if rows_RD.shape != weight_RD.shape:
        raise UserError(f"expected LM head rows of shape {tuple(weight_RD.shape)}, found {tuple(rows_RD.shape)}")
    weight_RD.copy_(rows_RD)
