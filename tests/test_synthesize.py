"""Synthesis keeps ids and states, stops in time, keeps the batch full, and resumes exactly."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from conf.errors import UserError
from conf.schema import DataConf
from data.clock import Clock, Limits
from data.generate import Generation
from data.log import CLOSES, RoundLog
from data.memory import SHARE, KeptStates
from data.prepare import prepare
from data.rows import parse_row
from data.store import StateStore
from data.synthesize import _Writer, synthesize
from data.tokens import prompt_ids, same_text, to_document
from models.chat import user_header_ids
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.states import DocumentStates
from models.vocab import DraftVocab
from tiny_writer import SMALL, Dying, content, plain_argmax, step_sizes, tiny_writer, tokenize, turns
from toy_head import ttt_loss

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def verifier():
    return tiny_writer(end=5.0)


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr("data.clock.GROUP_ROWS", 3)


def test_synthesis_writes_what_the_verifier_says(verifier, tmp_path):
    log = synthesize(verifier, tmp_path / "d.jsonl", SMALL, Limits(max_documents=10))
    assert len(log.rows) == 10
    texts = [row["conversations"][0]["content"] for row in log.rows]
    assert len(set(texts)) == 10
    for row in log.rows[:5]:
        start = row["answer_start"]
        prompt = prompt_ids(verifier.tokenizer, row["conversations"][:1])
        assert same_text(verifier.tokenizer, row["input_ids"][:start], prompt)
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


def test_the_end_and_the_way_there_are_logged(verifier, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("data.progress.LOG_EVERY", 0.0)
    with caplog.at_level("INFO", logger="data"):
        synthesize(verifier, tmp_path / "d.jsonl", SMALL, Limits(max_documents=10))
    *lines, last = [record.message for record in caplog.records]
    assert last.startswith("dialogues: 10, ") and last.endswith("100% of the limit")
    assert len(lines) > 5 and all("answer tokens, " in line and " live" in line for line in lines)


def test_the_batch_stays_full_and_nothing_is_written_in_vain(verifier, tmp_path, monkeypatch):
    sizes = step_sizes(verifier, monkeypatch)
    wide = replace(SMALL, batch_size=16)
    log = synthesize(verifier, tmp_path / "d.jsonl", wide, Limits(max_documents=60, seconds=600))
    assert len(log.rows) == 60 and log.used == 60 + log.counts.total()
    steady = sizes[: len(sizes) // 2]  # later, the last of the sixty are awaited
    assert max(sizes) == 16 and sum(steady) / len(steady) > 14


def test_late_no_prompt_is_begun(verifier, tmp_path):
    clock = Clock(RoundLog(tmp_path / "d.jsonl"), Limits(seconds=10))
    writer = _Writer(verifier, SMALL, clock)
    requests = writer.requests()
    assert next(requests).id == "synthetic-0"
    writer.seconds.extend([40.0, 40.0, 1.0])
    assert next(requests) is None, "a dialogue takes longer than the time that is left"
    writer.seconds.extend([1.0] * 5)
    assert next(requests).id == "synthetic-1"
    words = verifier.tokenizer("What is the capital?", add_special_tokens=False)["input_ids"]
    end = verifier.eos_ids[0]
    answer = writer.prompt_written(Generation("synthetic-1", [*words, end], "stop"))
    prompt = prompt_ids(verifier.tokenizer, turns("What is the capital?"))
    assert answer.id == "synthetic-1-answer-0" and [*writer.headers[0], *words, *answer.input_ids] == prompt
    writer.take(Generation("synthetic-1-answer-0", [5, 6, end], "stop"))
    assert not clock.rows and writer.next == 0, "number 0 is still on its way"
    # The same prompt, and the lower number counts.
    assert writer.prompt_written(Generation("synthetic-0", [*words, end], "stop")).id == "synthetic-0-answer-0"
    writer.take(Generation("synthetic-0-answer-0", [7, 8, end], "stop"))
    assert [row["id"] for row in clock.rows] == ["synthetic-0"]
    assert writer.next == 2 and clock.counts == {"duplicate prompt": 1}


def test_a_prompt_keeps_the_tokens_that_it_was_written_with(verifier, tmp_path):
    writer = _Writer(verifier, SMALL, Clock(RoundLog(tmp_path / "d.jsonl"), Limits(max_documents=3)))
    next(writer.requests())
    letters = [verifier.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "the fox"]
    end = verifier.eos_ids[0]
    assert verifier.tokenizer("the fox", add_special_tokens=False)["input_ids"] != letters
    assert writer.prompt_written(Generation("synthetic-0", [*letters, end], "stop"))
    writer.take(Generation("synthetic-0-answer-0", [7, 8, end], "stop"))
    row = writer.clock.rows[0]
    assert row["conversations"][0]["content"] == "the fox"
    assert row["input_ids"] == [*writer.headers[0], *letters, *writer.closing, 7, 8, end]
    assert to_document(parse_row(json.dumps(row), "x"), verifier).input_ids == row["input_ids"]


def test_a_template_that_changes_the_text_costs_the_prompt(tmp_path, monkeypatch):
    verifier = tiny_writer(end=5.0)
    trims = verifier.tokenizer.chat_template.replace("message['content']", "message['content'] | trim")
    assert trims != verifier.tokenizer.chat_template
    monkeypatch.setattr(verifier.tokenizer, "chat_template", trims)
    writer = _Writer(verifier, SMALL, Clock(RoundLog(tmp_path / "d.jsonl"), Limits(max_documents=3)))
    next(writer.requests())
    words = verifier.tokenizer(" The quick brown fox ", add_special_tokens=False)["input_ids"]
    assert writer.prompt_written(Generation("synthetic-0", [*words, verifier.eos_ids[0]], "stop")) is None
    assert writer.clock.counts == {"the template changes the prompt's text": 1}


def test_a_long_prompt_is_answered_as_far_as_it_goes(verifier, tmp_path, monkeypatch):
    monkeypatch.setattr("data.synthesize.PROMPT_TOKENS", 12)
    log = synthesize(verifier, tmp_path / "d.jsonl", SMALL, Limits(max_documents=12))
    cut = [row for row in log.rows if row["prompt_finish_reason"] == "length"]
    assert 0 < len(cut) < len(log.rows)
    for row in cut:
        start = row["answer_start"]
        assert start == len(prompt_ids(verifier.tokenizer, turns(""))) + 12
        assert row["input_ids"][start:] == plain_argmax(verifier, row["input_ids"][:start], SMALL.max_new_tokens)


def test_openings_in_turn(verifier, tmp_path):
    steered = replace(SMALL, openings=("What is", "", "the quick"))
    log = synthesize(verifier, tmp_path / "d.jsonl", steered, Limits(max_documents=9))
    for row in log.rows:
        opening = steered.openings[int(row["id"].removeprefix("synthetic-")) % 3]
        assert row["conversations"][0]["content"].startswith(opening)
        prompt = prompt_ids(verifier.tokenizer, row["conversations"][:1])
        assert same_text(verifier.tokenizer, row["input_ids"][: row["answer_start"]], prompt)
    free = synthesize(verifier, tmp_path / "e.jsonl", SMALL, Limits(max_documents=9))
    texts = {row["id"]: row["conversations"] for row in free.rows}
    same = [row["id"] for row in log.rows if texts.get(row["id"]) == row["conversations"]]
    assert same and all(int(name.removeprefix("synthetic-")) % 3 == 1 for name in same)


def test_states_are_kept_for_what_is_written(verifier, tmp_path, monkeypatch):
    """The store takes the states that writing left behind, and they are those that it would compute."""
    kept = KeptStates(verifier.device)
    log = synthesize(verifier, tmp_path / "d.jsonl", SMALL, Limits(max_documents=10), kept)
    dialogues = (parse_row(json.dumps(row), row["id"]) for row in log.rows)
    documents = list(tokenize(dialogues, verifier, SMALL.max_length, Counter()))
    computed = StateStore.capture(verifier, documents, tmp_path / "computed")
    gap = kept.pop(documents[2].ids_hash)  # as if there had been no room for it
    calls, states = [], type(verifier).states
    monkeypatch.setattr(type(verifier), "states", lambda self, *rows: calls.append(1) or states(self, *rows))
    store = StateStore.capture(verifier, documents, tmp_path / "kept", kept=kept)
    assert len(calls) == 1 and gap.nbytes > 0
    everything = list(range(len(documents)))
    found, wanted = store.states(everything), computed.states(everything)
    last_rows = torch.tensor([len(document.input_ids) for document in documents]).cumsum(0) - 1
    known = [i for i, row in enumerate(last_rows.tolist()) if i != 2 and not found.aux_BTAD[0, row].any()]
    assert len(known) == len(documents) - 1, "the last token was never read"
    found.aux_BTAD[0, last_rows], wanted.aux_BTAD[0, last_rows] = 0, 0
    for field in fields(wanted):
        torch.testing.assert_close(getattr(found, field.name), getattr(wanted, field.name), atol=1e-4, rtol=1e-4)
    # ... and nothing depends on that row.
    vocab = DraftVocab.identity(verifier.vocab_size)
    head = Eagle3Head(
        Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, len(vocab)),
        verifier.embedding_VD,
        vocab,
    )
    found.aux_BTAD.requires_grad_()
    ttt_loss(head, found, verifier.logits(found.last_PD), 3)[0].backward()
    used_N = found.aux_BTAD.grad[0].flatten(1).abs().sum(1) > 0
    assert not used_N[last_rows].any() and used_N[last_rows - 2].any()


def test_the_whole_dialogue_can_be_supervised(verifier, tmp_path, monkeypatch):
    monkeypatch.setenv("EYRIE_CACHE", str(tmp_path))
    settings = DataConf(path=None, max_documents=40, max_new_tokens=12, max_length=256, batch_size=4, validation=2)
    answers = prepare(settings, verifier)
    whole = prepare(replace(settings, supervised="dialogue"), verifier)
    header = len(user_header_ids(verifier.tokenizer))
    assert [document.input_ids for document in whole.train] == [document.input_ids for document in answers.train]
    finished = set()
    for wide, document in zip(whole.train, answers.train, strict=True):
        (start, end), answer = wide.spans
        assert start == header and [answer] == document.spans
        ends = [index for index in range(start, answer[0]) if document.input_ids[index] in verifier.eos_ids]
        assert len(ends) == 1 and end - ends[0] in (0, 1), "its end of turn counts when the verifier wrote it"
        finished.add(end - ends[0])
    assert finished == {0, 1}
    assert list(whole.validation) == list(answers.validation), "held-out prompts stay prompts"
    assert whole.counts["train"]["labels"] > answers.counts["train"]["labels"]
    assert whole.counts["train"]["answer tokens"] == answers.counts["train"]["answer tokens"]
    kept = prepare(replace(settings, minutes=9, supervised="dialogue"), verifier, keep_states=True)
    assert {document.ids_hash for document in kept.train} <= set(kept.states) and not whole.states
    stored = StateStore.capture(verifier, kept.train, tmp_path / "kept", kept=kept.states).states([0, 1])
    computed = StateStore.capture(verifier, kept.train, tmp_path / "computed").states([0, 1])
    assert torch.equal(stored.top_P, computed.top_P)
    torch.testing.assert_close(stored.last_PD, computed.last_PD, atol=1e-4, rtol=1e-4)


def test_the_opening_is_not_supervised_and_long_prompts_fit(verifier, tmp_path):
    steered = replace(SMALL, openings=("What is",), max_length=60)
    with pytest.raises(UserError, match="expected data.max_length of .* found 20"):
        synthesize(verifier, tmp_path / "e.jsonl", replace(SMALL, max_length=20), Limits(max_documents=3))
    writer = _Writer(verifier, steered, Clock(RoundLog(tmp_path / "d.jsonl"), Limits(max_documents=3)))
    requests, end = writer.requests(), verifier.eos_ids[0]
    opening = next(requests).input_ids
    assert opening == user_header_ids(verifier.tokenizer, "What is")
    words = verifier.tokenizer(" the quick capital?", add_special_tokens=False)["input_ids"]
    assert writer.prompt_written(Generation("synthetic-0", [*words, end], "stop"))
    assert writer.prompt[0]["prompt_span"] == (len(opening), len(opening) + len(words) + 1)
    next(requests)
    letters = [verifier.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "the fox " * 6]
    assert writer.prompt_written(Generation("synthetic-1", [*letters, end], "stop")) is None
    assert writer.done[1] == "prompt beyond max_length"


def test_states_are_kept_while_there_is_room(monkeypatch):
    states = DocumentStates.of([(torch.zeros(9, 3, 8), torch.zeros(9, 8), torch.zeros(9), torch.zeros(9))])
    monkeypatch.setattr("data.memory.free_bytes", lambda _: 2.5 * states.nbytes / SHARE)
    kept = KeptStates(torch.device("cpu"))
    for name in "abc":
        kept.add(name, states)
    assert list(kept) == ["a", "b"]


def test_a_verifier_that_never_ends_a_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr("data.synthesize.PROMPT_TOKENS", 8)
    mute = tiny_writer(end=0.0)
    with pytest.raises(UserError, match="no usable prompts .*prompt does not end within 8 tokens"):
        synthesize(mute, tmp_path / "d.jsonl", SMALL, Limits(max_documents=200))


@pytest.mark.parametrize("limits", [Limits(max_documents=20), Limits(max_tokens=90)])
def test_stopped_anywhere_it_ends_in_the_same_bytes(tmp_path, monkeypatch, limits):
    """In bfloat16, where what shares a batch may change a text: rounds are the same, and so are rows in a batch."""
    verifier = tiny_writer(end=5.0, dtype=torch.bfloat16)
    warm, path, whole = replace(SMALL, temperature=1.0), tmp_path / "d.jsonl", tmp_path / "whole.jsonl"
    synthesize(verifier, whole, warm, limits)
    dying = Dying(monkeypatch, verifier, 30, 150, 60, 200)
    dying.through(lambda: synthesize(verifier, path, warm, limits), path, whole)


CHILD = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from pathlib import Path
from test_synthesize import SMALL, Limits, synthesize, tiny_writer
print("ready", flush=True)
synthesize(tiny_writer(end=5.0), Path({path!r}), SMALL, Limits(max_documents=24))
"""


def test_a_killed_run_loses_what_was_on_its_way(verifier, tmp_path):
    path = tmp_path / "d.jsonl"
    code = CHILD.format(root=str(ROOT), tests=str(ROOT / "tests"), path=str(path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout.readline() == b"ready\n"
        for _ in range(3000):
            if path.exists() and path.stat().st_size > 1500:
                break
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
    assert 2 <= len(RoundLog(path)) < 24
    synthesize(verifier, path, SMALL, Limits(max_documents=24))
    synthesize(verifier, tmp_path / "whole.jsonl", SMALL, Limits(max_documents=24))
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
