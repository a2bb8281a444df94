"""What a run has left, as hashes: two runs are bitwise equal where these are."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file

CLOCKS = ("train/seconds", "train/tokens_per_second")  # columns of metrics.csv that no two runs share


def digest(value) -> str:
    """A hash of nested dicts and lists of tensors and plain values; equal for bitwise equal contents alone."""
    found = hashlib.sha256()

    def add(item) -> None:
        if isinstance(item, torch.Tensor):
            found.update(f"{item.dtype}{tuple(item.shape)}".encode())
            found.update(item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key in sorted(item, key=str):
                found.update(repr(key).encode())
                add(item[key])
        elif isinstance(item, (list, tuple)):
            found.update(f"{len(item)}".encode())
            for each in item:
                add(each)
        else:
            found.update(repr(item).encode())

    add(value)
    return found.hexdigest()


def metrics(folder: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv, clocks left out."""
    with (folder / "metrics.csv").open(newline="") as stream:
        return [{k: v for k, v in row.items() if k not in CLOCKS} for row in csv.DictReader(stream)]


def newest(folder: Path) -> Path:
    """The checkpoint of a run that was written last."""
    return max((folder / "checkpoints").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def run_prints(folder: Path) -> dict[str, str]:
    """Of each artefact of a finished run a hash, times left out: two runs are bitwise equal where these are."""
    saved = torch.load(newest(folder), weights_only=True, map_location="cpu")
    kept = {name: value for name, value in saved["eyrie"].items() if name not in ("elapsed", "verifier")}
    kept["verifier"] = saved["eyrie"]["verifier"]["weights_hash"]
    kept["loader"] = {name: value for name, value in kept["loader"].items() if name != "files"}  # and where they lie
    alpha = json.loads((folder / "alpha.json").read_text())
    counted = ("tau", "alpha", "alpha_by_depth", "accepted_by_position", "verify_calls", "drafted", "emitted")
    prints = {
        "weights": digest(saved["state_dict"]),
        "optimizer": digest(saved["optimizer_states"]),
        "place, counts": digest(kept),
        "step": str(saved["global_step"]),
        "head": digest(load_file(folder / "head" / "head.safetensors")),
        "export": digest(load_file(folder / "export" / "model.safetensors")),
        "metrics": digest(metrics(folder)),
        "acceptance": digest({name: alpha[name] for name in counted}),
    }
    return prints


def tree_prints(folder: Path, pattern: str) -> dict[str, str]:
    """sha256 of the files of a folder that match."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }
