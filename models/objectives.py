"""What a head is taught: the switches of the training objective, and the labels of each (anchor, step) pair."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError
from models.states import VerifierStates
from models.supervision import supervised
from models.token_loss import Law

TOKEN = ("ce", "lk", "lk_alpha")
WEIGHTS = ("decay", "vat")
TOKENS = ("given", "own")
Logits = Callable[[Tensor], Tensor]  # post-norm last hidden [n, D] -> logits of the draft columns [n, R], float32


@dataclass(frozen=True)
class Objective:
    """The loss of each counted (anchor, step k), and its weight in the sum.

    token: "ce", soft cross-entropy (2503.01840); "lk", λ KL + (1 - λ) TV with λ = exp(-3 α) and "lk_alpha", -log α
      (2602.23881); α is the acceptance Σ min(p_target, q_draft).
    feature_weight: of SmoothL1 against the verifier's last hidden state, mean over D (2401.15077, with
      token_weight 0.1 and noise 0.1).
    top_k_weight: of cross-entropy on the verifier's top_k tokens (2408.15766).
    weights: "decay", step_decay^k; "vat", 1 up to the anchor's first rejection and decaying from there (2608.30135).
    tokens: what later steps read: "given", the text, or "own", the head's drafts (models.on_policy).
    survival_weight: of the cross-entropy of the head's survival output: were this draft and all before it accepted?
      It learns from every counted pair: a verifier's token outside the draft vocabulary is a certain rejection.
    noise: captured states get uniform noise of +- this much; what is learnt from stays clean.
    """

    steps: int
    step_decay: float = 0.8
    token: str = "ce"
    token_weight: float = 1.0
    feature_weight: float = 0.0
    top_k_weight: float = 0.0
    top_k: int = 10
    weights: str = "decay"
    survival_weight: float = 0.0
    noise: float = 0.0
    tokens: str = "given"

    def __post_init__(self) -> None:
        for name, allowed in (("token", TOKEN), ("weights", WEIGHTS), ("tokens", TOKENS)):
            if getattr(self, name) not in allowed:
                raise UserError(f"objective.{name} must be {' or '.join(allowed)}, found {getattr(self, name)}")
        least = dict.fromkeys(("token_weight", "feature_weight", "top_k_weight", "survival_weight", "noise"), 0)
        least["top_k"] = 1
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise UserError(f"objective.{name} must be {bound} or more, found {getattr(self, name)}")
        if not 0 <= self.step_decay <= 1:
            raise UserError(f"objective.step_decay must lie in 0..1, found {self.step_decay}")
        if self.token_weight == self.feature_weight == self.top_k_weight == 0:
            raise UserError("the objective has no loss: give token_weight, feature_weight or top_k_weight")

    def step_weights(self, hit_KP: Tensor) -> Tensor:
        """The weight [K, P] of each pair; hit_KP bool: was the draft the verifier's own token?"""
        K = len(hit_KP)
        step_K1 = torch.arange(K, device=hit_KP.device)[:, None]
        if self.weights == "vat":
            rejected_P = hit_KP.long().cumprod(0).sum(0)  # the step that is rejected first
            step_K1 = (step_K1 - rejected_P).clamp_min(0)
        return (self.step_decay ** step_K1.double()).expand(hit_KP.shape)


@dataclass
class Labels:
    """The verifier's laws that label a batch, M of them, and which one (anchor p, step k) learns from.

    law:          probabilities of the draft columns, of label rows as a slice, formed when they are needed.
    top_M:        argmax over the full vocabulary.  last_MD: post-norm last hidden at the same rows.
    row_KP:       the law of each pair.  counted_KP: does the pair count?
    pair_MU:      the other way round: pairs k * P + p that learn from each law; K * P where there are fewer than U.
    tokens_KP:    what is read at each pair in place of the text; None: the text.
    """

    law: Law
    top_M: Tensor
    last_MD: Tensor
    row_KP: Tensor
    counted_KP: Tensor
    pair_MU: Tensor
    tokens_KP: Tensor | None = None

    @classmethod
    def given(cls, states: VerifierStates, logits: Logits, steps: int) -> Labels:
        """Of the text itself: the law of (p, k) is that of label row p + k."""
        P, device = len(states.last_index_P), states.last_index_P.device
        p, k = torch.arange(P, device=device), torch.arange(steps, device=device)[:, None]
        row_KP = (p + k).clamp_max(P - 1)  # past the end nothing is counted
        pair_MU = torch.where(p >= k, k * P + p - k, steps * P).T
        law = law_of(logits, states.last_PD, states.lse_P)
        return cls(law, states.top_P, states.last_PD, row_KP, supervised(states, steps), pair_MU)


def law_of(logits: Logits, last_MD: Tensor, lse_M: Tensor) -> Law:
    """The verifier's full-vocabulary probabilities of the columns that `logits` gives, at rows of its last hidden."""

    def law(rows: slice) -> Tensor:
        return (logits(last_MD[rows]) - lse_M[rows, None]).exp_()

    return law
