"""A run's checkpoints: whole or not there, checked before they are believed; the newest few and the best are kept.

`step-00000200.ckpt` is what Lightning saves; `step-00000200.json`, written after it, has its bytes and sha256, and what
validation found at that step. They are read with weights_only: a file holds tensors and plain values, or is refused.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from filelock import FileLock, Timeout
from lightning.pytorch.plugins.io import CheckpointIO

from conf.disk import disk_error, writing
from conf.errors import UserError
from data.files import file_hash, read_json, replacing, write_json
from train.guard import not_finite

log = logging.getLogger(__name__)

NAME = "step-{:08d}.ckpt"
OLD = "last.ckpt"  # of runs before checkpoints had numbers
BEST = "val/tau"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found whole. values: what it holds; its tensors are mapped from the file."""

    path: Path
    values: dict[str, Any]

    @property
    def step(self) -> int:
        return self.values["global_step"]

    @property
    def kept(self) -> dict[str, Any]:
        """What HeadModule.on_save_checkpoint left."""
        return self.values["eyrie"]


def begun(run_folder: Path, resume: bool) -> Saved | None:
    """The checkpoint that a run goes on from. UserError for a new run where another has left some."""
    folder = run_folder / "checkpoints"
    if resume:
        if (saved := newest(folder)) is None:
            if (run_folder / "head").exists():  # saved once training is through; training anew would take its place
                raise UserError(
                    f"{run_folder} is trained, and its checkpoints are gone: measure its head with python -m eval "
                    f"run={run_folder}, or train a new run from it with head.start={run_folder}"
                )
            log.info(f"{run_folder} was stopped before its first checkpoint: it begins anew")
        return saved
    if any(folder.glob("*.ckpt")):
        raise UserError(
            f"expected a new folder, found another run's checkpoints in {run_folder}: continue it with "
            f"resume={run_folder}, or give another hydra.run.dir"
        )
    return None


def newest(folder: Path) -> Saved | None:
    """The newest checkpoint of a run that is whole; None where there never was one.

    Damaged ones are passed over with a warning; UserError when there are no others.
    """
    stems = {path.stem for pattern in ("step-*.ckpt", "step-*.json") for path in folder.glob(pattern)}
    paths = [folder / f"{stem}.ckpt" for stem in sorted(stems, reverse=True)]
    damaged = []
    for path in [*paths, *folder.glob(OLD)]:
        found = _read(path)
        if isinstance(found, Saved):
            if damaged:
                log.warning(f"damaged: {', '.join(damaged)}; going on from {path.name} before it")
            return found
        damaged.append(f"{path.name} {found}")
    if damaged:
        raise UserError(
            f"expected a whole checkpoint in {folder}, found {', '.join(damaged)}: put a copy of one back, "
            "or start a new run"
        )
    return None


def _read(path: Path) -> Saved | str:
    """The checkpoint, or what is wrong with it. Without its JSON (its writer was killed) reading is all."""
    note = read_json(path.with_suffix(".json"))
    if not path.is_file():
        return "is missing"
    if note:
        if (found := path.stat().st_size) != note.get("bytes"):
            return f"has {found} of {note.get('bytes')} bytes"
        if file_hash(path) != note.get("sha256"):
            return "has another sha256 than was written"
    try:
        values = torch.load(path, weights_only=True, map_location="cpu", mmap=bool(note) or None)
    except OSError:
        raise
    except Exception as error:  # of the zip, the unpickler or their contents
        return f"cannot be read ({type(error).__name__})"
    if not isinstance(values, dict) or not {"eyrie", "global_step", "state_dict"} <= values.keys():
        return "is no checkpoint of a head"
    return Saved(path, values)


class WholeFiles(CheckpointIO):
    """How Lightning writes a checkpoint: beside it first, hashed on the way, on the disk before it takes its name."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """OSError that names `path` when the disk refuses; nothing is left of it then."""
        path = Path(path)
        path.with_suffix(".json").unlink(missing_ok=True)  # of a damaged one with the same name
        with replacing(path) as part, writing(path, _bytes(checkpoint)), part.open("wb") as stream:
            file = _Hashed(stream)
            torch.save(checkpoint, file)
        validated = checkpoint["eyrie"]["validated"]
        now = validated if validated.get("step") == checkpoint["global_step"] else {}
        note = {"file": path.name, "bytes": file.bytes, "sha256": file.digest.hexdigest()}
        try:
            write_json(path.with_suffix(".json"), note | {"step": checkpoint["global_step"], "metrics": now})
        except OSError:
            path.unlink()
            raise

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> dict:
        return torch.load(path, map_location=map_location, weights_only=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        remove(Path(path))


class _Hashed:
    """A file whose bytes are counted and hashed as they are written."""

    def __init__(self, stream):
        self.stream, self.digest, self.bytes = stream, hashlib.sha256(), 0
        self.flush = stream.flush

    def write(self, block) -> int:
        self.digest.update(block)
        self.bytes += len(block)
        return self.stream.write(block)


def _bytes(value: Any) -> int:
    """Of all tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(map(_bytes, items))


def prune(folder: Path, keep: int, step: int) -> None:
    """Leave the `keep` newest checkpoints up to `step`, and the one that validated best. What is newer was damaged."""
    paths = sorted(path for path in folder.glob("step-*.ckpt") if path.name <= NAME.format(step))
    kept = {path.name for path in paths[-keep:]} | {(best(folder, step) or {}).get("file")}
    for path in [*folder.glob("step-*.ckpt"), *folder.glob("step-*.json")]:
        if path.with_suffix(".ckpt").name not in kept:
            path.unlink(missing_ok=True)


def best(folder: Path, step: int | None = None) -> dict[str, Any] | None:
    """{file, step, metrics} of the checkpoint, up to `step`, at which validation found most; None without one."""
    notes = [read_json(path) for path in sorted(folder.glob("step-*.json"))]
    judged = [note for note in notes if BEST in note.get("metrics", {}) and (step is None or note["step"] <= step)]
    if not judged:
        return None
    found = max(judged, key=lambda note: note["metrics"][BEST])  # of equals the first
    return {name: found[name] for name in ("file", "step", "metrics")}


def remove(path: Path) -> None:
    path.with_suffix(".json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


class KeepCheckpoints(pl.Callback):
    """Saves every `every` steps, after each validation, at the end, and when an exception ends the run."""

    def __init__(self, folder: Path, every: int, keep: int = 2, validate_every: int = 0):
        self.folder, self.every, self.keep, self.validate_every = folder, every, keep, validate_every
        self.saved = 0

    def on_train_start(self, trainer, module) -> None:
        """The one that was resumed lies there already. It is saved again where its validation, which a second Ctrl-C
        cut short, has been made up for (by Validate, whose turn is before): what is best must be known of it."""
        self.saved = step = trainer.global_step
        note = read_json((self.folder / NAME.format(step)).with_suffix(".json"))
        known = step and step == module.validated.get("step") and BEST in module.validated
        if known and BEST not in note.get("metrics", {}) and trainer.world_size == 1:
            self.saved = 0
            self.save(trainer, module)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if any(every and trainer.global_step % every == 0 for every in (self.every, self.validate_every)):
            self.save(trainer, module)

    def on_train_end(self, trainer, module) -> None:
        self.save(trainer, module)

    def on_exception(self, trainer, module, exception) -> None:
        # Several ranks cannot agree to save while one of them is failing; theirs is the last regular checkpoint.
        # Nor is a step saved in whose midst the exception came, or on a disk that has just refused.
        whole = module.settled and not not_finite(module.head.named_parameters())
        if trainer.world_size == 1 and whole and not disk_error(exception):
            self.save(trainer, module)

    def save(self, trainer, module) -> None:
        step = trainer.global_step
        if step == self.saved:
            return
        if names := not_finite(module.head.named_parameters()):
            raise UserError(
                f"after step {step} the weights of {names[0]} are not finite ({len(names)} parameters): lower optim.lr "
                "(or optim.matrix_lr) and resume from the last checkpoint"
            )
        for logger in trainer.loggers:
            logger.save()
        trainer.save_checkpoint(self.folder / NAME.format(step))
        if trainer.is_global_zero:
            prune(self.folder, self.keep, step)
        self.saved = step


def rng_states() -> dict[str, Any]:
    """Of Python, numpy and torch, as plain values and tensors."""
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng(states: dict[str, Any]) -> None:
    """Nothing in the training step draws from these today: noise has a seed of its own at each place in the data."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if len(states["cuda"]) == torch.cuda.device_count() > 0:
        torch.cuda.set_rng_state_all(states["cuda"])


@contextmanager
def sole_run(folder: Path, rank: int) -> Iterator[None]:
    """This process alone writes the run folder: UserError when another does. The lock goes with its process.

    What a killed writer left half done is removed. Of several ranks, the first is the one that writes.
    """
    if rank:
        yield
        return
    lock = FileLock(folder / ".lock")
    try:
        with writing(folder / ".lock"):
            lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process works in {folder}: wait for it or stop it, or give hydra.run.dir") from None
    try:
        for left in [*folder.glob("*.tmp"), *folder.glob("checkpoints/*.tmp")]:
            left.unlink(missing_ok=True)
        yield
    finally:
        lock.release()
