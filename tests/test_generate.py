"""Generation in batches equals one by one, whatever shares the batch, and stops in time."""

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from conf.errors import UserError
from data.batches import packed_rows
from data.documents import Document
from data.generate import MIN_CUT, Request, choose, generate
from data.memory import SHARE, slot_bytes
from tiny_writer import plain_argmax, step_sizes, tiny_writer


@pytest.fixture(scope="module")
def verifier():
    return tiny_writer(end=5.0)


def requests(count=11):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 40, count)
    return [Request(f"r{i}", rng.integers(3, 500, size).tolist(), 3 + i % 9) for i, size in enumerate(sizes)]


def outputs(verifier, rows, **options):
    found = list(generate(verifier, rows, **{"max_new_tokens": 10, **options}))
    assert len({generation.id for generation in found}) == len(found)
    return {generation.id: (generation.output_ids, generation.finish_reason) for generation in found}


def test_greedy_batch_equals_the_plain_loop(verifier):
    rows = requests()
    found = outputs(verifier, rows, batch_size=4)
    reasons = Counter()
    for row in rows:
        ids, reason = found[row.id]
        assert ids == plain_argmax(verifier, row.input_ids, min(10, row.max_new_tokens))
        assert reason == ("stop" if ids[-1] in verifier.eos_ids else "length")
        reasons[reason] += 1
    assert len(reasons) == 2, "the test should see both ends"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_result_does_not_depend_on_batch_or_neighbours(verifier, temperature):
    rows = requests()
    one_by_one = {}
    for row in rows:
        one_by_one |= outputs(verifier, [row], temperature=temperature, seed=5)
    assert outputs(verifier, rows, temperature=temperature, seed=5, batch_size=4) == one_by_one
    assert outputs(verifier, rows[::-1], temperature=temperature, seed=5, batch_size=64) == one_by_one
    if temperature:
        assert outputs(verifier, rows, temperature=temperature, seed=6) != one_by_one


def test_a_longer_limit_continues_the_same_text(verifier):
    rows = [Request(f"r{i}", [7, 8, 9]) for i in range(4)]
    short = outputs(verifier, rows, temperature=1.0, max_new_tokens=4)
    for name, (ids, _) in outputs(verifier, rows, temperature=1.0, max_new_tokens=12).items():
        assert ids[: len(short[name][0])] == short[name][0]


def test_finished_rows_leave_the_batch(verifier, monkeypatch):
    sizes, decode = [], type(verifier).decode

    def recorded(self, cache, tokens_BT, **options):
        sizes.append(tuple(tokens_BT.shape))
        return decode(self, cache, tokens_BT, **options)

    monkeypatch.setattr(type(verifier), "decode", recorded)
    rows = [Request(str(i), [5, 6], limit) for i, limit in enumerate((2, 2, 9, 9, 3, 3))]
    found = outputs(verifier, rows, batch_size=4, stop_ids=[])
    assert [len(found[str(i)][0]) for i in range(6)] == [2, 2, 9, 9, 3, 3]
    steps = [batch for batch, tokens in sizes if tokens == 1]
    assert sum(steps) == sum(row.max_new_tokens - 1 for row in rows), "no slot computes for a row that has left"
    assert sizes[0] == (1, 2), "equal prompts are computed once"


def test_a_long_prompt_costs_rows_and_not_memory(verifier, monkeypatch):
    rows = requests()
    wanted = outputs(verifier, rows, batch_size=8)
    made, new_cache = [], type(verifier).new_cache
    monkeypatch.setattr(type(verifier), "new_cache", lambda self, *size: made.append(size) or new_cache(self, *size))
    longest = max(len(row.input_ids) + min(10, row.max_new_tokens) for row in rows)
    for fitting in (0, 1, 3):
        budget = int((fitting + 0.5) * longest * slot_bytes(verifier) / SHARE)
        monkeypatch.setattr("data.memory.free_bytes", lambda _, budget=budget: budget)
        made.clear()
        assert outputs(verifier, rows, batch_size=8) == wanted
        assert made[0] == (max(1, fitting), longest)
    cache = new_cache(verifier, 1, 5)
    verifier.decode(cache, torch.ones(1, 1, dtype=torch.int64))
    stored = sum(t.nbytes for t in (*cache.keys, *cache.values))
    assert stored == slot_bytes(verifier) * 6, "one spare slot"


def test_inverse_cdf_is_exact_at_its_edges():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).repeat(5, 1)
    uniform = np.array([0.0, 0.49999, 0.5, 0.99999, np.nextafter(1, 0)])
    assert choose(logits, 1.0, uniform) == [1, 1, 3, 3, 3]
    assert choose(logits, 0.0, uniform) == [1] * 5


def test_sampling_follows_the_law():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    uniform = np.random.default_rng(1).random(20000)
    drawn = torch.bincount(torch.tensor(choose(logits.expand(20000, -1), 0.7, uniform)), minlength=4) / 20000
    torch.testing.assert_close(drawn, torch.softmax(logits[0] / 0.7, -1), atol=0.012, rtol=0)


def test_deadline_cuts_and_leaves_out(verifier):
    rows = [Request(str(i), [5, 6]) for i in range(40)]
    assert outputs(verifier, rows, deadline=time.monotonic() - 1) == {}
    began = time.monotonic()
    options = {"max_new_tokens": 4000, "batch_size": 4, "stop_ids": []}
    found = outputs(verifier, rows, deadline=began + 1.5, **options)
    assert time.monotonic() - began < 10
    assert 0 < len(found) <= 8 and all(len(ids) >= MIN_CUT for ids, _ in found.values())
    assert "cut" in {reason for _, reason in found.values()}


def test_requests_that_cannot_be(verifier):
    with pytest.raises(UserError, match="found no tokens"):
        list(generate(verifier, [Request("a", [])], max_new_tokens=2))
    with pytest.raises(UserError, match="at least one new token"):
        list(generate(verifier, [Request("a", [5], 0)], max_new_tokens=2))
    assert list(generate(verifier, [], max_new_tokens=2)) == []


def test_requests_carry_their_own_limit_temperature_and_stop(verifier):
    rows = requests(8)
    ends = frozenset(range(3, 60))
    alone = [outputs(verifier, rows[:4]), outputs(verifier, rows[4:], temperature=1.0, seed=5, stop_ids=ends)]
    mixed = [row if i < 4 else replace(row, temperature=1.0, stop_ids=ends) for i, row in enumerate(rows)]
    assert outputs(verifier, mixed, seed=5, batch_size=6) == alone[0] | alone[1]
    assert {reason for _, reason in alone[1].values()} == {"stop", "length"}


def test_requests_are_taken_when_slots_are_free(verifier, monkeypatch):
    live = step_sizes(verifier, monkeypatch)
    done, asked = [], []

    def source():
        for number in range(40):
            while number == 20 and len(done) < 20:
                yield None  # what comes then depends on what has finished
            asked.append((number, len(done)))
            yield Request(str(number), [5, 6], 3 + number % 5)

    options = {"max_new_tokens": 10, "batch_size": 8, "stop_ids": [], "capacity": 12}
    for generation in generate(verifier, source(), **options):
        done.append(generation.id)
    assert len(done) == 40 and all(number - finished < 8 for number, finished in asked)
    assert asked[20] == (20, 20), "None is no end"
    assert set(live[:6]) == {8}, "full until the wait"
    assert list(generate(verifier, iter([None]), **options)) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_goes_on_is_the_request_it_would_have_been(verifier, temperature):
    rows, asked = requests(), []

    def then(generation):
        asked.append(generation)
        if generation.id == "r3":
            return None
        return Request(f"{generation.id}-more", [40, 41, 42], 6)

    options = {"temperature": temperature, "seed": 5, "capacity": 80}
    found = outputs(verifier, iter([replace(row, then=then) for row in rows]), batch_size=4, **options)
    assert {generation.id for generation in asked} == {row.id for row in rows}
    prompts = {row.id: row.input_ids for row in rows}
    assert {generation.finish_reason for generation in asked} == {"stop", "length"}
    assert len(found) == len(rows) - 1
    for generation in (generation for generation in asked if generation.id != "r3"):
        stopped = generation.finish_reason == "stop"
        whole = [*prompts[generation.id], *generation.output_ids[: -1 if stopped else None], 40, 41, 42]
        alone = outputs(verifier, [Request(f"{generation.id}-more", whole, 6)], temperature=temperature, seed=5)
        assert alone.items() <= found.items()


def test_states_are_those_of_the_whole_document(verifier):
    rows = requests()
    for generation in generate(verifier, rows, max_new_tokens=10, batch_size=4, capture=True):
        prompt = next(row.input_ids for row in rows if row.id == generation.id)
        document = Document("", [*prompt, *generation.output_ids], [(len(prompt), len(prompt + generation.output_ids))])
        wanted, states = verifier.states(*packed_rows([document])), generation.states
        row_P, close = wanted.last_index_P, {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(states.aux_TAD[:-1], wanted.aux_BTAD[0, :-1], **close)
        torch.testing.assert_close(states.last_TD[row_P], wanted.last_PD, **close)
        torch.testing.assert_close(states.lse_T[row_P], wanted.lse_P, **close)
        assert torch.equal(states.top_T[row_P], wanted.top_P)
        assert len(states.top_T) == len(document.input_ids) and not states.aux_TAD[-1].any()
