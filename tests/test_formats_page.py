"""docs/formats.md against what is written: every tensor and key of every export, and every key of a run's files."""

import json
import re
from dataclasses import fields
from math import prod
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open

from eval.alpha import AlphaReport
from eval.exposure import Exposure, accuracies
from models import heads
from models.export.formats import FORMATS, write_export
from models.export.native import StoredHead, save_head
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny_run import save_verifier

PAGE = (Path(__file__).parent.parent / "docs" / "formats.md").read_text()
NAMED = set(re.findall(r"`([^`]+)`", PAGE))


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return Verifier.load(str(save_verifier(tmp_path_factory.mktemp("formats") / "verifier")), dtype="float32")


def stored(verifier, kind: str, **switches) -> StoredHead:
    layers = {"eagle3": verifier.aux_layers, "independent": ()}.get(kind, (verifier.num_layers,))
    vocab = DraftVocab.identity(512) if kind == "eagle1" else DraftVocab(torch.arange(0, 128, 2), 512)
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, layers, len(vocab), **switches)
    return StoredHead.of(heads.build(config, verifier, vocab), verifier)


def tables() -> list[list[list[str]]]:
    """Cells of every table's rows, the head first."""
    found = re.findall(r"(?:^\|.*\|\n)+", PAGE, re.M)
    return [[[cell.strip() for cell in row.strip("| ").split("|")] for row in t.splitlines() if "|---" not in row]
            for t in found]  # fmt: skip


def column(head: str, name: str, shape: str = "shape") -> dict[str, tuple[int, ...]]:
    """{tensor: shape} of a column in the table that begins with `head`, in the sizes of the tiny head."""
    sizes = {"D": 32, "A": 3, "V": 512, "R": 64, "M": 64, "q": 32, "kv": 16, "2": 2}
    [(first, *rows)] = [table for table in tables() if table[0][0].startswith(head)]
    found = {}
    for row in rows:
        cells = dict(zip(first, row, strict=False))
        if tensor := re.match(r"`([^`]+)`(?: (\[.*\]))?", cells.get(name) or ""):
            axes = (tensor[2] or cells[shape]).strip("[]").split(", ")
            found[tensor[1]] = tuple(prod(sizes[letter] for letter in axis.split()) for axis in axes)
    return found


def tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    [file] = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def export(stored: StoredHead, name: str, folder: Path, verifier=None) -> Path:
    return write_export(stored, folder / stored.config.kind / name, name, torch.float32, verifier)


def test_eagle3_tensors(verifier, tmp_path):
    head = stored(verifier, "eagle3")
    page = column("native, SafeAI", "native, SafeAI")
    without = {name: shape for name, shape in page.items() if name != "t2d"}
    assert tensors(save_head(tmp_path / "head", head)) == without == tensors(export(head, "trtllm", tmp_path))
    assert tensors(export(head, "safeai", tmp_path)) == page == tensors(export(head, "sglang", tmp_path))
    embedding = {"embed_tokens.weight": (512, 32)}
    assert tensors(write_export(head, tmp_path / "with", "vllm", torch.float32, verifier)) == page | embedding
    assert tensors(export(head, "openvino", tmp_path, verifier)) == page | embedding
    renamed = {name.replace("midlayer.", "layers.0."): shape for name, shape in page.items()}
    assert tensors(export(head, "speculators", tmp_path, verifier)) == renamed | embedding
    file = gguf.GGUFReader(export(head, "gguf", tmp_path, verifier) / "head.gguf")
    found = {tensor.name: tuple(tensor.shape.tolist()[::-1]) for tensor in file.tensors}
    assert found == column("native, SafeAI", "GGUF")
    [ids] = [tensor.data for tensor in file.tensors if tensor.name == "d2t"]
    assert ids.tolist() == list(range(0, 128, 2)) and "`d2t` and Medusa's `token_map` hold the token ids" in PAGE
    assert file.fields["eagle3.target_layers"].contents() == list(verifier.aux_layers)


def test_tensors_of_eagle1_and_medusa(verifier, tmp_path):
    head, page = stored(verifier, "eagle1"), column("EAGLE-1", "EAGLE-1, native and exported")
    assert tensors(save_head(tmp_path / "eagle1" / "head", head)) == page | {"d2t": (512,)}
    assert tensors(export(head, "vllm", tmp_path)) == page
    assert tensors(export(head, "sglang", tmp_path)) == page | {"fc.bias": (32,)}
    head = stored(verifier, "medusa", heads=1)
    for name, folder in {
        "Medusa, native": save_head(tmp_path / "medusa" / "head", head),
        "`medusa`, `vllm`": export(head, "vllm", tmp_path),
        "`trtllm` (FasterDecoding's)": export(head, "trtllm", tmp_path),
    }.items():
        assert tensors(folder) == column("Medusa", name), name


def test_the_table_of_formats_is_the_codes(verifier):
    [(_, *rows)] = [table for table in tables() if table[0][0] == "layout"]
    kinds = {"EAGLE-3": "eagle3", "EAGLE-1": "eagle1", "Medusa": "medusa"}
    found = {(kinds[row[2]], name) for row in rows[1:] for name in re.findall(r"`(\w+)`", row[1])}
    assert found == {(kind, name) for kind, formats in FORMATS.items() for name in formats}


def test_keys_of_config_json(verifier, tmp_path):
    values = json.loads((save_head(tmp_path / "head", stored(verifier, "eagle3")) / "config.json").read_text())
    assert set(values) <= NAMED, set(values) - NAMED
    for name, keys in {
        "safeai": {"draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"},
        "speculators": {"speculators_model_type", "speculators_version", "speculators_config"},
        "trtllm": {"draft_vocab_size", "fc_norm"},
    }.items():
        found = json.loads((export(stored(verifier, "eagle3"), name, tmp_path, verifier) / "config.json").read_text())
        assert keys <= NAMED and keys <= set(found), name


def test_keys_of_a_runs_files(verifier):
    keys = {field.name for field in fields(AlphaReport)} - {"texts"}
    zero = {field.name: torch.zeros(1, 2).long().numpy() for field in fields(Exposure)}
    keys |= {"tested", "counted", *accuracies(Exposure(**zero))}
    assert keys <= NAMED, keys - NAMED
