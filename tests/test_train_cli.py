"""`python -m train` from one end to the other, on a verifier of a few thousand parameters in a local folder."""

import csv
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conf.cli import load
from conf.errors import UserError
from data.prepare import prepare
from models.export import safeai
from models.export.native import read_head
from models.verifier import Verifier
from toy_job import debug_words, run
from train.checkpoints import newest
from train.main import train
from train.plan import plan_rows

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return debug_words(tmp_path_factory.mktemp("train"))


def test_a_whole_run(words, monkeypatch, capsys):
    code, values, err = run(monkeypatch, capsys, words)
    assert code == 0, err
    folder = Path(values["run"])
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "checkpoints", "head", "export", "metrics.csv", "alpha.json", "report.html"} <= names
    assert {"provenance.json", "training.png", "alpha_by_depth.png"} <= names
    assert values["path"] == str(folder / "report.html")
    assert values["identical_to_baseline"] and 1 <= values["tau"] <= 4
    assert json.loads((folder / "alpha.json").read_text())["tau"] == values["tau"]
    assert values["trained"]["steps"] == 4
    assert {"synthesise", "capture", "train", "evaluate"} <= values["seconds"].keys()
    # The exported tensors are the head's, and the head's are the checkpoint's.
    stored, exported = read_head(folder), safeai.read(folder / "export")
    checkpoint = newest(folder / "checkpoints").values["state_dict"]
    for name, tensor in stored.tensors.items():
        assert torch.equal(tensor, exported.tensors[name]) and torch.equal(tensor, checkpoint[f"head.{name}"])
    record = json.loads((folder / "provenance.json").read_text())
    assert record["verifier"]["weights_hash"] == stored.verifier.weights_hash
    assert record["data"]["hash"] == stored.training["data_hash"] and record["seed"] == 0
    assert record["versions"]["torch"] and record["draft_vocabulary"]["hash"] == stored.vocab.hash
    with (folder / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["step"] for row in rows if row["train/loss"]] == ["1", "2", "3", "4"]
    assert [row["step"] for row in rows if row["val/tau"]] == ["2", "4"]
    for line in ("draft vocabulary: 300 of 300", "training: 10 documents", "trained 4 steps"):
        assert line in err


def test_what_the_demo_does_otherwise(words, monkeypatch, capsys):
    """A frozen LM head, and prompts that are supervised (that states come from the writing: test_synthesize)."""
    settings = ["head.train_lm_head=false", "data.supervised=dialogue", "data.minutes=0.2", "trainer.max_steps=2"]
    code, values, err = run(monkeypatch, capsys, [*words, *settings, "data.openings=[The]"])
    assert code == 0, err
    head = read_head(Path(values["run"]))
    verifier = Verifier.load(next(word for word in words if word.startswith("verifier.source=")).partition("=")[2])
    assert torch.equal(head.tensors["lm_head.weight"], verifier.lm_head_rows(head.vocab.ids_R))


def test_plan_only(words, monkeypatch, capsys, tmp_path):
    code, values, _ = run(monkeypatch, capsys, [*words, "plan=true", f"output_dir={tmp_path}"])
    assert code == 0 and "4 steps = 512 tokens" in values["plan"]["training"]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("verifier.source=/nowhere/model", "give a local folder"),
        ("verifier.source=no/such-model", "which needs no hub"),
        ("evaluation.prompts=[eyrie,/nowhere.jsonl]", "no prompts '/nowhere.jsonl'"),
        ("evaluation.limit=0", "limit must be 1 or more"),
        ("decode.depth=0", "decode.depth must be 1 or more"),
        ("decode.dtype=float8", "decode.dtype must be"),
        ("data.store_dtype=int4", "data.store_dtype must be"),
        ("trainer.tflops=-1", "expected above 0, found -1"),
        ("trainer.max_steps=null", "the run has no end"),
        ("data.path=/nowhere/*.jsonl", "/nowhere"),
        ("trainer.accelerator=gpu", "found none"),
        ("head.ttt_steps=0", "head.ttt_steps must be 1 or more"),
        ("optim.name=sgd", "adamw or muon"),
        ("head.start=zero", "verifier, random, or a folder"),
        ("data.supervised=everything", "answers or dialogue"),
        ("optim.lr=-1", "optim.lr must be 0 or more, found -1"),
        ("optim.clip=nan", "optim.clip must be 0 or more, found nan"),
        ("optim.betas=[0.9]", "optim.betas must be two numbers from 0 to below 1, found [0.9]"),
        ("optim.warmup_ratio=2", "optim.warmup_ratio must lie in 0..1, found 2"),
        ("trainer.max_steps=-3", "trainer.max_steps must be 0 or more, found -3"),
        ("trainer.devices=x", "trainer.devices must be 1 or more"),
        ("trainer.devices=0", "trainer.devices must be 1 or more"),
        ("seed=-1", "seed must lie in 0..4294967295, found -1"),
        ("verifier.device=foo", 'expected verifier.device to be "auto"'),
        ("verifier.device=cuda:99", "a GPU that is not here"),
        ("evaluation.prompts=5", "expected evaluation.prompts to name suites or files, found 5"),
        ("data.exclude=[[eyrie]]", "expected data.exclude to name suites or files, found [['eyrie']]"),
        ("data.validation=-1", "data.validation must be 0 or more, found -1"),
        ("data.batch_size=0", "data.batch_size must be 1 or more, found 0"),
        ("resume=", "expected resume= to name a run folder, found nothing"),
        ("trainer.strategy=foo", "trainer.strategy must be auto or ddp or "),
        ("trainer.precision=foo", "trainer.precision must be auto or "),
        ("trainer.accelerator=foo", "trainer.accelerator must be auto or cpu or gpu or cuda, found foo"),
        ("head.start_layer=99", "head.start_layer must lie in -8..7, found 99"),
        ("head.draft_vocab_size=0", "head.draft_vocab_size must lie in 1..300, the verifier's tokens, found 0"),
        ("head.draft_vocab_size=1000000", "found 1000000: leave it out"),
        ("head={start_lm_head:random,train_lm_head:false}", "a random LM head must be trained"),
    ],
)
def test_mistakes_end_at_once_in_one_line(words, monkeypatch, capsys, tmp_path, extra, message):
    """Before the verifier is loaded, and without a run folder left behind."""
    monkeypatch.setattr("models.verifier.Verifier.load", None)
    if "gpu" in extra and torch.cuda.is_available():
        pytest.skip("has one")
    code, _, err = run(monkeypatch, capsys, [*words, f"output_dir={tmp_path}", extra])
    lines = err.splitlines()
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]
    assert not list(tmp_path.glob("*/*"))


def test_documents_longer_than_a_step(words, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, [*words, "trainer.tokens_per_step=8"])
    last = err.splitlines()[-1]
    assert code == 2 and last.startswith("error: ") and "trainer.tokens_per_step" in last and "Traceback" not in err


def test_plan_knows_the_disk_and_the_clock(words, monkeypatch):
    cpu = torch.device("cpu")
    cfg = load("train", [*words, "data.max_documents=1000000", "data.minutes=7", "minutes=11", "evaluation.minutes=2"])
    monkeypatch.setattr("train.plan.shutil.disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(UserError, match=r"expected .* [GT]B free .* found 1 GB: set data.store=false"):
        plan_rows(cfg, cpu)
    cfg.data.store = False
    rows = dict(plan_rows(cfg, cpu))
    assert "no states kept" in rows["disk"] and rows["data time"].startswith(("7 min", "about"))
    assert rows["whole job"] == "11 min after the start, 2 of them kept for the evaluation"
    cfg.data.answers, cfg.data.max_documents = "given", None  # the clock is the writing's, and nothing is written
    rows = dict(plan_rows(cfg, cpu))
    assert "7" not in rows["data time"] and "min" not in rows["data"].replace(cfg.data.path, "")


def test_data_first_then_ranks_and_an_interrupted_evaluation(words, monkeypatch, capsys, tmp_path):
    """No process group while data is made; a verifier in another dtype goes first; Ctrl-C then says what to do."""
    seen = {}

    def preparing(cfg, verifier, **options):
        seen["group"], seen["old"] = torch.distributed.is_initialized(), weakref.ref(verifier)
        return prepare(cfg, verifier, **options)

    def measuring(cfg, folder, verifier):
        seen["dtype"], seen["gone"] = verifier.dtype, seen["old"]() is None
        raise KeyboardInterrupt

    monkeypatch.setattr("train.main.prepare", preparing)
    monkeypatch.setattr("train.finish.measure", measuring)
    extra = [f"output_dir={tmp_path}", "trainer.strategy=ddp", "decode.dtype=float64", "minutes=60"]
    environment = dict(os.environ)
    try:
        code, _, err = run(monkeypatch, capsys, [*words, *extra])
        assert code == 130 and seen["group"] is False and torch.distributed.is_initialized()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()  # Lightning leaves LOCAL_RANK and the like, which children would believe
        os.environ.update(environment)
    assert seen["dtype"] == torch.float64 and seen["gone"]
    folder = next(tmp_path.glob("debug/*"))
    assert err.splitlines()[-1] == f"interrupted; continue with: python -m train resume={folder}"
    assert json.loads((folder / "provenance.json").read_text())["training"]["steps"] == 4
    assert "min at most: of 60 in all, 0.0 are spent, 0 kept for the evaluation" in err


def test_online_states_give_the_same_losses(words, monkeypatch, capsys):
    losses = []
    for store in ("true", "false"):
        code, values, err = run(monkeypatch, capsys, [*words, f"data.store={store}", "trainer.validate_every=0"])
        assert code == 0, err
        with (Path(values["run"]) / "metrics.csv").open() as stream:
            losses.append([float(row["train/loss"]) for row in csv.DictReader(stream)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_two_processes_through_hydra(words, tmp_path):
    """Lightning starts the second rank with Hydra's command line; only one rank speaks."""
    extra = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.tokens_per_step=64"]
    command = [sys.executable, "-m", "train", *words, *extra, f"output_dir={tmp_path}", "trainer.validate_every=0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    values = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(values) == 1 and values[0]["trained"]["steps"] == 4
    assert len(list(tmp_path.glob("debug/*"))) == 1


def test_a_sweep(words, monkeypatch, capsys, tmp_path):
    sweep = [f"output_dir={tmp_path}", "optim.lr=1e-3,1e-4", "trainer.max_steps=1", "evaluation.report=false"]
    monkeypatch.setattr(sys, "argv", ["train", "-m", *words, *sweep])
    train()
    values = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [Path(value["run"]).name for value in values] == ["0", "1"]
