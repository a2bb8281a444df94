"""`python -m eval.bench` on a tiny verifier in a local folder."""

import json
import sys

import pytest
import torch

from eval.bench import entry
from models.export.native import StoredHead, save_head
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A verifier, and a run with a head for it."""
    folder = tmp_path_factory.mktemp("bench")
    tiny_model(layers=7, hidden=32, seed=1).save_pretrained(folder / "verifier")
    tiny_tokenizer().save_pretrained(folder / "verifier")
    verifier = Verifier.load(str(folder / "verifier"), dtype="float32", device="cpu")
    vocab = DraftVocab(torch.arange(64), verifier.vocab_size)
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, len(vocab))
    save_head(folder / "run" / "head", StoredHead.of(Eagle3Head(config, verifier.embedding_VD, vocab), verifier))
    return folder


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs the command in this process; returns (exit code, standard output, standard error)."""

    def call(*words: str):
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        code = 0
        try:
            entry()
        except SystemExit as end:
            code = end.code
        out = capsys.readouterr()
        return code, out.out.strip(), out.err.strip()

    return call


SMALL = ("repeats=2", "max_new_tokens=8", "depth=2", "batches=[2,3]")


def test_decode_with_a_head_in_a_file(folder, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = command("decode", f"run={folder}/run", *SMALL)
    assert code == 0, err
    path = out.splitlines()[-1]
    assert path.startswith("outputs/bench/decode-")
    values = json.loads((tmp_path / path).read_text())
    rows = {row["name"]: row for row in values["rows"]}
    assert list(rows) == [
        "plain decoding", "transformers generate", "transformers prompt lookup", "transformers, 4 layers",
        "prompt lookup", "Lookahead", "first 4 layers",
        "head, N=1", "head, N=2", "head, tree [2,2,2]", "head, EAGLE-2 of 16", "batch of 2", "batch of 3",
    ]  # fmt: skip
    assert all(row["tokens_per_second"] > 0 and row["ratio"] > 0 for row in rows.values())
    assert rows["plain decoding"]["ratio"] == 1
    for name in list(rows)[:-2]:
        assert rows[name]["same_text"] == "2/2", name
    assert rows["head, N=2"].keys() >= {"tau", "draft_ms", "verify_ms", "other_ms"}
    assert all(0 < row["other_share"] < 1 for row in rows.values() if "tau" in row)


def test_train_against_products_of_the_same_flops(folder, command, tmp_path):
    code, out, err = command("kind=train", f"verifier.source={folder}/verifier", "steps=[2,1]", "repeats=2",
                             f"out={tmp_path}/x.json", "json=true")  # fmt: skip
    assert code == 0, err
    values = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == values["rows"] and "train" in err
    one, two = values["rows"]
    assert (one["name"], two["name"]) == ("K=1", "K=2")
    assert 1 < two["gflop"] / one["gflop"] < 2 and two["peak_mib"] > 0
    assert 0 < one["ratio"] == pytest.approx(one["products_ms"] / one["step_ms"], rel=1)


@pytest.mark.parametrize("words, hint", [([], "decode | train"), (["fly"], "fly"), (["train", "steps=[0]"], "steps")])
def test_mistakes_are_one_line(words, hint, command):
    code, _, err = command(*words)
    assert code == 2 and hint in err and len(err.splitlines()) == 1
