"""Attention of a training-time-test step (2503.01840, section 3), at the anchors alone.

Anchor t at step k sees the step-0 keys of its document up to row t, and its own keys of steps 1..k; anchors never meet
each other's later keys. So a step is one softmax over a causal part, the same keys at every step, and a few terms of a
row's own. The causal part runs in a fused kernel; its output and log-sum-exp are merged with the few terms.

Back ends by name in BACKENDS; all give the same, and tests hold each against a naive reference:
  dense  plain products, any device; every run of anchors is computed again in backward, so no [P, T] scores are kept.
  flash  torch's fused kernel for CPUs: what a run sees before its first anchor needs no mask, the rest is causal.
  mixed  dense for short runs, where the kernel's overhead is most of it, and flash for long ones.
  flex   FlexAttention, for CUDA: one call for all documents. It has no backward on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from models.layout import Layout, Run
from models.states import VerifierStates

# (queries [P, H, F], step-0 keys and values [N, h, F] of all rows, own keys and values [P, h, F] of each step 1..k)
# -> [P, H, F].  H heads of size F in h groups of g that share keys; J: the steps that have own keys.
Attend = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]

FLASH_SCORES = 2**19  # scores of a run, query heads that share keys counted, from which on the fused kernel is faster
flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_of(states: VerifierStates, backend: str = "auto") -> Attend:
    """The attention of this batch's anchors. "auto": mixed on a CPU, flex on CUDA, dense elsewhere."""
    if backend == "auto":
        backend = {"cpu": "mixed", "cuda": "flex"}.get(states.aux_BTAD.device.type, "dense")
    return BACKENDS[backend](states)


# --- dense and flash: one softmax over all parts, by hand --------------------------------------------------------


def _merged(flash_from: float, states: VerifierStates) -> Attend:
    layout = states.layout

    def attend(q_PHF, k_NhF, v_NhF, own_k, own_v):
        heads = k_NhF.shape[1]
        q_PhgF = q_PHF.unflatten(1, (heads, -1))
        return _Merged.apply(q_PhgF, k_NhF, v_NhF, layout, flash_from, *own_k, *own_v).flatten(1, 2)

    return attend


class _Merged(torch.autograd.Function):
    """Softmax attention over keys that lie in several parts.

    With the log-sum-exp of all parts, the gradient of each part is that of a softmax which knows of no other: a part's
    weights are exp(score - lse), and delta = Σ grad · out is the same for all (2205.14135, appendix B.2). So a
    kernel's own backward serves, given the merged output and log-sum-exp in place of its own.
    """

    @staticmethod
    def forward(ctx, q, k, v, layout: Layout, flash_from, *own):
        own_k, own_v = own[: len(own) // 2], own[len(own) // 2 :]
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=_wide(q))
        for run, part in _runs(layout):
            out[part], lse[part] = _causal(q[part], k, v, run, flash_from)
        if own:
            score_PhgJ = torch.stack([_own_scores(q, x) for x in own_k], dim=-1)
            causal, lse = lse, torch.logaddexp(lse, score_PhgJ.logsumexp(-1))
            total = out * (causal - lse).exp().unsqueeze(-1)
            for weight_Phg, x in zip((score_PhgJ - lse.unsqueeze(-1)).exp().unbind(-1), own_v, strict=True):
                total.addcmul_(weight_Phg.unsqueeze(-1), x.unsqueeze(2).to(total.dtype))
            out = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.layout, ctx.flash_from = layout, flash_from
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse, *own = ctx.saved_tensors
        own_k, own_v = own[: len(own) // 2], own[len(own) // 2 :]
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        delta = (grad.to(lse.dtype) * out).sum(-1)
        for run, part in _runs(ctx.layout):
            parts = grad[part], q[part], out[part], lse[part], delta[part]
            grad_q[part] = _causal_backward(*parts, k, v, grad_k, grad_v, run, ctx.flash_from)
        grad_own_k, grad_own_v = [], []
        scale = q.shape[-1] ** -0.5
        for x, y in zip(own_k, own_v, strict=True):
            weight_Phg = (_own_scores(q, x) - lse).exp()
            grad_score = weight_Phg * ((grad.to(lse.dtype) * y.unsqueeze(2)).sum(-1) - delta) * scale
            grad_q += grad_score.unsqueeze(-1) * x.unsqueeze(2)
            grad_own_k.append((grad_score.unsqueeze(-1) * q).sum(2).to(x.dtype))
            grad_own_v.append((weight_Phg.unsqueeze(-1) * grad).sum(2).to(y.dtype))
        return grad_q, grad_k, grad_v, None, None, *grad_own_k, *grad_own_v


def _own_scores(q_PhgF: Tensor, k_PhF: Tensor) -> Tensor:
    return (q_PhgF.to(_wide(q_PhgF)) * k_PhF.unsqueeze(2)).sum(-1) * q_PhgF.shape[-1] ** -0.5


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _runs(layout: Layout):
    return ((run, slice(run.anchor, run.anchor + run.count)) for run in layout.runs)


def _stacked(x_PhgF: Tensor) -> Tensor:
    """[n, h, g, F] -> [1, h, n * g, F]: the query heads that share keys as rows, nothing is copied per head."""
    return x_PhgF.transpose(0, 1).flatten(1, 2)[None]


def _unstacked(x: Tensor, group: int) -> Tensor:
    """[1, h, n * g, ...] -> [n, h, g, ...]."""
    return x[0].unflatten(1, (-1, group)).transpose(0, 1)


def _per_head(x_PhgF: Tensor) -> Tensor:
    """[n, h, g, F] -> [1, h * g, n, F]."""
    return x_PhgF.permute(1, 2, 0, 3).flatten(0, 1)[None]


def _is_long(run: Run, group: int, flash_from: float) -> bool:
    return run.count * group * (run.stop - run.begin) >= flash_from


def _causal(q, k, v, run: Run, flash_from: float) -> tuple[Tensor, Tensor]:
    """Output [n, h, g, F] and log-sum-exp [n, h, g] of a run's anchors over rows begin..anchor."""
    n, heads, group, _ = q.shape
    if not _is_long(run, group, flash_from):
        p, lse = _probabilities(q, k, run)
        return _unstacked(p.to(q.dtype) @ _keys(v, run.begin, run.stop), group), lse
    square = flash_forward(_per_head(q), *(_repeated(x, run, group) for x in (k, v)), 0.0, True)
    out, lse = (x[0].unflatten(0, (heads, group)).movedim(2, 0) for x in square)
    if run.begin == run.first:
        return out, lse
    before = flash_forward(_stacked(q), _keys(k, run.begin, run.first), _keys(v, run.begin, run.first), 0.0, False)
    out_before, lse_before = (_unstacked(x, group) for x in before)
    both = torch.logaddexp(lse, lse_before)
    merged = out * (lse - both).exp().unsqueeze(-1) + out_before * (lse_before - both).exp().unsqueeze(-1)
    return merged, both


def _causal_backward(grad, q, out, lse, delta, k, v, grad_k, grad_v, run: Run, flash_from: float) -> Tensor:
    """The gradient of a run's queries; those of keys and values are added to grad_k and grad_v [N, h, F]."""
    n, heads, group, _ = q.shape
    rows, scale = slice(run.begin, run.stop), q.shape[-1] ** -0.5
    if not _is_long(run, group, flash_from):
        p, _ = _probabilities(q, k, run, lse)
        grad_s = _stacked(grad)
        grad_p = (grad_s @ _keys(v, run.begin, run.stop).transpose(2, 3)).to(p.dtype)
        grad_score = ((grad_p - _stacked(delta.unsqueeze(-1))) * p * scale).to(q.dtype)
        grad_v[rows] += (p.to(q.dtype).transpose(2, 3) @ grad_s)[0].transpose(0, 1)
        grad_k[rows] += (grad_score.transpose(2, 3) @ _stacked(q))[0].transpose(0, 1)
        return _unstacked(grad_score @ _keys(k, run.begin, run.stop), group)
    keys = (_repeated(x, run, group) for x in (k, v))
    seen = (x.contiguous() for x in (_per_head(out), _per_head(lse.unsqueeze(-1)).squeeze(-1)))
    dq, *square = flash_backward(_per_head(grad), _per_head(q), *keys, *seen, 0.0, True)
    for total, part in zip((grad_k, grad_v), square, strict=True):
        total[run.first : run.stop] += part[0].unflatten(0, (heads, group)).sum(1).transpose(0, 1)
    dq = dq[0].unflatten(0, (heads, group)).movedim(2, 0)
    if run.begin < run.first:
        keys = (_keys(x, run.begin, run.first) for x in (k, v))
        seen = (x.contiguous() for x in (_stacked(out), _stacked(lse.unsqueeze(-1)).squeeze(-1)))
        dq_before, *before = flash_backward(_stacked(grad), _stacked(q), *keys, *seen, 0.0, False)
        for total, part in zip((grad_k, grad_v), before, strict=True):
            total[run.begin : run.first] += part[0].transpose(0, 1)
        dq = dq + _unstacked(dq_before, group)
    return dq


def _keys(x_NhF: Tensor, begin: int, stop: int) -> Tensor:
    return x_NhF[begin:stop].transpose(0, 1)[None]


def _repeated(x_NhF: Tensor, run: Run, group: int) -> Tensor:
    """Keys or values of the run's own rows, once for each query head [1, h * g, n, F]."""
    return _keys(x_NhF, run.first, run.stop).repeat_interleave(group, dim=1)


def _probabilities(q, k, run: Run, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax weights [1, h, n * g, length] of a run over its keys, and their log-sum-exp [n, h, g] (or the given)."""
    group, length = q.shape[2], run.stop - run.begin
    score = (_stacked(q) @ _keys(k, run.begin, run.stop).transpose(2, 3)).to(_wide(q)) * q.shape[-1] ** -0.5
    last = torch.arange(run.first - run.begin, length, device=q.device).repeat_interleave(group)
    score.masked_fill_(torch.arange(length, device=q.device) > last[:, None], -torch.inf)
    if lse is None:
        lse = _unstacked(score.logsumexp(-1), group)
    return (score - _stacked(lse.unsqueeze(-1))).exp_(), lse


# --- flex --------------------------------------------------------------------------------------------------------


def _flex(states: VerifierStates) -> Attend:
    document_N, anchor_P = states.document_BT.flatten(), states.layout.anchor_P
    of_P, device = document_N[anchor_P], anchor_P.device

    def seen(_batch, _head, row, key):
        return (key <= anchor_P[row]) & (document_N[key] == of_P[row])

    make_mask, kernel = create_block_mask, flex_attention
    if device.type == "cuda":
        make_mask, kernel = _compiled(make_mask), _compiled(kernel)
    mask = make_mask(seen, None, None, len(anchor_P), len(document_N), device=device)

    def attend(q_PHF, k_NhF, v_NhF, own_k, own_v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q_PHF, k_NhF, v_NhF))
        out, aux = kernel(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        out_PHF, lse_PH = out[0].transpose(0, 1), aux.lse[0].transpose(0, 1)
        if not own_k:
            return out_PHF
        q_PhgF = q_PHF.unflatten(1, (k_NhF.shape[1], -1))
        score_PHJ = torch.stack([_own_scores(q_PhgF, x).flatten(1) for x in own_k], dim=-1)
        total_PH = torch.logaddexp(lse_PH, score_PHJ.logsumexp(-1))
        merged = (lse_PH - total_PH).exp().unsqueeze(-1) * out_PHF
        group = q_PhgF.shape[2]
        for weight_PH, x in zip((score_PHJ - total_PH.unsqueeze(-1)).exp().unbind(-1), own_v, strict=True):
            merged = merged + weight_PH.unsqueeze(-1) * x.repeat_interleave(group, dim=1)
        return merged.to(q_PHF.dtype)

    return attend


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


BACKENDS: dict[str, Callable[[VerifierStates], Attend]] = {
    "dense": partial(_merged, float("inf")),
    "flash": partial(_merged, 0),
    "mixed": partial(_merged, FLASH_SCORES),
    "flex": _flex,
}
