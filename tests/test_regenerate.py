"""Regeneration answers turn after turn with the verifier's own words, and resumes exactly."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from data.clock import Limits
from data.log import CLOSES, RoundLog
from data.memory import SHARE, slot_bytes
from data.quarantine import Quarantine
from data.regenerate import regenerate
from data.rows import Dialogue
from tiny_writer import SMALL, Dying, content, plain_argmax, tiny_writer, turns


@pytest.fixture(scope="module")
def verifier():
    return tiny_writer(end=5.0)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr("data.clock.GROUP_ROWS", 3)


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


def test_a_file_is_read_again_when_nothing_is_left_to_write(verifier, tmp_path):
    """Its reader counts bad rows, and begins their file anew."""

    def dialogues():
        for index in range(20):
            met.append(index)
            yield Dialogue(str(index), "s", turns(f"question {index}"))

    met = []
    for run in ("first", "killed before it said that it was done"):
        met.clear()
        regenerate(verifier, dialogues(), tmp_path / "a.jsonl", SMALL, Limits(max_documents=5))
        assert met == list(range(5)), run


def test_what_cannot_be_asked_is_in_quarantine_once_in_each_run(verifier, tmp_path):
    rows = [Dialogue(str(n), "s", turns("word " * 300 if n == 2 else f"q {n}"), place=f"f:{n + 1}") for n in range(6)]
    for _ in ("first", "again"):
        with Quarantine(tmp_path / "q.jsonl") as quarantine:
            log = regenerate(verifier, rows, tmp_path / "a.jsonl", SMALL, Limits(), quarantine=quarantine)
        assert len(log) == 5 and log.counts["prompt beyond max_length"] == 1
        (line,) = (tmp_path / "q.jsonl").read_text().splitlines()
        row = json.loads(line)
        assert (row["place"], row["reason"]) == ("f:3", "prompt beyond max_length") and row["text"].startswith("word")


def test_regeneration_fills_up_after_drops(verifier, tmp_path):
    usable = [Dialogue(str(i), "s", turns(f"question {i}")) for i in range(9)]
    long = Dialogue("long", "s", turns("word " * 300))
    mixed = [dialogue for one in usable for dialogue in (one, long)]
    log = regenerate(verifier, mixed, tmp_path / "a.jsonl", SMALL, Limits(max_documents=6))
    assert [row["id"] for row in log.rows] == [str(i) for i in range(6)], "no dialogue is passed over"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stopped_anywhere_it_ends_in_the_same_bytes(tmp_path, monkeypatch, dtype):
    verifier = tiny_writer(end=5.0, dtype=dtype)
    dialogues = [Dialogue(str(i), "s", turns(f"question {i}", "old", "And then?")) for i in range(20)]
    warm, path, whole = replace(SMALL, temperature=1.0), tmp_path / "d.jsonl", tmp_path / "whole.jsonl"
    regenerate(verifier, dialogues, whole, warm, Limits())
    dying = Dying(monkeypatch, verifier, 10, 40, 20, 50)
    dying.through(lambda: regenerate(verifier, iter(dialogues), path, warm, Limits()), path, whole)
    assert any(len(row["spans"]) > 1 for row in RoundLog(path).rows)


def test_memory_that_is_free_later_changes_no_batch(verifier, tmp_path, monkeypatch):
    made, new_cache = [], type(verifier).new_cache
    monkeypatch.setattr(type(verifier), "new_cache", lambda self, *size: made.append(size) or new_cache(self, *size))
    dialogues = [Dialogue(str(i), "s", turns(f"question {i}")) for i in range(20)]
    for room, limits in ((90, Limits(max_documents=8)), (10**6, Limits())):
        free = int((room + 0.5) * slot_bytes(verifier) / SHARE)
        monkeypatch.setattr("data.memory.free_bytes", lambda _, free=free: free)
        log = regenerate(verifier, dialogues, tmp_path / "d.jsonl", SMALL, limits)
    assert len(log) == 20 and log.slots == 90
    batches = [rows for rows, capacity in made if capacity > 30]  # the others are of prompts
    assert set(batches) == {2} and len(batches) == 3, "as in the first run: 90 slots are two sequences"


def rounds(path, numbers):
    """A log with a round of two rows for each number."""
    log = RoundLog(path)
    for number in numbers:
        log.append([{"n": number}, {"n": number, "text": "größer"}], number + 1, Counter(odd=number % 2), 0.5)
    return log


def test_a_log_knows_its_rounds(tmp_path):
    path = tmp_path / "log.jsonl"
    log = rounds(path, range(4))
    again = RoundLog(path)
    assert list(again) == log.rows and len(again) == 8 and (again.used, again.seconds) == (4, 2.0)
    assert again.counts == {"odd": 2} and not (tmp_path / "log.jsonl.cut").exists()
    assert rounds(path, [4]).used == 5 and len(RoundLog(path)) == 10


def test_damage_costs_the_rounds_from_there_on_and_is_said(tmp_path, caplog):
    path, cut = tmp_path / "log.jsonl", tmp_path / "log.jsonl.cut"
    rounds(path, range(4))
    data = path.read_bytes()
    edges = [0]
    for line in data.splitlines(keepends=True):
        edges.append(edges[-1] + len(line))
    ends = edges[::2]
    swapped = data[ends[1] : ends[2]] + data[: ends[1]] + data[ends[2] :]
    damaged = {"swapped": (swapped, 0), "no row": (b"5\n" + data, 0)}
    damaged["left out"] = data[: ends[1]] + data[ends[2] :], 1
    damaged |= {f"torn at {size}": (data[:size], 1) for size in (ends[1] + 1, edges[3], ends[2] - 1)}
    for place in range(ends[1], ends[2], 7):  # every kind of byte: braces, names, text, the checksum itself
        flipped = bytearray(data)
        flipped[place] ^= 1
        damaged[f"flipped at {place}"] = bytes(flipped), 1
    for name, (found, good) in damaged.items():
        caplog.clear()
        path.write_bytes(found)
        assert len(RoundLog(path)) == 2 * good, name
        assert path.read_bytes() == data[: ends[good]] and cut.read_bytes() == found[ends[good] :]
        assert f"after {good} whole rounds ({2 * good} rows) are unfinished or damaged" in caplog.text
        caplog.clear()
        assert rounds(path, range(good, 4)) and path.read_bytes() == data and not caplog.records


def test_a_clock_alone_leaves_its_time_in_the_log(verifier, tmp_path):
    dialogues = [Dialogue("0", "s", turns("question"))]
    for name, limits, timed in (("a", Limits(), False), ("b", Limits(seconds=600), True)):
        log = regenerate(verifier, dialogues, tmp_path / f"{name}.jsonl", SMALL, limits)
        assert ("seconds" in log.rows[-1][CLOSES]) is timed and log.seconds > 0
