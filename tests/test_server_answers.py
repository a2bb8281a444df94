"""Answers of servers: those of the batch here, whatever fails on the way, and one line for what can't pass."""

import json
import signal
import threading
import time
from dataclasses import replace

import pytest

from answer_stub import Stub, Time
from conf.cli import reported
from conf.errors import UserError
from conf.schema import DataConf
from data.answers import RETOKENISED
from data.clock import Limits
from data.fleet import FIRST, LONGEST, served_model, urls_of
from data.generate import Request
from data.prepare import dialogues_folder, prepare
from data.regenerate import regenerate
from data.rows import Dialogue
from data.server_answers import ServerAnswers
from data.synthesize import synthesize
from tiny_writer import SMALL, content, tiny_writer, turns

DIALOGUES = [Dialogue(str(i), "s", turns(f"question {i}", "old", "And then?")) for i in range(10)]


@pytest.fixture(scope="module")
def verifier():
    return tiny_writer(end=5.0)


@pytest.fixture(scope="module")
def served():
    """The same, as the server has it."""
    return tiny_writer(end=5.0)


@pytest.fixture(scope="module")
def expected(verifier, tmp_path_factory):
    """Written here, in one process."""
    path = tmp_path_factory.mktemp("here") / "d.jsonl"
    rows = regenerate(verifier, DIALOGUES, path, SMALL, Limits()).rows
    assert any(len(row["spans"]) > 1 for row in rows) and {row["finish_reason"] for row in rows} == {"stop", "length"}
    return content(rows)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("data.server_answers.SLOWEST", 1e9)


def answers(verifier, *stubs, clock=None, **options):
    """ServerAnswers on a clock of its own."""
    clock = clock or Time()
    urls = [stub if isinstance(stub, str) else stub.url for stub in stubs]
    return ServerAnswers(urls, verifier, "tiny", sleep=clock.sleep, now=clock.now, **{"concurrency": 3} | options)


def written(verifier, path, write, dialogues=DIALOGUES):
    return regenerate(verifier, dialogues, path, SMALL, Limits(), write)


def test_the_file_is_the_one_that_is_written_here(verifier, served, expected, tmp_path):
    with Stub(served) as stub, answers(verifier, stub) as write:
        log = written(verifier, tmp_path / "d.jsonl", write)
    assert content(log.rows) == expected and not any("tokenised" in reason for reason in log.counts)
    assert 2 <= stub.busiest <= 3
    assert len(stub.asked) == 1 + sum(len(row["spans"]) for row in expected), "a probe, and each answer once"
    body = stub.asked[1]
    assert body["model"] == "tiny" and body["temperature"] == 0 and body["return_token_ids"] is True
    assert body["stop_token_ids"] == sorted(verifier.eos_ids)
    assert (body["top_p"], body["top_k"], body["repetition_penalty"]) == (1.0, -1, 1.0), "no defaults of the server's"


def test_prompts_of_its_own_too(verifier, served, tmp_path):
    openings = ("What is", "the quick", "How many", "", "Write a")
    steered, limits = replace(SMALL, prompt_temperature=0.0, openings=openings), Limits(max_documents=4)
    here = synthesize(verifier, tmp_path / "here.jsonl", steered, limits)
    with Stub(served) as stub, answers(verifier, stub) as write:
        there = synthesize(verifier, tmp_path / "there.jsonl", steered, limits, None, write)
    assert content(there.rows) == content(here.rows) and len(here) == 4 and there.counts == here.counts


def test_a_seed_for_each_request(verifier, served):
    requests = [Request(name, [5, 6, 7], 8, 1.0) for name in ("a", "b")]
    found = []
    with Stub(served) as stub, answers(verifier, stub) as write:
        for seed in (0, 0, 1):
            generations = write(verifier, requests, max_new_tokens=8, seed=seed, stop_ids=[])
            found.append({generation.id: generation.output_ids for generation in generations})
    assert found[0] == found[1] != found[2] and found[0]["a"] != found[0]["b"]
    assert len({body["seed"] for body in stub.asked[1:]}) == 4


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", "status 500: out of memory"),
        ("429 7", "status 429: slow down"),
        ("cut", "peer closed connection"),
        ("garbage", "expected JSON from /v1/completions, found '<html>bad"),
        ("shape", "expected a completion, found"),
        ("abort", "an answer that ended by 'abort'"),
        ("truncated", "an answer cut at "),
        ("hang", "no answer within 1.5 s"),
        ("trickle", "no answer within 1.5 s"),
    ],
)
def test_what_passes_is_waited_out(verifier, served, expected, tmp_path, caplog, fault, said):
    clock, silent = Time(), fault in ("hang", "trickle")
    with Stub(served) as stub, answers(verifier, stub, clock=clock) as write:
        stub.faults += ["", fault] if silent else ["", fault, "", fault]
        write.answer_seconds = 1.5 if silent else 300
        log = written(verifier, tmp_path / "d.jsonl", write)
    assert content(log.rows) == expected, "nothing lost, nothing twice"
    assert any(f"{stub.url}: {said}" in record.message for record in caplog.records)
    assert clock.seconds >= (7 if fault == "429 7" else FIRST / 2) and clock.seconds < 30


def test_pauses_double_and_are_the_same_every_time(verifier, served):
    def pauses():
        clock = Time()
        with Stub(served) as stub, answers(verifier, stub, clock=clock, concurrency=1) as write:
            stub.faults += ["500"] * 9
            list(write(verifier, [Request("a", [5, 6])], max_new_tokens=4))
        return clock.slept

    slept = pauses()
    assert len(slept) == 9 and slept == pauses()
    assert all(min(LONGEST, FIRST * 2**n) / 2 <= pause <= min(LONGEST, FIRST * 2**n) for n, pause in enumerate(slept))


def test_the_work_of_a_dead_server_goes_to_the_others(verifier, served, expected, tmp_path, caplog):
    clock = Time()
    with Stub(served) as good, Stub(served) as dying, answers(verifier, good, dying, clock=clock) as write:
        dying.after = 5
        log = written(verifier, tmp_path / "d.jsonl", write)
    assert content(log.rows) == expected
    assert len(good.asked) > 6 and len(dying.asked) > 5 and clock.seconds == 0, "nobody waits while another can do it"
    with Stub(served) as good, answers(verifier, "http://127.0.0.1:9", good) as write:
        assert content(written(verifier, tmp_path / "e.jsonl", write).rows) == expected
    assert any("127.0.0.1:9" in record.message and "go on without it" in record.message for record in caplog.records)


def test_patience_ends_in_one_line_and_a_rerun_goes_on(verifier, served, expected, tmp_path):
    path, clock = tmp_path / "d.jsonl", Time()
    with Stub(served) as stub:
        with answers(verifier, stub, clock=clock, patience=100) as write:
            stub.after = 16  # the probe, and a round
            with pytest.raises(
                UserError, match=r"within 100 s from .*status 500: out of memory.*same command"
            ) as caught:
                written(verifier, path, write)
        assert "\n" not in str(caught.value) and 90 < clock.seconds < 200
    kept = path.read_bytes()
    assert kept.count(b"\n") == 8, "the round before it"
    with Stub(served) as stub, answers(verifier, stub) as write:
        log = written(verifier, path, write)
    assert content(log.rows) == expected and path.read_bytes().startswith(kept)
    assert len(stub.asked) - 1 == sum(len(row["spans"]) for row in expected[kept.count(b"\n") :])


def test_it_waits_as_long_as_it_is_told(verifier, served):
    with Stub(served) as stub, answers(verifier, stub, patience=100) as write:
        stub.faults += ["429 3600"]
        with pytest.raises(UserError, match="within 100 s .*status 429: slow down"):
            list(write(verifier, [Request("a", [5, 6])], max_new_tokens=4))


def test_text_alone_is_tokenised_and_counted(verifier, served, tmp_path, caplog):
    with Stub(served, token_ids=None, prompt_token_ids=None) as stub, answers(verifier, stub) as write:
        log = written(verifier, tmp_path / "d.jsonl", write)
    spans = [(row, span) for row in log.rows for span in row["spans"]]
    assert log.counts[RETOKENISED] == len(spans) > 10
    assert sum("gives text and no token ids" in record.message for record in caplog.records) == 1
    for row, (start, end) in spans:
        assert start < end <= start + SMALL.max_new_tokens
        assert not set(row["input_ids"][start : end - 1]) & set(verifier.eos_ids)
    assert all((row["input_ids"][-1] in verifier.eos_ids) == (row["finish_reason"] == "stop") for row in log.rows)


def test_an_answer_ends_where_its_turn_ends(verifier, served, expected, tmp_path):
    """Some servers leave out the token that ended a text, others don't mind stop_token_ids."""
    end = verifier.eos_ids[0]

    def without_last(choice):
        return choice["token_ids"][:-1] if choice["finish_reason"] == "stop" else choice["token_ids"]

    def too_far(choice):
        return [*choice["token_ids"], 7, 7] if choice["token_ids"][-1] == end else choice["token_ids"]

    for number, changed in enumerate(({"token_ids": without_last, "matched_stop": end}, {"token_ids": too_far})):
        if number == 0:
            changed |= {"stop_reason": None}
        with Stub(served, **changed) as stub, answers(verifier, stub) as write:
            log = written(verifier, tmp_path / f"{number}.jsonl", write)
        assert content(log.rows) == expected and not log.counts[RETOKENISED]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt_token_ids": [1, 2]}, r"read other token ids than it was sent .*\[1, 2\]"),
        ({"token_ids": [9, 512], "finish_reason": "stop"}, "writes token 512, beyond the 512 of tiny-writer"),
        ({"token_ids": [9, 10], "finish_reason": "stop"}, r"ends an answer with token 10, and a turn .* with \[2\]"),
        ({"models": ["a", "b"]}, "expected data.server_model among a, b at .*, found tiny"),
        ({"models": []}, "lists none"),
        ({"longest": 255}, "takes texts of 255 tokens, data.max_length is 256: .*--max-model-len 256"),
        ({"verifier": 5}, "goes on otherwise than tiny-writer does here: token 0 "),
        ({"always": "400"}, r"refused \(status 400\): this model's maximum context length is 8"),
        ({"always": "500"}, "no server answers .*status 500: out of memory"),
    ],
)
def test_what_cannot_pass_is_one_line_at_the_start(verifier, served, changed, said):
    changed = dict(changed)
    model = tiny_writer(seed=5) if changed.pop("verifier", None) else served
    with Stub(model, **changed) as stub:
        with pytest.raises(UserError, match=said) as caught, answers(verifier, stub, longest=256):
            pass
        assert "\n" not in str(caught.value)


def test_a_tokenizer_that_cuts_otherwise(verifier, monkeypatch, caplog):
    """Told without the verifier's layers, too; where nothing can be told, that is said."""
    other = tiny_writer(end=5.0)
    monkeypatch.setattr(verifier, "whole", False)
    with Stub(other) as stub, answers(verifier, stub):
        assert not caplog.records
    with Stub(other, tokenizes=False) as stub, answers(verifier, stub):
        assert "could not be held to tiny-writer" in caplog.text
    monkeypatch.setattr(other, "tokenizer", lambda text, **_: {"input_ids": list(text.encode())})
    with Stub(other) as stub, pytest.raises(UserError, match="cuts text into other tokens"), answers(verifier, stub):
        pass


def test_addresses():
    assert urls_of(["http://a:1/v1/", "http://a:1", "http://b:2"]) == ["http://a:1", "http://b:2"]
    with pytest.raises(UserError, match="expected data.server=http://HOST:PORT, found a:1"):
        urls_of("a:1")
    with pytest.raises(UserError, match="found an empty one"):
        urls_of([])
    with pytest.raises(UserError, match=r"no answer from http://127.0.0.1:9 \(.*data.server_model=NAME"):
        served_model(["http://127.0.0.1:9"], None)
    assert served_model(["http://127.0.0.1:9"], "given") == "given"


def test_the_deadline_leaves_out_what_is_not_there(verifier, served):
    with Stub(served) as stub, answers(verifier, stub) as write:
        stub.faults += ["", "hang"]
        began = time.monotonic()
        requests = [Request(str(n), [5, 6 + n]) for n in range(3)]
        found = list(write(verifier, requests, max_new_tokens=4, deadline=began + 1.0))
        assert len(found) == 2 and time.monotonic() - began < 5
        assert list(write(verifier, requests, max_new_tokens=4, deadline=began)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once(verifier, served, capsys, number):
    began = time.monotonic()
    with Stub(served) as stub, pytest.raises(SystemExit) as end, reported(), answers(verifier, stub) as write:
        stub.always = "hang"
        threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, number)).start()
        list(write(verifier, [Request(str(n), [5, 6 + n]) for n in range(9)], max_new_tokens=4))
    assert time.monotonic() - began < 10 and end.value.code == 128 + number
    assert capsys.readouterr().err.strip().endswith("run the same command again to continue from what is in the cache")


def test_training_data_from_servers(tmp_path, monkeypatch):
    """The folder knows the model's name, not the address; what is complete needs no server if the model is named."""
    monkeypatch.setenv("EYRIE_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(8)))
    verifier, served = tiny_writer(seed=1), tiny_writer(seed=1)
    cfg = DataConf(path=str(prompts), max_new_tokens=8, max_length=128, batch_size=2, validation=2, max_documents=8)
    here = prepare(cfg, verifier)
    monkeypatch.setattr(verifier, "decode", None)  # nothing is decoded here
    with Stub(served) as one, Stub(served) as two:
        there = prepare(replace(cfg, server=[one.url, two.url], concurrency=2), verifier)
        assert one.asked and two.asked
        assert dialogues_folder(replace(cfg, server=two.url), verifier) == there.folder.parent
    assert there.content_hash == here.content_hash and there.folder.parent != here.folder.parent
    named = replace(cfg, server="http://127.0.0.1:9", server_model="tiny")
    assert prepare(named, verifier).content_hash == here.content_hash
    assert dialogues_folder(replace(named, server_model="other"), verifier) != there.folder.parent
    with pytest.raises(UserError, match="leave out data.server"):
        prepare(replace(named, answers="given"), verifier)
    with pytest.raises(UserError, match="data.concurrency of 1 or more, found 0"):
        prepare(replace(named, concurrency=0, max_documents=7), verifier)
