"""The EAGLE-1 head (2401.15077): one decoder layer that regresses the verifier's next feature.

EAGLE-2 (2406.16858) is the same head with another draft tree. Parameter names are the published checkpoints' (`fc`,
`layers.0.*`), so that export is a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import UserError
from models.heads.eagle import EagleConfig, EagleHead, Layer, Projected
from models.heads.start import init_weights
from models.vocab import DraftVocab

START = "an EAGLE-1 layer has no input norm, so a verifier's layer is no start for it: use head.start=random"


@dataclass(frozen=True, kw_only=True)
class Eagle1Config(EagleConfig):
    """aux_layers is (L,): the feature is the verifier's last hidden state, after its final norm.

    fc_bias, attention_bias: some published heads have them.  final_logit_softcapping: the verifier's, None without.
    """

    kind: ClassVar[str] = "eagle1"

    fc_bias: bool = False
    attention_bias: bool = False
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.aux_layers) != 1:
            raise UserError(
                f"an EAGLE-1 head reads the last hidden state alone, found layers {list(self.aux_layers)}: "
                "leave verifier.aux_layers unset"
            )
        if self.draft_vocab_size != self.vocab_size:
            raise UserError(
                f"an EAGLE-1 head drafts with the verifier's LM head, so over all {self.vocab_size} ids, found "
                f"{self.draft_vocab_size}: leave head.draft_vocab_size unset"
            )


class Eagle1Head(EagleHead):
    """Trainable: fc over [embedding | feature] and the layer, which has no input norm. Embedding and LM head are not.

    The residual is fc's output, there is no final norm, and the output is both the regressed feature and what the
    LM head and the next step read.  lm_head_VD: the verifier's; shared like the embedding. See EagleHead.
    """

    def __init__(self, config: Eagle1Config, embedding_VD: Tensor, vocab: DraftVocab, lm_head_VD: Tensor) -> None:
        super().__init__(config, embedding_VD, vocab)
        if lm_head_VD.shape != embedding_VD.shape:
            raise UserError(
                f"expected an LM head of shape {tuple(embedding_VD.shape)}, found {tuple(lm_head_VD.shape)}: "
                "is it another verifier's?"
            )
        D = config.hidden_size
        self.softcap = config.final_logit_softcapping
        self.register_buffer("lm_head_VD", lm_head_VD.detach(), persistent=False)
        self.fc = nn.Linear(2 * D, D, bias=config.fc_bias)
        self.layers = nn.ModuleList([Layer(config, D, bias=config.attention_bias)])
        init_weights(self)

    @classmethod
    def over(cls, config: Eagle1Config, verifier, vocab: DraftVocab) -> Self:
        """On a models.verifier.Verifier; UserError for one whose logits are no plain product of its LM head."""
        scales = [getattr(verifier.config, name, None) or 1 for name in ("logit_scale", "logits_scaling")]
        if getattr(verifier.lm_head, "bias", None) is not None or scales != [1, 1]:
            raise UserError(
                f"expected an LM head without bias or scale, found one in {verifier.name}: an EAGLE-1 head drafts with "
                "the verifier's LM head and has nowhere to keep them; use head=eagle3"
            )
        return cls(config, verifier.embedding_VD, vocab, verifier.lm_head_rows())

    @property
    def layer(self) -> Layer:
        return self.layers[0]

    @property
    def lm_weight(self) -> Tensor:
        return self.lm_head_VD

    def fuse(self, aux: Tensor) -> Tensor:
        """The one captured state [.., 1, D] -> feature [.., D]."""
        return aux.squeeze(-2).to(self.fc.weight.dtype)

    def token_part(self, tokens: Tensor) -> Tensor:
        """The embedding half of fc."""
        embedded = self.embedding_VD[tokens].to(self.fc.weight.dtype)
        return F.linear(embedded, self.fc.weight[:, : self.config.hidden_size], self.fc.bias)

    def project(self, token_part: Tensor, hidden: Tensor) -> Projected:
        """The residual is fc's output."""
        x = self._fused(token_part, hidden)
        return Projected(x, *(self._heads(projection(x)) for projection in self.layer.self_attn.projections))

    def keys_values(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = self._fused(self.token_part(tokens), hidden)
        _, k, v = self.layer.self_attn.projections
        return self._heads(k(x)), self._heads(v(x))

    def _fused(self, token_part: Tensor, hidden: Tensor) -> Tensor:
        return token_part + F.linear(hidden, self.fc.weight[:, self.config.hidden_size :])

    def final(self, out: Tensor) -> Tensor:
        return out

    def start(self, verifier, layer: int | None, lm_head: bool = True) -> None:
        """Random, as its authors start it; the LM head is the verifier's anyway. UserError for a verifier's layer.

        A verifier's layer norms what it reads, and this one has nothing to do it with: outputs would grow a
        hundredfold.
        """
        if layer is not None:
            raise UserError(START)
