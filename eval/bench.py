"""Speed against rivals, measured in turns in one run, so that ratios mean something on a noisy machine.

python -m eval.bench decode [run=DIR]    one sequence, many sequences, and where the time of a round goes
python -m eval.bench train               EAGLE-3's training step beside our naive one and another trainer's, on the CPU
python -m eval.bench sweep               the same over tokens, answer fraction, K and draft vocabulary, one at a time
python -m eval.bench scaling             how the step's time and memory grow
python -m eval.bench profile             where the step's time goes
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import torch
from rich.table import Table

from conf.cli import Outcome, main
from conf.errors import UserError
from conf.terminal import TextConsole
from eval.bench_decode import bench_decode
from eval.bench_train import bench_profile, bench_scaling, bench_sweep, bench_train
from eval.measure import use_threads
from eval.tables import number

HEADINGS = {
    "tokens_per_second": "tok/s",
    "same_text": "same",
    "draft_ms": "draft",
    "verify_ms": "verify",
    "other_ms": "other ms",
}
TRAINING = {"train": bench_train, "sweep": bench_sweep, "scaling": bench_scaling, "profile": bench_profile}


def bench(cfg) -> Outcome:
    """cfg: conf.schema.BenchCommandConf. Writes a JSON file and prints its rows; of a training step a table as well."""
    if cfg.kind != "decode" and cfg.kind not in TRAINING:
        raise UserError(f"say what to measure: python -m eval.bench decode | {' | '.join(TRAINING)}; found {cfg.kind}")
    axes = [*cfg.batches, *(cfg.steps or ()), *(cfg.tokens or ()), *(cfg.vocabularies or ())]
    if min([cfg.repeats, cfg.max_new_tokens - 1, cfg.depth, cfg.draft_layers, cfg.documents, *axes]) < 1:
        raise UserError(
            "repeats, depth, draft_layers, documents, batches, tokens, steps and vocabularies must be 1 or more, "
            "max_new_tokens 2 or more"
        )
    path = Path(cfg.out) if cfg.out else Path("outputs", "bench", f"{cfg.kind}-{datetime.now():%Y-%m-%d_%H-%M-%S}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    console = TextConsole(stderr=cfg.json)
    with use_threads(cfg.threads) as threads:
        values = {"kind": cfg.kind, "threads": threads, "torch": torch.__version__, "repeats": cfg.repeats}
        if cfg.kind == "decode":
            verifier, rows = bench_decode(cfg)
            values |= {"verifier": verifier.name, "dtype": str(verifier.dtype).removeprefix("torch.")}
            values |= {"device": str(verifier.device), "rows": rows}
            console.print(as_table(values))
        else:
            values = TRAINING[cfg.kind](cfg, values, path, console)
    path.write_text(json.dumps(values, indent=1) + "\n")
    return Outcome(path, values)


def as_table(values: dict) -> Table:
    """Every number of every row; a dash where a row has none."""
    machine = f"{values['dtype']}, {values['threads']} threads, {values['device']}"
    table = Table(title=f"{values['kind']}: {values['verifier']}, {machine}, median of {values['repeats']}")
    names = list(dict.fromkeys(name for row in values["rows"] for name in row))
    for name in names:
        heading = HEADINGS.get(name, name.replace("_", " "))
        table.add_column(heading, justify="left" if name == "name" else "right", no_wrap=True)
    for row in values["rows"]:
        cells = [row.get(name) for name in names]
        table.add_row(*[cell if isinstance(cell, str) else number(cell, 2) for cell in cells])
    return table


def entry() -> None:
    """`decode ...` on the command line is short for `kind=decode ...`."""
    words = sys.argv[1:]
    if words and words[0].isidentifier():
        sys.argv[1:] = [f"kind={words[0]}", *words[1:]]
    main("bench")(bench)()


if __name__ == "__main__":
    entry()
