"""The shell around commands: one line for a mistake, JSON as the last line, codes of exit, sweeps."""

import json
import os
import subprocess
import sys

import numpy
import pytest
import torch

from conf.cli import Outcome, main
from conf.errors import UserError
from conf.explain import groups, options, settings
from conf.paths import cache_dir
from conf.schema import COMMANDS


def call(monkeypatch, capsys, command, words, run=None, **options):
    """(exit code, lines of standard output, lines of standard error)."""
    monkeypatch.setattr(sys, "argv", ["command", *words])
    seen = []

    def record(cfg):
        seen.append(cfg)
        return run(cfg) if run else Outcome("some/file", {"seed": cfg.seed})

    code = 0
    try:
        main(command, **options)(record)()
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines(), seen


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("theory", ["alpah=0.5"], "did you mean alpha?"),
        ("theory", ["+alpah=0.5"], "no setting 'alpah'"),
        ("theory", ["alpha=half"], "alpha: Value 'half'"),
        ("theory", ["seed=${oc.env:HOME}"], "seed"),
        ("theory", [f"alpha=1{'0' * 400}"], "too large"),
        ("theory", ["alpha"], "cannot read the overrides"),
        ("data", ["data.path=für.jsonl"], "wants quotes of its own"),
        ("theory", ["threads=0"], "threads must lie in 1..1024, found 0"),
        ("theory", ["threads=100000"], "threads must lie in 1..1024, found 100000"),
        ("theory", ["-m"], "takes no flags"),
        ("eval", ["decode=bush"], "no decode 'bush'; there are: chain, tree"),
        ("train", ["experiment=eagle3_lama"], "did you mean eagle3_llama or"),
        ("train", ["optim.rate=1"], "no setting 'optim.rate'"),
        ("train", ["lr=1"], "did you mean optim.lr"),
        ("train", ["data=jsonl"], "data.path has no value"),
        ("train", ["-m", "optim=adamw,sgd"], "no optim 'sgd'"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(monkeypatch, capsys, tmp_path, command, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, err, seen = call(monkeypatch, capsys, command, words, multirun=command == "train")
    assert code == 2 and out == [] and len(err) == 1 and seen == []
    assert err[0].startswith("error: ") and message in err[0]
    assert list(tmp_path.iterdir()) == []  # and no folder is left


def test_last_line_names_the_file_or_is_json(monkeypatch, capsys):
    def odd(cfg):
        print("a table")
        values = {"nan": float("nan"), "array": numpy.arange(2), "tensor": torch.tensor(1.5), "none": None}
        return Outcome("a/file", values | {"nested": [{"x": numpy.float32(2)}]})

    code, out, _, _ = call(monkeypatch, capsys, "theory", [], odd)
    assert (code, out) == (0, ["a table", "a/file"])
    code, out, _, _ = call(monkeypatch, capsys, "theory", ["json=true"], odd)
    assert code == 0
    expected = {"nan": None, "array": [0, 1], "tensor": 1.5, "none": None, "nested": [{"x": 2.0}], "path": "a/file"}
    assert json.loads(out[-1]) == expected


def test_user_errors_bugs_and_interruptions(monkeypatch, capsys):
    def raising(error):
        def run(cfg):
            raise error

        return run

    code, _, err, _ = call(monkeypatch, capsys, "theory", [], raising(UserError("expected a, found b")))
    assert (code, err) == (2, ["error: expected a, found b"])
    code, _, err, _ = call(monkeypatch, capsys, "theory", [], raising(KeyboardInterrupt("continue with: x")))
    assert (code, err) == (130, ["interrupted; continue with: x"])
    code, _, err, _ = call(monkeypatch, capsys, "theory", [], raising(KeyboardInterrupt()))
    assert code == 130 and len(err) == 1
    with pytest.raises(ZeroDivisionError):
        call(monkeypatch, capsys, "theory", [], raising(ZeroDivisionError()))
    with pytest.raises(ValueError, match="a bug"):  # only our own kind of ValueError is a user's mistake
        call(monkeypatch, capsys, "theory", [], raising(ValueError("a bug")))


def test_under_hydra(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, _, seen = call(monkeypatch, capsys, "train", ["-m", "seed=1,2", "json=true"], multirun=True)
    assert code == 0 and [json.loads(line)["seed"] for line in out] == [1, 2]
    assert [cfg.seed for cfg in seen] == [1, 2] and type(seen[0].optim.betas) is list
    folders = {path.parent.name for path in tmp_path.glob("outputs/train/*/0")}
    assert len(folders) == 1

    def fails(cfg):
        raise UserError("expected a, found b")

    code, _, err, _ = call(monkeypatch, capsys, "train", ["seed=1"], fails, multirun=True)
    assert (code, err) == (2, ["error: expected a, found b"])
    with pytest.raises(ZeroDivisionError):
        call(monkeypatch, capsys, "train", [], lambda cfg: 1 / 0, multirun=True)


def test_hydras_own_flags_pass_through(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["budget=demo", "--cfg", "job"]
    code, out, _, seen = call(monkeypatch, capsys, "train", words, multirun=True, resolve=lambda words: 1 / 0)
    assert code == 0 and seen == [] and "budget_name: demo" in out


def test_data_has_limits_without_a_budget(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, _, seen = call(monkeypatch, capsys, "data", ["task=synthesize"])
    assert code == 0 and seen[0].budget_name == "hour" and seen[0].data.minutes
    _, _, _, seen = call(monkeypatch, capsys, "data", ["task=synthesize", "data.max_documents=9"])
    assert seen[0].budget_name is None and seen[0].data.minutes is None
    code, _, err, seen = call(monkeypatch, capsys, "data", ["task=inspect", "budegt=demo"])
    assert code == 2 and len(err) == 1 and "did you mean" in err[0]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_has_every_group_and_setting(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _, seen = call(monkeypatch, capsys, command, ["--help"], multirun=command == "train")
    assert code == 0 and seen == [] and "python -m" in " ".join(out[:2])
    assert all(len(line) <= 100 for line in out if line.startswith(" " * 34))
    sections = {name.rpartition(".")[0] for name in settings(command)}
    for name in set(settings(command)) - sections:
        assert any(line.startswith(f"  {name}=") for line in out), name
    for group in groups(command):
        assert all(any(line.startswith(f"  {group}={name}") for line in out) for name in options(group)), group


def test_help_says_what_a_setting_means_and_what_holds_without_it(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _, _ = call(monkeypatch, capsys, "train", ["--help"], multirun=True)
    at = out.index("  data.max_length=1024            longer dialogues end at their last whole turn,")
    assert out[at + 1] == " " * 34 + "with a count; see data/documents.py" and out[at + 2].startswith("  data.")
    assert "  seed=0                          of everything drawn by lot" in out  # of a class that it inherits from
    assert '  verifier.source=smollm2         "smollm2" (shipped in a wheel), a local' in out  # of the command's file
    assert "  optim.betas=[0.9,0.95]" in out
    assert "  data.seed=${seed}               of what is sampled, and of what is held out" in out
    assert "  head=eagle3 *                   EAGLE-3: three captured layers, training-time" in out
    assert "  budget=null *                   hour on a CPU, full on a GPU" in out
    assert "  verifier.device_map=null        Layers over several devices, host memory or" in out  # a comment above it


def test_a_terminal_without_every_character(tmp_path):
    words = ["alpha=.5", f"out='{tmp_path / 'α'}'"]
    command, env = [sys.executable, "-m", "eval.theory", *words], os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0 and done.stdout.rstrip().endswith(r"\u03b1/theory.png"), done.stderr


def test_a_folder_that_cannot_be_made(monkeypatch):
    monkeypatch.setenv("EYRIE_CACHE", "/proc/none")
    with pytest.raises(UserError, match="cannot make the folder /proc/none.*: choose another place"):
        cache_dir("states")


@pytest.mark.parametrize("words", [["alpha=.5"], ["alpha=.5", "json=true"], ["--help"]])
def test_whoever_reads_may_leave(words):
    """As `| head -1` does. Nothing is said of it, and the work is done."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "eval.theory", *words]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert done.returncode == 0 and "rror" not in done.stderr
