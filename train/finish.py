"""After training: evaluate, export, provenance, report, and the closing table."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import torch
from rich.table import Table

from conf.cli import Outcome
from conf.schema import TrainConf
from conf.terminal import TextConsole
from eval import command
from eval.alpha import AlphaReport
from eval.command import candidate_of, settings_of
from eval.prompts import load_prompts
from eval.report import write_plots, write_report
from eval.tables import alpha_tables, number
from models.export.formats import exported
from models.export.native import load_head, read_head
from models.heads import captured_layers
from models.verifier import Verifier
from train import ledger as ledgers
from train.ledger import Ledger

log = logging.getLogger(__name__)


def finish(cfg: TrainConf, folder: Path, verifier: Verifier | None, record: dict, ledger: Ledger) -> Outcome:
    """Everything a run folder holds beside the checkpoints. `head/` is written already.

    verifier: in decode.dtype; None has it loaded in that dtype.  record: what provenance.json is to hold.
    """
    with ledger.phase("export"):
        export = exported(read_head(folder), folder / "export")
    ledgers.write(folder, record)
    if not cfg.verifier.whole:
        log.info(f"not evaluated, for the verifier has no layers here: python -m eval run={folder}")
        record["seconds"] = ledger.rounded()
        ledgers.write(folder, record)
        values = {"run": str(folder), "head_folder": str(folder / "head"), "export": str(export) if export else None}
        return Outcome(folder / "head", values | {"seconds": ledger.rounded(), "trained": record["training"]})
    with ledger.phase("evaluate"):
        if verifier is None:
            gc.collect()  # the one in another dtype still hangs in Lightning's circles
            verifier = load_verifier(cfg, cfg.decode.dtype, record["machine"]["device"])
        report = measure(cfg, folder, verifier)
        alpha = report.write(folder / "alpha.json")
    record["seconds"] = ledger.rounded()
    ledgers.write(folder, record)
    page = alpha
    if cfg.evaluation.report:
        page = write_report(folder, folder)
    elif cfg.evaluation.plots:
        write_plots(folder, folder)
    console = TextConsole(stderr=cfg.json)
    console.print(alpha_tables(report.to_dict()))
    paths = {"head": folder / "head", **({"export": export} if export else {}), "report": page}
    console.print(closing_table(cfg, report, record, ledger, paths))
    values = report.to_dict() | {"run": str(folder), "head_folder": str(folder / "head")}
    values["export"] = str(export) if export else None
    return Outcome(page, values | {"seconds": ledger.rounded(), "trained": record["training"]})


def load_verifier(cfg: TrainConf, dtype: str, device: torch.device | str) -> Verifier:
    names = ("trust_remote_code", "revision", "device_map", "max_memory", "whole")
    options = {name: getattr(cfg.verifier, name) for name in names}
    options["aux_layers"] = captured_layers(cfg.head.name, cfg.verifier.aux_layers)
    return Verifier.load(cfg.verifier.source, dtype=dtype, device=str(device), **options)


def measure(cfg: TrainConf, folder: Path, verifier: Verifier) -> AlphaReport:
    """The saved head, as it lies on disk, on the named suites: nothing that the verifier wrote is among them."""
    settings = settings_of(cfg.decode, seed=cfg.seed, threads=cfg.threads)
    head = load_head(folder, verifier, verifier.dtype)
    prompts = load_prompts(verifier, cfg.evaluation.prompts, cfg.evaluation.limit)
    return command.measure(verifier, candidate_of(head, folder), settings, prompts, cfg.trainer.progress)


def closing_table(cfg: TrainConf, report: AlphaReport, record: dict, ledger: Ledger, paths: dict[str, Path]) -> Table:
    """What one wants to know at the end: acceptance, speed, time by phase, and where things lie."""
    trained = record["training"]
    shape = f"K = {trained['ttt_steps']}, R = {record['draft_vocabulary']['size']:,}"
    table = Table(title=cfg.name, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path that is cut off is no use
    table.add_row("n-alpha by depth", "  ".join(number(value) for value in report.alpha_by_depth))
    table.add_row("tau", f"{number(report.tau)} of at most {report.depth + 1} tokens per verify call")
    table.add_row("speed-up", f"{number(report.speedup, 2)} in {report.dtype}, {report.threads} threads")
    identical = {True: "yes", False: "NO: see differences in alpha.json", None: "not asked"}
    table.add_row("same text as the verifier alone", identical[report.identical_to_baseline])
    table.add_row("decoding", f"a chain of {report.depth} at temperature {cfg.decode.temperature:g}")
    table.add_row("head trained", f"{trained['steps']:,} steps, {trained['tokens']:,} tokens; {shape}")
    phases = ", ".join(f"{name} {minutes(seconds)}" for name, seconds in ledger.seconds.items())
    table.add_row("time", f"{phases}; {minutes(sum(ledger.seconds.values()))} in all")
    for name, path in paths.items():
        table.add_row(name, str(path))
    return table


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
