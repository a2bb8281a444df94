"""The EAGLE-3 head (2503.01840): one decoder layer over [embedding | fused verifier states].

Parameter names are the published checkpoints' (`fc`, `midlayer.*`, `norm`, `lm_head`), so that export is a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import UserError
from models.heads.eagle import EagleConfig, EagleHead, Layer, Projected, copy_layer
from models.heads.start import copy_rows, init_weights
from models.layers import RMSNorm
from models.vocab import DraftVocab


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(EagleConfig):
    """fc_norm: RMSNorm on each captured state before fc; norm_output: feed back the post-norm state.

    Both are EAGLE-3.1's (2605.09992); off is EAGLE-3.
    """

    kind: ClassVar[str] = "eagle3"

    verifier_hidden_size: int
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.aux_layers:
            raise UserError("an EAGLE-3 head needs at least one captured layer, found none: set aux_layers")
        if self.hidden_size != self.verifier_hidden_size:
            raise UserError(
                f"the head reads the verifier's embedding, so hidden_size must be the verifier's "
                f"{self.verifier_hidden_size}, found {self.hidden_size}"
            )

    @classmethod
    def from_verifier(
        cls, geometry: dict[str, Any], aux_layers: tuple[int, ...], draft_vocab_size: int, **switches: Any
    ) -> Self:
        """`geometry`: Verifier.head_geometry."""
        switches.setdefault("verifier_hidden_size", geometry["hidden_size"])
        return super().from_verifier(geometry, aux_layers, draft_vocab_size, **switches)


class Eagle3Head(EagleHead):
    """Trainable: fc, the layer, final norm, and unless frozen the LM head over R draft tokens. See EagleHead.

    q/k/v of [embedding | hidden] is the sum of two halves, and the embedding half of a row at step k is that of row
    t + k at step 0: `token_part` computes it once.
    """

    def __init__(self, config: Eagle3Config, embedding_VD: Tensor, vocab: DraftVocab) -> None:
        super().__init__(config, embedding_VD, vocab)
        D, A = config.hidden_size, len(config.aux_layers)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(D, config.rms_norm_eps) for _ in range(A))
        self.fc = nn.Linear(A * D, D, bias=False)
        self.midlayer = Layer(config, 2 * D, ("hidden_norm", "input_layernorm"))
        self.norm = RMSNorm(D, config.rms_norm_eps)
        self.lm_head = nn.Linear(D, config.draft_vocab_size, bias=False)
        init_weights(self)

    @classmethod
    def over(cls, config: Eagle3Config, verifier, vocab: DraftVocab) -> Self:
        """On a models.verifier.Verifier."""
        return cls(config, verifier.embedding_VD, vocab)

    @property
    def layer(self) -> Layer:
        return self.midlayer

    @property
    def lm_weight(self) -> Tensor:
        return self.lm_head.weight

    def fuse(self, aux: Tensor) -> Tensor:
        """Captured states [.., A, D] -> fused hidden g [.., D]."""
        aux = aux.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            aux = torch.stack([norm(x) for norm, x in zip(self.fc_norm, aux.unbind(-2), strict=True)], dim=-2)
        return self.fc(aux.flatten(-2))

    def token_part(self, tokens: Tensor) -> Tensor:
        """The embedding halves of queries, keys and values, side by side."""
        D = self.config.hidden_size
        weight = torch.cat([m.weight[:, :D] for m in self.midlayer.self_attn.projections])
        return F.linear(self._embedded(tokens), weight)

    def project(self, token_part: Tensor, hidden: Tensor) -> Projected:
        """The residual is the un-normed hidden state."""
        D, projections = self.config.hidden_size, self.midlayer.self_attn.projections
        weight = torch.cat([m.weight[:, D:] for m in projections])
        both = token_part + F.linear(self.midlayer.hidden_norm(hidden), weight)
        q, k, v = both.split([m.out_features for m in projections], dim=-1)
        return Projected(hidden, self._heads(q), self._heads(k), self._heads(v))

    def keys_values(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([self._embedded(tokens), self.midlayer.hidden_norm(hidden)], dim=-1)
        _, k, v = self.midlayer.self_attn.projections
        return self._heads(k(both)), self._heads(v(both))

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.midlayer.input_layernorm(self.embedding_VD[tokens].to(self.fc.weight.dtype))

    def final(self, out: Tensor) -> Tensor:
        return self.norm(out)

    def feedback(self, out: Tensor) -> Tensor:
        """The output before the final norm (after it: norm_output)."""
        return self.norm(out) if self.config.norm_output else out

    @torch.no_grad()
    def start_from_verifier(
        self,
        layer_state: dict[str, Tensor],
        final_norm_D: Tensor,
        lm_head_rows_RD: Tensor,
        layer: bool = True,
        lm_head: bool = True,
    ) -> None:
        """Start from one of the verifier's decoder layers and its LM head, instead of at random.

        layer: fc passes the last captured state through, q/k/v take the verifier's weights on the hidden half and
        zeros on the embedding half, the rest is copied. lm_head: the verifier's rows of the draft vocabulary. The
        final norm comes along with either. Raises UserError when names or shapes differ.
        """
        if layer:
            norm = {"input_layernorm.weight": self.midlayer.hidden_norm.weight}
            copy_layer(self.midlayer, layer_state, norm)
            self.midlayer.input_layernorm.weight.fill_(1.0)
            self.fc.weight.zero_()
            self.fc.weight[:, -self.config.hidden_size :].copy_(torch.eye(self.config.hidden_size))
        if lm_head:
            copy_rows(self.lm_head.weight, lm_head_rows_RD)
        if layer or lm_head:
            self.norm.weight.copy_(final_norm_D)

    def start(self, verifier, layer: int | None, lm_head: bool) -> None:
        """`start_from_verifier` of a Verifier's layer (None: random) and LM head."""
        self.start_from_verifier(
            {} if layer is None else verifier.layer_state_dict(layer),
            verifier.final_norm_weight,
            verifier.lm_head_rows(self.vocab.ids_R),
            layer=layer is not None,
            lm_head=lm_head,
        )
