"""The acceptance rule of speculative sampling (Leviathan et al. 2211.17192, Chen et al. 2302.01318)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftLaw:
    """The law that each sampled candidate of a draft was really drawn from.

    probs_NR: one distribution a candidate, float32 or better, rows sum to 1.
    ids_R:    verifier token id of each column; None: the columns are the whole vocabulary in order.

    A candidate that wasn't drawn (a head's argmax, a prompt's n-gram) has a point mass for its law; that
    is written as `None` in place of a DraftLaw.
    """

    probs_NR: Tensor
    ids_R: Tensor | None = None

    def of(self, tokens_N: Tensor) -> Tensor:
        """q(d) of each candidate d, [N]."""
        columns_N = tokens_N if self.ids_R is None else torch.searchsorted(self.ids_R, tokens_N)
        assert self.ids_R is None or torch.equal(self.ids_R[columns_N.clamp(max=len(self.ids_R) - 1)], tokens_N), (
            "a candidate lies outside the vocabulary of the law it was drawn from"
        )
        return self.probs_NR.gather(1, columns_N[:, None]).squeeze(1)

    def dense(self, row: int, vocab_size: int) -> Tensor:
        """Row `row` spread over the verifier's vocabulary, [V]: zero outside the draft's columns."""
        if self.ids_R is None:
            return self.probs_NR[row]
        return self.probs_NR.new_zeros(vocab_size).index_copy(0, self.ids_R, self.probs_NR[row])


@dataclass(frozen=True)
class Accepted:
    """`count` leading candidates were accepted; `token` follows them: the correction, or the bonus."""

    count: int
    token: int


def draw(weights_V: Tensor, uniform: Tensor) -> Tensor:
    """The token whose slice of the (unnormalised) law holds `uniform` in [0, 1). Any leading shape; float64 inside.

    A token of zero weight is never drawn: the first column whose running sum exceeds u * total is taken, so
    its own weight isn't zero.
    """
    cdf_V = weights_V.double().cumsum(-1)
    target = (uniform.double() * cdf_V[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cdf_V, target, right=True).squeeze(-1).clamp_(max=weights_V.shape[-1] - 1)


def accept_chain(p_target_NV: Tensor, tokens_N: Tensor, q_draft: DraftLaw | None, uniform_N: Tensor) -> Accepted:
    """Tests a chain of N drafts against N+1 rows of the verifier's law; the emitted tokens follow p exactly.

    p_target_NV: [N+1, V], after the logits processors, float32 or better. Row i is the law of the token that
                 follows i accepted drafts; row N gives the bonus.
    tokens_N:    [N] candidates d_1..d_N (N may be 0).
    q_draft:     their laws, or None for point masses: then d is accepted with probability p(d).
    uniform_N:   [N+1] numbers in [0, 1): one coin a draft, and the last for the correction or bonus.

    Draft d passes with probability min(1, p(d)/q(d)). The first that fails is replaced by a draw from
    (p - q)+, which for a point mass is p without d, and the chain ends. A candidate with q(d) = 0 can't have
    been drawn, so it is an error, never an accept. Mass of p outside the draft's vocabulary stays in the
    residual. A residual of no mass can only be met by rounding (probability zero): the draw is from p then.
    """
    count_N, vocab_size = len(tokens_N), p_target_NV.shape[-1]
    assert p_target_NV.dtype in (torch.float32, torch.float64), f"p_target in {p_target_NV.dtype}"
    assert len(p_target_NV) == count_N + 1 == len(uniform_N), (p_target_NV.shape, count_N, uniform_N.shape)
    accepted = 0
    if count_N:
        p_of_draft_N = p_target_NV[:-1].gather(1, tokens_N[:, None]).squeeze(1).double()
        q_of_draft_N = torch.ones_like(p_of_draft_N) if q_draft is None else q_draft.of(tokens_N).double()
        assert bool((q_of_draft_N > 0).all()), "a candidate has q(d) = 0: it can't have been drawn from this law"
        passed_N = uniform_N[:-1].double() * q_of_draft_N < p_of_draft_N  # u < p/q without dividing; p(d) = 0 fails
        accepted = int(passed_N.long().cumprod(0).sum())
    law_V = p_target_NV[accepted].double()
    if accepted < count_N:
        if q_draft is None:
            residual_V = law_V.index_fill(0, tokens_N[accepted], 0.0)
        else:
            residual_V = (law_V - q_draft.dense(accepted, vocab_size).double()).clamp(min=0.0)
        law_V = torch.where(residual_V.sum() > 0, residual_V, law_V)
    return Accepted(accepted, int(draw(law_V, uniform_N[-1])))


def accept_greedy(top_N: Tensor, tokens_N: Tensor) -> Accepted:
    """`accept_chain` at temperature 0, where row i of p is a point mass on `top_N[i]`, [N+1].

    Then a draft passes exactly when it is the verifier's argmax, whatever law it came from, and the
    correction is that argmax: no row of width V is needed.
    """
    accepted = int((top_N[:-1] == tokens_N).long().cumprod(0).sum())
    return Accepted(accepted, int(top_N[accepted]))
