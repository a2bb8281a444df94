"""The training loss of a head: what its draft steps give, against what the verifier says."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from models.objectives import Labels, Objective
from models.states import VerifierStates
from models.token_loss import TokenTerms, choices, token_loss


@dataclass
class StepCounts:
    """Sums per draft step, of one batch or of many (`+`). Ratios are the reader's: loss_K / weight_K, ...

    loss_K:    step weight times loss, over counted rows with the verifier's top token in the draft vocabulary.
    weight_K:  the same sum of step weights.
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


def head_loss(head, states: VerifierStates, labels: Labels, objective: Objective) -> tuple[Tensor, Tensor, StepCounts]:
    """Sum over counted (anchor, step k) of weight * loss, and the sum of those weights.

    head: any of models.heads.  labels: used up, make them for this call.
    Returns (loss_sum, weight_sum, counts): divide by the weights of the whole accumulation window and all
    ranks, once, so that padding, splitting and ranks change no gradient. Nothing here waits for the device
    beyond what `unroll` says. Both sums are zero for a batch without label rows.
    """
    K, P = labels.row_KP.shape
    given = {} if labels.tokens_KP is None else {"tokens_KP": labels.tokens_KP}
    out_ND = torch.cat(list(head.unroll(with_noise(states, objective.noise), K, **given)))
    hidden_ND, row_N = head.final(out_ND), labels.row_KP.flatten()
    top_KP = head.inverse_V[labels.top_N][labels.row_KP]
    usable_KP = labels.counted_KP & (top_KP >= 0)

    def hits(choice_N: Tensor) -> Tensor:
        return (choice_N.view(K, P) == top_KP) & labels.counted_KP

    # Only weights that depend on what was accepted need a look at the drafts before the loss.
    early = hits(choices(hidden_ND, head.lm_weight)) if objective.weights == "vat" else usable_KP
    weight_KP = objective.step_weights(early).to(labels.logits_NR.dtype) * usable_KP
    terms = TokenTerms(objective.token, objective.token_weight, objective.top_k_weight, objective.top_k, head.softcap)
    target_NR = labels.probabilities()
    rows = token_loss(hidden_ND, head.lm_weight, target_NR, row_N, weight_KP.flatten(), terms)
    hit_KP = hits(rows.choice_N)
    extra_N = torch.zeros_like(rows.loss_N)
    if objective.feature_weight:
        extra_N = extra_N + objective.feature_weight * feature_loss(out_ND, labels.last_ND[row_N], extra_N.dtype)
    if objective.survival_weight:
        survived_N = hit_KP.cumprod(0).flatten().to(extra_N.dtype)
        logit_N = head.survival(hidden_ND).squeeze(-1).to(extra_N.dtype)
        bce_N = F.binary_cross_entropy_with_logits(logit_N, survived_N, reduction="none")
        extra_N = extra_N + objective.survival_weight * bce_N

    def by_step(row_N: Tensor, weight: Tensor) -> Tensor:
        return (row_N.detach().view(K, P) * weight).sum(1)

    counts = StepCounts(
        loss_K=by_step(rows.loss_N + extra_N, weight_KP),
        weight_K=weight_KP.sum(1),
        correct_K=hit_KP.sum(1).to(weight_KP.dtype),
        total_K=labels.counted_KP.sum(1).to(weight_KP.dtype),
        overlap_K=by_step(rows.overlap_N, labels.counted_KP),
    )
    return rows.loss_sum + (extra_N * weight_KP.flatten()).sum(), weight_KP.sum(), counts


def feature_loss(out_ND: Tensor, target_ND: Tensor, dtype: torch.dtype) -> Tensor:
    """SmoothL1 (beta 1) of each row, mean over D, in `dtype` (2401.15077)."""
    return F.smooth_l1_loss(out_ND.to(dtype), target_ND.to(dtype), reduction="none").mean(-1)


def with_noise(states: VerifierStates, amplitude: float) -> VerifierStates:
    """Uniform noise on the captured states, from torch's own generator, so that a resumed run draws the same."""
    if not amplitude:
        return states
    noise = (torch.rand_like(states.aux_BTAD) * 2 - 1) * amplitude
    return replace(states, aux_BTAD=states.aux_BTAD + noise)
