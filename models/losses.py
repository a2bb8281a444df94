"""The TTT loss of 2503.01840, with the LM head and its gradient fused so that no [P, R] tensor lives on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from models.heads.eagle3 import Eagle3Head
from models.states import VerifierStates
from models.supervision import supervised

CHUNK_ELEMENTS = 2**21  # logits formed at a time: a few MB, so that they stay in the cache between passes


@dataclass
class StepCounts:
    """Sums per TTT step, of one batch or of many (`+`). Ratios are the reader's: loss_K / weight_K, ...

    loss_K:    step weight times soft cross-entropy, over counted rows with the verifier's top token in the
               draft vocabulary.  weight_K: the same sum of step weights.
    correct_K: rows where the head's argmax is the verifier's full-vocabulary argmax.
    total_K:   all counted rows; those with the top token outside the draft vocabulary are misses.
    overlap_K: sum over all counted rows of sum_x min(p_target, q_draft): expected acceptance when sampling.
    """

    loss_K: Tensor
    weight_K: Tensor
    correct_K: Tensor
    total_K: Tensor
    overlap_K: Tensor

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class SoftCE(NamedTuple):
    """loss_sum: sum of weight * loss, the only differentiable entry. Per row: loss, argmax, overlap."""

    loss_sum: Tensor
    loss_N: Tensor
    choice_N: Tensor
    overlap_N: Tensor


class _SoftCE(torch.autograd.Function):
    """The gradient is formed beside the loss, one block of rows at a time, and scaled in backward."""

    @staticmethod
    def forward(ctx, hidden_ND, weight_RD, target_PR, label_N, row_weight_N, dtype, hidden_grad, weight_grad):
        N, R = len(hidden_ND), len(weight_RD)
        wide = target_PR.dtype
        mass_P = target_PR.sum(-1).clamp_min(torch.finfo(wide).tiny)
        loss_N, overlap_N = target_PR.new_empty(N), target_PR.new_empty(N)
        choice_N = torch.empty(N, dtype=torch.int64, device=hidden_ND.device)
        grad_hidden = torch.empty_like(hidden_ND) if hidden_grad else None
        grad_weight = torch.zeros_like(weight_RD, dtype=wide) if weight_grad else None
        matrix_RD = weight_RD.to(dtype)
        size = max(64, CHUNK_ELEMENTS // R)
        for rows in (slice(i, i + size) for i in range(0, N, size)):
            hidden, label, row_weight = hidden_ND[rows].to(dtype), label_N[rows], row_weight_N[rows]
            logits = (hidden @ matrix_RD.T).to(wide)
            p_target, mass = target_PR.index_select(0, label), mass_P[label]
            top, choice = logits.max(-1)
            dot = (p_target * logits).sum(-1)
            q_draft = logits.softmax(-1)
            chosen = q_draft.gather(1, choice.unsqueeze(1)).squeeze(1)
            loss_N[rows] = top - chosen.log() - dot / mass  # log-sum-exp minus the teacher's mean logit
            choice_N[rows] = choice
            overlap_N[rows] = torch.minimum(p_target, q_draft).sum(-1)
            if not (hidden_grad or weight_grad):
                continue
            scale = (row_weight / mass).unsqueeze(1)
            grad = q_draft.mul_(row_weight.unsqueeze(1)).addcmul_(p_target, scale, value=-1).to(dtype)
            if hidden_grad:
                grad_hidden[rows] = grad @ matrix_RD
            if weight_grad and dtype == wide:
                grad_weight.addmm_(grad.T, hidden)
            elif weight_grad:  # low-precision products, summed in float32
                grad_weight += grad.T @ hidden
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(loss_N, choice_N, overlap_N)
        loss_sum = (loss_N * row_weight_N).sum()
        return loss_sum, loss_N, choice_N, overlap_N

    @staticmethod
    def backward(ctx, grad_sum, *_):
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled = [None if grad is None else grad * grad_sum.to(grad.dtype) for grad in (grad_hidden, grad_weight)]
        return *scaled, *[None] * 6


def soft_ce(hidden_ND: Tensor, weight_RD: Tensor, target_PR: Tensor, label_N: Tensor, row_weight_N: Tensor) -> SoftCE:
    """LM head and soft cross-entropy of each row against the teacher's law over the draft columns.

    hidden_ND:    what the LM head reads.  weight_RD: the LM head.
    target_PR:    the verifier's full-vocabulary probabilities of the draft columns (they sum to at most 1;
                  the loss normalises them, the overlap does not), float32 or better.
    label_N:      teacher row of each row.  row_weight_N: its weight in the sum; 0 leaves it out.
    Matrix products follow autocast, the rest is in target's dtype.
    """
    wanted = [torch.is_grad_enabled() and x.requires_grad for x in (hidden_ND, weight_RD)]
    device = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_RD.dtype
    with torch.autocast(device, enabled=False):
        return SoftCE(*_SoftCE.apply(hidden_ND, weight_RD, target_PR, label_N, row_weight_N, dtype, *wanted))


def ttt_loss(
    head: Eagle3Head, states: VerifierStates, teacher_PR: Tensor, steps: int, step_decay: float = 0.8
) -> tuple[Tensor, Tensor, StepCounts]:
    """Sum over counted (anchor, step k) of step_decay^k * soft cross-entropy, and the sum of those weights.

    teacher_PR: the verifier's logits of the draft columns at the label rows, float32. Its memory is used up (it
                is the largest tensor of a step, and a second one would double that): pass a tensor made for this call.
    Returns (loss_sum, weight_sum, counts): divide by the weights of the whole accumulation window and all
    ranks, once, so that padding, splitting and ranks change no gradient. Nothing here waits for the device
    beyond what `unroll` says. Both sums are zero for a batch without label rows.
    """
    P = len(states.last_index_P)
    counted_KP = supervised(states, steps)
    decay_K = torch.tensor([step_decay**k for k in range(steps)], dtype=teacher_PR.dtype, device=teacher_PR.device)
    # Teacher of (anchor p, step k) = law of label row p + k; past the end nothing is counted.
    label_KP = torch.stack([torch.arange(k, P + k, device=teacher_PR.device) for k in range(steps)]).clamp_max(P - 1)
    top_KP = head.inverse_V[states.top_P][label_KP]
    weight_KP = decay_K[:, None] * (counted_KP & (top_KP >= 0))

    target_PR = teacher_PR.sub_(states.lse_P.to(teacher_PR.dtype)[:, None]).exp_()
    hidden_ND = head.norm(torch.cat(list(head.unroll(states, steps))))
    rows = soft_ce(hidden_ND, head.lm_head.weight, target_PR, label_KP.flatten(), weight_KP.flatten())

    def by_step(row_N: Tensor, weight: Tensor) -> Tensor:
        return (row_N.view(steps, P) * weight).sum(1)

    counts = StepCounts(
        loss_K=by_step(rows.loss_N, weight_KP),
        weight_K=weight_KP.sum(1),
        correct_K=by_step(rows.choice_N == top_KP.flatten(), counted_KP).to(weight_KP.dtype),
        total_K=counted_KP.sum(1).to(weight_KP.dtype),
        overlap_K=by_step(rows.overlap_N, counted_KP),
    )
    return rows.loss_sum, weight_KP.sum(), counts
