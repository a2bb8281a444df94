"""Do the rivals compute the same? Losses and gradients on the same weights and states, before anything is timed.

Ours and the naive step take cross-entropy and one mean over all draft steps. The peer takes KL and a mean of each
step, so it is held against the naive step done so, and against ours directly at K = 1, where gradients are the same.
Counted rows are made the same by an answer that opens its one document: elsewhere the peer also counts a row when the
answer begins between it and its label. It counts by the token before the label, so that it learns from one row more
after each answer: its mask leaves that row out here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from conf.errors import UserError
from eval.tables import number
from eval.training_bench.rival import FROZEN, NAIVE, OURS, Process, Rival
from eval.training_bench.setting import Setting, write_setting

TOLERANCE = 2e-3  # relative, in float32


def agreement(
    setting: Setting, geometry: dict, aux_layers, peer: Rival | None, threads: int, folder: Path
) -> list[dict]:
    """Rows of relative differences: loss (None: not the same by its definition), gradient of the worst parameter (named
    by `where`) and of all together (`whole_gradient`).

    setting: shapes of the check; run in float32 with the answer first, and again in its dtype.
    Raises UserError where two differ by more than TOLERANCE in float32.
    """
    exact = replace(setting, dtype="float32", answer_first=True, documents=1)
    asks = {"ours": (OURS, False), "naive": (NAIVE, False)}
    if peer is not None:
        asks |= {"naive, by step": (NAIVE, True), peer.name: (peer, True)}
    found = _run(exact, asks, geometry, aux_layers, threads, folder)
    rows = [_difference("ours against naive", found["ours"], found["naive"])]
    if peer is not None:
        rows.append(_difference(f"{peer.name} against naive", found[peer.name], found["naive, by step"]))
        asks = {"ours": (FROZEN, False), peer.name: (peer, True)}
        one = _run(replace(exact, steps=1), asks, geometry, aux_layers, threads, folder)
        rows.append(_difference(f"ours against {peer.name}, K = 1", one["ours"], one[peer.name]) | {"loss": None})
    for row in rows:
        if not ((row["loss"] or 0.0) < TOLERANCE and row["gradient"] < TOLERANCE):  # so also for NaN
            raise UserError(
                f"{row['name']}: expected the same loss and gradients, found relative differences of "
                f"{number(row['loss'], 6)} and {row['gradient']:.6f} ({row['where']}): nothing was timed; see {folder}"
            )
    if setting.autocast:
        rough = replace(exact, dtype=setting.dtype)
        asks = {"ours": (OURS, False), "naive": (NAIVE, False)}
        narrow = _run(rough, asks, geometry, aux_layers, threads, folder)
        rows += [_difference(f"{name}, {setting.dtype}", narrow[name], found["naive"]) for name in asks]
    return rows


def _run(setting: Setting, asks: dict, geometry, aux_layers, threads: int, folder: Path) -> dict:
    """name -> (loss, gradients) of each (rival, by_step)."""
    file, found = folder / "check.safetensors", {}
    write_setting(file, setting, geometry, aux_layers)
    for name, (rival, by_step) in asks.items():
        out = folder / "gradients.safetensors"
        with Process(rival, file, threads, folder / "check.txt") as process:
            loss = process.ask(do="gradients", out=str(out), by_step=by_step)["loss"]
        found[name] = loss, {key: grad.clone() for key, grad in load_file(out).items()}
    return found


def _difference(name: str, one: tuple, other: tuple) -> dict:
    """Over the parameters that both train."""
    (loss, grads), (expected, wanted) = one, other
    shared = grads.keys() & wanted.keys()
    if not shared:
        raise UserError(f"{name}: expected gradients of the same parameters, found none in common")
    apart = {key: float((grads[key] - wanted[key]).norm() / wanted[key].norm()) for key in sorted(shared)}
    where = max(apart, key=lambda key: apart[key] if math.isfinite(apart[key]) else math.inf)
    whole = math.sqrt(sum(float((grads[key] - wanted[key]).square().sum()) for key in shared))
    size = math.sqrt(sum(float(wanted[key].square().sum()) for key in shared))
    return {
        "name": name, "loss": abs(loss - expected) / abs(expected), "gradient": apart[where], "where": where,
        "whole_gradient": whole / size, "parameters": len(shared),
    }  # fmt: skip
