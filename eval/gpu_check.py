"""What only a CUDA machine can show: our step there equals the CPU's and the naive one, and how fast it is.

python -m eval.gpu_check        `make gpu-check`; ends with 0 when all rows pass, 1 when one does not, 2 without CUDA
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from conf.cli import Outcome, main
from conf.errors import UserError
from conf.terminal import TextConsole
from eval.rivals import in_turns
from eval.serving.engine import last_line
from eval.speculative.clock import Clock
from eval.tables import number
from eval.training_bench.naive import naive_losses, naive_teacher
from eval.training_bench.rival import PEERS
from eval.training_bench.setting import Loaded, Setting, read_setting, write_setting
from models.anchor_attention import BACKENDS
from models.losses import head_loss
from models.objectives import Labels, Objective
from models.verifier import Verifier

ONLY = {"flash": "cpu", "mixed": "cpu", "flex": "cuda"}  # back ends with a kernel for one kind of device
BARS = {"float32": 2e-3, "bfloat16": 3e-2}  # relative difference of loss and of all gradients together
CHECKED = Setting(768, 0.5, 3, 2048, documents=3)
PEER_SECONDS = 240
NAIVE = "naive"


@main("gpu_check")
def check(cfg) -> Outcome:
    """cfg: conf.schema.GpuCheckCommandConf. A row that fails ends the command with 1, after everything is written."""
    device = torch.device(cfg.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("expected a CUDA device, found none: this check is for machines that have one")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    verifier = Verifier.load(**vars(cfg.verifier) | {"device": "cpu", "dtype": "float32", "whole": False})
    out = Path(cfg.out or f"outputs/gpu-check/{datetime.now():%Y-%m-%d_%H-%M-%S}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_suffix(".safetensors")
    shape = verifier.head_geometry, verifier.aux_layers
    checked = replace(CHECKED, draft_vocab=min(CHECKED.draft_vocab, verifier.vocab_size))
    timed = Setting(cfg.tokens, cfg.fraction, cfg.steps, cfg.draft_vocab, dtype="bfloat16")
    try:
        rows = agreement(file, checked, shape, device)
        speeds = speed(file, timed, shape, device, cfg.repeats, Path(cfg.environments))
    finally:
        file.unlink(missing_ok=True)
    failed = [row["name"] for row in rows if not row["passes"]]
    values = {"device": name_of(device), "torch": torch.__version__, "passes": not failed, "agreement": rows}
    values |= {"shapes": vars(timed), "speed": speeds}
    out.write_text(json.dumps(values, indent=1) + "\n")
    console = TextConsole(stderr=cfg.json, width=120)
    for title, part in (("agreement", rows), ("speed", speeds)):
        console.print(table(f"{title}: {values['device']}", part))
    if failed:
        console.print(f"{len(failed)} of {len(rows)} rows do not pass, {failed[0]} first; all of it is in {out}")
        sys.exit(1)
    return Outcome(out, values)


def agreement(file: Path, setting: Setting, shape: tuple, device: torch.device) -> list[dict]:
    """Rows: each back end on the kinds of device it is for against the naive step on the CPU, all in float32; and our
    usual step on `device` in bfloat16 against the same.
    """
    write_setting(file, setting, *shape)
    truth = gradients(read_setting(file), NAIVE, torch.device("cpu"))
    rows = []
    for place in dict.fromkeys((torch.device("cpu"), device)):
        for backend in BACKENDS:
            if ONLY.get(backend, place.type) == place.type:
                rows.append(compared(f"{backend} on {place.type}", file, backend, place, truth, "float32"))
    rounded = replace(setting, dtype="bfloat16")
    write_setting(file, rounded, *shape)  # the same numbers: states are rounded in every dtype
    return [*rows, compared(f"bfloat16 on {device.type}", file, "auto", device, truth, "bfloat16")]


def compared(name: str, file: Path, backend: str, device: torch.device, truth: tuple, dtype: str) -> dict:
    """Row of one back end. One that does not even run (a kernel that can't be compiled) does not pass."""
    try:
        return difference(name, gradients(read_setting(file), backend, device), truth, dtype)
    except Exception as error:
        return {"name": name, "where": said(error), "bar": BARS[dtype], "passes": False}


def step(loaded: Loaded, backend: str, device: torch.device) -> Tensor:
    """The loss, after its gradients are in the head. backend: of models.anchor_attention, "auto", or NAIVE."""
    setting, head, states = loaded.setting, loaded.head, loaded.states
    with torch.autocast(device.type, torch.bfloat16, enabled=setting.autocast):
        if backend == NAIVE:
            parts = list(naive_losses(head, states, naive_teacher(head, loaded.last_TD, loaded.lm_VD), setting.steps))
            total = sum(Objective.step_decay**k * loss for k, (loss, _) in enumerate(parts))
            weight = sum(Objective.step_decay**k * count for k, (_, count) in enumerate(parts))
        else:
            head.attention = backend
            lm_RD = loaded.lm_VD[head.vocab.ids_R.to(device)]
            labels = Labels.given(states, lambda rows: F.linear(rows, lm_RD).float(), setting.steps)
            total, weight, _ = head_loss(head, states, labels, Objective(steps=setting.steps))
    loss = total / weight
    loss.backward()
    return loss.detach()


def on(loaded: Loaded, device: torch.device) -> Loaded:
    """The same with everything on `device`."""
    moved = {name: getattr(loaded, name).to(device) for name in ("head", "states", "last_TD", "lm_VD")}
    return Loaded(loaded.setting, **moved)


def gradients(loaded: Loaded, backend: str, device: torch.device) -> tuple[float, dict[str, Tensor]]:
    """Loss and the gradient of every parameter, on the CPU."""
    loaded = on(loaded, device)
    loss = step(loaded, backend, device)
    return loss.item(), {name: p.grad.cpu() for name, p in loaded.head.named_parameters() if p.grad is not None}


def difference(name: str, found: tuple, truth: tuple, dtype: str) -> dict:
    """Relative differences of the loss, of all gradients together, and of the worst parameter's, which is `where`."""
    (loss, grads), (expected, wanted) = found, truth
    if grads.keys() != wanted.keys():
        raise UserError(f"{name}: expected gradients of {len(wanted)} parameters, found {len(grads)}")
    apart = {key: float((grads[key] - wanted[key]).norm()) for key in wanted}
    each = {key: apart[key] / float(wanted[key].norm()) for key in wanted}
    where = max(each, key=lambda key: each[key] if math.isfinite(each[key]) else math.inf)
    whole = math.hypot(*apart.values()) / math.hypot(*(float(grad.norm()) for grad in wanted.values()))
    row = {"name": name, "loss": abs(loss - expected) / abs(expected), "gradient": whole, "worst": each[where]}
    passes = row["loss"] < BARS[dtype] and whole < BARS[dtype]  # not so for NaN
    return row | {"where": where, "bar": BARS[dtype], "passes": passes}


def speed(
    file: Path, setting: Setting, shape: tuple, device: torch.device, repeats: int, environments: Path
) -> list[dict]:
    """Rows: forward and backward in bfloat16 of our step, of the naive one, and of the peer's, where it can be had."""
    write_setting(file, setting, *shape)
    loaded, clock = on(read_setting(file), device), Clock(device)
    frozen = on(read_setting(file), device)
    frozen.head.lm_head.weight.requires_grad_(False)

    def timed(which: Loaded, backend: str) -> float:
        which.head.zero_grad(set_to_none=True)
        begun = clock.now()
        step(which, backend, device)
        return clock.now() - begun

    runs = {"ours": (loaded, "auto"), "ours, LM head frozen": (frozen, "auto"), NAIVE: (loaded, NAIVE)}
    rows = []
    for name, (which, backend) in runs.items():
        try:
            timed(which, backend)  # compiles, and finds its kernels
        except Exception as error:  # out of memory, or as in `compared`
            rows.append({"name": name, "missing": said(error)})
    steps = {
        name: lambda _, run=run: timed(*run) for name, run in runs.items() if name not in {r["name"] for r in rows}
    }
    for name, seconds in in_turns(steps, repeats).items():
        rows.append({"name": name, "seconds": median(seconds), "tokens_per_second": setting.tokens / median(seconds)})
    torch.cuda.empty_cache()  # the peer is another process; where CUDA is not in use this does nothing
    return [*rows, peer_row(file, setting, device, repeats, environments)]


def peer_row(file: Path, setting: Setting, device: torch.device, repeats: int, environments: Path) -> dict:
    """speculators by its own Python; on CUDA with flex attention and its fused loss. Its LM head is frozen."""
    name, python = "speculators", Path(environments, "speculators", "bin", "python").absolute()
    if not python.is_file():
        return {"name": name, "missing": f"not installed: no {python}"}
    words = [str(python), str(PEERS / "speculators_timed.py"), str(file.absolute()), device.type, str(repeats)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=PEER_SECONDS)
    except subprocess.TimeoutExpired:
        return {"name": name, "missing": f"not through after {PEER_SECONDS} s"}
    if done.returncode:
        return {"name": name, "missing": last_line(done.stderr) or f"ended with {done.returncode}"}
    seconds = median(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])
    return {"name": name, "seconds": seconds, "tokens_per_second": setting.tokens / seconds}


def said(error: Exception) -> str:
    """Its kind, and its first line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:100]}"


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def table(title: str, rows: list[dict]) -> Table:
    """Every value of every row."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = Table(*(name.replace("_", " ") for name in names), title=title)
    for row in rows:
        shown.add_row(*(_cell(row.get(name)) for name in names))
    return shown


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return value if isinstance(value, str) else number(value, 5)


if __name__ == "__main__":
    begun = time.monotonic()
    check()
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
