"""Grows a draft from a model that scores next tokens: a chain, a fixed tree, or EAGLE-2's tree."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from eval.speculative.acceptance import DraftLaw, draw
from eval.speculative.clock import Clock
from eval.speculative.drafter import Draft
from eval.speculative.processors import Sampling, to_law
from eval.speculative.shapes import FixedTree, GrowingShape, Shape, verify_rows


class Scorer(Protocol):
    """Draft logits at the root and at nodes below it. ids_R: verifier id of each column, ascending."""

    name: str
    ids_R: Tensor

    def root(self) -> Tensor:
        """After the pending token, [B, R]; forgets the nodes of the last draft."""

    def grow(self, tokens_BK: Tensor, parents_BK: Tensor) -> Tensor:
        """Adds K nodes to each sequence; logits after them, [B, K, R].

        parents_BK: by the order in which nodes were added, -1 for the root.
        """


def grow(scorer: Scorer, shape: Shape, sampling: Sampling, uniform_BN: Tensor | None) -> Draft:
    """uniform_BN: draws siblings without replacement, a number a candidate; None: takes the best tokens."""
    if isinstance(shape, GrowingShape):
        return grow_by_confidence(scorer, shape)
    return grow_fixed(scorer, shape, sampling, uniform_BN)


def grow_fixed(scorer: Scorer, tree: FixedTree, sampling: Sampling, uniform_BN: Tensor | None) -> Draft:
    """Level by level; a level that no sequence has confidence in is left out with all below it."""
    clock = Clock(scorer.ids_R.device)
    times = [clock.now()]
    logits_BKR = scorer.root()[:, None]
    B = len(logits_BKR)
    sure_BK = logits_BKR.new_ones(B, 1)  # probability of the path to each expanded node
    columns, laws, live, depth, first = [], [], [], 0, 0
    for level in tree.levels:
        L = len(level.parent)
        law_BKR = None
        if uniform_BN is not None:
            law_BKR = to_law(logits_BKR, sampling)
            column_BL, drawn_BL = _draw_children(law_BKR, level, uniform_BN[:, first : first + L])
        else:
            best_BKC = logits_BKR.topk(max(level.rank) + 1, -1).indices
            column_BL, drawn_BL = best_BKC[:, list(level.parent), list(level.rank)], None
        if tree.min_confidence:
            probs_BKR = logits_BKR.float().softmax(-1) if law_BKR is None else law_BKR
            kept_BK = sure_BK * probs_BKR.amax(-1) >= tree.min_confidence
            if not bool(kept_BK.any()):
                break
            kept_BL = kept_BK[:, list(level.parent)]
            drawn_BL = kept_BL if drawn_BL is None else drawn_BL & kept_BL
            of_node_BL = probs_BKR[:, list(level.parent)].gather(2, column_BL[..., None]).squeeze(2)
            sure_BL = sure_BK[:, list(level.parent)] * of_node_BL * drawn_BL
            sure_BK = sure_BL[:, list(level.expanded)]
        columns.append(column_BL)
        live.append(column_BL.new_ones(B, L, dtype=torch.bool) if drawn_BL is None else drawn_BL)
        if law_BKR is not None:
            laws.append(law_BKR)
        times.append(clock.now())
        depth, first = depth + 1, first + L
        if level.expanded:
            chosen_BK = scorer.ids_R[column_BL[:, list(level.expanded)]]
            above_BK = torch.tensor([level.above], device=chosen_BK.device).expand(B, -1)
            logits_BKR = scorer.grow(chosen_BK, above_BK)
    first_seconds = clock.now() - times[0] if depth == 0 else times[1] - times[0]
    step_seconds = (times[-1] - times[1]) / (depth - 1) if depth > 1 else None
    if depth == 0:
        nothing = scorer.ids_R.new_empty(B, 0)
        return Draft(nothing, nothing, first_seconds=first_seconds)
    tree = tree.cut(depth)
    whole = uniform_BN is None and not tree.min_confidence
    return Draft(
        scorer.ids_R[torch.cat(columns, 1)],
        tree.parents_1N,
        tree.rows,
        DraftLaw(torch.cat(laws, 1), tree.law_row, scorer.ids_R) if laws else None,
        None if whole else _below_live(torch.cat(live, 1), tree),
        first_seconds,
        step_seconds,
    )


def _draw_children(law_BKR: Tensor, level, uniform_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Columns [B, L], drawn without replacement among siblings, and whether there was any mass left to draw from."""
    left_BKR = law_BKR.clone()
    column_BL = torch.zeros_like(uniform_BL, dtype=torch.int64)
    drawn_BL = torch.zeros_like(uniform_BL, dtype=torch.bool)
    for rank in range(max(level.rank) + 1):
        nodes = [i for i, r in enumerate(level.rank) if r == rank]
        parents = [level.parent[i] for i in nodes]
        weights_BKR = left_BKR[:, parents]
        column_BL[:, nodes] = chosen_BK = draw(weights_BKR, uniform_BL[:, nodes])
        drawn_BL[:, nodes] = weights_BKR.sum(-1) > 0
        left_BKR[:, parents] = weights_BKR.scatter(2, chosen_BK[..., None], 0.0)
    return column_BL, drawn_BL


def _below_live(live_BN: Tensor, tree: FixedTree) -> Tensor:
    """A node lives when it was drawn and its parent lives."""
    columns: list[Tensor] = []
    for n, parent in enumerate(tree.parents):
        columns.append(live_BN[:, n] if parent < 0 else live_BN[:, n] & columns[parent])
    return torch.stack(columns, 1)


def grow_by_confidence(scorer: Scorer, shape: GrowingShape) -> Draft:
    """EAGLE-2: point masses, so that any choice among them is exact (2406.16858, section 4.2).

    With min_confidence nothing is grown below a level whose paths are all less likely, and no row is left for
    candidates that are so in every sequence.
    """
    floor = math.log(shape.min_confidence) if shape.min_confidence else None
    clock = Clock(scorer.ids_R.device)
    begun = clock.now()
    logp_BKR = scorer.root().float().log_softmax(-1)[:, None]
    B, k = len(logp_BKR), min(shape.top_k, logp_BKR.shape[2])
    score_BK, node_BK = logp_BKR.new_zeros(B, 1), logp_BKR.new_full((B, 1), -1, dtype=torch.int64)  # of the parents
    grown_BK, first_seconds = node_BK, 0.0
    tokens, scores, parents, above = [], [], [], []  # above: the parent's place among the nodes that were grown
    for depth in range(1, shape.depth + 1):
        best = logp_BKR.topk(k, -1)
        scores.append((score_BK[..., None] + best.values).flatten(1))
        tokens.append(scorer.ids_R[best.indices].flatten(1))
        parents.append(node_BK[..., None].expand(-1, -1, k).flatten(1))
        above.append(grown_BK[..., None].expand(-1, -1, k).flatten(1))
        if depth == 1:
            first_seconds = clock.now() - begun
        if depth < shape.depth:
            top = scores[-1].topk(min(k, scores[-1].shape[1]), -1)
            if floor is not None and not bool((top.values >= floor).any()):
                break
            score_BK, before = top.values, sum(s.shape[1] for s in scores[:-1])
            node_BK = top.indices + before
            grown_BK = torch.arange(top.indices.shape[1], device=node_BK.device).expand(B, -1) + k * (depth - 1)
            logits_BKR = scorer.grow(tokens[-1].gather(1, top.indices), above[-1].gather(1, top.indices))
            logp_BKR = logits_BKR.float().log_softmax(-1)
    step_seconds = (clock.now() - begun - first_seconds) / (depth - 1) if depth > 1 else None
    chosen_BN, live_BN = rerank(torch.cat(scores, 1), shape)
    if live_BN is not None:
        some_N = live_BN.any(0)
        chosen_BN, live_BN = chosen_BN[:, some_N], live_BN[:, some_N]
    parents_BN = renumber(torch.cat(parents, 1), chosen_BN)
    return Draft(
        torch.cat(tokens, 1).gather(1, chosen_BN),
        parents_BN,
        verify_rows(parents_BN, depth) if chosen_BN.shape[1] else None,
        None,
        live_BN,
        first_seconds,
        step_seconds,
    )


def rerank(score_BC: Tensor, shape: GrowingShape) -> tuple[Tensor, Tensor | None]:
    """The likeliest candidates in order of creation, [B, N], and which of them are likely enough (None: all).

    Candidates were made level by level and a child is never likelier than its parent, so a stable sort keeps parents:
    of equal scores the shallower comes first. (`topk` breaks ties as it likes and may keep a child without its parent.)
    """
    order_BC = score_BC.sort(dim=-1, descending=True, stable=True).indices
    chosen_BN = order_BC[:, : shape.nodes].sort(-1).values
    if not shape.min_confidence:
        return chosen_BN, None
    return chosen_BN, score_BC.gather(1, chosen_BN).exp() >= shape.min_confidence


def renumber(parents_BC: Tensor, chosen_BN: Tensor) -> Tensor:
    """Parents of the chosen candidates as indices among them, -1 for the root."""
    place_BC = torch.full_like(parents_BC, -1)
    index_BN = torch.arange(chosen_BN.shape[1], device=chosen_BN.device).expand_as(chosen_BN)
    place_BC.scatter_(1, chosen_BN, index_BN)
    parents_BN = parents_BC.gather(1, chosen_BN)
    return torch.where(parents_BN < 0, -1, place_BC.gather(1, parents_BN.clamp_min(0)))
