"""Heads from elsewhere: whatever lies in the folder, it is a head or one line says why not."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load

import fuzz
from models import heads
from models.export import eagle1, gguf, medusa, safeai, speculators
from models.export.native import StoredHead, attach, load_head, save_head
from models.export.warm import is_published, layers_wanted, named_verifier, peek, read_any
from models.heads.config import LayerConfig
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_verifier

LAYOUTS = {"safeai": safeai.write, "eagle1": eagle1.write_sglang, "speculators": speculators.write}
LAYOUTS |= {"medusa": medusa.write, "gguf": gguf.write, "native": lambda stored, out, *_: save_head(out, stored)}
KINDS = {"eagle1": "eagle1", "medusa": "medusa"}


@cache
def verifier_of(layout: str) -> Verifier:
    layers = heads.captured_layers(KINDS.get(layout, "eagle3"), None)
    return tiny_verifier(hidden=32, vocab=300, aux_layers=layers)


@cache
def stored_of(layout: str) -> StoredHead:
    verifier, kind = verifier_of(layout), KINDS.get(layout, "eagle3")
    ids = torch.arange(300) if kind == "eagle1" else torch.arange(1, 300, 3)
    switches = {"heads": 2} if kind == "medusa" else {}
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, verifier.aux_layers, len(ids), **switches)
    torch.manual_seed(0)
    return StoredHead.of(heads.build(config, verifier, DraftVocab(ids, 300)), verifier, {"ttt_steps": 7})


@cache
def files_of(layout: str) -> fuzz.Folder:
    """A folder of that layout that is read without complaint."""
    with TemporaryDirectory() as folder:
        LAYOUTS[layout](stored_of(layout), Path(folder), torch.float32, verifier_of(layout))
        return fuzz.Folder({path.name: path.read_bytes() for path in Path(folder).iterdir()})


def folders(layout: str, foreign: bool = False):
    """Folders of that layout with one file other than it should be. foreign: without our notes, as published heads."""
    whole = files_of(layout)
    if "config.json" not in whole:
        return fuzz.folders(whole, {name: fuzz.files(data) for name, data in whole.items()})
    config = json.loads(whole["config.json"])
    config.pop("eyrie" if foreign else "file", None)  # the native head's checksum would stop every other file at once
    whole = whole | {"config.json": json.dumps(config).encode()}
    (weights,) = whole.keys() - {"config.json"}
    return fuzz.folders(whole, {"config.json": fuzz.jsons(config), weights: fuzz.tensor_files(load(whole[weights]))})


def read_published(files: fuzz.Folder, folder: Path, layout: str) -> StoredHead:
    files.put(folder)
    if is_published(folder):
        peek(folder), layers_wanted(folder), named_verifier(folder)
    stored = read_any(folder, verifier_of(layout))
    attach(stored, verifier_of(layout))
    assert stored.config.vocab_size == stored.vocab.vocab_size == 300
    assert all(tensor.isfinite().all() for tensor in stored.tensors.values())
    if isinstance(stored.config, LayerConfig):
        assert stored.config.head_dim > 0 and stored.config.intermediate_size > 0
    return stored


def fuzzed(layout: str, foreign: bool = False):
    @fuzz.fuzz(folders(layout, foreign), files_of(layout))
    def check(files, folder):
        read_published(files, folder, layout)

    return check


test_safeai, test_safeai_foreign = fuzzed("safeai"), fuzzed("safeai", foreign=True)
test_eagle1, test_eagle1_foreign = fuzzed("eagle1"), fuzzed("eagle1", foreign=True)
test_medusa, test_medusa_foreign = fuzzed("medusa"), fuzzed("medusa", foreign=True)
test_speculators, test_speculators_foreign = fuzzed("speculators"), fuzzed("speculators", foreign=True)
test_gguf = fuzzed("gguf")


@fuzz.fuzz(folders("native"), files_of("native"))
def test_native(files, folder):
    load_head(files.put(folder), verifier_of("native"))
