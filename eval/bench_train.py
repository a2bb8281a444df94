"""The training step of an EAGLE-3 head against rivals, over shapes: which settings, and what is written about them."""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import astuple, replace
from pathlib import Path

from rich.console import Console

from conf.errors import UserError
from eval.training_bench import scaling, tables
from eval.training_bench.check import agreement
from eval.training_bench.plots import plot_axis
from eval.training_bench.rival import OURS, Process, peer
from eval.training_bench.run import Bench, measure
from eval.training_bench.setting import Axes, Setting, write_setting
from models.loading import native_dtype
from models.verifier import Verifier

log = logging.getLogger(__name__)


CORE = Axes([2048], [0.4], [3, 7], [8192, 32000])
SWEEP = Axes([256, 512, 1024, 2048, 4096], [0.1, 0.2, 0.4, 0.7, 1.0], [1, 2, 3, 5, 7], [8192, 16384, 32000, 49152])
MIDDLE = Setting(2048, 0.4, 7, 8192)
NAMES = ("tokens", "fraction", "steps", "draft_vocab")
CHECK = Setting(256, 0.4, 3, 1024)  # of the agreement; a smaller vocabulary takes all of it


def bench_train(cfg, values: dict, path: Path, console: Console) -> dict:
    """Every combination of the axes."""
    axes = _axes(cfg, CORE)
    settings = [Setting(*point, documents=cfg.documents) for point in itertools.product(*astuple(axes))]
    return _compare(cfg, values, path, console, settings)


def bench_sweep(cfg, values: dict, path: Path, console: Console) -> dict:
    """One axis at a time around the middle (the first of an axis that leaves the middle's value out)."""
    axes = astuple(_axes(cfg, SWEEP))
    middle = [value if value in axis else axis[0] for value, axis in zip(astuple(MIDDLE), axes, strict=False)]
    points = {
        tuple(middle[:i] + [value] + middle[i + 1 :]): None for i, axis in enumerate(axes) for value in axis
    }  # each once, in order
    values = _compare(cfg, values, path, console, [Setting(*point, documents=cfg.documents) for point in points])
    for name, axis in zip(NAMES, axes, strict=True):
        if len(axis) > 1:
            others = {other: at for other, at in zip(NAMES, middle, strict=True) if other != name}
            rows = [row for row in values["rows"] if all(row[other] == at for other, at in others.items())]
            log.info("%s", plot_axis(rows, name, others, path.with_name(f"{path.stem}-{name}.png")))
    return values


def bench_scaling(cfg, values: dict, path: Path, console: Console) -> dict:
    """See eval.training_bench.scaling."""
    bench, values = _begin(cfg, values, path)
    found = scaling.scaling(bench, _axes(cfg, scaling.AXES), values["dtype"])
    _show(console, path, tables.scaling_table(found))
    return values | found


def bench_profile(cfg, values: dict, path: Path, console: Console) -> dict:
    """Of one step, at the last value of each axis."""
    bench, values = _begin(cfg, values, path)
    point = [axis[-1] for axis in astuple(_axes(cfg, CORE))]
    setting = Setting(*point, documents=cfg.documents, dtype=values["dtype"])
    file = bench.folder / "setting.safetensors"
    write_setting(file, setting, bench.geometry, bench.aux_layers)
    with Process(OURS, file, bench.threads, bench.folder / "profile.txt") as process:
        found = process.ask(do="profile")
    file.unlink()
    _show(console, path, tables.profile_table(setting, found))
    return values | found


def _compare(cfg, values: dict, path: Path, console: Console, settings: list[Setting]) -> dict:
    """Agreement first, then every setting; the JSON is written anew after each."""
    bench, values = _begin(cfg, values, path)
    settings = [replace(setting, dtype=values["dtype"]) for setting in settings]
    smaller = replace(CHECK, draft_vocab=min(CHECK.draft_vocab, bench.geometry["vocab_size"]), dtype=values["dtype"])
    log.info("losses and gradients are compared")
    values["agreement"] = agreement(smaller, bench.geometry, bench.aux_layers, bench.peer, bench.threads, bench.folder)
    values["rows"] = []
    for n, setting in enumerate(settings, 1):
        T, part, K, R = astuple(setting)[:4]
        log.info("setting %d of %d: T=%d, answer %g, K=%d, R=%d", n, len(settings), T, part, K, R)
        values["rows"] += measure(bench, setting)
        path.write_text(json.dumps(values, indent=1) + "\n")
    _show(console, path, tables.markdown(values))
    return values


def _show(console: Console, path: Path, text: str) -> None:
    """On the terminal, and in a file beside the JSON."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
    path.with_suffix(".md").write_text(text + "\n")


def _begin(cfg, values: dict, path: Path) -> tuple[Bench, dict]:
    """What is measured, and with what; a folder for the processes' files beside the JSON."""
    verifier = Verifier.load(**vars(cfg.verifier))
    dtype = str(native_dtype("cpu")).removeprefix("torch.") if cfg.verifier.dtype == "auto" else cfg.verifier.dtype
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"the training bench runs in float32 or bfloat16, found verifier.dtype={dtype}")
    other = peer(cfg.environments, cfg.peer) if cfg.peer else None
    if cfg.peer and other is None:
        log.warning("%s is not in %s: make %s/%s/.done", cfg.peer, cfg.environments, cfg.environments, cfg.peer)
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    geometry, aux_layers = verifier.head_geometry, verifier.aux_layers
    values |= {"verifier": verifier.name, "dtype": dtype, "device": "cpu", "peer": other.name if other else None}
    return Bench(geometry, aux_layers, values["threads"], cfg.repeats, folder, other, cfg.naive), values


def _axes(cfg, default: Axes) -> Axes:
    given = {name: getattr(cfg, name) for name in vars(default) if getattr(cfg, name)}
    return replace(default, **given)
