"""Where a run's time went, and everything needed to say what it was."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from conf.schema import TrainConf
from data.files import write_json
from data.prepare import Prepared
from models.export.native import VerifierCard
from train.checkpoints import Saved

log = logging.getLogger(__name__)

COMPUTE = ("torch", "threads", "device")
PACKAGES = ("eyrie", "torch", "transformers", "lightning", "safetensors", "hydra-core", "datasets", "numpy")


class Ledger:
    """Seconds by phase, in the order they were met."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.begun = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begun

    @property
    def spent(self) -> float:
        """Seconds since the job began, phases or not."""
        return time.monotonic() - self.begun

    def rounded(self) -> dict[str, float]:
        return {name: round(value, 1) for name, value in self.seconds.items()}


def provenance(cfg: TrainConf, verifier, prepared: Prepared, head, trained: dict, ledger: Ledger) -> dict:
    """provenance.json. trained: steps, tokens and seconds of the training itself."""
    return {
        "command": " ".join([Path(sys.executable).name, "-m", "train", *sys.argv[1:]]),
        "seed": cfg.seed,
        "budget": cfg.budget_name,
        "git": git_commit(),
        "verifier": asdict(VerifierCard.of(verifier)) | {"dtype": str(verifier.dtype).removeprefix("torch.")},
        "data": {"hash": prepared.content_hash, "folder": str(prepared.folder), **prepared.counts},
        "draft_vocabulary": {"size": len(head.vocab), "hash": head.vocab.hash},
        "training": trained,
        "seconds": ledger.rounded(),
        "machine": {
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": str(verifier.device),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def write(folder: Path, values: dict) -> Path:
    """Whole or not at all."""
    write_json(path := folder / "provenance.json", values)
    return path


def sessions(saved: Saved | None, device: torch.device, world: int) -> list[dict[str, Any]]:
    """The processes that have worked at a run, each from a step on, this one last.

    A warning where this one computes otherwise than the one before, so that bits may differ.
    """
    before = saved.values.get("history", {}).get("sessions", []) if saved else []
    own = {
        "from_step": saved.step if saved else 0,
        "git": git_commit(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "device": device_name(device),
        "ranks": world,
    }
    last = before[-1] if before else own
    if changed := [f"{name} was {last[name]}, is now {own[name]}" for name in COMPUTE if last[name] != own[name]]:
        log.warning(f"resumed by other means ({'; '.join(changed)}): its last bits may differ from an unbroken run's")
    return [*before, own]


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def git_commit() -> str | None:
    """The commit of this source tree, `-dirty` behind it where files differ; None outside a repository."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
