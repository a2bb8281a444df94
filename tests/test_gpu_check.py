"""`make gpu-check` as far as a machine without CUDA goes: it says so, and what it compares is compared on a CPU."""

import json
import sys

import pytest
import torch

from eval import gpu_check
from eval.training_bench.setting import Setting
from tiny import tiny_model, tiny_tokenizer

WORDS = ["device=cpu", "tokens=96", "steps=2", "draft_vocab=128", "repeats=1", "environments=/nowhere"]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    tiny_model(layers=7, hidden=32, vocab=512).save_pretrained(tmp_path / "verifier")
    tiny_tokenizer(512).save_pretrained(tmp_path / "verifier")
    monkeypatch.setattr(gpu_check, "CHECKED", Setting(48, 0.5, 2, 128, documents=2))

    def call(*words):
        source = f"verifier.source={tmp_path / 'verifier'}"
        monkeypatch.setattr(sys, "argv", ["gpu_check", source, f"out={tmp_path / 'x.json'}", "json=true", *words])
        code = 0
        try:
            gpu_check.check()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr(), tmp_path / "x.json"

    return call


@pytest.mark.skipif(torch.cuda.is_available(), reason="has one")
def test_without_cuda_one_line_and_2(run):
    code, out, err, file = run()
    assert code == 2 and not out and not file.exists()
    assert err.splitlines() == ["error: expected a CUDA device, found none: this check is for machines that have one"]


def test_all_of_it_on_a_cpu(run):
    code, out, err, file = run(*WORDS)
    assert code == 0, err
    values = json.loads(file.read_text())
    names = [row["name"] for row in values["agreement"]]
    assert names == ["dense on cpu", "flash on cpu", "mixed on cpu", "bfloat16 on cpu"] and values["passes"]
    assert all(row["gradient"] < 1e-4 for row in values["agreement"][:3])
    speeds = {row["name"]: row for row in values["speed"]}
    assert speeds["ours"]["tokens_per_second"] > 0 and speeds["naive"]["seconds"] > 0
    assert "not installed" in speeds["speculators"]["missing"]
    assert "dense on cpu" in err and not list(file.parent.glob("*.safetensors"))


def test_a_wrong_gradient_fails_the_check(run, monkeypatch):
    right = gpu_check.gradients

    def wrong(loaded, backend, device):
        loss, grads = right(loaded, backend, device)
        if backend == "flash":
            grads["fc.weight"] = grads["fc.weight"] * 1.5
        return loss, grads

    monkeypatch.setattr(gpu_check, "gradients", wrong)
    code, _, err, file = run(*WORDS)
    values = json.loads(file.read_text())
    failed = [row["name"] for row in values["agreement"] if not row["passes"]]
    assert code == 1 and failed == ["flash on cpu"] and "1 of 4 rows do not pass, flash on cpu first" in err


def test_a_back_end_that_does_not_run_is_a_row(run, monkeypatch):
    right = gpu_check.gradients

    def fails(loaded, backend, device):
        if backend == "mixed":
            raise RuntimeError("no kernel\nfor this device")
        return right(loaded, backend, device)

    monkeypatch.setattr(gpu_check, "gradients", fails)
    code, _, err, file = run(*WORDS)
    rows = {row["name"]: row for row in json.loads(file.read_text())["agreement"]}
    assert code == 1 and rows["mixed on cpu"]["where"] == "RuntimeError: no kernel" and "mixed on cpu first" in err
    assert [name for name, row in rows.items() if not row["passes"]] == ["mixed on cpu"] and len(rows) == 4


def test_nan_never_passes():
    grads = {"a": torch.ones(2)}
    row = gpu_check.difference("x", (1.0, {"a": torch.full((2,), torch.nan)}), (1.0, grads), "float32")
    assert not row["passes"] and row["where"] == "a"
    assert gpu_check.difference("x", (1.0, grads), (1.0, grads), "float32")["passes"]
