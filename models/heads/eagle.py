"""What EAGLE-1 and EAGLE-3 share: one decoder layer over a token and a hidden state, unrolled or served from a cache.

A head of this kind pairs the hidden state of row t with token x_{t+1} and drafts x_{t+2}; to draft further it reads its
own output in place of the verifier's state. Subclasses say how the two meet (`token_part`, `project`), what the
verifier's states become (`fuse`) and what the LM head reads (`final`, `lm_weight`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import UserError
from models import attention
from models.anchor_attention import attention_of
from models.cache import KVCache
from models.heads.config import LayerConfig
from models.heads.start import check_embedding, check_vocab
from models.layers import GatedMLP, RMSNorm, Rotary, rotate
from models.states import VerifierStates
from models.tree import TreeRows
from models.vocab import DraftVocab


@dataclass(frozen=True, kw_only=True)
class EagleConfig(LayerConfig):
    """survival: a small extra output that says how likely a draft and all before it are accepted (2608.30135)."""

    survival: bool = False


class Attention(nn.Module):
    """Projections of `inputs` values to queries, keys and values; output to D."""

    def __init__(self, config: LayerConfig, inputs: int, bias: bool = False) -> None:
        super().__init__()
        size, D = config.head_dim, config.hidden_size
        self.q_proj = nn.Linear(inputs, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(inputs, config.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(inputs, config.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, D, bias=False)

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj


class Layer(nn.Module):
    """Names and parameters of the one decoder layer; the head runs it. norms: names of the norms before attention."""

    def __init__(self, config: LayerConfig, inputs: int, norms: tuple[str, ...] = (), bias: bool = False) -> None:
        super().__init__()
        for name in norms:
            self.add_module(name, RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.self_attn = Attention(config, inputs, bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Residual [.., D] and attended heads [.., H, F] -> output of the layer [.., D]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@dataclass(frozen=True)
class Projected:
    """residual [.., D] of a row, its queries [.., H, F], keys and values [.., h, F], not rotated yet."""

    residual: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class EagleHead(nn.Module, ABC):
    """embedding_VD: the verifier's; shared, not copied, never in the state dict and never given a gradient.

    vocab: the draft vocabulary; only its map to draft ids is held here, outside the state dict.
    Raises UserError when sizes don't agree with the config.
    """

    softcap: float | None = None  # of the logits
    attention: str = "auto"  # in training; see models.anchor_attention

    def __init__(self, config: EagleConfig, embedding_VD: Tensor, vocab: DraftVocab) -> None:
        super().__init__()
        check_embedding(config, embedding_VD)
        check_vocab(config, vocab)
        self.config, self.vocab = config, vocab
        self.register_buffer("embedding_VD", embedding_VD.detach(), persistent=False)
        self.register_buffer("inverse_V", vocab.inverse_V, persistent=False)
        self.rotary = Rotary(config.rope_parameters, config.head_dim, config.max_position_embeddings)
        self.survival = nn.Linear(config.hidden_size, 1) if config.survival else None

    # --- what a kind of head says ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def layer(self) -> Layer:
        """The one decoder layer."""

    @property
    @abstractmethod
    def lm_weight(self) -> Tensor:
        """The LM head's weight [R, D]."""

    @abstractmethod
    def fuse(self, aux: Tensor) -> Tensor:
        """Captured states [.., A, D] -> the hidden state of a row with a true one [.., D]."""

    @abstractmethod
    def token_part(self, tokens: Tensor) -> Tensor:
        """What a row takes of its token ids [..], before it meets the hidden state: [.., E]."""

    @abstractmethod
    def project(self, token_part: Tensor, hidden: Tensor) -> Projected:
        """The layer's inputs of rows with these token parts [.., E] and hidden states [.., D]."""

    @abstractmethod
    def keys_values(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Those of `project` alone, of rows that draft nothing: [.., h, F] each, not rotated yet."""

    @abstractmethod
    def final(self, out: Tensor) -> Tensor:
        """Layer output [.., D] -> what the LM head reads."""

    def feedback(self, out: Tensor) -> Tensor:
        """What the next draft step takes as hidden."""
        return out

    def logits(self, out: Tensor) -> Tensor:
        """Layer output [.., D] -> draft logits [.., R]."""
        logits = F.linear(self.final(out).to(self.lm_weight.dtype), self.lm_weight)  # the verifier's may be bfloat16
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    # --- training ---------------------------------------------------------------------------------------------

    def unroll(self, states: VerifierStates, steps: int, tokens_KP: Tensor | None = None) -> Iterator[Tensor]:
        """Training-time test (2503.01840): yields out_PD of draft steps 0..steps-1 at the anchors.

        Every row pays `fuse` and the keys and values of step 0; everything else is computed at the anchors alone.
        Anchor t at step k reads token x_{t+1+k} (tokens_KP: another one from step 1 on), position t + k, its own step
        k-1 output. Rows past the end of an answer are computed on junk and must be left out by `supervised`.
        """
        layout, attend = states.layout, attention_of(states, self.attention)
        following_N = F.pad(states.input_ids_BT[:, 1:], (0, 1)).flatten()
        hidden_ND = self.fuse(states.aux_BTAD.flatten(0, 1))
        k_NhF, v_NhF = self.keys_values(following_N, hidden_ND)
        k_NhF = rotate(k_NhF, *self.rotary(states.position_BT.flatten(), k_NhF.dtype))

        # Where (t, k) counts, row t + k is an anchor too: its token's part is the one of anchor p + k.
        token_PE = self.token_part(following_N[layout.anchor_P])
        hidden_PD, own_k, own_v = hidden_ND[layout.anchor_P], [], []
        for k in range(steps):
            if k:
                token_KE = F.pad(token_PE[k:], (0, 0, 0, min(k, len(token_PE))))
                row = self.project(token_KE if tokens_KP is None else self.token_part(tokens_KP[k]), hidden_PD)
            else:
                row = self.project(token_PE, hidden_PD)
            angles = self.rotary(layout.position_P + k, row.q.dtype)
            if k:
                own_k.append(rotate(row.k, *angles))
                own_v.append(row.v)
            attended = attend(rotate(row.q, *angles), k_NhF, v_NhF, own_k, own_v)
            out_PD = self.layer.finish(row.residual, attended)
            yield out_PD
            hidden_PD = self.feedback(out_PD)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim))

    # --- serving ----------------------------------------------------------------------------------------------

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` rows each."""
        return KVCache(batch, capacity)

    def step(
        self,
        tokens_BT: Tensor,
        hidden_BTD: Tensor,
        cache: KVCache,
        count_B: Sequence[int] | None = None,
        tree: TreeRows | None = None,
    ) -> Tensor:
        """Append T rows to each sequence, causally or as `tree` says; returns out_BTD. As `Verifier.decode` otherwise.

        Row i of a sequence takes token x_{i+1} and `fuse` of the verifier's states at i, or, for a drafted row, the
        last draft and `feedback` of the row before.
        """
        plan = attention.CachePlan.over(cache, tokens_BT.shape[1], count_B, tree, tokens_BT.device)
        row = self.project(self.token_part(tokens_BT), hidden_BTD)
        angles = self.rotary(plan.position_BT.to(tokens_BT.device), row.q.dtype)
        k, v = cache.update(rotate(row.k, *angles).transpose(1, 2), row.v.transpose(1, 2), 0)
        rule = attention.Rule(row.q.shape[-1] ** -0.5, None, None, None)
        out_BHTF = plan.attend(rotate(row.q, *angles).transpose(1, 2), k, v, rule)
        cache.advance(plan.count_B)
        return self.layer.finish(row.residual, out_BHTF.transpose(1, 2))


@torch.no_grad()
def copy_layer(layer: Layer, layer_state: dict[str, Tensor], extra: dict[str, Tensor] | None = None) -> None:
    """The verifier's decoder layer into `layer`; q/k/v that are wider than D take it on their last D columns.

    The other columns become zero. `extra`: further parameters of the head by the verifier's name. A start only: biases
    are dropped, and norms taken as a plain RMSNorm holds them, which is how the verifier's adapter gives them.
    Raises UserError when the verifier's layer has other names or shapes, before anything is written.
    """
    own = {name: tensor for name, tensor in layer.state_dict().items() if not name.endswith("bias")}
    wide = {f"self_attn.{x}_proj.weight" for x in "qkv"}
    D = layer.self_attn.o_proj.weight.shape[0]
    targets = {name: own[name][:, -D:] if name in wide else own[name] for name in own if _copied(name)}
    targets |= extra or {}
    for name, target in targets.items():
        found = tuple(layer_state[name].shape) if name in layer_state else None
        if found != tuple(target.shape):
            raise UserError(
                f"cannot start from this verifier's layer: {name} should be {tuple(target.shape)}, "
                f"found {found or 'none'}; use head.start=random"
            )
    for name in wide:
        own[name].zero_()
    for name, target in targets.items():
        target.copy_(layer_state[name])


def _copied(name: str) -> bool:
    return name.startswith(("self_attn.", "mlp.", "post_attention_layernorm."))
