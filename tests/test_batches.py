"""Batches: each document once per epoch, the same order for the same seed, exact resume, equal work per rank."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch

from conf.errors import UserError
from data.batches import OnlineStates, PackedLoader, deal, pack, packed_rows
from data.documents import Document
from models.states import label_rows
from tiny import tiny_verifier


class Indices:
    """A source whose states are the indices asked for."""

    def __init__(self, lengths):
        self.documents = [Document(str(i), [i % 97] * n, [(0, n)]) for i, n in enumerate(lengths)]

    def states(self, indices):
        return tuple(indices)


def lengths(count, seed=0, top=300):
    return np.random.default_rng(seed).integers(3, top, count).tolist()


@pytest.mark.parametrize("count, budget", [(1, 300), (12501, 1024), (777, 301)])
def test_each_document_once_per_epoch(count, budget):
    sizes = lengths(count)
    for epoch in (0, 1):
        batches = pack(sizes, budget, seed=1, epoch=epoch)
        assert sorted(index for batch in batches for index in batch) == list(range(count))
        totals = [sum(sizes[index] for index in batch) for batch in batches]
        assert max(totals) <= budget
        if count > 1000:
            assert np.mean(totals) > 0.98 * budget, "rows are nearly full"


def test_order_follows_seed_and_epoch_alone():
    sizes = lengths(200)
    assert list(pack(sizes, 512, 3, 2)) == list(pack(np.array(sizes), 512, 3, 2))
    plans = [pack(sizes, 512, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({json.dumps(list(plan)) for plan in plans}) == 4


def first_fit(sizes, budget, seed, epoch):
    """The same in lists of lists, as it was first written: checkpoints of then go on."""
    rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    closed, rows, room = [], [], []
    for index in rng.permutation(len(sizes)).tolist():
        if sizes[index] > budget:
            continue
        place = next((row for row, free in enumerate(room) if free >= sizes[index]), None)
        if place is None:
            if len(rows) == 64:
                closed.append(rows.pop(0))
                room.pop(0)
            rows.append([])
            room.append(budget)
            place = len(rows) - 1
        rows[place].append(index)
        room[place] -= sizes[index]
    closed += rows
    return [closed[row] for row in rng.permutation(len(closed)).tolist()]


def deal_plainly(labels, world):
    filled = [i % len(labels) for i in range(-(-len(labels) // world) * world)]
    filled.sort(key=labels.__getitem__)
    return sorted((tuple(filled[i : i + world]) for i in range(0, len(filled), world)), key=min)


@pytest.mark.parametrize("count, budget", [(0, 100), (1, 300), (5000, 280), (3000, 2048)])
def test_the_plan_is_that_of_plain_first_fit(count, budget, monkeypatch):
    monkeypatch.setattr("data.batches.BLOCK", 999)  # several blocks
    sizes = lengths(count)
    for seed, epoch in ((0, 0), (7, 3)):
        assert list(pack(sizes, budget, seed, epoch)) == first_fit(sizes, budget, seed, epoch)


@pytest.mark.parametrize("count, world", [(1, 1), (1, 4), (500, 1), (500, 3), (501, 8)])
def test_batches_are_dealt_as_they_were(count, world):
    labels = np.random.default_rng(1).integers(0, 50, count).tolist()  # with many that are equal
    assert [tuple(step) for step in deal(labels, world).tolist()] == deal_plainly(labels, world)


def test_too_long_documents_are_counted():
    loader = PackedLoader(Indices([5, 50, 6, 51]), 10)
    assert loader.dropped == 2
    assert sorted(index for batch in loader.plan(0) for index in batch) == [0, 2]
    with pytest.raises(UserError, match="at most trainer.tokens_per_step=4 tokens, found none among 4 .shortest 5"):
        PackedLoader(Indices([5, 50, 6, 51]), 4)


@pytest.mark.parametrize("taken", [0, 1, 5, 11, 12, 13, 40])
def test_resume_is_exact_across_epochs(taken):
    """SpecForge #20, #243."""
    source = Indices(lengths(60))
    whole = list(islice(PackedLoader(source, 1024, seed=4), 60))
    first = PackedLoader(source, 1024, seed=4)
    assert list(islice(first, taken)) == whole[:taken]
    state = json.loads(json.dumps(first.state_dict()))
    second = PackedLoader(source, 1024, seed=4)
    second.load_state_dict(state)
    assert list(islice(second, 60 - taken)) == whole[taken:]
    assert len({state["epoch"] for state in [state, second.state_dict()]}) == 2 or taken == 40


def test_resume_with_other_data_is_an_error():
    state = PackedLoader(Indices([5, 6, 7]), 10).state_dict()
    with pytest.raises(
        UserError, match="cannot resume the batch order: tokens_per_step was 10, is now 11; use the same"
    ):
        PackedLoader(Indices([5, 6, 7]), 11).load_state_dict(state)


@pytest.mark.parametrize(
    "files, told",
    [
        (
            {"a": [10, 1], "b": [5, 2]},
            "no file has changed, but a setting of data=, a dataset of the hub, or what the verifier wrote; put",
        ),
        ({"a": [10, 9], "b": [2005, 2]}, "a has changed, b had 5 bytes, has 2,005; put back"),
        (
            {"a": [10, 1], "c": [5, 2]},
            "b is not read any more, c is new; put back what the run was trained on, or begin",
        ),
        ({name: [5, 1] for name in "cdefg"}, "a is not read any more, b is not read any more, c is new and 4 more;"),
    ],
)
def test_resume_on_changed_files_names_them(files, told):
    state = PackedLoader(Indices([5, 6, 7]), 10, files={"a": [10, 1], "b": [5, 2]}).state_dict()
    with pytest.raises(UserError) as error:
        PackedLoader(Indices([5, 6, 8]), 10, files=files).load_state_dict(json.loads(json.dumps(state)))
    assert str(error.value).startswith("cannot resume on other documents: " + told) and "\n" not in str(error.value)
    PackedLoader(Indices([5, 6, 7]), 10, files=files).load_state_dict(state)  # the same documents, from wherever


def test_a_checkpoint_of_ranks_that_were_dealt_in_turn_is_refused():
    loader = PackedLoader(Indices([5, 6, 7]), 10, world=2)
    old = {key: value for key, value in loader.state_dict().items() if key != "dealt"}
    with pytest.raises(UserError, match="dealt was None, is now by labels"):
        loader.load_state_dict(old)
    PackedLoader(Indices([5, 6, 7]), 10).load_state_dict(old | {"world": 1})  # one rank's order is what it was


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_get_equal_counts(world):
    """speculators #867: the plan is dealt out; what repeats to fill up is fewer than `world` batches."""
    source = Indices(lengths(101))
    loaders = [PackedLoader(source, 1024, seed=2, rank=rank, world=world) for rank in range(world)]
    for epoch in (0, 1):
        plans = [loader.plan(epoch) for loader in loaders]
        assert len({len(plan) for plan in plans}) == 1
        dealt = [tuple(batch) for step in zip(*plans, strict=True) for batch in step]
        whole = [tuple(batch) for batch in pack(loaders[0].lengths, 1024, 2, epoch)]
        assert len(dealt) - len(whole) < world
        assert Counter(dealt) == Counter(whole) + Counter(whole[: len(dealt) - len(whole)])
        seen = Counter(index for batch in dealt for index in batch)
        assert set(seen) == set(range(101))


@pytest.mark.parametrize("world", [2, 8])
def test_ranks_of_a_step_get_about_equal_work(world):
    """Label rows that ranks wait for: the largest of a step, for each rank, over all that there are."""
    labels = np.random.default_rng(0).normal(600, 90, 400).astype(int).tolist()

    def waited(steps):
        return sum(world * max(labels[i] for i in step) for step in steps) / sum(labels) - 1

    dealt = deal(labels, world)
    in_turn = [range(i, i + world) for i in range(0, 400, world)]
    assert waited(dealt) < 0.01 < 0.08 < waited(in_turn)
    assert sorted(i for step in dealt for i in step) == list(range(400))
    sizes = [sum(labels[i] for i in step) for step in dealt]
    assert abs(np.corrcoef(sizes, range(len(sizes)))[0, 1]) < 0.2, "steps come in a random order, not by size"


def test_one_rank_keeps_the_order():
    assert deal([5, 1, 3], 1).tolist() == [[0], [1], [2]]
    assert deal([5, 1], 4).tolist() == [[1, 1, 0, 0]]


def test_packed_rows_number_documents_positions_and_spans():
    documents = [Document("a", [5, 6, 7, 8], [(1, 2), (2, 4)]), Document("b", [9, 9, 9], [(0, 3)])]
    ids, document, position, span = (row.tolist() for row in packed_rows(documents))
    assert ids == [[5, 6, 7, 8, 9, 9, 9]]
    assert document == [[0, 0, 0, 0, 1, 1, 1]]
    assert position == [[0, 1, 2, 3, 0, 1, 2]]
    assert span == [[-1, 0, 1, 1, 2, 2, 2]]
    rows = label_rows(torch.tensor(span))
    assert rows.tolist() == [2, 4, 5], "neighbouring answers and documents do not run into one another"
    assert len(rows) == sum(item.labels for item in documents)


def test_loader_yields_the_verifiers_record():
    verifier = tiny_verifier(layers=7, hidden=32)
    documents = [Document(str(i), [5 + i] * 9, [(3, 9)]) for i in range(5)]
    loader = PackedLoader(OnlineStates(verifier, documents), 20)
    for states in islice(loader, 3):
        assert states.aux_BTAD.shape[:2] == states.input_ids_BT.shape == states.document_BT.shape
        assert len(states.last_PD) == len(states.top_P) == 5 * (int(states.document_BT.max()) + 1)
