"""From settings to a head: its kind and geometry, its draft vocabulary, and what it starts from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from conf.errors import UserError
from conf.schema import HeadConf, TrainConf
from data.documents import Document
from data.tokens import draft_vocab
from models import heads
from models.export.native import StoredHead, attach
from models.export.warm import read_any
from models.objectives import Objective
from models.verifier import Verifier
from models.vocab import DraftVocab

log = logging.getLogger(__name__)

SWITCHES = {
    "eagle1": ("survival",),
    "eagle3": ("fc_norm", "norm_output", "survival"),
    "medusa": ("heads", "blocks"),
    "independent": ("layers",),
}
STARTS = ("verifier", "random")


def build_head(
    cfg: TrainConf, verifier: Verifier, documents: Sequence[Document], checkpoint: Path | None = None
) -> nn.Module:
    """A head of the verifier's geometry, started from its layer and LM head, at random, or from a stored head.

    checkpoint: of the run that is resumed. It has what the folder of a stored head said, which may be gone by now.
    """
    if cfg.head.start not in STARTS:
        return trainable(resumed_head(checkpoint, cfg, verifier) if checkpoint else warm_head(cfg, verifier), cfg)
    vocab = vocabulary(cfg.head, verifier, documents)
    config = head_config(cfg, verifier, len(vocab))
    head = heads.build(config, verifier, vocab).to(verifier.device)
    layer = cfg.head.start_layer if cfg.head.start == "verifier" else None
    head.start(verifier, layer, cfg.head.start_lm_head == "verifier")
    return trainable(head, cfg)


def vocabulary(cfg: HeadConf, verifier: Verifier, documents: Sequence[Document]) -> DraftVocab:
    """The most frequent tokens of the training set; the whole vocabulary for a head that drafts with the verifier's."""
    if cfg.name == "eagle1":
        return DraftVocab.identity(verifier.vocab_size)
    vocab, covered = draft_vocab(documents, verifier.vocab_size, cfg.draft_vocab_size)
    log.info(f"draft vocabulary: {len(vocab):,} of {verifier.vocab_size:,} tokens, {covered:.2%} of the labels")
    return vocab


def head_config(cfg: TrainConf, verifier: Verifier, draft_vocab_size: int) -> heads.HeadConfig:
    """The head's own configuration, from the verifier's geometry and the settings that its kind has."""
    switches = {name: getattr(cfg.head, name) for name in SWITCHES[cfg.head.name] if name != "survival"}
    if "survival" in SWITCHES[cfg.head.name]:
        switches["survival"] = cfg.objective.survival > 0
    layers = () if cfg.head.name == "independent" else verifier.aux_layers
    kind, _ = heads.kind_of(cfg.head.name)
    return kind.from_verifier(verifier.head_geometry, layers, draft_vocab_size, **switches)


def warm_head(cfg: TrainConf, verifier: Verifier) -> nn.Module:
    """A stored head to go on from: its own switches and vocabulary stay. UserError when it is of another kind."""
    stored: StoredHead = read_any(Path(cfg.head.start), verifier)
    if stored.config.kind != cfg.head.name:
        raise UserError(
            f"expected an {cfg.head.name} head in {cfg.head.start}, found {stored.config.kind}: "
            f"set head={stored.config.kind}"
        )
    if stored.config.kind == "medusa" and stored.config.heads != cfg.head.heads:
        raise UserError(
            f"{cfg.head.start} has {stored.config.heads} Medusa heads: set head.heads={stored.config.heads}"
        )
    if cfg.objective.survival and not getattr(stored.config, "survival", False):
        raise UserError(f"{cfg.head.start} has no survival output: set objective.survival=0, or head.start=verifier")
    log.info(f"start from {cfg.head.start}: {stored.config.kind}, layers {list(stored.config.aux_layers)}")
    return attach(stored, verifier, torch.float32)


def resumed_head(checkpoint: Path, cfg: TrainConf, verifier: Verifier) -> nn.Module:
    """A head with the switches and vocabulary of a checkpoint's; its weights are loaded with the optimizer's state."""
    kept = torch.load(checkpoint, weights_only=True, map_location="cpu")["eyrie"]["head"]
    config = heads.config_from_dict(cfg.head.name, kept["config"])
    return heads.build(config, verifier, DraftVocab.from_d2t(kept["d2t"], config.vocab_size)).to(verifier.device)


def trainable(head: nn.Module, cfg: TrainConf) -> nn.Module:
    """In training mode, the LM head left as it starts where the settings say so."""
    if hasattr(head, "lm_head"):
        head.lm_head.requires_grad_(cfg.head.train_lm_head)
    if head.survival is not None:  # nothing teaches it without the objective, and ranks wait for every gradient
        head.survival.requires_grad_(cfg.objective.survival > 0)
    return head.train()


def draft_steps(cfg: HeadConf) -> int:
    """K, how many drafts are trained at each anchor."""
    return {"medusa": cfg.heads, "independent": 1}.get(cfg.name, cfg.ttt_steps)


def objective_of(cfg: TrainConf) -> Objective:
    """The training objective as the loss takes it."""
    asked = cfg.objective
    return Objective(
        steps=draft_steps(cfg.head),
        step_decay=asked.step_decay,
        token=asked.token,
        token_weight=asked.token_weight,
        feature_weight=asked.feature_weight,
        top_k_weight=asked.top_k_weight,
        top_k=asked.top_k,
        weights=asked.weights,
        survival_weight=asked.survival,
        noise=asked.noise,
        tokens=asked.tokens,
    )
