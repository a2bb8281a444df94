"""The training loss of a head: what its draft steps give, against what the verifier says."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from models.objectives import Labels, Objective
from models.states import VerifierStates
from models.token_loss import TokenTerms, choices, token_loss


@dataclass
class StepCounts:
    """Sums per draft step, of one batch or of many (`+`). Ratios are the reader's: loss_K / weight_K, ...

    loss_K:    step weight times loss, over counted rows with the verifier's top token in the draft vocabulary; the
               survival output's over all counted rows, for one without is a certain rejection.
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


def head_loss(
    head, states: VerifierStates, labels: Labels, objective: Objective, seed: int = 0
) -> tuple[Tensor, Tensor, StepCounts]:
    """Sum over counted (anchor, step k) of weight * loss, and the sum of those weights.

    head: any of models.heads.  seed: of the noise on this batch's states.
    Returns (loss_sum, weight_sum, counts): divide by the weights of the whole accumulation window and all
    ranks, once, so that padding, splitting and ranks change no gradient. Nothing here waits for the device. Both sums
    are zero for a batch without label rows.
    """
    K, P = labels.row_KP.shape
    given = {} if labels.tokens_KP is None else {"tokens_KP": labels.tokens_KP}
    out_ND = torch.cat(list(head.unroll(with_noise(states, objective.noise, seed), K, **given)))
    hidden_ND = head.final(out_ND)
    top_KP = head.inverse_V[labels.top_M][labels.row_KP]
    usable_KP = labels.counted_KP & (top_KP >= 0)
    dtype = torch.promote_types(states.lse_P.dtype, torch.float32)

    def hits(choice_N: Tensor) -> Tensor:
        return (choice_N.view(K, P) == top_KP) & labels.counted_KP

    # Only weights that depend on what was accepted need a look at the drafts before the loss.
    early = hits(choices(hidden_ND, head.lm_weight)) if objective.weights == "vat" else usable_KP
    step_KP = objective.step_weights(early).to(dtype)
    weight_KP = step_KP * usable_KP
    terms = TokenTerms(objective.token, objective.token_weight, objective.top_k_weight, objective.top_k, head.softcap)
    rows = token_loss(hidden_ND, head.lm_weight, labels.law, labels.pair_MU, weight_KP.flatten(), terms)
    hit_KP = hits(rows.choice_N)
    extra_KP = torch.zeros_like(weight_KP)
    if objective.feature_weight:
        feature_N = feature_loss(out_ND, labels.last_MD[labels.row_KP.flatten()], dtype)
        extra_KP = extra_KP + objective.feature_weight * feature_N.view(K, P) * weight_KP
    if objective.survival_weight:
        survived_KP, logit_N1 = hit_KP.cumprod(0).to(dtype), head.survival(hidden_ND).to(dtype)
        bce_KP = F.binary_cross_entropy_with_logits(logit_N1.view(K, P), survived_KP, reduction="none")
        extra_KP = extra_KP + objective.survival_weight * bce_KP * step_KP * labels.counted_KP
    overlap_KP = rows.overlap_N.view(K, P) * labels.counted_KP
    counts = StepCounts(
        loss_K=(rows.loss_N.view(K, P) * weight_KP + extra_KP.detach()).sum(1),
        weight_K=weight_KP.sum(1),
        correct_K=hit_KP.sum(1).to(dtype),
        total_K=labels.counted_KP.sum(1).to(dtype),
        overlap_K=overlap_KP.sum(1),
    )
    return rows.loss_sum + extra_KP.sum(), weight_KP.sum(), counts


def feature_loss(out_ND: Tensor, target_ND: Tensor, dtype: torch.dtype) -> Tensor:
    """SmoothL1 (beta 1) of each row, mean over D, in `dtype` (2401.15077)."""
    return F.smooth_l1_loss(out_ND.to(dtype), target_ND.to(dtype), reduction="none").mean(-1)


def with_noise(states: VerifierStates, amplitude: float, seed: int) -> VerifierStates:
    """Uniform noise of +- amplitude on the captured states (2401.15077); the same for the same seed and device."""
    if not amplitude:
        return states
    aux = states.aux_BTAD
    generator = torch.Generator(aux.device).manual_seed(seed)
    noise = torch.empty_like(aux).uniform_(-amplitude, amplitude, generator=generator)
    return states.with_aux(noise.add_(aux))
