"""The EAGLE-3 head (2503.01840): one decoder layer over [embedding | fused verifier states].

Parameter names are the published checkpoints' (`fc`, `midlayer.*`, `norm`, `lm_head`), so that export is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import UserError
from models.heads.cache import HeadCache
from models.layers import GatedMLP, RMSNorm, Rotary, anchor_attention, grouped_attention, rotate
from models.states import VerifierStates
from models.supervision import anchor_plan
from models.vocab import DraftVocab


@dataclass(frozen=True)
class Eagle3Config:
    """Geometry of a head; everything up to vocab_size is the verifier's own, positions and RoPE included.

    aux_layers: captured layers, as indices of transformers' `hidden_states`, ascending.
    fc_norm:     RMSNorm on each captured state before fc; norm_output: feed back the post-norm state
                 (both 2605.09992; off is EAGLE-3).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    rope_parameters: dict
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    verifier_hidden_size: int
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "aux_layers", tuple(self.aux_layers))
        object.__setattr__(self, "rope_parameters", dict(self.rope_parameters))
        if not self.aux_layers:
            raise UserError("an EAGLE-3 head needs at least one captured layer, found none: set aux_layers")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"found {self.num_attention_heads} and {self.num_key_value_heads}"
            )
        if self.hidden_size != self.verifier_hidden_size:
            raise UserError(
                f"the head reads the verifier's embedding, so hidden_size must be the verifier's "
                f"{self.verifier_hidden_size}, found {self.hidden_size}"
            )

    def to_dict(self) -> dict:
        """Plain JSON types."""
        return {**asdict(self), "aux_layers": list(self.aux_layers)}

    @classmethod
    def from_dict(cls, values: dict) -> Eagle3Config:
        """Raises UserError on unknown or missing keys."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise UserError(f"unknown keys in the head's config: {', '.join(unknown)}")
        if missing := sorted(known - set(values) - {"fc_norm", "norm_output"}):
            raise UserError(f"missing keys in the head's config: {', '.join(missing)}")
        return cls(**values)

    @classmethod
    def from_verifier(
        cls,
        geometry: dict,
        aux_layers: tuple[int, ...],
        draft_vocab_size: int,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> Eagle3Config:
        """`geometry`: Verifier.head_geometry."""
        return cls(
            **geometry,
            draft_vocab_size=draft_vocab_size,
            aux_layers=aux_layers,
            verifier_hidden_size=geometry["hidden_size"],
            fc_norm=fc_norm,
            norm_output=norm_output,
        )


class Eagle3Attention(nn.Module):
    """Projections of [embedding | hidden] (2D wide, no biases) to queries, keys and values; output to D."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        D, size = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * D, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * D, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * D, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, D, bias=False)


class Eagle3Layer(nn.Module):
    """Names and parameters of the one decoder layer; Eagle3Head runs it."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = RMSNorm(D, eps)
        self.input_layernorm = RMSNorm(D, eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = RMSNorm(D, eps)
        self.mlp = GatedMLP(D, config.intermediate_size, config.hidden_act)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual (un-normed) hidden [.., D] and attended heads [.., H, F] -> output of the layer [.., D]."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """Trainable: fc, the layer, final norm, and unless frozen the LM head over R draft tokens. The verifier's embedding
    is frozen.

    embedding_VD: the verifier's; shared, not copied, never in the state dict and never given a gradient.
    vocab: the draft vocabulary; only its map to draft ids is held here, outside the state dict.
    Raises UserError when sizes don't agree with the config.
    """

    def __init__(self, config: Eagle3Config, embedding_VD: Tensor, vocab: DraftVocab) -> None:
        super().__init__()
        if tuple(embedding_VD.shape) != (config.vocab_size, config.hidden_size):
            raise UserError(
                f"expected an embedding of shape {(config.vocab_size, config.hidden_size)}, "
                f"found {tuple(embedding_VD.shape)}: is the head for another verifier?"
            )
        if (len(vocab), vocab.vocab_size) != (config.draft_vocab_size, config.vocab_size):
            raise UserError(
                f"expected a draft vocabulary of {config.draft_vocab_size} of {config.vocab_size} ids, "
                f"found {len(vocab)} of {vocab.vocab_size}"
            )
        self.config, self.vocab = config, vocab
        D, A = config.hidden_size, len(config.aux_layers)
        self.register_buffer("embedding_VD", embedding_VD.detach(), persistent=False)
        self.register_buffer("inverse_V", vocab.inverse_V, persistent=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(D, config.rms_norm_eps) for _ in range(A))
        self.fc = nn.Linear(A * D, D, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(D, config.rms_norm_eps)
        self.lm_head = nn.Linear(D, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rope_parameters, config.head_dim, config.max_position_embeddings)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    # --- what both training and serving use ---------------------------------------------------------------

    def fuse(self, aux: Tensor) -> Tensor:
        """Captured states [.., A, D] -> fused hidden g [.., D]."""
        aux = aux.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            aux = torch.stack([norm(x) for norm, x in zip(self.fc_norm, aux.unbind(-2), strict=True)], dim=-2)
        return self.fc(aux.flatten(-2))

    def feedback(self, out: Tensor) -> Tensor:
        """What the next draft step takes as hidden: the output before the final norm (after it: norm_output)."""
        return self.norm(out) if self.config.norm_output else out

    def logits(self, out: Tensor) -> Tensor:
        """Layer output [.., D] (pre-norm) -> draft logits [.., R]."""
        return self.lm_head(self.norm(out))

    def _embed(self, tokens: Tensor) -> Tensor:
        """Normed embedding of token ids [..] -> [.., D]."""
        return self.midlayer.input_layernorm(self.embedding_VD[tokens].to(self.fc.weight.dtype))

    # --- training -----------------------------------------------------------------------------------------

    def unroll(self, states: VerifierStates, steps: int) -> Iterator[Tensor]:
        """Training-time test: yields out_PD, pre-norm, of TTT steps 0..steps-1 at the anchors.

        Step 0 needs keys and values of every row, everything else only at the anchors. Anchor t at step k
        reads token x_{t+1+k}, position t + k, its own step k-1 output. Rows past the end of an answer are
        computed on junk and must be left out by `supervised`.
        """
        plan = anchor_plan(states, self.fc.weight.dtype)
        layer, attention = self.midlayer, self.midlayer.self_attn
        D = self.config.hidden_size
        # q/k/v of [embedding | hidden] is a sum of two halves, and the embedding half of row t at step k is
        # that of row t + k at step 0: computed once.
        halves = [m.weight.split(D, dim=1) for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
        following_N = F.pad(states.input_ids_BT[:, 1:], (0, 1)).flatten()
        embedded_ND = self._embed(following_N)
        q_embedded, k_embedded, v_embedded = (F.linear(embedded_ND, w) for w, _ in halves)
        (_, q_weight), (_, k_weight), (_, v_weight) = halves

        hidden_ND = self.fuse(states.aux_BTAD.flatten(0, 1))
        normed_ND = layer.hidden_norm(hidden_ND)
        k_N = k_embedded + F.linear(normed_ND, k_weight)
        v_N = v_embedded + F.linear(normed_ND, v_weight)
        k_NhF = rotate(self._heads(k_N), *self.rotary(states.position_BT.flatten(), k_N.dtype))
        runs = zip(k_NhF.split(plan.lengths), self._heads(v_N).split(plan.lengths), strict=True)
        keys = [(k.transpose(0, 1), v.transpose(0, 1)) for k, v in runs]

        own_k, own_v = [], []
        hidden_PD, normed_PD = hidden_ND[plan.anchor_P], normed_ND[plan.anchor_P]
        for k in range(steps):
            row_P = (plan.anchor_P + k).clamp_max(len(following_N) - 1)
            angles = self.rotary(plan.position_P + k, hidden_PD.dtype)
            if k:
                normed_PD = layer.hidden_norm(hidden_PD)
                own_k.append(rotate(self._heads(k_embedded[row_P] + F.linear(normed_PD, k_weight)), *angles))
                own_v.append(self._heads(v_embedded[row_P] + F.linear(normed_PD, v_weight)))
            q_PHF = rotate(self._heads(q_embedded[row_P] + F.linear(normed_PD, q_weight)), *angles)
            out_PD = layer.finish(hidden_PD, anchor_attention(q_PHF, keys, own_k, own_v, plan.anchors, plan.masks))
            yield out_PD
            hidden_PD = self.feedback(out_PD)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))

    # --- serving ------------------------------------------------------------------------------------------

    def new_cache(self, batch: int, capacity: int) -> HeadCache:
        """Room for `capacity` rows of `batch` sequences, on the head's device and in its dtype."""
        shape = (batch, self.config.num_key_value_heads, capacity, self.config.head_dim)
        return HeadCache(self.fc.weight.new_zeros(shape), self.fc.weight.new_zeros(shape))

    def step(self, tokens_BT: Tensor, hidden_BTD: Tensor, start: int, cache: HeadCache) -> Tensor:
        """Append T rows, causally, at positions start.. (= rows already in the cache); returns out_BTD, pre-norm.

        Row i of a sequence takes token x_{i+1} and `fuse` of the verifier's states at i, or, for a drafted
        row, the last draft and `feedback` of the row before (MATH section 4).
        """
        assert start == cache.length, f"rows start at {start}, but the cache holds {cache.length}"
        T = tokens_BT.shape[1]
        layer, attention = self.midlayer, self.midlayer.self_attn
        both = torch.cat([self._embed(tokens_BT), layer.hidden_norm(hidden_BTD)], dim=-1)
        angles = self.rotary(torch.arange(start, start + T, device=tokens_BT.device), both.dtype)
        k, v = cache.append(rotate(self._heads(attention.k_proj(both)), *angles), self._heads(attention.v_proj(both)))
        causal = None
        if T > 1:
            causal = torch.ones(T, start + T, dtype=torch.bool, device=k.device).tril(start)
        q = rotate(self._heads(attention.q_proj(both)), *angles)
        return layer.finish(hidden_BTD, grouped_attention(q, k, v, causal))

    # --- start --------------------------------------------------------------------------------------------

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

        layer: fc passes the last captured state through, q/k/v take the verifier's weights on the hidden
        half and zeros on the embedding half, the rest is copied. lm_head: the verifier's rows of the draft
        vocabulary. The final norm comes along with either.
        A start only: biases (Qwen2's q/k/v) can't be held by the format and are dropped. Norms are taken as a
        plain RMSNorm holds them, which is how the verifier's adapter gives them.
        Raises UserError when the verifier's layer has other names or shapes than the head's.
        """
        if layer:
            D = self.config.hidden_size
            own = self.midlayer.state_dict()
            names = {name: name for name in own if name != "input_layernorm.weight"}
            names["hidden_norm.weight"] = "input_layernorm.weight"
            wide = {f"self_attn.{x}_proj.weight" for x in "qkv"}
            for name, source in names.items():
                shape = (own[name].shape[0], D) if name in wide else tuple(own[name].shape)
                found = tuple(layer_state[source].shape) if source in layer_state else None
                if found != shape:
                    raise UserError(
                        f"cannot start from this verifier's layer: {source} should be {shape}, "
                        f"found {found or 'none'}; use head.start=random"
                    )
                target = own[name][:, D:] if name in wide else own[name]
                target.copy_(layer_state[source])
                if name in wide:
                    own[name][:, :D].zero_()
            own["input_layernorm.weight"].fill_(1.0)
            self.fc.weight.zero_()
            self.fc.weight[:, -D:].copy_(torch.eye(D))
        if lm_head:
            if lm_head_rows_RD.shape != self.lm_head.weight.shape:
                raise UserError(
                    f"expected LM head rows of shape {tuple(self.lm_head.weight.shape)}, "
                    f"found {tuple(lm_head_rows_RD.shape)}"
                )
            self.lm_head.weight.copy_(lm_head_rows_RD)
        if layer or lm_head:
            self.norm.weight.copy_(final_norm_D)
