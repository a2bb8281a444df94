"""Shapes of a draft: a chain, a fixed tree, or EAGLE-2's tree that grows where the draft is sure of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from conf.errors import UserError
from models.tree import TreeRows


@dataclass(frozen=True)
class Level:
    """The nodes of one level of a fixed tree, in order.

    parent: of each node, its parent's index among the expanded nodes of the level above. rank: which child it is.
    expanded: indices of the nodes here that have children. above: of each of these, its parent's index among all
    nodes expanded before, -1 for the root.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]
    expanded: tuple[int, ...]
    above: tuple[int, ...]


@dataclass(frozen=True)
class FixedTree:
    """parents: of each node, level by level, -1 for the root (the pending token); siblings by rank, best first.

    min_confidence: children are left out where the draft's probability of the path so far times that of its best next
    token is lower. That never depends on a token that was drawn but for the path, so acceptance stays exact.
    """

    parents: tuple[int, ...]
    min_confidence: float = 0.0

    @classmethod
    def chain(cls, depth: int, min_confidence: float = 0.0) -> FixedTree:
        return cls(tuple(range(-1, depth - 1)), min_confidence)

    @classmethod
    def of(cls, spec: Sequence[int] | Sequence[Sequence[int]], min_confidence: float = 0.0) -> FixedTree:
        """From children a level ([2, 2, 2]), or from paths of ranks as Medusa writes them ([[0], [1], [0, 0]]).

        Raises UserError for anything else, and for a path whose parent or better sibling is missing.
        """
        by_level = all(isinstance(part, int) and part > 0 for part in spec)
        by_path = all(isinstance(part, list | tuple) and all(isinstance(r, int) for r in part) for part in spec)
        if not spec or not (by_level or by_path):
            raise _bad_shape(spec)
        if by_level:
            parents, level = [], [-1]
            for children in spec:
                first = len(parents)
                parents += [node for node in level for _ in range(children)]
                level = list(range(first, len(parents)))
            return cls(tuple(parents), min_confidence)
        paths = sorted({tuple(path) for path in spec}, key=lambda path: (len(path), path))
        index = {(): -1} | {path: i for i, path in enumerate(paths)}
        for path in paths:
            better = (*path[:-1], path[-1] - 1) if path else ()
            if not path or path[:-1] not in index or path[-1] < 0 or (path[-1] and better not in index):
                raise _bad_shape(spec)
        return cls(tuple(index[path[:-1]] for path in paths), min_confidence)

    @property
    def nodes(self) -> int:
        """Candidates of a draft."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Level of each node, 1 for children of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        assert depths == sorted(depths), "nodes go level by level"
        return tuple(depths)

    @property
    def depth(self) -> int:
        return self.depths[-1]

    @property
    def is_chain(self) -> bool:
        return self.depth == self.nodes

    @property
    def grown(self) -> int:
        """Rows that a draft model runs below the root."""
        return len(set(self.parents) - {-1})

    @cached_property
    def law_row(self) -> tuple[int, ...]:
        """Of each node, the index of its parent among the nodes that have children, the root being the first."""
        order = {parent: i for i, parent in enumerate(sorted(set(self.parents)))}
        return tuple(order[parent] for parent in self.parents)

    @cached_property
    def levels(self) -> list[Level]:
        levels, above, inner = [], [-1], [-1]  # nodes expanded one level up, and all of them
        ranks: dict[int, int] = {}
        for depth in range(1, self.depth + 1):
            here = [n for n, d in enumerate(self.depths) if d == depth]
            rank = []
            for n in here:
                rank.append(ranks.setdefault(self.parents[n], 0))
                ranks[self.parents[n]] += 1
            expanded = [n for n in here if n in set(self.parents)]
            parent = tuple(above.index(self.parents[n]) for n in here)
            growth = tuple(inner.index(self.parents[n]) - 1 for n in expanded)
            levels.append(Level(parent, tuple(rank), tuple(here.index(n) for n in expanded), growth))
            above, inner = expanded, inner + expanded
        return levels

    def cut(self, depth: int) -> FixedTree:
        """Its first levels."""
        return self if depth >= self.depth else _first_levels(self, depth)

    @cached_property
    def parents_1N(self) -> torch.Tensor:
        return torch.tensor([self.parents])

    @cached_property
    def rows(self) -> TreeRows | None:
        """What a verify call of the pending token and all nodes needs; None for a chain. Built once a shape."""
        return None if self.is_chain else verify_rows(self.parents_1N, self.depth)


@lru_cache(maxsize=256)
def _first_levels(tree: FixedTree, depth: int) -> FixedTree:
    kept = sum(d <= depth for d in tree.depths)
    return FixedTree(tree.parents[:kept], tree.min_confidence)


@dataclass(frozen=True)
class GrowingShape:
    """EAGLE-2's tree (2406.16858, section 4): in each level the `top_k` likeliest nodes get `top_k` children each.

    Of all candidates the total_tokens - 1 likeliest paths are verified (the pending token is the other one), of equal
    ones the shallower. depth: levels. min_confidence: candidates of a less likely path are left out.
    """

    depth: int
    top_k: int = 10
    total_tokens: int = 60
    min_confidence: float = 0.0

    @property
    def nodes(self) -> int:
        return min(self.total_tokens - 1, self.candidates)

    def cut(self, depth: int) -> GrowingShape:
        """Its first levels."""
        return replace(self, depth=min(depth, self.depth))

    @property
    def candidates(self) -> int:
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def grown(self) -> int:
        return self.top_k * (self.depth - 1)


Shape = FixedTree | GrowingShape


def verify_rows(parents_BN: torch.Tensor, levels: int) -> TreeRows:
    """Rows of a verify call: the pending token is row 0, and node n row n + 1."""
    root_B1 = torch.full_like(parents_BN[:, :1], -1)
    return TreeRows.of(torch.cat([root_B1, parents_BN + 1], 1), levels)


def _bad_shape(spec: object) -> UserError:
    return UserError(
        "expected the shape of a tree as children a level ([2,2,2]) or as paths of ranks whose parents and better "
        f"siblings are all there ([[0],[1],[0,0]]), found {spec!r}"
    )
