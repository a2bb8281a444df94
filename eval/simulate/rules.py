"""Our acceptance rules once more, for very many rounds at once, in numpy; `eval.speculative.acceptance` is what they
are held against, round by round on the same random numbers.

R rounds, N drafts, V tokens, U = 2 N + 1 numbers in [0, 1) a round: one a draft, one coin a draft, one for the token
after them. Laws may depend on the token before (a row of p_VV each), or not (the rows are equal).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from eval.speculative.acceptance import Accepted, DraftLaw, accept_sampled
from eval.speculative.grow import grow
from eval.speculative.processors import Sampling
from eval.speculative.shapes import FixedTree


@dataclass(frozen=True)
class Laws:
    """p_target and q_draft of each context, [V, V]."""

    p_VV: np.ndarray
    q_VV: np.ndarray

    @classmethod
    def free(cls, p_V: np.ndarray, q_V: np.ndarray) -> Laws:
        """The same after every token."""
        return cls(np.tile(p_V, (len(p_V), 1)), np.tile(q_V, (len(q_V), 1)))

    @cached_property
    def residual_VV(self) -> np.ndarray:
        """(p - q)+, renormalised; p where they are equal."""
        left_VV = np.clip(self.p_VV - self.q_VV, 0, None)
        total_V1 = left_VV.sum(1, keepdims=True)
        return np.where(total_V1 > 0, left_VV / np.where(total_V1 > 0, total_V1, 1), self.p_VV)

    @cached_property
    def alpha_V(self) -> np.ndarray:
        """P(a draft is accepted) = sum of min(p, q) = 1 - TV(p, q), by context."""
        return np.minimum(self.p_VV, self.q_VV).sum(1)


@dataclass(frozen=True)
class Rounds:
    """drafts_RN; accepted_R: how many passed; token_R: what follows them, the correction or the bonus."""

    drafts_RN: np.ndarray
    accepted_R: np.ndarray
    token_R: np.ndarray


def random_law(rng: np.random.Generator, vocab: int, concentration: float) -> np.ndarray:
    """A distribution, [V]: the smaller the concentration, the more it sits on few tokens."""
    return rng.dirichlet([concentration] * vocab)


def draw(law_CV: np.ndarray, row_R: np.ndarray, uniform_R: np.ndarray) -> np.ndarray:
    """A token from the law in `row` of a table: the one whose slice holds `uniform`."""
    vocab = law_CV.shape[1]
    cdf_CV = law_CV.cumsum(1)
    # One ladder of all laws, a unit each, so that one search serves all rows.
    ladder = (cdf_CV / cdf_CV[:, -1:] + np.arange(len(law_CV))[:, None]).ravel()
    return np.minimum(np.searchsorted(ladder, row_R + uniform_R, side="right") - row_R * vocab, vocab - 1)


def draw_each(law_RV: np.ndarray, uniform_R: np.ndarray) -> np.ndarray:
    """The same where everyone has a law of its own, which needn't sum to one."""
    cdf_RV = law_RV.cumsum(1)
    return np.minimum((cdf_RV <= uniform_R[:, None] * cdf_RV[:, -1:]).sum(1), law_RV.shape[1] - 1)


def chain_rounds(laws: Laws, last_R: np.ndarray, uniform_RU: np.ndarray, accept_all=False, from_p=False) -> Rounds:
    """One round of each: drafts from q, coins, the correction from the residual or the bonus from p.

    Two mistakes to compare with: accept_all tosses no coins; from_p draws the correction from p itself.
    """
    N = uniform_RU.shape[1] // 2
    context = [last_R]
    for k in range(N):
        context.append(draw(laws.q_VV, context[-1], uniform_RU[:, k]))
    context_RM = np.stack(context, 1)
    before_RN, drafts_RN = context_RM[:, :-1], context_RM[:, 1:]
    passed_RN = uniform_RU[:, N:-1] * laws.q_VV[before_RN, drafts_RN] < laws.p_VV[before_RN, drafts_RN]
    accepted_R = np.logical_or(passed_RN, accept_all).cumprod(1).sum(1)
    end_R, whole_R = context_RM[np.arange(len(last_R)), accepted_R], accepted_R == N
    bonus_R = draw(laws.p_VV, end_R, uniform_RU[:, -1])
    token_R = bonus_R if from_p else np.where(whole_R, bonus_R, draw(laws.residual_VV, end_R, uniform_RU[:, -1]))
    return Rounds(drafts_RN, accepted_R, token_R)


def texts(laws: Laws, first: int, depth: int, length: int, count: int, rng: np.random.Generator, **fault) -> np.ndarray:
    """[count, length] tokens after `first`, across as many rounds as each takes. fault: of `chain_rounds`."""
    text_RT = np.full((count, length), -1)
    filled_R, last_R, live = np.zeros(count, int), np.full(count, first), np.arange(count)
    while len(live):
        rounds = chain_rounds(laws, last_R[live], rng.random((len(live), 2 * depth + 1)), **fault)
        for j in range(depth + 1):
            here = (j <= rounds.accepted_R) & (filled_R[live] + j < length)
            token_R = np.where(j == rounds.accepted_R, rounds.token_R, rounds.drafts_RN[:, min(j, depth - 1)])
            text_RT[live[here], filled_R[live[here]] + j] = token_R[here]
        filled_R[live] += rounds.accepted_R + 1
        last_R[live] = rounds.token_R
        live = live[filled_R[live] < length]
    return text_RT


@dataclass(frozen=True)
class TreeRounds:
    """tokens_RN: all nodes. rank_RL: which child passed at each level, -1 where none did. token_R: what follows."""

    tokens_RN: np.ndarray
    rank_RL: np.ndarray
    token_R: np.ndarray

    @property
    def accepted_R(self) -> np.ndarray:
        return (self.rank_RL >= 0).sum(1)


def tree_rounds(p_V: np.ndarray, q_V: np.ndarray, shape: Sequence[int], uniform_RU: np.ndarray) -> TreeRounds:
    """Trees of `shape` (children a level), siblings drawn without replacement; the laws are the same at every node."""
    R, N = len(uniform_RU), uniform_RU.shape[1] // 2
    drawn, coins = np.split(uniform_RU[:, :-1], 2, 1)
    row_R, at_R, live_R = np.arange(R), np.zeros(R, int), np.ones(R, bool)
    tokens, ranks, token_R, first, groups = [], [], np.zeros(R, int), 0, 1
    for children in shape:
        nodes = slice(first, first + groups * children)
        level_RGC = siblings(q_V, drawn[:, nodes].reshape(R, groups, children))
        coins_RC = coins[:, nodes].reshape(R, groups, children)[row_R, at_R]
        rank_R, left_RV = judge_siblings(p_V, q_V, level_RGC[row_R, at_R], coins_RC)
        rank_R = np.where(live_R, rank_R, -1)
        failed_R = live_R & (rank_R < 0)
        token_R[failed_R] = draw_each(left_RV[failed_R], uniform_RU[failed_R, -1])
        live_R = live_R & ~failed_R
        at_R = at_R * children + np.maximum(rank_R, 0)
        tokens.append(level_RGC.reshape(R, -1))
        ranks.append(rank_R)
        first, groups = nodes.stop, groups * children
    assert first == N, (first, N)
    token_R[live_R] = draw(p_V[None], np.zeros(live_R.sum(), int), uniform_RU[live_R, -1])
    return TreeRounds(np.concatenate(tokens, 1), np.stack(ranks, 1), token_R)


def siblings(q_V: np.ndarray, uniform_RGC: np.ndarray) -> np.ndarray:
    """Children of each node, drawn from q without replacement, [R, G, C]."""
    R, G, C = uniform_RGC.shape
    left_XV = np.tile(q_V, (R * G, 1))
    rows, tokens = np.arange(R * G), []
    for rank in range(C):
        tokens.append(draw_each(left_XV, uniform_RGC[:, :, rank].ravel()))
        left_XV[rows, tokens[-1]] = 0
    return np.stack(tokens, 1).reshape(R, G, C)


def judge_siblings(p_V, q_V, tokens_RC: np.ndarray, coins_RC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which child passed, -1: none; and what has become of p, [R, V]: what the correction is drawn from."""
    R, C = tokens_RC.shape
    p_RV, q_RV, rows, rank_R = np.tile(p_V, (R, 1)), np.tile(q_V, (R, 1)), np.arange(R), np.full(R, -1)
    for rank in range(C):
        token_R = tokens_RC[:, rank]
        q_RV /= q_RV.sum(1, keepdims=True)
        passed_R = coins_RC[:, rank] * q_RV[rows, token_R] < p_RV[rows, token_R]
        rank_R = np.where((rank_R < 0) & passed_R, rank, rank_R)
        left_RV = np.clip(p_RV - q_RV, 0, None)
        total_R1 = left_RV.sum(1, keepdims=True)
        p_RV = np.where(total_R1 > 0, left_RV / np.where(total_R1 > 0, total_R1, 1), p_RV)
        q_RV[rows, token_R] = 0
    return rank_R, p_RV


def hold_chains(laws: Laws, last_R: np.ndarray, uniform_RU: np.ndarray, rounds: Rounds) -> int:
    """Runs our own rule on the same drafts and coins; returns how many rounds came out the same, of all."""
    N = uniform_RU.shape[1] // 2
    p_VV, q_VV = torch.from_numpy(laws.p_VV), torch.from_numpy(laws.q_VV)
    same = 0
    for row, last in enumerate(last_R.tolist()):
        context = [last, *rounds.drafts_RN[row].tolist()]
        nodes = [(n - 1, token) for n, token in enumerate(context[1:])]
        law = DraftLaw(q_VV[context[:-1]][None], range(N))
        coins_U = torch.from_numpy(uniform_RU[row, N:])
        verdict = accept_sampled(nodes, law, 0, lambda n, context=context: p_VV[context[n + 1]], coins_U)
        same += verdict == Accepted(tuple(range(rounds.accepted_R[row])), int(rounds.token_R[row]))
    return same


@dataclass(frozen=True)
class _FreeScorer:
    """A draft model with one law."""

    log_q_V: torch.Tensor
    batch: int
    name: str = "context-free"

    @property
    def ids_R(self) -> torch.Tensor:
        return torch.arange(len(self.log_q_V))

    def root(self) -> torch.Tensor:
        return self.log_q_V.expand(self.batch, -1)

    def grow(self, tokens_BK: torch.Tensor, parents_BK: torch.Tensor) -> torch.Tensor:
        return self.log_q_V.expand(*tokens_BK.shape, -1)


def hold_trees(p_V, q_V, shape: Sequence[int], uniform_RU: np.ndarray, rounds: TreeRounds) -> int:
    """Grows the same trees with our own code and judges them with our own rule; how many came out the same."""
    R, N = len(uniform_RU), uniform_RU.shape[1] // 2
    tree, uniform_RU = FixedTree.of(list(shape)), torch.from_numpy(uniform_RU)
    draft = grow(_FreeScorer(torch.from_numpy(q_V).log(), R), tree, Sampling(1.0), uniform_RU[:, :N])
    law_V = torch.from_numpy(p_V)
    same = 0
    for row in range(R):
        verdict = accept_sampled(draft.nodes_B[row], draft.laws, row, lambda n: law_V, uniform_RU[row, N:])
        path, at, first, groups = [], 0, 0, 1
        for children, rank in zip(shape, rounds.rank_RL[row].tolist(), strict=True):
            if rank < 0:
                break
            path.append(first + at * children + rank)
            first, groups, at = first + groups * children, groups * children, at * children + rank
        drawn = draft.tokens_BN[row].tolist() == rounds.tokens_RN[row].tolist()
        same += drawn and verdict == Accepted(tuple(path), int(rounds.token_R[row]))
    return same
