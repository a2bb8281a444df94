"""Shapes of drafts, and rows of trees against an obvious walk to the root."""

import re

import pytest
import torch

from conf.errors import UserError
from eval.speculative.grow import renumber, rerank
from eval.speculative.shapes import FixedTree, GrowingShape
from models.tree import GrowingTree, TreeRows


def test_children_a_level_and_paths_of_ranks_are_two_ways_to_write_a_tree():
    tree = FixedTree.of([2, 1, 2])
    assert tree.parents == (-1, -1, 0, 1, 2, 2, 3, 3)
    assert tree == FixedTree.of([[1], [0], [0, 0], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 0, 0]])
    assert (tree.nodes, tree.depth, tree.grown, tree.is_chain) == (8, 3, 4, False)
    chain = FixedTree.chain(4)
    assert chain == FixedTree.of([1, 1, 1, 1]) and chain.is_chain and chain.rows is None
    assert (chain.nodes, chain.depth, chain.grown) == (4, 4, 3)


@pytest.mark.parametrize(
    "spec", [[], [0], [2, -1], [[0], [0, 0, 0]], [[1]], [[0], [2]], [[]], [2, [0]], ["a"], [[0, 0]]]
)
def test_what_is_no_tree_is_the_users_error(spec):
    with pytest.raises(UserError, match=f"expected the shape of a tree.*found {re.escape(repr(spec))}"):
        FixedTree.of(spec)


def test_levels_of_a_tree_by_hand():
    tree = FixedTree.of([[0], [1], [2], [0, 0], [2, 0], [2, 1], [2, 0, 0]])
    first, second, third = tree.levels
    assert (first.parent, first.rank, first.expanded, first.above) == ((0, 0, 0), (0, 1, 2), (0, 2), (-1, -1))
    assert (second.parent, second.rank) == ((0, 1, 1), (0, 0, 1))
    assert (second.expanded, second.above) == ((1,), (1,))  # node [2,0], below the second node that was grown
    assert (third.parent, third.rank, third.expanded) == ((0,), (0,), ())
    assert tree.law_row == (0, 0, 0, 1, 2, 2, 3)
    assert tree.cut(2).parents == tree.parents[:6] and tree.cut(9) is tree
    assert GrowingShape(6, 10, 60).cut(2) == GrowingShape(2, 10, 60)
    assert GrowingShape(2, 3, 60).nodes == 3 + 9


def by_hand(parents):
    """Rows that each node sees, and its depth, walking to the root."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    depth = []
    for n in range(len(parents)):
        at, steps = n, -1
        while at >= 0:
            seen[n, at] = True
            at, steps = parents[at], steps + 1
        depth.append(steps)
    return seen, torch.tensor(depth)


def test_rows_of_random_trees_and_of_trees_that_grow():
    generator = torch.Generator().manual_seed(0)
    for sizes in ([1], [3], [2, 4, 3], [1, 1, 3], [1, 1, 1], [4, 1, 2]):
        level_of, parents_BN = [], [[], []]
        for level, size in enumerate(sizes):
            above = [n for n, other in enumerate(level_of) if other == level - 1]
            for parents in parents_BN:
                for _ in range(size):
                    parents.append(above[int(torch.randint(len(above), (), generator=generator))] if above else -1)
            level_of += [level] * size
        tensor_BN, growing, first = torch.tensor(parents_BN), GrowingTree(), 0
        whole = [TreeRows.of(tensor_BN), TreeRows.of(tensor_BN, levels=len(sizes))]
        for size in sizes:
            rows = growing.extend(tensor_BN[:, first : first + size])
            end = first + size
            for b, parents in enumerate(parents_BN):
                seen, depth = by_hand(parents)
                if rows is None:  # a chain so far
                    assert torch.equal(seen[:end, :end], torch.ones(end, end).tril().bool())
                else:
                    assert torch.equal(rows.seen_BTN[b], seen[first:end, :end]) and rows.earlier == first
                    assert torch.equal(rows.depth_BN[b], depth[:end])
                for full in whole:
                    assert torch.equal(full.seen_BTN[b], seen) and torch.equal(full.depth_BN[b], depth)
            first = end


@pytest.mark.parametrize("ties", [True, False])
def test_rerank_keeps_parents_on_exact_ties_too(ties):
    generator = torch.Generator().manual_seed(1)
    shape = GrowingShape(depth=4, top_k=3, total_tokens=9)
    for _ in range(50):
        parents, scores = [-1] * 3, torch.rand(3, generator=generator).log().tolist()
        level = range(3)
        for _ in range(3):
            picked = torch.tensor([scores[n] for n in level]).topk(3).indices.tolist()
            first = len(parents)
            for p in picked:
                parents += [level[p]] * 3
                scores += (scores[level[p]] + torch.rand(3, generator=generator).log()).tolist()
            level = range(first, first + 9)
        score_1C = torch.zeros(1, len(scores)) if ties else torch.tensor([scores])
        chosen_1N, live = rerank(score_1C, shape)
        chosen = chosen_1N[0].tolist()
        assert live is None and len(chosen) == 8 and chosen == sorted(chosen)
        assert all(parents[n] in (-1, *chosen) for n in chosen)
        assert min(score_1C[0, chosen]) >= max(score_1C[0, [n for n in range(len(scores)) if n not in chosen]])
        again = renumber(torch.tensor([parents]), chosen_1N)[0].tolist()
        assert again == [-1 if parents[n] < 0 else chosen.index(parents[n]) for n in chosen]
