"""The frozen verifier: one adapter over any transformers causal language model.

It captures what a draft head may see (packed documents), and decodes with ragged lengths and draft trees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import UserError
from models import attention, chat, introspect, packed, parts
from models.cache import KVCache
from models.states import VerifierStates, label_rows
from models.tree import TreeRows

LSE_ROWS = 128  # rows of full-vocabulary logits that exist at once in `states`


@dataclass(frozen=True)
class Captured:
    """aux_BTAD: residual stream entering each captured layer; of layer L, and last_BTD: output of the final norm."""

    aux_BTAD: Tensor
    last_BTD: Tensor


@dataclass(frozen=True)
class Decoded:
    """logits: float32 [B, T, V] ("all"), [B, V] at each sequence's last counted row ("last"), or None ("none").

    aux_BTAD and last_BTD as in `Captured`; aux_BTAD is None with capture=False. Rows past `count_B` are junk.
    """

    logits: Tensor | None
    aux_BTAD: Tensor | None
    last_BTD: Tensor


class Verifier:
    """A frozen causal language model in eval mode. Not an nn.Module, so no checkpoint can swallow it.

    aux_layers: captured states as indices of transformers' `hidden_states` (introspect.check_aux_layers); None takes
    those of EAGLE-3 (2503.01840): 2, L//2, L-3.
    whole: False for a model whose layers have no weights: heads start from it and learn from stored states.
    The model is changed in place: attention goes through `models.attention`, and on a CPU its linear layers are
    packed. Its layers may lie on several devices; what comes out is on that of the embedding.
    Raises UserError for architectures that cannot be driven that way.
    """

    def __init__(
        self, model: nn.Module, tokenizer, name: str, aux_layers: Sequence[int] | None = None, whole: bool = True
    ):
        self.model, self.tokenizer, self.name = model.eval().requires_grad_(False), tokenizer, name
        self.whole = whole
        self.config = model.config.get_text_config()
        parts = introspect.find_parts(model)
        self.base, self.layers, self.final_norm, self.lm_head = parts.base, parts.layers, parts.norm, parts.lm_head
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = len(self.layers)
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.device, self.dtype = self.embedding_VD.device, self.embedding_VD.dtype
        self.aux_layers = introspect.check_aux_layers(aux_layers, self.num_layers)
        self.eos_ids = chat.end_of_turn_ids(tokenizer, getattr(model, "generation_config", None))
        introspect.use_plan_attention(model, self.config, attention.NAME)
        packed.pack_linears(model)
        self.lm_head = model.get_output_embeddings()
        parameters = inspect.signature(self.base.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._taps: dict[int, Tensor] | None = None
        self._install_taps()
        if whole:
            self._try_out()

    @classmethod
    def load(cls, source: str, *, aux_layers=None, whole=True, **options):
        """From "smollm2" (embedded), a local folder, or a hub name. options: of `models.loading.load_model`."""
        from models.loading import load_model

        loaded = load_model(source, whole=whole, **options)
        verifier = cls(loaded.model, loaded.tokenizer, source, aux_layers, whole)
        verifier._files = loaded.weight_files
        return verifier

    def capturing(self, aux_layers: Sequence[int]) -> Verifier:
        """The same model with other captured layers; weights are shared."""
        other = Verifier(self.model, self.tokenizer, self.name, aux_layers, self.whole)
        other._files = self._files
        return other

    @torch.no_grad()
    def _try_out(self) -> None:
        """Two tokens with a cache and two without: what this model cannot do is said before any work is begun."""
        cached, plain = introspect.TrialPlan(), introspect.TrialPlan()
        pad = getattr(self.config, "pad_token_id", None) or 0  # a pad would make transformers warn
        ids_BT = torch.full((1, 2), (pad + 1) % self.vocab_size, device=self.device)
        position_BT = torch.arange(2, device=self.device)[None]
        try:
            cache = self.new_cache(1, 2)
            cache.stage(2, [2], self.device)
            self._run(ids_BT, position_BT, cached, cache, False)
            with self._tapped() as taps:
                settings = {"position_ids": position_BT, "use_cache": False, "eyrie_plan": plain}
                expected = self.model(input_ids=ids_BT, **settings).logits
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            said = str(error).strip().split("\n")[0]
            raise introspect.unsupported(f"{type(error).__name__} ({said})", self.model) from error
        own, expected = self.logits(taps[-1]), expected.to(self.device)
        introspect.check_trial(self.model, self.config, plain.windows, taps.values(), own, expected)

    # What a head takes from the verifier

    _files: tuple = ()

    @property
    def embedding_VD(self) -> Tensor:
        """The input embedding's weight [V, D]."""
        return self.model.get_input_embeddings().weight

    def lm_head_rows(self, ids_R: Tensor | None = None) -> Tensor:
        """Rows of the LM head's weight [R, D] (all of it without ids)."""
        weight_VD = self.lm_head.weight
        return weight_VD if ids_R is None else weight_VD[ids_R.to(weight_VD.device)]

    def layer_state_dict(self, layer: int = -1) -> dict[str, Tensor]:
        """One decoder layer's weights by their usual Llama names; fused projections are split."""
        module = self.layers[layer]
        if parts.absent(module):
            index = range(self.num_layers)[layer]
            module = parts.read_layer(self.model, self.layers, index, self._files, self.device, self.dtype)
        return introspect.plain_layer(module, self.head_geometry)

    @property
    def final_norm_weight(self) -> Tensor:
        """The final norm's scale [D], as a plain RMSNorm would hold it."""
        return introspect.norm_scale(self.final_norm, self.hidden_size)

    @cached_property
    def head_geometry(self) -> dict:
        """Everything that a head's shape takes from the verifier's text config."""
        return introspect.geometry(self.config, self.vocab_size)

    @cached_property
    def weights_hash(self) -> str:
        """sha256 over the weights as they are stored (name, dtype, shape, bytes), so not of the loaded dtype."""
        return introspect.hash_files(self._files) if self._files else introspect.hash_model(self.model)

    @cached_property
    def stored_dtype(self) -> str:
        """Of the weights as they are stored, where that can be told; else as they were loaded."""
        return introspect.dtype_of_files(self._files) or str(self.dtype).removeprefix("torch.")

    @cached_property
    def tokenizer_hash(self) -> str:
        """sha256 of what turns text into ids, and of the chat template."""
        return chat.tokenizer_hash(self.tokenizer)

    @cached_property
    def template_hash(self) -> str:
        """sha256 of the chat template's source."""
        return chat.template_hash(self.tokenizer)

    # Capture

    def _install_taps(self) -> None:
        def tap(index: int):
            def hook(_module, args, kwargs):
                if self._taps is not None:
                    self._taps[index] = args[0] if args else kwargs["hidden_states"]

            return hook

        for index in self.aux_layers:
            if index == self.num_layers:
                continue  # the final norm's output
            self.layers[index].register_forward_pre_hook(tap(index), with_kwargs=True)

        def norm_hook(_module, _args, output):
            if self._taps is not None:
                self._taps[-1] = output

        self.final_norm.register_forward_hook(norm_hook)

    @contextmanager
    def _tapped(self) -> Iterator[dict[int, Tensor]]:
        self._taps = {}
        try:
            yield self._taps
        finally:
            self._taps = None

    @torch.no_grad()
    def _run(self, input_ids_BT, position_BT, plan, cache: KVCache | None, capture: bool) -> Decoded:
        if not self.whole:
            raise UserError(
                "expected the verifier's layers, found it loaded without them (verifier.whole=false): capture the "
                "states first (python -m data task=capture with the same settings), or set verifier.whole=true"
            )
        extra = {self._cache_name: cache} if cache is not None else {}
        with self._tapped() as taps:
            self.base(
                input_ids=input_ids_BT,
                position_ids=position_BT,
                use_cache=cache is not None,
                eyrie_plan=plan,
                **extra,
            )
        return Decoded(None, self._stacked(taps) if capture else None, taps[-1].to(self.device))

    def _stacked(self, taps: dict[int, Tensor]) -> Tensor:
        """Captured states [B, T, A, D]; A may be 0."""
        last_BTD = taps[-1]
        states = [last_BTD if index == self.num_layers else taps[index] for index in self.aux_layers]
        states = [state.to(self.device) for state in states or [last_BTD]]
        return torch.stack(states, dim=2)[:, :, : len(self.aux_layers)]

    def capture(self, input_ids_BT: Tensor, document_BT: Tensor, position_BT: Tensor) -> Captured:
        """States of packed rows: each document attends to itself only. All arguments int64 [B, T], any device.

        document_BT is -1 on pads, whose states mean nothing. The LM head is not run.
        """
        plan = attention.PackedPlan.of(document_BT)
        out = self._run(input_ids_BT.to(self.device), position_BT.to(self.device), plan, None, True)
        return Captured(out.aux_BTAD, out.last_BTD)

    def states(self, input_ids_BT, document_BT, position_BT, span_BT) -> VerifierStates:
        """The record that heads train on: `capture` with the verifier's law at the label rows.

        On the verifier's device; with arguments on the host, nothing waits for it.
        """
        captured = self.capture(input_ids_BT, document_BT, position_BT)
        index_P = label_rows(span_BT)
        last_PD = captured.last_BTD.flatten(0, 1)[index_P.to(self.device, non_blocking=True)]
        top_P, lse_P = self.top_and_lse(last_PD)
        return VerifierStates(
            input_ids_BT=input_ids_BT,
            document_BT=document_BT,
            position_BT=position_BT,
            span_BT=span_BT,
            aux_BTAD=captured.aux_BTAD,
            last_PD=last_PD,
            last_index_P=index_P,
            top_P=top_P,
            lse_P=lse_P,
        ).to(self.device)

    # Logits

    @torch.no_grad()
    def logits(self, hidden_ND: Tensor, ids_R: Tensor | None = None) -> Tensor:
        """Post-norm hidden [..., D] -> float32 logits [..., V], or [..., R] of the given ids; soft-cap and scale in."""
        if ids_R is not None:
            return self.draft_logits(ids_R)(hidden_ND)
        logits = self.lm_head(hidden_ND.to(self.dtype)).to(self.device)
        return introspect.finish_logits(self.config, logits.float())

    def draft_logits(self, ids_R: Tensor | None) -> Callable[[Tensor], Tensor]:
        """`logits` of the given ids, for many calls: their rows of the LM head are copied once."""
        if ids_R is None:
            return self.logits
        weight_RD, bias = self.lm_head_rows(ids_R).to(self.device), self.lm_head.bias
        bias_R = None if bias is None else bias[ids_R.to(bias.device)].to(self.device)

        @torch.no_grad()
        def logits(hidden_ND: Tensor) -> Tensor:
            out_NR = F.linear(hidden_ND.to(self.dtype), weight_RD, bias_R)
            return introspect.finish_logits(self.config, out_NR.float())

        return logits

    @torch.no_grad()
    def top_and_lse(self, hidden_PD: Tensor) -> tuple[Tensor, Tensor]:
        """Argmax id and log-sum-exp [P] of the full-vocabulary logits, never holding [P, V] at once."""
        pairs = []
        for part in hidden_PD.split(LSE_ROWS):
            logits = self.logits(part)
            pairs.append((logits.argmax(-1), logits.logsumexp(-1)))
        if not pairs:
            empty = hidden_PD.new_empty(0)
            return empty.long(), empty.float()
        top, lse = zip(*pairs, strict=True)
        return torch.cat(top), torch.cat(lse)

    # Decoding

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens each."""
        return KVCache(batch, capacity)

    def decode(
        self,
        cache: KVCache,
        tokens_BT: Tensor,
        *,
        count_B: Sequence[int] | None = None,
        tree: TreeRows | None = None,
        logits: str = "all",
        capture: bool = True,
    ) -> Decoded:
        """Append T new tokens to each sequence and advance the cache by `count_B` (default: T for all).

        tokens_BT int64 [B, T]; row b uses its first count_B[b] tokens, the rest are junk that nothing sees.
        tree: None for a causal chain; else which nodes each row sees. Follow with `cache.accept_paths`.
        Rollback: `cache.truncate`. Raises UserError when the cache would overflow.
        """
        batch, tokens = tokens_BT.shape
        assert batch == len(cache.length_B), f"{batch} rows of tokens for a cache of {len(cache.length_B)}"
        plan = attention.CachePlan.over(cache, tokens, count_B, tree, self.device)
        out = self._run(tokens_BT.to(self.device), plan.position_BT.to(self.device), plan, cache, capture)
        cache.advance(plan.count_B)
        return Decoded(self._wanted_logits(out.last_BTD, plan.count_B, logits), out.aux_BTAD, out.last_BTD)

    def _wanted_logits(self, last_BTD: Tensor, counts: list[int], wanted: str) -> Tensor | None:
        if wanted == "none":
            return None
        if wanted == "all":
            return self.logits(last_BTD)
        if wanted != "last":
            raise UserError(f'expected logits="all", "last" or "none", found {wanted!r}')
        if last_BTD.shape[1] == 1:
            return self.logits(last_BTD[:, 0])
        row_B = torch.tensor([max(c - 1, 0) for c in counts], device=last_BTD.device)
        return self.logits(last_BTD[torch.arange(len(counts), device=last_BTD.device), row_B])
