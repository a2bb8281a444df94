"""A study: several arms trained on the same data, each in its own folder of the run, then measured side by side."""

from __future__ import annotations

import gc
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import lightning.pytorch as pl

from conf.cli import Outcome, load
from conf.errors import UserError
from conf.explain import mistake
from conf.schema import StudyConf, TrainConf
from conf.terminal import TextConsole
from data.prepare import excluding
from eval.command import settings_of
from eval.exposure import measure_heads
from eval.prompts import load_prompts
from eval.study import ArmRun, last_accuracy, study_record, terminal_tables, write_study
from models import heads
from models.export.native import load_head
from models.verifier import Verifier
from train import finish
from train import ledger as ledgers
from train.build import draft_steps
from train.checkpoints import begun
from train.checks import EAGLE, check
from train.resolve import CONFIG, resumed_config, write_config
from train.schedule import training_minutes

if TYPE_CHECKING:
    from train.main import Job

log = logging.getLogger(__name__)

SHARED = "arms share everything but head, objective and optim"
CHANGEABLE = ("head", "objective", "optim")


@dataclass(frozen=True)
class Run:
    """One arm with one seed. cfg.study: the study's until the arm's own limits are in cfg, then empty."""

    arm: str
    cfg: TrainConf
    folder: Path

    @property
    def finished(self) -> bool:
        return (self.folder / "provenance.json").is_file()

    @property
    def cost(self) -> int:
        """Of a step, by guess: its draft steps, and twice of that where the verifier reads the head's drafts too."""
        return (1 + draft_steps(self.cfg.head)) * (2 if self.cfg.objective.tokens == "own" else 1)


def runs_of(cfg: TrainConf, folder: Path, words: Sequence[str]) -> list[Run]:
    """Every arm with every seed, checked before anything is loaded; none without a study.

    words: the command line's overrides, to which an arm adds its own. A resumed study's arms have their own settings in
    their folders. Raises UserError that names the arm.
    """
    study = cfg.study
    if not study.arms:
        return []
    if study.equal not in ("steps", "minutes"):
        raise UserError(f"study.equal must be steps or minutes, found {study.equal}")
    if not study.seeds or len(set(study.seeds)) < len(study.seeds):
        raise UserError(f"study.seeds must be different numbers, one or more, found {study.seeds}")
    if cfg.decode.temperature:
        raise UserError("a study compares greedy decoding: leave decode.temperature at 0")
    runs = []
    for arm, extra in study.arms.items():
        if not re.fullmatch(r"\w[\w.-]*", arm):
            raise UserError(f"a study's arm names a folder: expected letters, digits, _ . -, found {arm!r}")
        try:
            own = None if cfg.resume else arm_settings(cfg, [*words], extra)
            for seed in study.seeds:
                place = folder / (arm if len(study.seeds) == 1 else f"{arm}-seed{seed}")
                one = replace(own, seed=seed, name=f"{cfg.name}/{folder.name}") if own else _stored(place, words)
                check(one)
                runs.append(Run(arm, one, place))
        except UserError as error:
            raise UserError(f"study arm {arm}: {error}") from None
    return runs


def arm_settings(cfg: TrainConf, words: list[str], extra: Sequence[str]) -> TrainConf:
    """The study's settings with an arm's own on top. UserError where they touch what arms must share."""
    if line := mistake("train", list(extra)):
        raise UserError(line)
    own = load("train", [*words, *extra])
    own.data = excluding(own.data, own.evaluation.prompts)  # as the job's are
    for item in fields(cfg):
        if item.name not in CHANGEABLE and getattr(own, item.name) != getattr(cfg, item.name):
            raise UserError(f"{SHARED}, found another {item.name}")
    if own.head.name not in EAGLE:
        raise UserError(f"expected a head that reads its own output, {' or '.join(EAGLE)}, found {own.head.name}")
    layers = [heads.captured_layers(one.head.name, one.verifier.aux_layers) for one in (cfg, own)]
    if layers[0] != layers[1]:
        raise UserError(f"{SHARED}, found head {own.head.name}, which reads other states than {cfg.head.name}")
    return own


def _stored(folder: Path, words: Sequence[str]) -> TrainConf:
    """The settings that an arm was begun with."""
    if not (folder / CONFIG).is_file():
        raise UserError(f"expected its settings in {folder / CONFIG}, found none: start the study anew")
    return resumed_config(folder, list(words))


def study_rows(cfg: TrainConf) -> list[tuple[str, str]]:
    """What the plan says of a study beside its run; nothing without one."""
    study = cfg.study
    if not study.arms:
        return []
    arms = "; ".join(f"{name}: {' '.join(extra) or 'as above'}" for name, extra in study.arms.items())
    clock = any((cfg.trainer.minutes, cfg.minutes))
    split = ", all for the steps of the dearest" if study.equal == "steps" else ", equal minutes, so not equal steps"
    seeds = f" x {len(study.seeds)} seeds" if len(study.seeds) > 1 else ""
    return [("study", f"{len(study.arms)} arms{seeds}, one after another{split if clock else ''}. {arms}")]


def begin(runs: Sequence[Run]) -> None:
    """Leaves every arm's settings in its folder, where `resume` finds them; those of a finished one stay."""
    for run in runs:
        if run.finished:
            continue
        run.folder.mkdir(parents=True, exist_ok=True)
        write_config(run.cfg, run.folder)


def train_arms(job: Job, runs: Sequence[Run], train_head: Callable[[Job], dict]) -> dict:
    """Trains every arm that is not finished, the dearest first; returns what the study's provenance.json is to hold.

    train_head: trains and saves the head of one job. With study.equal=steps every arm takes the steps of the first,
    whose clock is its share of the job's minutes.
    """
    cfg, records, steps = job.cfg, {}, None
    runs = _with_clocks(job, sorted(runs, key=lambda run: -run.cost))
    for run in runs:
        if run.finished:
            records[run.folder.name] = json.loads((run.folder / "provenance.json").read_text())
            log.info(f"{run.folder.name}: trained already")
        else:
            own = run.cfg
            if steps and cfg.study.equal == "steps":
                trainer = replace(own.trainer, max_steps=steps, minutes=None, epochs=None)
                own = replace(own, trainer=trainer)
            if job.rank == 0:
                begin([replace(run, cfg=own)])
            log.info(f"{run.folder.name}: K = {draft_steps(own.head)}, {' '.join(cfg.study.arms[run.arm])}")
            pl.seed_everything(own.seed, verbose=False)
            saved = begun(run.folder, resume=bool(own.resume))
            records[run.folder.name] = train_head(replace(job, cfg=own, folder=run.folder, saved=saved))
            if job.rank == 0:
                ledgers.write(run.folder, records[run.folder.name])
            gc.collect()  # the arm's optimizer hangs in Lightning's circles
        steps = steps or records[run.folder.name]["training"]["steps"]
    record = next(iter(records.values()))
    training = {name: one["training"] for name, one in records.items()}
    return record | {"seed": cfg.seed, "training": training, "seconds": job.ledger.rounded()}


def _with_clocks(job: Job, runs: list[Run]) -> list[Run]:
    """The job's minutes dealt out: by cost where steps are to be equal, else evenly. A resumed study's are already."""
    cfg = job.cfg
    if not runs[0].cfg.study.arms:
        return runs
    whole = training_minutes(cfg.trainer.minutes, cfg.minutes, job.ledger.spent / 60, cfg.evaluation.minutes)
    costs = [run.cost if cfg.study.equal == "steps" else 1 for run in runs]
    dealt = []
    for run, cost in zip(runs, costs, strict=True):
        trainer = replace(run.cfg.trainer, minutes=whole and whole * cost / sum(costs))
        dealt.append(replace(run, cfg=replace(run.cfg, study=StudyConf(), minutes=None, trainer=trainer)))
    if job.rank == 0:
        begin(dealt)
    return dealt


def finish_study(job: Job, runs: Sequence[Run], verifier: Verifier | None, record: dict) -> Outcome:
    """Measures every head on the same prompts and writes the study.

    verifier: in decode.dtype; None has it loaded in that dtype.
    """
    cfg, folder, ledger = job.cfg, job.folder, job.ledger
    with ledger.phase("evaluate"):
        if verifier is None:
            gc.collect()  # the one in another dtype still hangs in Lightning's circles
            verifier = finish.load_verifier(cfg, cfg.decode.dtype, record["machine"]["device"])
        prompts = load_prompts(verifier, cfg.evaluation.prompts, cfg.evaluation.limit)
        settings = settings_of(cfg.decode, seed=cfg.seed, threads=cfg.threads)
        trained = {run.folder.name: load_head(run.folder, verifier, verifier.dtype) for run in runs}
        measured = measure_heads(verifier, trained, prompts, settings)
    record["seconds"] = ledger.rounded()
    ledgers.write(folder, record)
    arm_runs = [
        ArmRun(
            run.arm,
            run.cfg.seed,
            *measured[run.folder.name],
            trained=record["training"][run.folder.name],
            training_accuracy=last_accuracy(run.folder / "metrics.csv"),
        )
        for run in runs
    ]
    values = study_record(cfg.study.arms, arm_runs, settings.depth, record)
    path = write_study(values, folder, plots=cfg.evaluation.plots, page=cfg.evaluation.report)
    console = TextConsole(stderr=cfg.json)
    console.print(terminal_tables(values))
    phases = ", ".join(f"{name} {finish.minutes(seconds)}" for name, seconds in ledger.seconds.items())
    console.print(f"time: {phases}; {finish.minutes(sum(ledger.seconds.values()))} in all")
    console.print(f"run: {folder}")
    return Outcome(path, values | {"run": str(folder), "study_json": str(folder / "study.json")})
