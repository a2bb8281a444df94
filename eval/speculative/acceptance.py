"""The acceptance rules of speculative sampling: which drafts of a tree pass, and what the verifier says after them.

All are exact: the text follows the verifier's law whatever the draft (Leviathan et al. 2211.17192, Chen et al.
2302.01318, and for siblings drawn without replacement 2305.09781 and 2402.12374), for the tree's shape never
depends on the verifier, and every candidate is tested with the law that it was really drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Nodes = Sequence[tuple[int, int] | None]  # (parent, token) of each candidate, None: not one that can be accepted


@dataclass(frozen=True)
class DraftLaw:
    """The laws that sampled candidates were really drawn from.

    probs_BMR: float32 or better. The children of a node share a row, and were drawn from it without replacement: the
    second from what is left without the first, renormalised, and so on.
    row_N: the row of each candidate. ids_R: verifier token id of each column, ascending; None: the whole vocabulary.
    """

    probs_BMR: Tensor
    row_N: Sequence[int]
    ids_R: Tensor | None = None

    def column(self, token: int) -> int:
        """Where a token stands; an error for one that has no column."""
        if self.ids_R is None:
            return token
        column = int(torch.searchsorted(self.ids_R, token))
        assert column < len(self.ids_R) and int(self.ids_R[column]) == token, (
            f"candidate {token} lies outside the vocabulary of the law it was drawn from"
        )
        return column


@dataclass(frozen=True)
class Accepted:
    """nodes: the accepted path from a child of the root down; token: what follows it, the correction or the bonus."""

    nodes: tuple[int, ...]
    token: int


def draw(weights_V: Tensor, uniform: Tensor) -> Tensor:
    """The token whose slice of the (unnormalised) law holds `uniform` in [0, 1). Any leading shape; float64 inside.

    A token of zero weight is never drawn: the first column whose running sum exceeds u * total is taken, so
    its own weight isn't zero.
    """
    cdf_V = weights_V.double().cumsum(-1)
    target = (uniform.double() * cdf_V[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cdf_V, target, right=True).squeeze(-1).clamp_(max=weights_V.shape[-1] - 1)


def accept_points(nodes_B: Sequence[Nodes], say: Callable[[list[int], int], list[int]]) -> list[Accepted]:
    """Candidates that weren't drawn (a head's best tokens, a prompt's n-gram): the verifier's own token is followed.

    say: from the node that each sequence stands at (-1: the root) and the level, the verifier's token after it: its
    argmax, or a draw from its law. While that is a child it is accepted, otherwise it is the correction. This is the
    rule for point masses (accept x with p(x), else p without x, renormalised, for the next sibling): the token that
    comes out has the law p either way, so one draw does.
    """
    children_B = [{node: n for n, node in reversed(list(enumerate(nodes))) if node is not None} for nodes in nodes_B]
    paths_B: list[list[int]] = [[] for _ in nodes_B]
    token_B: list[int | None] = [None] * len(nodes_B)
    while None in token_B:
        level = max(len(path) for path, token in zip(paths_B, token_B, strict=True) if token is None)
        said_B = say([path[-1] if path else -1 for path in paths_B], level)
        for b, (path, said) in enumerate(zip(paths_B, said_B, strict=True)):
            if token_B[b] is not None:
                continue
            child = children_B[b].get((path[-1] if path else -1, said))
            if child is None:
                token_B[b] = said
            else:
                path.append(child)
    return [Accepted(tuple(path), token) for path, token in zip(paths_B, token_B, strict=True)]


def accept_sampled(
    nodes: Nodes, laws: DraftLaw, sequence: int, p_target: Callable[[int], Tensor], uniform_U: Tensor
) -> Accepted:
    """Candidates of one sequence, drawn from `laws`, siblings without replacement; in a chain each is an only child.

    p_target:  the verifier's law after a node (-1: the root), [V], after the logits processors, float32 or better.
    uniform_U: numbers in [0, 1): one coin a candidate, in order, and then one for the correction or bonus.

    At each node with law p its children are tested in the order in which they were drawn. d passes with probability
    min(1, p(d)/q(d)). If it fails, p becomes (p - q)+ and q loses d, both renormalised, for the next sibling. When all
    failed, or there are none, the token is drawn from what p has become. A candidate with q(d) = 0 can't have been
    drawn, so it is an error, never an accept. Mass of p outside the draft's vocabulary stays in the residual. A
    residual of no mass can only be met by rounding (probability zero): p stays as it was.
    """
    path: list[int] = []
    coins = uniform_U.tolist()
    while True:
        at = path[-1] if path else -1
        p_V = p_target(at)
        assert p_V.dim() == 1 and p_V.dtype in (torch.float32, torch.float64), (p_V.shape, p_V.dtype)
        p_V = p_V.double()
        children = [n for n, node in enumerate(nodes) if node is not None and node[0] == at]
        q_R = laws.probs_BMR[sequence, laws.row_N[children[0]]].double() if children else None
        passed = None
        for child in children:
            token = nodes[child][1]
            column = laws.column(token)
            q_R = q_R / q_R.sum()
            q = float(q_R[column])
            assert q > 0, "a candidate has q(d) = 0: it can't have been drawn from this law"
            if coins[child] * q < float(p_V[token]):  # u < p/q without dividing; p(d) = 0 fails
                passed = child
                break
            residual_V = p_V - q_R if laws.ids_R is None else p_V.index_add(0, laws.ids_R, q_R, alpha=-1)
            residual_V = residual_V.clamp(min=0.0)
            total = residual_V.sum()
            p_V = torch.where(total > 0, residual_V / total, p_V)
            q_R = q_R.index_fill(0, torch.tensor(column, device=q_R.device), 0.0)
        if passed is None:
            return Accepted(tuple(path), int(draw(p_V, uniform_U[-1])))
        path.append(passed)
