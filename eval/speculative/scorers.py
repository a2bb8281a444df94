"""Drafters that grow trees from a model: EAGLE heads, Medusa, and models that read tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from conf.errors import UserError
from eval.speculative.drafter import Draft, Features, pad
from eval.speculative.grow import grow
from eval.speculative.processors import Sampling
from eval.speculative.shapes import FixedTree, Shape
from models.tree import GrowingTree


class TreeDrafter:
    """Any of the scorers below with the shape of its drafts.

    points: take the draft's best tokens also where the verifier samples (as vLLM does by default), and test them as
    point masses. Otherwise a fixed shape is drawn from the draft's law, after the same processors as the verifier's.
    Raises UserError for a node with more children than there are tokens to take the best of.
    """

    def __init__(self, scorer, shape: Shape, sampling: Sampling, points: bool = False):
        self.scorer, self.shape, self.sampling = scorer, shape, sampling
        self.name, self.ids_R, self.nodes, self.depth = scorer.name, scorer.ids_R, shape.nodes, shape.depth
        self.points = points or sampling.greedy or not isinstance(shape, FixedTree)
        if isinstance(shape, FixedTree) and self.points:
            widest = max(max(level.rank) + 1 for level in shape.levels)
            if widest > len(self.ids_R):
                raise UserError(f"expected at most {len(self.ids_R)} children, as many as draft tokens, found {widest}")

    def start(self, prompts: list[list[int]], pending: list[int], features: Features, capacity: int) -> None:
        self.scorer.start(prompts, pending, features, capacity + self.shape.grown)

    @torch.no_grad()
    def draft(self, uniform_BN: Tensor | None) -> Draft:
        return grow(self.scorer, self.shape, self.sampling, None if self.points else uniform_BN)

    def accepted(self, tokens: list[list[int]], features: Features, logits_BMV: Tensor | None) -> None:
        self.scorer.accepted(tokens, features)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.scorer.keep_rows(rows)


class EagleScorer:
    """An EAGLE head, fed as the serving engines feed it (2401.15077, 2503.01840; vLLM and SGLang agree).

    Once the verifier processed x_0..x_{n-1} and emitted x_n, the root pass takes every new row i as (token x_{i+1},
    `fuse` of the states at i, position i). A node of level l takes (its token, the output of its parent, position
    n+l-1). Accepted tokens are run again with the verifier's features in the next root pass: the head's cache is cut
    back to its true rows before it.
    """

    def __init__(self, head):
        self.head, self.name = head, head.config.kind
        self.ids_R = head.vocab.ids_R.to(next(head.parameters()).device)

    def start(self, prompts: list[list[int]], pending: list[int], features: Features, capacity: int) -> None:
        self.cache = self.head.new_cache(len(prompts), capacity)
        self.true_B = [0] * len(prompts)  # rows of the cache that hold the verifier's features
        self.accepted([[*ids[1:], token] for ids, token in zip(prompts, pending, strict=True)], features)

    def accepted(self, tokens: list[list[int]], features: Features) -> None:
        self.new_tokens, self.new_aux_BTAD = tokens, features.aux_BTAD

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.cache.truncate(self.true_B)
        self.cache.keep_rows(rows)
        self.true_B = [self.true_B[row] for row in rows]
        self.new_tokens, self.new_aux_BTAD = [self.new_tokens[row] for row in rows], self.new_aux_BTAD[list(rows)]

    def root(self) -> Tensor:
        self.cache.truncate(self.true_B)
        counts = [len(tokens) for tokens in self.new_tokens]
        hidden_BTD = self.head.fuse(self.new_aux_BTAD[:, : max(counts)])
        out_BTD = self.head.step(pad(self.new_tokens, self.ids_R.device), hidden_BTD, self.cache, counts)
        self.true_B = list(self.cache.length_B)
        last_B = torch.tensor(counts, device=out_BTD.device) - 1
        self.out_BGD = out_BTD[torch.arange(len(counts), device=out_BTD.device), last_B][:, None]  # root, then nodes
        self.tree = GrowingTree()
        return self.head.logits(self.out_BGD[:, 0])

    def grow(self, tokens_BK: Tensor, parents_BK: Tensor) -> Tensor:
        index_BKD = (parents_BK + 1)[..., None].expand(-1, -1, self.out_BGD.shape[2])
        hidden_BKD = self.head.feedback(self.out_BGD.gather(1, index_BKD))
        out_BKD = self.head.step(tokens_BK, hidden_BKD, self.cache, tree=self.tree.extend(parents_BK))
        self.out_BGD = torch.cat([self.out_BGD, out_BKD], 1)
        return self.head.logits(out_BKD)


class MedusaScorer:
    """Medusa's heads (2401.10774): head l scores level l, all of them from the last processed row's state.

    The heads don't see each other's drafts, so every node of a level has the same children.
    """

    def __init__(self, head, depth: int):
        self.head, self.depth, self.name = head, depth, "medusa"
        self.ids_R = head.vocab.ids_R.to(head.lm_weight.device)

    def start(self, prompts: list[list[int]], pending: list[int], features: Features, capacity: int) -> None:
        self.accepted(prompts, features)

    def accepted(self, tokens: list[list[int]], features: Features) -> None:
        last_B = torch.tensor([len(row) - 1 for row in tokens], device=features.aux_BTAD.device)
        aux_BAD = features.aux_BTAD[torch.arange(len(tokens), device=last_B.device), last_B]
        self.hidden_BD = self.head.fuse(aux_BAD)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.hidden_BD = self.hidden_BD[list(rows)]

    def root(self) -> Tensor:
        self.logits_HBR, self.level = self.head.logits(torch.stack(self.head.outputs(self.hidden_BD, self.depth))), 0
        return self.logits_HBR[0]

    def grow(self, tokens_BK: Tensor, parents_BK: Tensor) -> Tensor:
        self.level += 1
        return self.logits_HBR[self.level][:, None].expand(-1, tokens_BK.shape[1], -1)


class ModelScorer:
    """A model that reads tokens alone: the independent draft of 2211.17192.

    model: `new_cache(batch, capacity)`, `extend(cache, tokens_BT, count_B, tree) -> logits`, and `ids_R`
    (models.heads.independent, models.draft_model). Accepted tokens are read again in the next root pass.
    """

    def __init__(self, model, device: torch.device | str):
        self.model, self.name = model, "independent"
        self.ids_R = model.ids_R.to(device)

    def start(self, prompts: list[list[int]], pending: list[int], features: Features, capacity: int) -> None:
        self.cache = self.model.new_cache(len(prompts), capacity)
        self.true_B = [0] * len(prompts)
        self.new_tokens = [[*ids, token] for ids, token in zip(prompts, pending, strict=True)]

    def accepted(self, tokens: list[list[int]], features: Features) -> None:
        self.new_tokens = tokens

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.cache.truncate(self.true_B)
        self.cache.keep_rows(rows)
        self.true_B = [self.true_B[row] for row in rows]
        self.new_tokens = [self.new_tokens[row] for row in rows]

    def root(self) -> Tensor:
        self.cache.truncate(self.true_B)
        counts = [len(tokens) for tokens in self.new_tokens]
        logits_B1R = self.model.extend(self.cache, pad(self.new_tokens, self.ids_R.device), counts)
        self.true_B, self.tree = list(self.cache.length_B), GrowingTree()
        return logits_B1R[:, 0]

    def grow(self, tokens_BK: Tensor, parents_BK: Tensor) -> Tensor:
        return self.model.extend(self.cache, tokens_BK, tree=self.tree.extend(parents_BK))


def drafter_for(head, shape: Shape, sampling: Sampling, points: bool = False) -> TreeDrafter:
    """The drafter that drives this kind of head. Medusa drafts no more levels than it has heads."""
    kind = head.config.kind
    if kind == "medusa":
        shape = shape.cut(head.config.heads)
        return TreeDrafter(MedusaScorer(head, shape.depth), shape, sampling, points)
    scorer = ModelScorer(head, head.lm_weight.device) if kind == "independent" else EagleScorer(head)
    return TreeDrafter(scorer, shape, sampling, points)
