"""LM head, token loss and their gradient in one pass over blocks of rows, so that no [N, R] tensor lives on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**21  # logits formed at a time: a few MB, so that they stay in the cache between passes
LK_DECAY = 3.0  # how fast LK turns from KL to total variation as acceptance grows (2602.23881)


@dataclass(frozen=True)
class TokenTerms:
    """Which loss of a row's logits; see Objective. softcap: of the logits, None without."""

    kind: str = "ce"
    weight: float = 1.0
    top_k_weight: float = 0.0
    top_k: int = 10
    softcap: float | None = None


class TokenLoss(NamedTuple):
    """loss_sum: sum of weight * loss, the only differentiable entry. Per row: loss, argmax, acceptance."""

    loss_sum: Tensor
    loss_N: Tensor
    choice_N: Tensor
    overlap_N: Tensor


def token_loss(
    hidden_ND: Tensor,
    weight_RD: Tensor,
    target_PR: Tensor,
    label_N: Tensor,
    row_weight_N: Tensor,
    terms: TokenTerms = TokenTerms(),  # noqa: B008 - frozen
) -> TokenLoss:
    """LM head and loss of each row against the verifier's law over the draft columns.

    hidden_ND:    what the LM head reads.  weight_RD: the LM head.
    target_PR:    the verifier's full-vocabulary probabilities of the draft columns (they sum to at most 1;
                  cross-entropy normalises them, the acceptance does not), float32 or better.
    label_N:      teacher row of each row.  row_weight_N: its weight in the sum; 0 leaves it out.
    Matrix products follow autocast, the rest is in target's dtype.
    """
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (hidden_ND, weight_RD)]
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return TokenLoss(
            *_TokenLoss.apply(hidden_ND, weight_RD, target_PR, label_N, row_weight_N, terms, _dtype(weight_RD), *wanted)
        )


def choices(hidden_ND: Tensor, weight_RD: Tensor) -> Tensor:
    """The head's argmax [N] of each row, without a gradient."""
    dtype, size = _dtype(weight_RD), _rows(weight_RD)
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
        matrix_DR = weight_RD.to(dtype).T
        return torch.cat([(rows.to(dtype) @ matrix_DR).argmax(-1) for rows in hidden_ND.split(size)])


def acceptance(target_NR: Tensor, q_NR: Tensor) -> Tensor:
    """Σ_x min(p, q) of each row: the chance that a draft drawn from q is accepted (2211.17192)."""
    return torch.minimum(target_NR, q_NR).sum(-1)


def _dtype(weight_RD: Tensor) -> torch.dtype:
    device = weight_RD.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_RD.dtype


def _rows(weight_RD: Tensor) -> int:
    return max(64, CHUNK_ELEMENTS // len(weight_RD))


class _TokenLoss(torch.autograd.Function):
    """The gradient is formed beside the loss, one block of rows at a time, and scaled in backward."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_RD, target_PR, label_N, row_weight_N, terms, dtype, hidden_grad, weight_grad):
        N, wide = len(hidden_ND), target_PR.dtype
        mass_P = target_PR.sum(-1).clamp_min(torch.finfo(wide).tiny)
        loss_N, overlap_N = target_PR.new_empty(N), target_PR.new_empty(N)
        choice_N = torch.empty(N, dtype=torch.int64, device=hidden_ND.device)
        grad_hidden = torch.empty_like(hidden_ND) if hidden_grad else None
        grad_weight = torch.zeros_like(weight_RD, dtype=wide) if weight_grad else None
        matrix_RD, size = weight_RD.to(dtype), _rows(weight_RD)
        for rows in (slice(i, i + size) for i in range(0, N, size)):
            hidden, label = hidden_ND[rows].to(dtype), label_N[rows]
            logits = (hidden @ matrix_RD.T).to(wide)
            if terms.softcap is not None:
                logits = terms.softcap * torch.tanh(logits / terms.softcap)
            p_target, mass = target_PR.index_select(0, label), mass_P[label].unsqueeze(1)
            choice_N[rows] = logits.argmax(-1)
            loss_N[rows], overlap_N[rows], grad = _losses(logits, p_target, mass, terms)
            if not (hidden_grad or weight_grad):
                continue
            if terms.softcap is not None:
                grad *= 1 - (logits / terms.softcap).square()
            grad = grad.mul_(row_weight_N[rows].unsqueeze(1)).to(dtype)
            if hidden_grad:
                grad_hidden[rows] = grad @ matrix_RD
            if weight_grad and dtype == wide:
                grad_weight.addmm_(grad.T, hidden)
            elif weight_grad:  # low-precision products, summed in float32
                grad_weight += grad.T @ hidden
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(loss_N, choice_N, overlap_N)
        return (loss_N * row_weight_N).sum(), loss_N, choice_N, overlap_N

    @staticmethod
    def backward(ctx, grad_sum, *_):
        scaled = [None if grad is None else grad * grad_sum.to(grad.dtype) for grad in ctx.saved_tensors]
        return *scaled, *[None] * 7


def _losses(z: Tensor, p: Tensor, mass: Tensor, terms: TokenTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and acceptance of each row, and the loss's gradient with respect to the logits z [n, R].

    q = softmax(z). Cross-entropy against p / mass has the gradient q - p / mass. Acceptance α = Σ min(p, q) has
    q (m - Σ q m) where m = [q < p]; no part of it exceeds α, so that the gradient of log α stays finite as α goes to 0.
    """
    lse = z.logsumexp(-1, keepdim=True)
    q = (z - lse).exp_()
    alpha = acceptance(p, q)
    loss = (lse - (p * z).sum(-1, keepdim=True) / mass).squeeze(1)
    if terms.kind == "ce":
        grad = q.addcdiv(p, mass, value=-1)
    else:
        below = q * (q < p)
        grad_alpha = below.addcmul_(q, below.sum(-1, keepdim=True), value=-1)
        if terms.kind == "lk_alpha":
            floor = torch.finfo(alpha.dtype).tiny
            loss = -alpha.clamp_min(floor).log()
            grad = grad_alpha.div_(-alpha.clamp_min(floor).unsqueeze(1))
        else:
            share = torch.exp(-LK_DECAY * alpha)
            entropy = -torch.special.xlogy(p, p / mass).sum(-1) / mass.squeeze(1)
            loss = share * (loss - entropy) + (1 - share) * (1 - alpha)
            grad = q.addcdiv(p, mass, value=-1).mul_(share.unsqueeze(1))
            grad.addcmul_(grad_alpha, (1 - share).unsqueeze(1), value=-1)
    if terms.weight != 1:
        loss, grad = loss * terms.weight, grad.mul_(terms.weight)
    if terms.top_k_weight:
        best, column = p.topk(min(terms.top_k, p.shape[1]), dim=-1)
        total = best.sum(-1, keepdim=True)
        loss = loss + terms.top_k_weight * (total * lse - (best * z.gather(1, column)).sum(-1, keepdim=True)).squeeze(1)
        grad = grad.add_(q * total, alpha=terms.top_k_weight)
        grad.scatter_add_(1, column, -terms.top_k_weight * best)
    return loss, alpha, grad
