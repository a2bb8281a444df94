"""Attention for a frozen verifier: one function, registered with transformers, that follows a plan.

transformers builds a mask per call from what it knows of the batch. The verifier adapter knows more (documents packed
into a row, cache lengths per sequence, draft trees), so it hands a plan to the model's forward, and the model hands it
through to `attend` in each layer together with that layer's own window and soft-cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from conf.errors import UserError
from models.cache import KVCache
from models.layout import document_runs
from models.tree import TreeRows

NAME = "eyrie"
BIASES = ("position_bias", "sinks", "indices", "block_indices")  # what some layers add, and no plan knows of


@dataclass(frozen=True)
class Rule:
    """What a layer says about its attention. window: how many positions a row sees, itself included (None: all).

    softcap: scores become softcap * tanh(score / softcap) (Gemma 2). sinks_H: a logit per head that takes part in the
    softmax and carries no value (gpt-oss).
    """

    scale: float
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None

    @property
    def plain(self) -> bool:
        """Whether a fused kernel computes it."""
        return self.softcap is None and self.sinks_H is None


@dataclass(frozen=True)
class PackedPlan:
    """Causal attention inside each document of packed rows. runs: (row, start, stop) of each document."""

    runs: list[tuple[int, int, int]]
    whole_rows: bool  # every row is one document: a single call does

    @classmethod
    def of(cls, document_BT: Tensor) -> PackedPlan:
        """From document indices [B, T], -1 on pads; best on the host."""
        return cls.over(document_runs(document_BT), document_BT.shape)

    @classmethod
    def over(cls, runs: Sequence[tuple[int, int, int]], shape: Sequence[int]) -> PackedPlan:
        """From the documents of rows of this shape [B, T] (`models.layout.Layout`)."""
        whole = [(b, 0, shape[1]) for b in range(shape[0])]
        return cls(list(runs), list(runs) == whole)

    def attend(self, q_BHTF: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """Attention [B, H, T, F] of one layer; keys and values are those of the same rows."""
        if self.whole_rows:
            return _causal(q_BHTF, k, v, rule)
        out_BHTF = q_BHTF.new_zeros(*q_BHTF.shape[:3], v.shape[3])  # rows of pads stay zero
        for b, start, stop in self.runs:
            part = (slice(b, b + 1), slice(None), slice(start, stop))
            out_BHTF[part] = _causal(q_BHTF[part], k[part], v[part], rule)
        return out_BHTF


@dataclass
class CachePlan:
    """Attention of T new rows per sequence over a cache.

    length_B: slots in use before the new rows. count_B: how many of the T rows are real.
    tree: None for a chain; else the new rows are the last of a tree whose earlier nodes end the cache.
    Row t of sequence b sits in slot length_B[b] + t, and at its position in `position_BT`.
    masks: made once per forward for each window that the layers ask for, on each device that they lie on.
    """

    length_B: list[int]
    count_B: list[int]
    tokens: int
    slots: int  # that the keys cover
    tree: TreeRows | None = None
    masks: dict[tuple[int | None, torch.device], Tensor | None] = field(default_factory=dict)

    @classmethod
    def over(
        cls, cache: KVCache, tokens: int, count_B: Sequence[int] | None, tree: TreeRows | None, device: torch.device
    ) -> CachePlan:
        """Makes the cache ready for `tokens` new rows; call `cache.advance(plan.count_B)` after the forward.

        Raises UserError when the cache would overflow.
        """
        batch = len(cache.length_B)
        counts = [tokens] * batch if count_B is None else [int(c) for c in count_B]
        assert len(counts) == batch and all(0 <= c <= tokens for c in counts), "count_B lies in 0..T"
        rows = None if tree is None else tree.rows(batch, device)
        assert rows is None or rows.seen_BTN.shape[1] == tokens, f"{tokens} rows for a tree of {rows.seen_BTN.shape}"
        return cls(list(cache.length_B), counts, tokens, cache.stage(tokens, counts, device), rows)

    @property
    def position_BT(self) -> Tensor:
        """Position of each new row, int64; on the CPU for a chain."""
        length_B1 = torch.tensor(self.length_B)[:, None]
        if self.tree is None:
            return length_B1 + torch.arange(self.tokens)
        depth_BT = self.tree.depth_BN[:, self.tree.earlier :]
        return length_B1.to(depth_BT.device) - self.tree.earlier + depth_BT

    def attend(self, q_BHTF: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """Attention [B, H, T, F] of one layer over the cache's visible slots."""
        if self.tree is None and max(self.length_B) == 0 and self.slots >= self.tokens:
            new = slice(0, self.tokens)
            return _causal(q_BHTF, k[:, :, new], v[:, :, new], rule)
        window = None if rule.window is not None and rule.window >= self.slots else rule.window
        key = window, q_BHTF.device
        if key not in self.masks:
            mask = self._mask(window, q_BHTF)
            self.masks[key] = mask if mask is None else _per_group(mask, q_BHTF, k)
        return _grouped(q_BHTF, k, v, self.masks[key], rule)

    def _mask(self, window: int | None, like: Tensor) -> Tensor | None:
        """Additive mask [B, 1, T, slots], or None where every row sees every slot."""
        even = min(self.length_B) == max(self.length_B)
        if self.tree is None and self.tokens == 1 and even and window is None and min(self.count_B) == 1:
            return None
        seen_BTC = self._visible(window)
        mask_BTC = torch.zeros(seen_BTC.shape, dtype=like.dtype, device=seen_BTC.device)
        mask_BTC = mask_BTC.masked_fill_(~seen_BTC, float("-inf"))
        return mask_BTC.unsqueeze(1).to(like.device, non_blocking=True)

    def _visible(self, window: int | None) -> Tensor:
        slot_C = torch.arange(self.slots)
        length_B11 = torch.tensor(self.length_B).view(-1, 1, 1)
        if self.tree is None:
            # Rows past the count are junk that nobody reads: they see what the last real row sees, so that no row
            # has an empty softmax (its NaN would spread through masked slots).
            last_B11 = torch.tensor(self.count_B).view(-1, 1, 1) - 1
            row_BT1 = torch.arange(self.tokens).view(1, -1, 1).minimum(last_B11)
            position_BT1 = (length_B11 + row_BT1).clamp_min(0)
            seen_BTC = slot_C <= position_BT1
            return seen_BTC if window is None else seen_BTC & (slot_C > position_BT1 - window)
        tree, device = self.tree, self.tree.seen_BTN.device
        slot_C, prefix_B1 = slot_C.to(device), length_B11[:, 0].to(device) - tree.earlier
        node_BC = slot_C - prefix_B1
        index_BC = node_BC.clamp(0, tree.depth_BN.shape[1] - 1)
        of_tree_BTC = tree.seen_BTN.gather(2, index_BC[:, None].expand(-1, self.tokens, -1))
        seen_BTC = (node_BC < 0)[:, None] | (of_tree_BTC & (node_BC == index_BC)[:, None])
        if window is not None:
            position_BC = torch.where(node_BC < 0, slot_C, prefix_B1 + tree.depth_BN.gather(1, index_BC))
            seen_BTC &= position_BC[:, None] > self.position_BT[..., None] - window
        return seen_BTC


def _causal(q_BHTF: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    """Each row sees itself and the rows before it, as far as the window goes."""
    tokens = q_BHTF.shape[2]
    if rule.plain and (rule.window is None or rule.window >= tokens):
        return F.scaled_dot_product_attention(q_BHTF, k, v, is_causal=True, scale=rule.scale, enable_gqa=True)
    index = torch.arange(tokens, device=q_BHTF.device)
    ahead_TT = index - index[:, None]
    hidden_TT = ahead_TT > 0 if rule.window is None else (ahead_TT > 0) | (ahead_TT <= -rule.window)
    mask_TT = torch.zeros(tokens, tokens, dtype=q_BHTF.dtype, device=q_BHTF.device)
    mask_TT.masked_fill_(hidden_TT, float("-inf"))
    return _grouped(q_BHTF, k, v, _per_group(mask_TT[None, None], q_BHTF, k), rule)


def _per_group(mask_B1TC: Tensor, q_BHTF: Tensor, k: Tensor) -> Tensor:
    """The mask for `_grouped`: its rows once for each query head of a group."""
    return mask_B1TC.repeat(1, 1, q_BHTF.shape[1] // k.shape[1], 1) if q_BHTF.shape[2] > 1 else mask_B1TC


def _grouped(q_BHTF: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Attention with the query heads that share keys stacked as rows: nothing is copied per head."""
    batch, heads, tokens, width = q_BHTF.shape
    q = q_BHTF.reshape(batch, k.shape[1], -1, width)
    if rule.plain:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale)
    else:
        score = (q @ k.transpose(2, 3)).float() * rule.scale
        if rule.softcap is not None:
            score = torch.tanh(score / rule.softcap) * rule.softcap
        if mask is not None:
            score = score + mask
        if rule.sinks_H is not None:
            sink = rule.sinks_H.float().repeat_interleave(tokens).view(1, k.shape[1], -1, 1).expand(batch, -1, -1, 1)
            score = torch.cat([score, sink], dim=-1)
        out = score.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v
    return out.reshape(batch, heads, tokens, v.shape[3])


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    eyrie_plan: PackedPlan | CachePlan | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The function that transformers' attention modules call. query [B, H, T, F], key and value [B, kv, C, F]."""
    assert eyrie_plan is not None, "the plan of models.verifier.Verifier did not arrive here"
    if attention_mask is not None or any(kwargs.get(name) is not None for name in BIASES):
        raise UserError(
            f"expected softmax attention without more, found a mask or bias of its own in {type(module).__name__}: "
            "this architecture is not supported as a verifier"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_BHTF = eyrie_plan.attend(query, key, value, Rule(scale, sliding_window, softcap, s_aux))
    return out_BHTF.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
