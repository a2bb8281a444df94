"""The draft vocabulary: choice, offsets, round trip, and errors that say what to do."""

import pytest
import torch

from conf.errors import UserError
from models.vocab import DraftVocab, draft_vocab_size


def test_most_frequent_ids_ascending_with_ties_to_the_lower_id():
    counts = torch.tensor([0, 5, 2, 2, 9, 2, 0])
    assert DraftVocab.from_counts(counts, 4).ids_R.tolist() == [1, 2, 3, 4]
    many = torch.arange(50_000) % 3  # long enough for a sort that is not stable to show
    assert DraftVocab.from_counts(many, 1000).ids_R.tolist() == list(range(2, 3000, 3))


def test_too_few_seen_fills_with_the_lowest_unused_ids():
    counts = torch.tensor([0, 0, 0, 0, 0, 3, 1, 0])
    assert DraftVocab.from_counts(counts, 5).ids_R.tolist() == [0, 1, 2, 5, 6]


def test_offsets_flags_and_inverse_agree():
    vocab = DraftVocab(torch.tensor([1, 4, 6]), 8)
    assert vocab.d2t.tolist() == [1, 3, 4]  # target id - draft id, not the target id
    assert vocab.t2d.tolist() == [False, True, False, False, True, False, True, False]
    assert vocab.inverse_V.tolist() == [-1, 0, -1, -1, 1, -1, 2, -1]
    assert torch.equal(torch.arange(3) + vocab.d2t, vocab.ids_R)


def test_round_trip_and_hash():
    vocab = DraftVocab.from_counts(torch.randint(100, (50,), generator=torch.Generator().manual_seed(0)), 20)
    again = DraftVocab.from_d2t(vocab.d2t, 50)
    assert torch.equal(again.ids_R, vocab.ids_R) and again.hash == vocab.hash and len(again.hash) == 64
    assert DraftVocab(vocab.ids_R, 51).hash != vocab.hash
    moved = vocab.ids_R.clone()
    moved[-1] += 1 if moved[-1] < 49 else -1
    assert DraftVocab(moved, 51).hash != DraftVocab(vocab.ids_R, 51).hash


def test_whole_vocabulary_is_the_identity():
    vocab = DraftVocab.from_counts(torch.zeros(6), 6)
    assert vocab.is_identity and vocab.d2t.tolist() == [0] * 6
    assert torch.equal(vocab.ids_R, DraftVocab.identity(6).ids_R)
    assert not DraftVocab(torch.arange(5), 6).is_identity


@pytest.mark.parametrize(
    ("ids", "message"),
    [([3, 1], "ascend"), ([1, 1], "ascend"), ([-1, 2], "0..7"), ([1, 8], "0..7"), ([], "1 to 8"), ([[1]], "1 to 8")],
)
def test_impossible_ids_are_named(ids, message):
    with pytest.raises(UserError, match=message):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), 8)


def test_bad_maps_and_sizes_are_refused():
    with pytest.raises(UserError, match="absolute"):  # ids where offsets belong
        DraftVocab.from_d2t(torch.tensor([1, 4, 6]), 8)
    with pytest.raises(UserError, match="ascend"):
        DraftVocab.from_d2t(torch.tensor([3, 2, 0]), 8)
    with pytest.raises(UserError, match="one axis"):
        DraftVocab.from_d2t(torch.zeros(2, 2), 8)
    for size in (0, 9):
        with pytest.raises(UserError, match=f"found {size}"):
            DraftVocab.from_counts(torch.zeros(8), size)


def test_draft_vocabulary_defaults():
    assert draft_vocab_size(None, 49152) == 8192
    assert draft_vocab_size(None, 128256) == 32000
    assert draft_vocab_size(None, 300) == 300
    assert draft_vocab_size(64, 300) == 64 and draft_vocab_size(300, 300) == 300
    for wrong in (0, -1, 301):
        with pytest.raises(UserError, match=rf"must lie in 1..300, the verifier's tokens, found {wrong}"):
            draft_vocab_size(wrong, 300)
