"""The key/value cache: rows that leave, rows that enter, and what is copied."""

import pytest
import torch

from conf.errors import UserError
from models.tree import TreeRows
from tiny import tiny_verifier

VERIFIER = tiny_verifier(layers=7)
CLOSE = {"atol": 3e-5, "rtol": 1e-4}


def filled(prompts, capacity=20, rows=None):
    """A cache over these prompts, ragged, made in one decode."""
    cache = VERIFIER.new_cache(rows or len(prompts), capacity)
    cache.length_B = cache.length_B[: len(prompts)]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    VERIFIER.decode(cache, padded, count_B=[len(p) for p in prompts], logits="none")
    return cache


@pytest.fixture
def prompts():
    return [torch.randint(3, 512, (n,)) for n in (6, 3, 9, 4)]


def follow(cache, token=5):
    batch = len(cache.length_B)
    return VERIFIER.decode(cache, torch.full((batch, 2), token)).logits


@pytest.mark.parametrize("rows", [[0, 2], [1], [0, 3, 2], [3, 0, 1, 2], [0, 1, 2, 3], []])
def test_kept_rows_go_on_as_if_alone(prompts, rows):
    cache = filled(prompts)
    cache.keep_rows(rows)
    assert cache.length_B == [len(prompts[r]) for r in rows]
    if rows:
        torch.testing.assert_close(follow(cache), follow(filled([prompts[r] for r in rows])), **CLOSE)


def test_placed_rows_go_on_as_if_alone(prompts):
    cache, other = filled(prompts[:2], rows=3), filled(prompts[2:])
    cache.place(0, other, 1)
    cache.place(2, other, 0)
    assert cache.length_B == [4, 3, 9]
    torch.testing.assert_close(follow(cache), follow(filled([prompts[3], prompts[1], prompts[2]])), **CLOSE)
    with pytest.raises(AssertionError, match="no row 3"):
        cache.place(3, other)
    empty = VERIFIER.new_cache(1, 8)
    empty.place(0, other, 1)
    torch.testing.assert_close(follow(empty), follow(filled(prompts[3:])), **CLOSE)
    with pytest.raises(UserError, match="at most 8"):
        empty.place(0, other, 0)


def test_one_accepts_all_and_one_rejects_the_second_draft(prompts):
    """MATH section 7.4: n + 1 + N and n + 2 valid slots, each sequence at its own length."""
    cache, drafts = filled(prompts[:2]), 4
    verify = torch.randint(3, 512, (2, 1 + drafts))
    VERIFIER.decode(cache, verify)
    cache.truncate([6 + 1 + drafts, 3 + 2])
    assert cache.length_B == [11, 5]
    alone = [torch.cat([prompts[0], verify[0]]), torch.cat([prompts[1], verify[1, :2]])]
    torch.testing.assert_close(follow(cache), follow(filled(alone)), **CLOSE)


def test_lengths_only_shrink_and_paths_are_paths(prompts):
    cache = filled(prompts)
    cache.truncate(2)
    assert cache.length_B == [2, 2, 2, 2]
    with pytest.raises(AssertionError, match="cannot truncate 2"):
        cache.truncate([2, 2, 2, 3])
    VERIFIER.decode(cache, torch.full((4, 3), 5), tree=TreeRows.of(torch.tensor([[-1, 0, 0]])))
    with pytest.raises(AssertionError, match="no path"):
        cache.accept_paths([[0, 2, 1], [], [], []])
    with pytest.raises(AssertionError, match="more nodes"):
        cache.accept_paths([[0, 3], [], [], []])
    cache.accept_paths([[], [0, 2], [0, 1], [0]])
    assert cache.length_B == [2, 4, 4, 3]
    VERIFIER.decode(cache, torch.full((4, 2), 5))
    cache.accept_paths([[0, 1], [0], [], [0, 1]])  # after a chain: its first rows
    assert cache.length_B == [4, 5, 4, 5]


def test_nothing_is_allocated_after_the_first_decode(prompts):
    cache = filled(prompts)
    before = [t.data_ptr() for t in (*cache.keys, *cache.values)]
    assert cache.keys[0].shape == (4, 2, 21, 16) and len(cache.keys) == 7
    follow(cache)
    cache.keep_rows([3, 1])
    follow(cache)
    assert before == [t.data_ptr() for t in (*cache.keys, *cache.values)]
