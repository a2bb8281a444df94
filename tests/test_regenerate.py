"""Regeneration answers turn after turn with the verifier's own words, and resumes exactly."""

import json

import pytest

from data.clock import Limits
from data.log import RoundLog
from data.regenerate import regenerate
from data.rows import Dialogue
from tiny_writer import SMALL, content, plain_argmax, tiny_writer, turns


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


def test_regeneration_fills_up_after_drops(verifier, tmp_path):
    usable = [Dialogue(str(i), "s", turns(f"question {i}")) for i in range(9)]
    long = Dialogue("long", "s", turns("word " * 300))
    mixed = [dialogue for one in usable for dialogue in (one, long)]
    log = regenerate(verifier, mixed, tmp_path / "a.jsonl", SMALL, Limits(max_documents=6))
    assert [row["id"] for row in log.rows] == [str(i) for i in range(6)], "no dialogue is passed over"
