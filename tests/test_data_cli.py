"""python -m data: every task, in this process on a tiny verifier's folder; mistakes are one line."""

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import data.command
from conf.cli import main
from conf.schema import DataConf
from data.prepare import dialogues_folder, prepare
from models.verifier import Verifier
from tiny_writer import tiny_writer

SIZES = [
    "data.max_documents=8",
    "data.max_new_tokens=12",
    "data.max_length=128",
    "data.batch_size=4",
    "data.validation=1",
]


@pytest.fixture(scope="module")
def verifier():
    return tiny_writer()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def command(verifier, cache, monkeypatch, capsys):
    """Run `python -m data` with these words; returns (exit code, lines of stdout, stderr)."""
    monkeypatch.setenv("EYRIE_CACHE", str(cache))
    monkeypatch.setattr("conf.cli.quiet_logs", lambda: None)  # it would keep a stream that ends with the test
    monkeypatch.setattr(Verifier, "load", lambda source, **options: verifier)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["data", *words])
        code = 0
        try:
            main("data")(data.command.run)()
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return call


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": f"What is {i} and {i}?"} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return path


def test_synthesize_then_inspect_then_the_rest(command):
    code, lines, _ = command("task=synthesize", *SIZES)
    assert code == 0 and lines[-1].endswith("dialogues.jsonl")
    with open(lines[-1]) as stream:
        first = stream.read()
    assert command("task=synthesize", *SIZES)[1][-1] == lines[-1]
    with open(lines[-1]) as stream:
        assert stream.read() == first, "complete: nothing is written again"
    for words in (SIZES, []):  # the settings' own dialogues, and without settings the newest
        code, shown, _ = command("task=inspect", *words, "limit=2")
        assert code == 0 and shown[-1] == lines[-1]
        assert any("legend" in line for line in shown)
    code, out, _ = command("task=capture", *SIZES, "json=true")
    values = json.loads(out[-1])
    assert code == 0 and values["verified"] and values["bytes"] > 0 and values["path"].endswith("index.json")
    code, out, _ = command("task=vocab", *SIZES, "json=true", "head.draft_vocab_size=400")
    values = json.loads(out[-1])
    assert values["draft_vocab_size"] == 400 and 0.5 < values["coverage of train labels"] <= 1
    with open(values["path"]) as stream:
        assert len(json.load(stream)["ids"]) == 400


def test_regenerate_tokenize_and_read_back(command, prompts, tmp_path, verifier):
    out = tmp_path / "answers" / "mine.jsonl"
    code, lines, _ = command("task=regenerate", *SIZES, f"data.path={prompts}", f"out={out}")
    assert code == 0 and lines[-1] == str(out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"p{i}" for i in range(8)]
    given = [*SIZES, f"data.path={out}", "data.answers=given", "json=true"]
    code, lines, _ = command("task=tokenize", *given)
    values = json.loads(lines[-1])
    assert code == 0 and values["train"]["documents"] + values["validation"]["documents"] >= 2
    with open(values["path"]) as stream:
        documents = [json.loads(line) for line in stream]
    originals = {row["id"]: row for row in rows}
    for document in documents:
        assert document["input_ids"] == originals[document["id"]]["input_ids"]
    # Documents are a source too.
    code, again, _ = command("task=tokenize", *SIZES, f"data.path={values['path']}", "data.answers=given", "json=true")
    assert json.loads(again[-1])["content_hash"] == values["content_hash"]
    code, lines, _ = command("task=inspect", f"data.path={out}", "json=true")
    assert json.loads(lines[-1])["documents shown"] == 3


def test_supervised_prompts_survive_the_file(command):
    whole = [*SIZES, "data.supervised=dialogue", "json=true"]
    code, lines, _ = command("task=tokenize", *whole)
    values = json.loads(lines[-1])
    assert code == 0 and values["train"]["labels"] > values["train"]["answer tokens"]
    code, again, _ = command("task=tokenize", *whole, f"data.path={values['path']}", "data.answers=given")
    assert code == 0 and json.loads(again[-1])["content_hash"] == values["content_hash"]


def test_inspect_shows_every_shape(command, tmp_path):
    path = tmp_path / "given.jsonl"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Paris is\nthere."}]
    path.write_text(json.dumps({"conversations": chat}) + "\n")
    code, lines, _ = command("task=inspect", f"data.path={path}")
    assert code == 0 and any("1 answer(s)" in line for line in lines) and lines[-1] == str(path)


def test_inspect_reads_mixes_datasets_and_prompts(command, tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Paris is\nthere."}]
    (tmp_path / "hub" / "data").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([{"messages": chat}]), tmp_path / "hub" / "data" / "test-0.parquet")
    (tmp_path / "prompts.txt").write_bytes(b"What is it?\n\n\xff\nWho are you?\n")
    mix = f"[{{path: {tmp_path}/hub, split: test, weight: 1}}, {{path: {tmp_path}/prompts.txt, weight: 2}}]"
    code, lines, _ = command("task=inspect", "json=true", f"data.path={mix}")
    values = json.loads(lines[-1])
    assert code == 0 and values["documents shown"] == 3, "prompts without an answer are shown as they would be asked"
    assert values["answer tokens"] > 0 and values["dropped on the way"] == "1 not UTF-8"
    code, _, error = command("task=inspect", f"data.path={{path: {tmp_path}/hub, split: dev}}")
    assert code == 2 and f"expected one of the splits test of {tmp_path}/hub, found split=dev" in error


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "expected task=synthesize|"),
        (("task=fly",), "expected task=synthesize|"),
        (("task=tokenize", "out="), "expected out= to name what is written, found nothing"),
        (("task=regenerate",), "give data.path=FILE"),
        (("task=synthesize", "data.path=x.jsonl"), "use task=regenerate"),
        (("task=tokenize", "data.path=nowhere.jsonl"), "found none; check the path"),
        (("task=tokenize", "data.answers=made_up"), "expected data.answers"),
    ],
)
def test_mistakes_are_one_line(command, words, message):
    code, lines, error = command(*words)
    assert code == 2 and not lines
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_inspect_without_any_dialogues(command, monkeypatch, tmp_path):
    monkeypatch.setenv("EYRIE_CACHE", str(tmp_path))
    code, lines, error = command("task=inspect")
    assert code == 2 and not lines and "found none: run task=synthesize first" in error


def test_prepare_is_the_same_twice_and_its_key_follows_the_settings(verifier, prompts, monkeypatch, tmp_path):
    monkeypatch.setenv("EYRIE_CACHE", str(tmp_path / "cache"))
    settings = {"path": str(prompts), "max_new_tokens": 8, "max_length": 128, "batch_size": 4, "validation": 2}
    first, second = prepare(DataConf(**settings), verifier), prepare(DataConf(**settings), verifier)
    assert list(first.train) == list(second.train) and first.content_hash == second.content_hash
    assert first.counts["dropped"]["malformed JSON"] == 1 and first.counts == second.counts
    assert not {d.content_hash for d in first.train} & {d.content_hash for d in first.validation}
    changed = [{"seed": 1}, {"max_new_tokens": 9}, {"temperature": 0.5}, {"answers": "given"}, {"max_documents": 3}]
    folders = {dialogues_folder(DataConf(**(settings | change)), verifier) for change in changed}
    prompts.write_text(prompts.read_text() + json.dumps({"prompt": "one more"}) + "\n")
    folders.add(dialogues_folder(DataConf(**settings), verifier))
    assert len(folders | {first.folder.parent}) == len(changed) + 2
    with torch.no_grad():
        other = tiny_writer(seed=9)
    assert dialogues_folder(DataConf(**settings), other) not in folders


def test_states_are_those_that_the_head_reads(command, monkeypatch, verifier):
    """Else training would capture them a second time."""
    seen = []
    monkeypatch.setattr(Verifier, "load", lambda source, **options: seen.append(options["aux_layers"]) or verifier)
    for head in ("eagle3", "eagle1", "medusa", "independent"):
        assert command("task=vocab", f"head={head}", *SIZES)[0] == 0
    assert seen == [None, [-1], [-1], []]
