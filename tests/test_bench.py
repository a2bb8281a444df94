"""`python -m eval.bench` on a tiny verifier in a local folder."""

import json
import sys

import pytest
import torch

from bench_stand_in import InProcess
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


@pytest.fixture
def train(folder, command, tmp_path, monkeypatch):
    """Runs a kind of the training bench with its processes in this one; returns what it wrote and what it printed."""
    environment = tmp_path / "engines" / "speculators" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").write_text("only its being there is asked for")
    for module in ("bench_train", "training_bench.run", "training_bench.check", "training_bench.scaling"):
        monkeypatch.setattr(f"eval.{module}.Process", InProcess)

    monkeypatch.setattr("eval.training_bench.work.SQUARE", 64)

    def call(kind: str, *words: str):
        source = (f"verifier.source={folder}/verifier", "verifier.dtype=float32", f"out={tmp_path}/x.json")
        engines = f"environments={tmp_path}/engines"
        code, out, err = command(kind, *source, engines, "repeats=2", "threads=1", *words)
        assert code == 0, err
        return json.loads((tmp_path / "x.json").read_text()), out + err

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


def test_train_compares_ours_with_a_peer_and_with_the_naive_step(train, tmp_path):
    values, out = train("train", "tokens=[64]", "steps=[2]", "vocabularies=[128,512]")
    assert {row["name"]: row["gradient"] < 1e-4 for row in values["agreement"]} == {
        "ours against naive": True, "speculators against naive": True, "ours against speculators, K = 1": True,
    }  # fmt: skip
    names = ["ours, LM head frozen", "ours", "speculators", "naive"]
    assert [(row["draft_vocab"], row["name"]) for row in values["rows"]] == [(R, n) for R in (128, 512) for n in names]
    for row in values["rows"]:
        assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"])
        assert set(row["parts"]) >= {"verifier", "forward", "backward", "optimizer"}
        assert row["useful_gflop"] > 0 and row["share_of_square"] > 0 and len(row["turns"]) == 2
    frozen, ours, peer, naive = values["rows"][:4]
    assert frozen["useful_gflop"] == peer["useful_gflop"] < ours["useful_gflop"] == naive["useful_gflop"]
    assert "faster" not in ours and "argmax" in ours["parts"] and "argmax" not in naive["parts"]
    ratios = [theirs / own for theirs, own in zip(peer["turns"], frozen["turns"], strict=True)]
    assert peer["faster"] == pytest.approx(sum(ratios) / 2) and naive["faster"] == naive["faster_as_trained"] > 0
    assert peer["faster_as_trained"] == pytest.approx(
        sum(theirs / own for theirs, own in zip(peer["turns"], ours["turns"], strict=True)) / 2
    )
    table = (tmp_path / "x.md").read_text()
    assert table.strip() in out and "| 64 | 0.4 | 2 | 512 | speculators |" in table and "needs Triton" in table


def test_sweep_varies_one_axis_at_a_time_and_draws_it(train, tmp_path):
    values, _ = train("sweep", "peer=null", "tokens=[48,64]", "steps=[1,2]", "vocabularies=[64]", "fractions=[0.5]")
    points = [(row["tokens"], row["steps"]) for row in values["rows"] if row["name"] == "ours"]
    assert points == [(48, 1), (64, 1), (48, 2)] and {row["name"] for row in values["rows"]} == {"ours", "naive"}
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["x-steps.png", "x-tokens.png"]


def test_scaling_and_profile(train, tmp_path):
    values, out = train("scaling", "tokens=[32,64]", "steps=[1,2]", "vocabularies=[64,128]", "fractions=[0.5]")
    assert [(row["tokens"], row["documents"]) for row in values["by_tokens"]] == [(32, 1), (64, 2)]
    assert [point[0] for point in values["by_steps"]] == [1, 2] and len(values["memory"]) == 4 and values["linear"] > 0
    (_, ours, naive), (_, ours_2, naive_2) = values["by_steps"]
    share = (ours_2 - ours) / (naive_2 - naive)
    assert values["growth_with_steps"]["share"] == pytest.approx(share) and "A further draft step" in out
    values, out = train("profile", "tokens=[64]", "steps=[2]", "vocabularies=[64]")
    assert values["kinds"]["matrix products"] > 0 and "| matrix products |" in (tmp_path / "x.md").read_text()


def test_a_peer_that_is_not_installed_is_left_out(train, tmp_path):
    values, printed = train("train", f"environments={tmp_path}/none", "naive=false", "tokens=[64]", "steps=[1]",
                      "vocabularies=[64]")  # fmt: skip
    assert [row["name"] for row in values["rows"]] == ["ours"] and values["peer"] is None
    assert "none/speculators/.done" in printed


@pytest.mark.parametrize(
    "words, hint",
    [([], "decode | train"), (["fly"], "fly"), (["train", "steps=[0]"], "steps"), (["train", "peer=nobody"], "nobody"),
     (["train", "tokens=[20]", "steps=[7]"], "give more tokens"), (["train", "vocabularies=[9999]"], "512 or less"),
     (["profile", "fractions=[2]"], "fraction"), (["train", "verifier.dtype=float16"], "float16")],
)  # fmt: skip
def test_mistakes_are_one_line(words, hint, command, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("eval.training_bench.check.Process", InProcess)
    source = [f"verifier.source={folder}/verifier", f"out={tmp_path}/x.json"] if words[:1] != ["fly"] else []
    code, _, err = command(*words, *source, *(["naive=false", "peer=null"] if "peer=nobody" not in words else []))
    assert code == 2 and hint in err.splitlines()[-1] and err.count("error:") == 1
