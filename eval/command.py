"""What `python -m eval` does: loads a trained head with its verifier, measures, and writes the folder."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console

from conf.cli import Outcome
from conf.errors import UserError
from eval.alpha import AlphaReport, evaluate
from eval.measure import EvalSettings
from eval.prompts import Prompt, load_prompts
from eval.report import write_plots, write_report
from eval.speculative.drafter import HeadDrafter
from eval.speculative.processors import Sampling
from eval.tables import alpha_tables
from models.export.native import WEIGHTS, head_folder, load_head, read_head
from models.verifier import Verifier

log = logging.getLogger(__name__)


def evaluate_run(cfg) -> Outcome:
    """cfg: conf.schema.EvalCommandConf. Writes alpha.json, and report.html with its plots, into a new folder.

    Raises UserError for an absent head, another verifier than the head's, or prompts that can't be read.
    """
    if cfg.run is None:
        raise UserError("give the run to evaluate: python -m eval run=outputs/NAME/TIME")
    run = Path(cfg.run)
    settings = settings_of(cfg.decode, seed=cfg.seed, threads=cfg.threads, temperature=cfg.temperature)
    stored = read_head(run)
    source = cfg.verifier_source or stored.verifier.name
    verifier = Verifier.load(source, dtype=cfg.decode.dtype, aux_layers=stored.config.aux_layers)
    head = load_head(run, verifier, verifier.dtype)
    report = measure_head(verifier, head, settings, load_prompts(verifier, cfg.prompts, cfg.limit), run)
    folder = Path(cfg.out) if cfg.out else fresh_folder(run)
    alpha = report.write(folder / "alpha.json")
    page = None
    if cfg.report:
        page = write_report(folder, run)
    elif cfg.plots:
        write_plots(folder, run)
    Console(stderr=cfg.json).print(alpha_tables(report.to_dict()))
    if report.skipped:
        log.info("skipped %d prompts that leave no room for an answer: %s", len(report.skipped), report.skipped[:5])
    return Outcome(page or alpha, report.to_dict() | {"alpha_json": str(alpha)})


def settings_of(decode, seed: int, threads: int | None = None, temperature: float | None = None) -> EvalSettings:
    """`EvalSettings` of a conf.schema.DecodeConf; `temperature` wins over its own."""
    return EvalSettings(
        depth=decode.depth,
        sampling=Sampling(decode.temperature if temperature is None else temperature, decode.top_k, decode.top_p),
        max_new_tokens=decode.max_new_tokens,
        seed=seed,
        threads=threads,
        mode=decode.mode,
    )


def measure_head(
    verifier,
    head: torch.nn.Module,
    settings: EvalSettings,
    prompts: Sequence[Prompt],
    run: Path,
    progress: bool = True,
) -> AlphaReport:
    """Measures a head; `run` holds it as it was saved, and gives it its name and hash in the report."""
    return evaluate(
        verifier,
        lambda: HeadDrafter(head, settings.sampling),
        prompts,
        settings,
        progress,
        head=str(run),
        head_hash=hashlib.sha256((head_folder(run) / WEIGHTS).read_bytes()).hexdigest(),
    )


def fresh_folder(run: Path) -> Path:
    """run/eval-TIME, with a number behind it where that is taken."""
    base = run / f"eval-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    taken = 1
    folder = base
    while folder.exists():
        taken += 1
        folder = base.with_name(f"{base.name}-{taken}")
    return folder
