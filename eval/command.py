"""What `python -m eval` does: loads a trained head with its verifier, measures, and writes the folder."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch
from omegaconf import OmegaConf
from rich.console import Console

from conf.cli import Outcome
from conf.errors import UserError
from eval.alpha import AlphaReport, evaluate
from eval.measure import EvalSettings
from eval.prompts import Prompt, load_prompts
from eval.report import write_plots, write_report
from eval.speculative.drafter import drafter_for
from eval.speculative.processors import Sampling
from eval.tables import alpha_tables
from models.export.native import WEIGHTS, StoredHead, head_folder, load_head, read_head
from models.verifier import Verifier

log = logging.getLogger(__name__)
# A head that learnt anything passes far more first drafts than this; one that reads the wrong states doesn't.
CHANCE, ENOUGH = 0.02, 100


def evaluate_run(cfg) -> Outcome:
    """cfg: conf.schema.EvalCommandConf. Writes alpha.json, and report.html with its plots, into a new folder.

    Raises UserError for an absent head, another verifier than the head's, or prompts that can't be read.
    """
    if cfg.run is None:
        raise UserError("give the run to evaluate: python -m eval run=outputs/NAME/TIME")
    run = Path(cfg.run)
    settings = settings_of(cfg.decode, seed=cfg.seed, threads=cfg.threads, temperature=cfg.temperature)
    given = {name: getattr(cfg, f"verifier_{name}") for name in ("source", "device", "revision", "trust_remote_code")}
    verifier = load_verifier(run, read_head(run), cfg.decode.dtype, given)
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


def load_verifier(run: Path, stored: StoredHead, dtype: str, given: dict | None = None) -> Verifier:
    """The verifier of a run's head: `given` settings first, then the run's config.yaml, then the name in the head.

    A revision and the trust in remote code are the source's: another source than the run's gets neither.
    """
    values = {"source": stored.verifier.name, "device": "auto", "revision": None, "trust_remote_code": False}
    file = head_folder(run).parent / "config.yaml"
    if file.is_file():
        saved = OmegaConf.to_container(OmegaConf.load(file)).get("verifier") or {}
        values |= {name: saved[name] for name in values if name in saved}
    given = {name: value for name, value in (given or {}).items() if value is not None}
    if given.get("source", values["source"]) != values["source"]:
        values |= {"revision": None, "trust_remote_code": False}
    return Verifier.load(dtype=dtype, aux_layers=stored.config.aux_layers, **(values | given))


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
    report = evaluate(
        verifier,
        lambda: drafter_for(head, settings.sampling),
        prompts,
        settings,
        progress,
        head=shown(run),
        head_hash=hashlib.sha256((head_folder(run) / WEIGHTS).read_bytes()).hexdigest(),
    )
    warn_at_chance(report, verifier, head)
    return report


def warn_at_chance(report: AlphaReport, verifier, head) -> None:
    """One line when hardly a first draft passed: then the head reads other states than it was trained on."""
    if not report.tested_by_depth or report.tested_by_depth[0] < ENOUGH:
        return
    share = report.accepted_by_depth[0] / report.tested_by_depth[0]
    if share < CHANCE:
        log.warning(
            "only %.1f %% of %d first drafts were accepted, no better than chance: check that the head was trained "
            "with layers %s, with the vocabulary map %s (%d of %d tokens) and for the verifier %s",
            100 * share, report.tested_by_depth[0], list(verifier.aux_layers), head.vocab.hash[:12], len(head.vocab),
            verifier.vocab_size, verifier.name,
        )  # fmt: skip


def shown(run: Path) -> str:
    """The folder as it is named in a report: relative where it lies under the working directory."""
    whole, here = run.resolve(), Path.cwd().resolve()
    return str(whole.relative_to(here)) if whole != here and whole.is_relative_to(here) else str(run)


def fresh_folder(run: Path) -> Path:
    """run/eval-TIME, with a number behind it where that is taken."""
    base = run / f"eval-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    taken = 1
    folder = base
    while folder.exists():
        taken += 1
        folder = base.with_name(f"{base.name}-{taken}")
    return folder
