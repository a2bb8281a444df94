"""`python -m train`: stopped anywhere, damaged, or under other conditions, and continued."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tiny import tiny_model, tiny_tokenizer
from toy_job import PLAIN, debug_words, run, steady
from train.checkpoints import newest
from train.fit import fit
from train.main import train
from train.reproduce import reproduce

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return debug_words(tmp_path_factory.mktemp("train"))


class Killed(BaseException):
    """What nothing in the command expects."""


@pytest.fixture(scope="module")
def calm(words, tmp_path_factory):
    """The folder of a run that nothing disturbed; to be read, or copied."""
    folder = tmp_path_factory.mktemp("calm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train", *words, *PLAIN, f"output_dir={folder}"])
        train()
    return next(folder.glob("debug/*"))


@pytest.fixture
def finished(calm, tmp_path):
    """A copy of the calm run."""
    return Path(shutil.copytree(calm, tmp_path / "debug" / calm.name))


PLACES = {"train.main.prepare": 0, "train.main.build_module": 0, "train.main.save_head": 4, "train.finish.measure": 4}


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_died_anywhere_is_continued(words, calm, monkeypatch, capsys, tmp_path, place):
    """In data, before the first checkpoint, with the head trained, in the evaluation: the same run in the end."""

    def die(*_, **__):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(place, die)
        run(patch, capsys, [*words, *PLAIN, f"output_dir={tmp_path}"])
    capsys.readouterr()
    if PLACES[place]:  # the finished head is not trained again
        monkeypatch.setattr("train.module.head_loss", None)
    code, values, err = run(monkeypatch, capsys, [f"resume={tmp_path / 'debug'}", "json=true"])
    assert code == 0, err
    assert ("trained already: 4 steps" in err) == (PLACES[place] == 4)
    assert ("it begins anew" in err) == (PLACES[place] == 0)
    assert steady(values["run"]) == steady(calm) and values["run"] == str(next(tmp_path.glob("debug/*")))
    sessions = json.loads((Path(values["run"]) / "provenance.json").read_text())["training"]["sessions"]
    assert [one["from_step"] for one in sessions] == sorted({0, PLACES[place]})


def test_a_finished_run_is_measured_again(words, calm, finished, monkeypatch, capsys):
    (finished / "alpha.json").unlink()
    code, again, err = run(monkeypatch, capsys, [f"resume={finished}", "json=true"])
    assert code == 0 and "trained already: 4 steps" in err and steady(finished) == steady(calm), err
    assert again["trained"]["best"]["step"] in (2, 4) and again["trained"]["best"]["metrics"]["val/tau"] >= 1
    code, _, err = run(monkeypatch, capsys, [*words, f"hydra.run.dir={finished}"])
    assert code == 2 and f"continue it with resume={finished}" in err.splitlines()[-1]


def test_another_verifier_under_a_resumed_run(calm, finished, monkeypatch, capsys, tmp_path):
    """One line, before anything is computed, and the run is as it was. (Other data: tests/test_batches.py.)"""
    tiny_model("llama", layers=8, hidden=32, vocab=300, seed=1).save_pretrained(tmp_path / "verifier")
    tiny_tokenizer(300).save_pretrained(tmp_path / "verifier")
    settings = finished / "config.yaml"
    settings.write_text(re.sub("source: .*verifier", f"source: {tmp_path / 'verifier'}", settings.read_text()))
    monkeypatch.setattr("train.main.prepare", None)
    code, _, err = run(monkeypatch, capsys, [f"resume={finished}", "trainer.max_steps=6", "json=true"])
    assert code == 2 and "resume with the verifier it was trained for" in err.splitlines()[-1]
    assert steady(finished) == steady(calm)


def test_a_damaged_checkpoint_and_a_damaged_run(calm, finished, monkeypatch, capsys):
    last = finished / "checkpoints" / "step-00000004.ckpt"
    last.write_bytes(last.read_bytes()[:-100])
    code, again, err = run(monkeypatch, capsys, [f"resume={finished}", "json=true"])
    assert code == 0 and "going on from step-00000002.ckpt before it" in err and steady(finished) == steady(calm), err
    for path in last.parent.glob("*.ckpt"):
        path.write_bytes(b"")
    code, _, err = run(monkeypatch, capsys, [f"resume={finished}"])
    assert code == 2 and "put a copy of one back" in err.splitlines()[-1]
    (finished / "config.yaml").write_text("a: [")
    code, _, err = run(monkeypatch, capsys, [f"resume={finished}"])
    assert code == 2 and "config.yaml is damaged" in err.splitlines()[-1]


def test_a_run_resumed_by_other_means_says_so(finished, monkeypatch, capsys):
    code, _, err = run(monkeypatch, capsys, [f"resume={finished}", "threads=2", "json=true"])
    torch.set_num_threads(1)
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if line.startswith("resumed by other means")]
    assert "(threads was 1, is now 2): its last bits may differ from an unbroken run's" in line


def test_numbers_that_are_none(words, monkeypatch, capsys, tmp_path):
    """A learning rate beyond all measure: stopped, seen again, and skipped to no avail."""
    code, _, err = run(monkeypatch, capsys, [*words, "optim.lr=1e30", f"output_dir={tmp_path}", "trainer.max_steps=50"])
    line = err.splitlines()[-1]
    assert code == 2 and "not finite; documents " in line, err
    file = line.partition("file=")[2].partition(";")[0]
    monkeypatch.setattr(sys, "argv", ["reproduce", f"file={file}", "json=true"])
    reproduce()
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["reproduced"] is True and "now: loss" in err
    resumed = [f"resume={Path(file).parents[1]}", "trainer.nonfinite=skip", "json=true"]
    code, _, err = run(monkeypatch, capsys, resumed)
    assert code == 2 and err.count("the step is skipped") == 1 and "not finite" in err.splitlines()[-1]


@pytest.mark.parametrize("only", [True, False])
def test_two_runs_give_the_same_bits(words, calm, monkeypatch, capsys, tmp_path, only):
    """The switch is set for the whole job and written down; without it a CPU gives the same bits too."""
    seen = []

    def fitting(*given):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return fit(*given)

    monkeypatch.setattr("train.main.fit", fitting)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    extra = [f"trainer.deterministic={str(only).lower()}", f"output_dir={tmp_path}"]
    code, values, err = run(monkeypatch, capsys, [*words, *PLAIN, *extra])
    torch.use_deterministic_algorithms(False)
    assert code == 0 and seen == [only] and steady(values["run"]) == steady(calm), err
    assert json.loads((Path(values["run"]) / "provenance.json").read_text())["machine"]["deterministic"] is only
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if only else None)


def test_ctrl_c_and_resume(words, monkeypatch, capsys, tmp_path):
    command = [sys.executable, "-m", "train", *words, f"output_dir={tmp_path}", "trainer.max_steps=100000"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("debug/*/checkpoints/*.json")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    folder = next(tmp_path.glob("debug/*"))
    assert err.splitlines()[-1] == f"interrupted; continue with: python -m train resume={folder}"
    step = newest(folder / "checkpoints").step

    more = [f"resume={folder}", f"trainer.max_steps={step + 3}", "json=true"]
    code, values, err = run(monkeypatch, capsys, more)
    assert code == 0, err
    assert values["run"] == str(folder) and values["trained"]["steps"] == step + 3
    with (folder / "metrics.csv").open() as stream:
        steps = [int(row["step"]) for row in csv.DictReader(stream) if row["train/loss"]]
    assert steps == list(range(1, step + 4))

    code, _, err = run(monkeypatch, capsys, [f"resume={folder}", "optim.lr=1"])
    assert code == 2 and "optim.lr cannot change" in err.splitlines()[-1]
