"""LM head, teacher, token loss and their gradient in one pass over blocks of label rows.

Nothing of the size [T, R] ever exists: a block's logits are formed, turned into their gradient in place, multiplied
into the gradients of hidden states and LM head, and forgotten. The teacher's law of a label row is formed once, for all
the draft steps that learn from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_LOGITS = 2**25  # formed by one matrix product: a few hundred rows, so that it runs at full speed
CACHE_LOGITS = 2**18  # whose losses are formed at a time on a CPU: they stay in its cache between passes
LK_DECAY = 3.0  # how fast LK turns from KL to total variation as acceptance grows (2602.23881)

# Label rows -> the verifier's full-vocabulary probabilities of the draft columns [n, R], float32 or better. They sum to
# at most 1: cross-entropy normalises them, the acceptance does not.
Law = Callable[[slice], Tensor]


@dataclass(frozen=True)
class TokenTerms:
    """Which loss of a row's logits; see Objective. softcap: of the logits, None without."""

    kind: str = "ce"
    weight: float = 1.0
    top_k_weight: float = 0.0
    top_k: int = 10
    softcap: float | None = None


class TokenLoss(NamedTuple):
    """loss_sum: sum of weight * loss, the only differentiable entry. Per row: loss, argmax, acceptance.

    A row that no label points to has loss and acceptance 0, and argmax -1.
    """

    loss_sum: Tensor
    loss_N: Tensor
    choice_N: Tensor
    overlap_N: Tensor


def token_loss(
    hidden_ND: Tensor,
    weight_RD: Tensor,
    law: Law,
    row_MU: Tensor,
    row_weight_N: Tensor,
    terms: TokenTerms = TokenTerms(),  # noqa: B008 - frozen
) -> TokenLoss:
    """LM head and loss of each row against the verifier's law over the draft columns.

    hidden_ND: what the LM head reads.  weight_RD: the LM head.  law: of label rows 0..M-1.
    row_MU:    the rows of hidden_ND that learn from each label row; N where there are fewer than U. Each at most once.
    row_weight_N: weight of each row in the sum; 0 leaves it out. Its dtype, float32 or better, is that of the losses.
    Matrix products follow autocast.
    """
    dtype = _dtype(weight_RD)
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (hidden_ND, weight_RD)]
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return TokenLoss(*_TokenLoss.apply(hidden_ND, weight_RD, law, row_MU, row_weight_N, terms, dtype, *wanted))


def choices(hidden_ND: Tensor, weight_RD: Tensor) -> Tensor:
    """The head's argmax [N] of each row, without a gradient."""
    dtype, size = _dtype(weight_RD), max(1, BLOCK_LOGITS // len(weight_RD))
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
        matrix_DR = weight_RD.to(dtype).T
        return torch.cat([(rows.to(dtype) @ matrix_DR).argmax(-1) for rows in hidden_ND.split(size)])


def acceptance(p_target: Tensor, q_draft: Tensor) -> Tensor:
    """Σ_x min(p, q) over the last axis: the chance that a draft drawn from q is accepted (2211.17192)."""
    return torch.minimum(p_target, q_draft).sum(-1)


def _dtype(weight_RD: Tensor) -> torch.dtype:
    """Of matrix products: asked outside of the region where autocast is off."""
    device = weight_RD.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_RD.dtype


class _TokenLoss(torch.autograd.Function):
    """The gradient is formed beside the loss and scaled in backward. Row N of every result takes what is left out."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_RD, law, row_MU, row_weight_N, terms, dtype, hidden_grad, weight_grad):
        N, R, (M, U), wide = len(hidden_ND), len(weight_RD), row_MU.shape, row_weight_N.dtype
        loss_N, overlap_N = row_weight_N.new_zeros(N + 1), row_weight_N.new_zeros(N + 1)
        choice_N = torch.full((N + 1,), -1, device=hidden_ND.device)
        weight_N = torch.cat([row_weight_N, row_weight_N.new_zeros(1)])
        grad_hidden = hidden_ND.new_zeros(N + 1, hidden_ND.shape[1]) if hidden_grad else None
        grad_weight = torch.zeros_like(weight_RD, dtype=wide) if weight_grad else None
        matrix_RD, size = weight_RD.to(dtype), max(1, BLOCK_LOGITS // (U * R))
        for labels in (slice(i, min(i + size, M)) for i in range(0, M, size)):
            row = row_MU[labels].flatten()
            hidden = hidden_ND[row.clamp_max(N - 1)].to(dtype)
            logits = hidden @ matrix_RD.T
            rows = _losses_in_place(logits.view(-1, U, R), law(labels).to(wide), terms)
            loss_N[row], choice_N[row], overlap_N[row] = (x.flatten() for x in rows)
            if not (hidden_grad or weight_grad):
                continue
            grad, weight = logits, weight_N[row].unsqueeze(1)
            if hidden_grad:
                grad_hidden[row] = (grad @ matrix_RD * weight).to(grad_hidden.dtype)
            if weight_grad:
                grad_weight += grad.T @ (hidden * weight).to(dtype)  # low-precision products, summed in float32
        ctx.save_for_backward(grad_hidden[:N] if hidden_grad else None, grad_weight)
        kept = loss_N[:N], choice_N[:N], overlap_N[:N]
        ctx.mark_non_differentiable(*kept)
        return (loss_N * weight_N).sum(), *kept

    @staticmethod
    def backward(ctx, grad_sum, *_):
        scaled = [None if grad is None else grad * grad_sum.to(grad.dtype) for grad in ctx.saved_tensors]
        return *scaled, *[None] * 7


def _losses_in_place(logits_MUR: Tensor, p_MR: Tensor, terms: TokenTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, argmax and acceptance [n, U] of a block; its logits become the losses' gradient."""
    M, U, R = logits_MUR.shape
    size = max(1, CACHE_LOGITS // (U * R)) if logits_MUR.device.type == "cpu" else M
    parts = []
    for logits, p_mR in zip(logits_MUR.split(size), p_MR.split(size), strict=True):
        z = logits.to(p_MR.dtype)
        if terms.softcap is not None:
            z = terms.softcap * torch.tanh(z / terms.softcap)
        *rows, grad = _losses(z, p_mR.unsqueeze(1), terms)
        if terms.softcap is not None:
            grad *= 1 - (z / terms.softcap).square()
        logits.copy_(grad)
        parts.append(rows)
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _losses(z: Tensor, p: Tensor, terms: TokenTerms) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, argmax and acceptance of each row, and the loss's gradient with respect to the logits z [n, U, R].

    p: [n, 1, R], of which m is the mass.  q = softmax(z). Cross-entropy against p / m has the gradient q - p / m.
    Acceptance α = Σ min(p, q) has q (b - Σ q b) where b = [q < p]; no part of it exceeds α, so that the gradient of
    log α stays finite as α goes to 0.
    """
    mass = p.sum(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    p_hat, q = p / mass, z.softmax(-1)
    top, choice = z.max(-1)
    lse = top - q.gather(-1, choice.unsqueeze(-1)).squeeze(-1).log()
    alpha = acceptance(p, q)
    loss = lse - (z @ p_hat.mT).squeeze(-1)
    if terms.kind == "ce":
        grad = q - p_hat
    else:
        below = q * (q < p)
        grad_alpha = below.addcmul_(q, below.sum(-1, keepdim=True), value=-1)
        if terms.kind == "lk_alpha":
            floor = alpha.clamp_min(torch.finfo(alpha.dtype).tiny)
            loss, grad = -floor.log(), grad_alpha.div_(-floor.unsqueeze(-1))
        else:
            share = torch.exp(-LK_DECAY * alpha)
            entropy = -torch.special.xlogy(p_hat, p_hat).sum(-1)
            loss = share * (loss - entropy) + (1 - share) * (1 - alpha)
            grad = (q - p_hat).mul_(share.unsqueeze(-1)).addcmul_(grad_alpha, (1 - share).unsqueeze(-1), value=-1)
    if terms.weight != 1:
        loss, grad = loss * terms.weight, grad.mul_(terms.weight)
    if terms.top_k_weight:
        best, column = (x.expand(-1, z.shape[1], -1) for x in p.topk(min(terms.top_k, p.shape[-1])))
        total = best.sum(-1)
        loss = loss + terms.top_k_weight * (total * lse - (best * z.gather(-1, column)).sum(-1))
        grad = grad.add_(q * total.unsqueeze(-1), alpha=terms.top_k_weight)
        grad.scatter_add_(-1, column, -terms.top_k_weight * best)
    return loss, choice, alpha, grad
