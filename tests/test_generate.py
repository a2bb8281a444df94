"""Generation in batches equals one by one; synthesis and regeneration keep ids, stop in time, and resume exactly."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_writer import tiny_writer

from conf.errors import UserError
from data.generate import MIN_CUT, Request, choose, generate
from data.log import CLOSES, RoundLog
from data.memory import SHARE, slot_bytes
from data.sources import Dialogue, parse_row
from data.synthesize import Limits, Sampling, regenerate, synthesize
from data.tokens import prompt_ids, to_document

ROOT = Path(__file__).parent.parent
SMALL = Sampling(max_new_tokens=12, max_length=256, batch_size=4, seed=3)


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


def plain_argmax(verifier, ids, limit):
    """No cache, no batch: the whole prefix anew for each token."""
    ids, count = list(ids), len(ids)
    while len(ids) - count < limit:
        row = torch.tensor([ids])
        last = verifier.capture(row, torch.zeros_like(row), torch.arange(len(ids))[None]).last_BTD[:, -1]
        ids.append(int(verifier.logits(last).argmax()))
        if ids[-1] in verifier.eos_ids:
            break
    return ids[count:]


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
    options = {"max_new_tokens": 400, "batch_size": 4, "stop_ids": []}
    found = outputs(verifier, rows, deadline=began + 0.4, **options)
    assert time.monotonic() - began < 5
    assert 0 < len(found) <= 8 and all(len(ids) >= MIN_CUT for ids, _ in found.values())
    assert "cut" in {reason for _, reason in found.values()}


def test_requests_that_cannot_be(verifier):
    with pytest.raises(UserError, match="found no tokens"):
        list(generate(verifier, [Request("a", [])], max_new_tokens=2))
    with pytest.raises(UserError, match="at least one new token"):
        list(generate(verifier, [Request("a", [5], 0)], max_new_tokens=2))
    assert list(generate(verifier, [], max_new_tokens=2)) == []


# Synthesis


def content(rows):
    return [{name: value for name, value in row.items() if name != CLOSES} for row in json.loads(json.dumps(rows))]


def test_synthesis_writes_what_the_verifier_says(verifier, tmp_path):
    log = synthesize(verifier, tmp_path / "d.jsonl", SMALL, Limits(max_documents=10))
    assert len(log.rows) == 10
    texts = [row["conversations"][0]["content"] for row in log.rows]
    assert len(set(texts)) == 10
    for row in log.rows[:5]:
        start = row["answer_start"]
        assert row["input_ids"][:start] == prompt_ids(verifier.tokenizer, row["conversations"][:1])
        assert row["input_ids"][start:] == plain_argmax(verifier, row["input_ids"][:start], SMALL.max_new_tokens)
        assert row["finish_reason"] == ("stop" if row["input_ids"][-1] in verifier.eos_ids else "length")
        if len(row["input_ids"]) - start > 1:
            assert to_document(parse_row(json.dumps(row), "x"), verifier).input_ids == row["input_ids"]


def test_synthesis_resumes_after_a_cut_at_any_byte(verifier, tmp_path):
    path = tmp_path / "d.jsonl"
    whole = synthesize(verifier, path, SMALL, Limits(max_documents=10))
    data = path.read_bytes()
    for size in (100, len(data) - 1):
        path.write_bytes(data[:size])
        kept = RoundLog(path)
        assert path.stat().st_size <= size and (not kept.rows or CLOSES in kept.rows[-1])
        again = synthesize(verifier, path, SMALL, Limits(max_documents=10))
        assert content(again.rows) == content(whole.rows) and again.counts == whole.counts
    more = synthesize(verifier, path, SMALL, Limits(max_documents=12))
    assert content(more.rows)[:10] == content(whole.rows) and len(more.rows) == 12


def test_batch_size_changes_no_text(verifier, tmp_path):
    warm = replace(SMALL, temperature=1.0)
    small = synthesize(verifier, tmp_path / "a.jsonl", warm, Limits(max_documents=6))
    large = synthesize(verifier, tmp_path / "b.jsonl", replace(warm, batch_size=8), Limits(max_documents=6))
    assert content(small.rows) == content(large.rows)


def test_synthesis_stops_at_tokens_and_at_time(verifier, tmp_path):
    log = synthesize(verifier, tmp_path / "a.jsonl", SMALL, Limits(max_tokens=40))
    tokens = [row["spans"][0][1] - row["spans"][0][0] for row in log.rows]
    assert sum(tokens[:-1]) < 40 <= sum(tokens)
    began = time.monotonic()
    log = synthesize(verifier, tmp_path / "b.jsonl", SMALL, Limits(seconds=2))
    assert time.monotonic() - began < 6 and log.rows
    began = time.monotonic()
    again = synthesize(verifier, tmp_path / "b.jsonl", SMALL, Limits(seconds=max(1.0, log.seconds)))
    assert time.monotonic() - began < 2 and len(again.rows) == len(log.rows), "time of earlier runs counts"
    with pytest.raises(UserError, match="expected a bound"):
        synthesize(verifier, tmp_path / "c.jsonl", SMALL, Limits())


def test_each_round_is_logged(verifier, tmp_path, caplog):
    with caplog.at_level("INFO", logger="data.clock"):
        synthesize(verifier, tmp_path / "d.jsonl", SMALL, Limits(max_documents=10))
    lines = [record.message for record in caplog.records]
    assert len(lines) > 1 and lines[-1].startswith("dialogues: 10, ") and lines[-1].endswith("100% of the limit")
    assert all("answer tokens, " in line and "tokens/s" in line for line in lines)


def test_a_verifier_that_never_ends_a_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr("data.synthesize.PROMPT_TOKENS", 8)
    mute = tiny_writer(end=0.0)
    with pytest.raises(UserError, match="no usable prompts .*prompt too long"):
        synthesize(mute, tmp_path / "d.jsonl", SMALL, Limits(max_documents=2))


CHILD = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from pathlib import Path
from test_generate import SMALL, Limits, synthesize, tiny_writer
print("ready", flush=True)
synthesize(tiny_writer(end=5.0), Path({path!r}), SMALL, Limits(max_documents=400))
"""


def test_a_killed_run_loses_one_round_at_most(verifier, tmp_path):
    path = tmp_path / "d.jsonl"
    code = CHILD.format(root=str(ROOT), tests=str(ROOT / "tests"), path=str(path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout.readline() == b"ready\n"
        for _ in range(3000):
            if path.exists() and path.stat().st_size > 1500:
                break
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
    kept = len(RoundLog(path).rows)
    assert kept >= 2
    resumed = synthesize(verifier, path, SMALL, Limits(max_documents=kept + 4))
    whole = synthesize(verifier, tmp_path / "whole.jsonl", SMALL, Limits(max_documents=kept + 4))
    assert content(resumed.rows) == content(whole.rows)


# Regeneration


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_regeneration_answers_turn_after_turn(tmp_path):
    verifier = tiny_writer(end=8.0)  # short answers: dialogues go on
    dialogues = [
        Dialogue("same", "s", turns("The quick brown fox", "old answer", "What is the capital?")),
        Dialogue("same", "s", turns("How many apples?", "old", "And then?", "old", "Why?", "old")),
        Dialogue("c", "s", [{"role": "system", "content": "Be brief."}, *turns("Hi there")]),
        Dialogue("d", "s", turns("word " * 300)),
        Dialogue("e", "s", [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]),
    ]
    log = regenerate(verifier, dialogues, tmp_path / "d.jsonl", SMALL, Limits())
    assert log.counts["prompt beyond max_length"] == 1 and len(log.rows) == 4
    assert "old" not in json.dumps(log.rows)
    answers = 0
    for row in log.rows:
        for start, end in row["spans"]:
            ids = row["input_ids"]
            assert ids[start:end] == plain_argmax(verifier, ids[:start], SMALL.max_new_tokens)
            answers += 1
        assert row["conversations"][-1]["role"] == "assistant" and row["spans"][-1][1] == len(row["input_ids"])
    assert answers > len(log.rows), "a second answer should be seen"
    short = regenerate(tiny_writer(end=0.0), dialogues[:2], tmp_path / "e.jsonl", SMALL, Limits())
    assert short.counts["dialogue ended early: an answer met its limit"] == 2
    assert all(row["conversations"][-1]["role"] == "assistant" for row in short.rows)


def test_regeneration_resumes_and_honours_limits(verifier, tmp_path):
    dialogues = [Dialogue(str(i), "s", turns(f"question {i}")) for i in range(20)]
    whole = regenerate(verifier, iter(dialogues), tmp_path / "a.jsonl", SMALL, Limits())
    path = tmp_path / "b.jsonl"
    path.write_bytes((tmp_path / "a.jsonl").read_bytes()[:-200])
    assert 0 < len(RoundLog(path).rows) < 20
    assert content(regenerate(verifier, iter(dialogues), path, SMALL, Limits()).rows) == content(whole.rows)
    few = regenerate(verifier, iter(dialogues), tmp_path / "c.jsonl", SMALL, Limits(max_documents=5))
    assert content(few.rows) == content(whole.rows)[:5]
