"""What `python -m eval` does: loads a trained head with its verifier, measures, and writes the folder."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch
from omegaconf import OmegaConf

from conf.cli import Outcome
from conf.errors import UserError
from conf.parse import yaml_file
from conf.terminal import TextConsole
from eval.alpha import AlphaReport, evaluate
from eval.measure import EvalSettings
from eval.prompts import Prompt, load_prompts
from eval.report import write_plots, write_report
from eval.speculative.copying import Lookahead, NoDraft, PromptLookup
from eval.speculative.drafter import Drafter
from eval.speculative.processors import Sampling
from eval.speculative.scorers import ModelScorer, TreeDrafter, drafter_for
from eval.speculative.shapes import FixedTree, GrowingShape, Shape
from eval.tables import alpha_tables
from models.draft_model import DraftModel
from models.export.native import WEIGHTS, StoredHead, attach, head_folder, load_head, read_head
from models.export.warm import chance_warning, is_published, layers_wanted, named_verifier, read_any, weights_file
from models.verifier import Verifier

log = logging.getLogger(__name__)
WITHOUT_MODEL: dict[str, Callable[[EvalSettings], Drafter]] = {
    "none": lambda settings: NoDraft(),
    "prompt_lookup": lambda settings: PromptLookup(settings.depth),
    "lookahead": lambda settings: Lookahead(),
}


def evaluate_run(cfg) -> Outcome:
    """cfg: conf.schema.EvalCommandConf. Writes alpha.json, and report.html with its plots, into a new folder; with
    `serve`, serve.json (eval.serving.online).

    Raises UserError for an absent head, another verifier than the head's, or prompts that can't be read.
    """
    if cfg.serve:
        from eval.serving.online import serve  # it imports this module

        return serve(cfg)
    if cfg.replay and cfg.draft == "lookahead":
        raise UserError("Lookahead reads the verifier's calls, which a replay leaves out: leave replay out")
    settings = settings_of(cfg.decode, seed=cfg.seed, threads=cfg.threads, temperature=cfg.temperature)
    settings = replace(settings, replay=cfg.replay)
    verifier, candidate = load_candidate(cfg)
    run = Path(cfg.run or cfg.draft).expanduser()
    prompts = load_prompts(verifier, cfg.prompts, cfg.limit)
    folder = Path(cfg.out) if cfg.out else fresh_folder(run if cfg.run else Path("outputs") / "draft")
    folder.mkdir(parents=True, exist_ok=True)  # what can't be written there is not measured first
    try:
        report = measure(verifier, candidate, settings, prompts)
    except BaseException:
        remove_empty(folder)
        raise
    alpha = report.write(folder / "alpha.json")
    page = None
    if cfg.report:
        page = write_report(folder, run)
    elif cfg.plots:
        write_plots(folder, run)
    TextConsole(stderr=cfg.json).print(alpha_tables(report.to_dict()))
    if report.skipped:
        log.info("skipped %d prompts that leave no room for an answer: %s", len(report.skipped), report.skipped[:5])
    return Outcome(page or alpha, report.to_dict() | {"alpha_json": str(alpha)})


@dataclass(frozen=True)
class Candidate:
    """What is measured: a head (None for a model that was not trained here), its drafter, and how a report names it."""

    head: torch.nn.Module | None
    drafter: Callable[[EvalSettings], Drafter]
    name: str
    hash: str | None


def load_candidate(cfg) -> tuple[Verifier, Candidate]:
    """The verifier and what drafts for it: a run's head, a published one, or with `draft` any smaller model.

    cfg: conf.schema.CandidateConf.
    """
    if bool(cfg.run) == bool(cfg.draft):
        raise UserError("give the run to evaluate: run=outputs/NAME/TIME (or draft=MODEL, without one)")
    run = Path(cfg.run or cfg.draft).expanduser()
    given = {name: getattr(cfg, f"verifier_{name}") for name in ("source", "device", "revision", "trust_remote_code")}
    if cfg.run and not is_published(run):
        verifier = load_verifier(run, read_head(run), cfg.decode.dtype, given)
        return verifier, candidate_of(load_head(run, verifier, verifier.dtype), run)
    if cfg.run and given["source"] is None:
        given["source"] = named_verifier(run)
    if given["source"] is None:
        raise UserError(f"{run} names no verifier: say which verifier it drafts for, verifier_source=MODEL")
    options = {name: value for name, value in given.items() if value is not None}
    if cfg.draft:
        verifier = Verifier.load(dtype=cfg.decode.dtype, aux_layers=[], **options)
        if cfg.draft in WITHOUT_MODEL:
            return verifier, Candidate(None, WITHOUT_MODEL[cfg.draft], cfg.draft, None)
        model = Verifier.load(cfg.draft, dtype=cfg.decode.dtype, device=str(verifier.device), aux_layers=[])
        draft = DraftModel(model, verifier)

        def drafter(settings: EvalSettings) -> Drafter:
            return TreeDrafter(ModelScorer(draft, verifier.device), settings.shape, settings.sampling, settings.points)

        return verifier, Candidate(None, drafter, cfg.draft, model.weights_hash)
    verifier = Verifier.load(dtype=cfg.decode.dtype, aux_layers=layers_wanted(run), **options)
    head = attach(read_any(run, verifier), verifier, verifier.dtype)
    return verifier, candidate_of(head, run, weights_file(run))


def candidate_of(head: torch.nn.Module, run: Path, weights: Path | None = None) -> Candidate:
    """A head as it was saved in `run`; weights: its file, the native one when not given."""
    digest = hashlib.sha256((weights or head_folder(run) / WEIGHTS).read_bytes()).hexdigest()
    return Candidate(head, lambda s: drafter_for(head, s.shape, s.sampling, s.points), shown(run), digest)


def load_verifier(run: Path, stored: StoredHead, dtype: str, given: dict | None = None) -> Verifier:
    """The verifier of a run's head: `given` settings first, then the run's config.yaml, then the name in the head.

    Trust in remote code is given on the command line alone, for a run folder may come from anywhere; a revision is the
    source's: another source than the run's has none.
    """
    values = {"source": stored.verifier.name, "device": "auto", "revision": None, "trust_remote_code": False}
    values |= {"device_map": None, "max_memory": None}
    file = head_folder(run).parent / "config.yaml"
    if file.is_file():
        saved = yaml_file(file).get("verifier")
        saved = saved if isinstance(saved, dict) else {}
        values |= {name: saved[name] for name in values if name in saved and name != "trust_remote_code"}
    given = {name: value for name, value in (given or {}).items() if value is not None}
    if given.get("source", values["source"]) != values["source"]:
        values["revision"] = None
    return Verifier.load(dtype=dtype, aux_layers=list(stored.config.aux_layers), **(values | given))


def settings_of(decode, seed: int, threads: int | None = None, temperature: float | None = None) -> EvalSettings:
    """`EvalSettings` of a conf.schema.DecodeConf; `temperature` wins over its own."""
    return EvalSettings(
        shape=shape_of(decode),
        points=decode.points,
        batch=decode.batch,
        sampling=Sampling(decode.temperature if temperature is None else temperature, decode.top_k, decode.top_p),
        max_new_tokens=decode.max_new_tokens,
        seed=seed,
        threads=threads,
    )


def shape_of(decode) -> Shape:
    """The drafts of a conf.schema.DecodeConf. Raises UserError for a mode or a size that there isn't."""
    for name in ("depth", "branch"):
        if getattr(decode, name) < 1:
            raise UserError(f"decode.{name} must be 1 or more, found {getattr(decode, name)}")
    if decode.total_tokens < 2:
        raise UserError(
            f"decode.total_tokens must be 2 or more (one is the pending token), found {decode.total_tokens}"
        )
    if not 0 <= decode.min_confidence < 1:
        raise UserError(f"decode.min_confidence must lie in [0, 1), found {decode.min_confidence}")
    if decode.mode == "chain":
        if decode.shape is not None:
            raise UserError(f"decode.shape is of trees, found {decode.shape} with a chain: add decode=tree")
        return FixedTree.chain(decode.depth, decode.min_confidence)
    if decode.mode != "tree":
        raise UserError(f"decode must be chain or tree, found {decode.mode}")
    if decode.shape is not None:
        spec = OmegaConf.to_container(decode.shape) if OmegaConf.is_config(decode.shape) else decode.shape
        return FixedTree.of(spec, decode.min_confidence)
    return GrowingShape(decode.depth, decode.branch, decode.total_tokens, decode.min_confidence)


def measure(
    verifier, candidate: Candidate, settings: EvalSettings, prompts: Sequence[Prompt], progress: bool = True
) -> AlphaReport:
    """Acceptance, tau and speed of a candidate on these prompts."""
    report = evaluate(
        verifier,
        lambda: candidate.drafter(settings),
        prompts,
        settings,
        progress,
        head=candidate.name,
        head_hash=candidate.hash,
        module=candidate.head,
    )
    if candidate.head is not None:
        warn_at_chance(report, verifier, candidate.head)
    return report


def warn_at_chance(report: AlphaReport, verifier, head) -> None:
    """One line when hardly a first draft passed: then the head reads other states than it was trained on."""
    tested = report.tested_by_depth[0] if report.tested_by_depth else 0
    if tested and (line := chance_warning(report.accepted_by_depth[0] / tested, tested, head, verifier)):
        log.warning(line)


def shown(run: Path) -> str:
    """The folder as it is named in a report: relative where it lies under the working directory."""
    whole, here = run.resolve(), Path.cwd().resolve()
    return str(whole.relative_to(here)) if whole != here and whole.is_relative_to(here) else str(run)


def remove_empty(folder: Path) -> None:
    """A folder that was made for what did not come about."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def fresh_folder(run: Path) -> Path:
    """run/eval-TIME, with a number behind it where that is taken."""
    base = run / f"eval-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    taken = 1
    folder = base
    while folder.exists():
        taken += 1
        folder = base.with_name(f"{base.name}-{taken}")
    return folder
