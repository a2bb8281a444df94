"""An independent draft ("vanilla" speculative decoding, 2211.17192): a small causal LM that reads tokens alone.

The layers are transformers' own Llama layers, run through the same attention and cache as the verifier.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from conf.errors import UserError
from models import attention
from models.cache import KVCache
from models.heads.config import LayerConfig
from models.heads.eagle import check_vocab, init_weights
from models.heads.eagle3 import copy_rows
from models.layers import ROPE_TYPES
from models.states import VerifierStates
from models.vocab import DraftVocab


@dataclass(frozen=True, kw_only=True)
class IndependentConfig(LayerConfig):
    """layers: decoder layers of the verifier's width."""

    kind: ClassVar[str] = "independent"

    layers: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers < 1:
            raise UserError(f"expected 1 or more layers, found {self.layers}")
        if (rope := self.rope_parameters.get("rope_type", "default")) not in ROPE_TYPES:
            raise UserError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, found {rope!r}")

    def llama(self) -> LlamaConfig:
        """The same as transformers writes it; the vocabulary is not its business."""
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        names += ("rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters")
        return LlamaConfig(
            **{name: getattr(self, name) for name in names},
            num_hidden_layers=self.layers,
            vocab_size=1,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=attention.NAME,
        )


class IndependentHead(nn.Module):
    """Trainable: the layers, the final norm, and unless frozen the LM head over R draft tokens.

    embedding_VD: the verifier's; shared, not copied, never in the state dict and never given a gradient.
    Raises UserError when sizes don't agree with the config.
    """

    softcap: float | None = None
    survival = None

    def __init__(self, config: IndependentConfig, embedding_VD: Tensor, vocab: DraftVocab) -> None:
        super().__init__()
        if tuple(embedding_VD.shape) != (config.vocab_size, config.hidden_size):
            raise UserError(
                f"expected an embedding of shape {(config.vocab_size, config.hidden_size)}, "
                f"found {tuple(embedding_VD.shape)}: is the draft for another verifier?"
            )
        check_vocab(config, vocab)
        self.config, self.vocab = config, vocab
        self.register_buffer("embedding_VD", embedding_VD.detach(), persistent=False)
        self.register_buffer("inverse_V", vocab.inverse_V, persistent=False)
        self.model = LlamaModel(config.llama())
        self.model.embed_tokens = None  # rows come embedded
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        init_weights(self)
        self._cache_name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    @classmethod
    def over(cls, config: IndependentConfig, verifier, vocab: DraftVocab) -> Self:
        """On a models.verifier.Verifier."""
        return cls(config, verifier.embedding_VD, vocab)

    @property
    def lm_weight(self) -> Tensor:
        return self.lm_head.weight

    @property
    def ids_R(self) -> Tensor:
        """Verifier ids of the draft columns."""
        return self.vocab.ids_R

    def _run(self, input_ids_BT: Tensor, position_BT: Tensor, plan, cache: KVCache | None = None) -> Tensor:
        """Post-norm last hidden [B, T, D]."""
        out = self.model(
            inputs_embeds=self.embedding_VD[input_ids_BT].to(self.lm_head.weight.dtype),
            position_ids=position_BT,
            use_cache=cache is not None,
            eyrie_plan=plan,
            **({} if cache is None else {self._cache_name: cache}),
        )
        return out.last_hidden_state

    def unroll(self, states: VerifierStates, steps: int) -> Iterator[Tensor]:
        """Yields out_PD of each label row: one step, for step k of a model of tokens alone is step 0 of a later row."""
        assert steps == 1, "an independent draft trains one step"
        out_BTD = self._run(states.input_ids_BT, states.position_BT, attention.PackedPlan.of(states.document_BT))
        yield out_BTD.flatten(0, 1)[states.last_index_P]

    def final(self, out: Tensor) -> Tensor:
        return out

    def logits(self, out: Tensor) -> Tensor:
        """[.., D] -> draft logits [.., R]."""
        return F.linear(out, self.lm_weight)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one sequence of up to `capacity` tokens."""
        return KVCache(1, capacity)

    def extend(self, cache: KVCache, tokens_1T: Tensor) -> Tensor:
        """Append T tokens to the one sequence in the cache; draft logits [R] after the last of them."""
        tokens, length = tokens_1T.shape[1], cache.length_B[0]
        slots = cache.stage(tokens, [tokens], None, tokens_1T.device)
        plan = attention.CachePlan([length], [tokens], tokens, slots)
        position_1T = torch.arange(length, length + tokens, device=tokens_1T.device)[None]
        out_1TD = self._run(tokens_1T, position_1T, plan, cache)
        cache.advance([tokens])
        return self.logits(out_1TD[0, -1])

    @torch.no_grad()
    def start(self, verifier, layer: int | None, lm_head: bool) -> None:
        """Evenly spaced layers of the verifier (None leaves them random), its final norm, and its LM head rows.

        `layer` chooses nothing else. Raises UserError when the verifier's layers have other names or shapes.
        """
        if layer is not None:
            last = verifier.num_layers - 1
            for index, own in enumerate(self.model.layers):
                source = round(index * last / max(1, self.config.layers - 1))
                _copy(own.state_dict(), verifier.layer_state_dict(source))
        if lm_head:
            copy_rows(self.lm_head.weight, verifier.lm_head_rows(self.vocab.ids_R))
        if layer is not None or lm_head:
            self.model.norm.weight.copy_(verifier.final_norm_weight)


def _copy(own: dict[str, Tensor], layer_state: dict[str, Tensor]) -> None:
    for name, target in own.items():
        found = tuple(layer_state[name].shape) if name in layer_state else None
        if found != tuple(target.shape):
            raise UserError(
                f"cannot start from this verifier's layers: {name} should be {tuple(target.shape)}, "
                f"found {found or 'none'}; use head.start=random"
            )
        target.copy_(layer_state[name])
