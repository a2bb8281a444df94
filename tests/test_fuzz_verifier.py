"""A model's folder from anywhere: a verifier, or one line."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load

import fuzz
from models.verifier import Verifier
from tiny import tiny_model, tiny_tokenizer

IDS = torch.arange(5, 13)[None]


@cache
def folder_of() -> fuzz.Folder:
    with TemporaryDirectory() as folder:
        tiny_model(hidden=32, vocab=300, layers=7).save_pretrained(folder)
        tiny_tokenizer(300).save_pretrained(folder)
        return fuzz.Folder({path.name: path.read_bytes() for path in Path(folder).iterdir()})


def folders(*names: str):
    whole = folder_of()
    others = {name: fuzz.jsons(json.loads(whole[name])) for name in names if name.endswith(".json")}
    others |= {name: fuzz.tensor_files(load(whole[name])) for name in names if name.endswith(".safetensors")}
    return fuzz.folders(whole, others)


def check(files: fuzz.Folder, folder: Path) -> None:
    verifier = Verifier.load(str(files.put(folder)), dtype="float32", device="cpu")
    states = verifier.capture(IDS, torch.zeros_like(IDS), torch.arange(8)[None])
    assert states.aux_BTAD.shape[:3] == (1, 8, 3)


@fuzz.fuzz(folders("config.json"), folder_of(), few=25)
def test_config_json(files, folder):
    check(files, folder)


@fuzz.fuzz(folders("tokenizer.json", "tokenizer_config.json", "generation_config.json"), folder_of(), few=25)
def test_tokenizer_and_generation_config(files, folder):
    check(files, folder)


@fuzz.fuzz(folders("model.safetensors"), folder_of(), few=25)
def test_weights(files, folder):
    check(files, folder)


@cache
def sharded() -> fuzz.Folder:
    whole = dict(folder_of())
    tensors = load(whole["model.safetensors"])
    whole["a.safetensors"] = whole.pop("model.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    return fuzz.Folder(whole | {"model.safetensors.index.json": json.dumps(index).encode()})


@fuzz.fuzz(
    fuzz.folders(
        sharded(), {"model.safetensors.index.json": fuzz.jsons(json.loads(sharded()["model.safetensors.index.json"]))}
    ),
    sharded(),
    few=25,
)
def test_index_of_shards(files, folder):
    check(files, folder)
