"""An independent draft ("vanilla" speculative decoding, 2211.17192): a small causal LM that reads tokens alone.

The layers are transformers' own Llama layers, run through the same attention and cache as the verifier.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
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
from models.heads.start import check_embedding, check_vocab, copy_rows, init_weights
from models.layers import ROPE_TYPES
from models.states import VerifierStates
from models.tree import TreeRows
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
        check_embedding(config, embedding_VD)
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
        plan = attention.PackedPlan.over(states.layout.documents, states.document_BT.shape)
        out_BTD = self._run(states.input_ids_BT, states.position_BT, plan)
        yield out_BTD.flatten(0, 1)[states.last_index_P]

    def final(self, out: Tensor) -> Tensor:
        return out

    def logits(self, out: Tensor) -> Tensor:
        """[.., D] -> draft logits [.., R]."""
        return F.linear(out, self.lm_weight)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens each."""
        return KVCache(batch, capacity)

    def extend(
        self,
        cache: KVCache,
        tokens_BT: Tensor,
        count_B: Sequence[int] | None = None,
        tree: TreeRows | None = None,
    ) -> Tensor:
        """Append T tokens to each sequence; draft logits [B, T, R], of a chain's last counted row alone: [B, 1, R].

        Arguments as `Verifier.decode`.
        """
        plan = attention.CachePlan.over(cache, tokens_BT.shape[1], count_B, tree, tokens_BT.device)
        out_BTD = self._run(tokens_BT, plan.position_BT.to(tokens_BT.device), plan, cache)
        cache.advance(plan.count_B)
        if tree is None:
            last_B = torch.tensor(plan.count_B, device=out_BTD.device) - 1
            out_BTD = out_BTD[torch.arange(len(last_B), device=out_BTD.device), last_B][:, None]
        return self.logits(out_BTD)

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
