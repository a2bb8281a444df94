"""The whole job: data, states, head, training, evaluation, export, report."""

from __future__ import annotations

import logging
import os
import re
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from conf.cli import Outcome, main
from conf.errors import UserError
from conf.schema import TrainConf
from conf.terminal import TextConsole
from data.batches import OnlineStates, PackedLoader, require_same_documents
from data.prepare import Prepared, excluding, prepare
from data.store import StateStore
from eval.command import remove_empty, settings_of
from eval.prompts import document_prompts
from models.export.native import StoredHead, save_head
from models.loading import pick_device
from models.verifier import Verifier
from train import finish, study
from train.build import STARTS, build_head, draft_steps, objective_of
from train.callbacks import Bar, Validate, graceful
from train.checkpoints import KeepCheckpoints, Saved, begun, best, sole_run
from train.checks import check
from train.fit import device_count, fit, open_loggers, rank_lost
from train.ledger import Ledger, provenance, sessions
from train.module import HeadModule, StepSettings, check_verifier
from train.plan import plan_rows, show
from train.resolve import resumed_config, with_defaults, write_config
from train.schedule import Limits, training_minutes

log = logging.getLogger(__name__)

VALIDATION_TOKENS = 48  # of each held-out prompt, at most


@dataclass
class Job:
    """One run: its settings, its folder, its place among the ranks, the time it takes, and what it continues."""

    cfg: TrainConf
    folder: Path
    rank: int
    world: int
    ledger: Ledger
    saved: Saved | None = None

    def loggers(self):
        """Context: the loggers of rank 0, none elsewhere."""
        name = f"{self.cfg.name}/{self.folder.name}"
        if self.rank:
            return nullcontext([])
        step = self.saved.step if self.saved else 0
        return open_loggers(self.cfg.logger, self.folder, name, asdict(self.cfg), step)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


@main("train", multirun=True, resolve=with_defaults)
def train(cfg: TrainConf) -> Outcome | None:
    """python -m train: see the module."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        job = start(cfg, folder)
        cfg = job.cfg
        device = verifier_device(cfg)
        runs = study.runs_of(cfg, job.folder, list(HydraConfig.get().overrides.task))
        rows = [] if job.rank else plan_rows(cfg, device) + study.study_rows(cfg)
    except UserError:
        remove_empty(folder)
        raise
    if job.rank == 0:
        TextConsole(stderr=cfg.json).print(show(rows))
        if cfg.plan:
            remove_empty(folder)
            return Outcome(values={"plan": dict(rows)})
    with sole_run(job.folder, job.rank):
        how = f"continue with: python -m train resume={job.folder}"
        try:
            return work(job, runs, device)
        except KeyboardInterrupt as error:
            raise type(error)(how) from None
        except OSError as error:
            error.add_note(how)
            raise
        except RuntimeError as error:
            if not rank_lost(error):
                raise
            found = re.sub(r"^\[.*?\] ", "", str(error)).partition(". ")[0]
            raise UserError(f"another rank is gone ({found}): its own output may say why; {how}") from error


def work(job: Job, runs: list[study.Run], device: torch.device) -> Outcome | None:
    """From the verifier to the report. Started again after it was stopped anywhere, it does what is not done."""
    cfg = job.cfg
    if job.rank == 0:
        write_config(cfg, job.folder)
        study.begin(runs)
    with job.ledger.phase("load"):
        verifier = finish.load_verifier(cfg, cfg.verifier.dtype, device)
        if job.saved:
            check_verifier(job.saved.kept.get("verifier"), verifier)
    with job.ledger.phase("synthesise"):
        prepared = prepare(cfg.data, verifier, keep_states=cfg.data.store)
        if job.saved:
            require_same_documents(job.saved.kept["loader"], prepared.train, prepared.files)
    with job.ledger.phase("capture"):
        source = open_states(cfg, verifier, prepared)
    train_one = partial(train_head, verifier=verifier, prepared=prepared, source=source)
    record = study.train_arms(job, runs, train_one) if runs else train_one(job)
    if job.rank:
        return None
    same = verifier if str(verifier.dtype) == f"torch.{cfg.decode.dtype}" else None
    del verifier, prepared, source, train_one  # one in another dtype may need their memory
    if runs:
        return study.finish_study(job, runs, same, record)
    return finish.finish(cfg, job.folder, same, record, job.ledger)


def train_head(job: Job, verifier: Verifier, prepared: Prepared, source) -> dict:
    """Trains the job's head and saves it; returns what provenance.json is to hold."""
    cfg, module = job.cfg, build_module(job, verifier, prepared, source)
    with job.ledger.phase("train"):
        run_training(job, module, prepared)
    trained = {"steps": module.global_step, "seconds": round(module.elapsed, 1), "tokens": module.tokens * job.world}
    trained |= {"ttt_steps": draft_steps(cfg.head), "data_hash": prepared.content_hash, "skipped": module.skipped}
    trained |= {"best": best(job.checkpoints), "sessions": module.history["sessions"]}
    if job.rank == 0:
        save_head(job.folder / "head", StoredHead.of(module.head, verifier, trained))
    return provenance(cfg, verifier, prepared, module.head, trained, job.ledger)


def start(cfg: TrainConf, folder: Path) -> Job:
    """Ranks, threads, seed, and every check that needs no verifier; a resumed run gets its folder and settings."""
    hydra = HydraConfig.get()
    if cfg.resume:
        cfg = resumed_config(Path(cfg.resume), list(hydra.overrides.task))
        folder = Path(cfg.resume)
    cfg.data = excluding(cfg.data, cfg.evaluation.prompts)
    check(cfg)
    rank, world = place(cfg)
    if world > 1 and hydra.mode == RunMode.MULTIRUN:
        raise UserError("a sweep's jobs take one device each (trainer.devices=1): several would start the sweep anew")
    if rank:
        logging.disable(logging.INFO)
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    deterministic(cfg.trainer.deterministic)
    pl.seed_everything(cfg.seed, verbose=False)
    saved = None if cfg.study.arms else begun(folder, resume=bool(cfg.resume))
    return Job(cfg, folder, rank, world, Ledger(), saved)


def deterministic(only: bool) -> None:
    """Whether torch may use kernels whose bits differ from run to run. cuBLAS reads its part when CUDA starts."""
    if only:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(only)


def place(cfg: TrainConf) -> tuple[int, int]:
    """(rank, ranks) of this process, before there is a process group: data is prepared without one.

    From torchrun's or Slurm's environment, else what Lightning will start. HeadModule checks it against Lightning.
    """
    here = os.environ
    if "RANK" in here and "WORLD_SIZE" in here:
        return int(here["RANK"]), int(here["WORLD_SIZE"])
    devices = device_count(cfg.trainer)
    world = devices * cfg.trainer.num_nodes
    if int(here.get("SLURM_NTASKS", 1)) == world > 1:
        return int(here["SLURM_PROCID"]), world
    return int(here.get("NODE_RANK", 0)) * devices + int(here.get("LOCAL_RANK", 0)), world


def verifier_device(cfg: TrainConf) -> torch.device:
    """The verifier sits where this rank trains."""
    if cfg.verifier.device != "auto":
        return pick_device(cfg.verifier.device)
    if cfg.plan and cfg.trainer.tflops and cfg.trainer.accelerator in ("gpu", "cuda"):
        return torch.device("cuda")  # another machine's, which is planned for here
    if cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        if cfg.trainer.accelerator in ("gpu", "cuda"):
            raise UserError("trainer.accelerator asks for a GPU, found none: trainer=auto, or trainer.accelerator=cpu")
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def open_states(cfg: TrainConf, verifier: Verifier, prepared: Prepared) -> StateStore | OnlineStates:
    """The training documents' states: from disk, computed once, or from the verifier in every step."""
    if not cfg.data.store:
        return OnlineStates(verifier, prepared.train)
    store = StateStore.capture(verifier, prepared.train, dtype=cfg.data.store_dtype, kept=prepared.states)
    prepared.states.clear()  # they are on the disk now
    return store


def build_module(job: Job, verifier: Verifier, prepared: Prepared, source) -> HeadModule:
    """Head, loader and limits."""
    cfg = job.cfg
    head = build_head(cfg, verifier, prepared.train, job.saved and job.saved.path)
    loader = PackedLoader(source, cfg.trainer.tokens_per_step, cfg.seed, job.rank, job.world, prepared.files)
    windows = max(1, len(loader.plan(0)) // cfg.trainer.accumulate)
    limits = limits_of(job, windows)
    log.info(
        f"training: {len(prepared.train):,} documents, {windows:,} steps an epoch"
        + (f", {limits.steps:,} steps at most" if limits.steps else "")
        + (f"; {loader.dropped} documents longer than trainer.tokens_per_step are left out" if loader.dropped else "")
    )
    trainer = cfg.trainer
    guard = {"nonfinite": trainer.nonfinite, "reproducers": job.folder / "nonfinite"}
    settings = StepSettings(cfg.optim, limits, objective_of(cfg), trainer.accumulate, trainer.log_every, **guard)
    module = HeadModule(head, verifier, loader, settings, warm=cfg.head.start not in STARTS and not job.saved)
    module.history = {"asked": asked(cfg), "limits": asdict(limits)}
    module.history["sessions"] = sessions(job.saved, verifier.device, job.world)
    return module


def asked(cfg: TrainConf) -> list[float | None]:
    """What the settings say of the run's end."""
    return [cfg.trainer.max_steps, cfg.trainer.epochs, cfg.trainer.minutes]


def limits_of(job: Job, windows: int) -> Limits:
    """The run's end: trainer.max_steps, .epochs (of `windows` steps), and the clocks after the minutes of data.

    A resumed run keeps its ends unless it is given others; then the job's own clock, which began long ago, is out.
    """
    cfg, saved, spent = job.cfg, job.saved, job.ledger.spent / 60
    history = saved.values.get("history", {}) if saved else {}
    if history.get("asked") == asked(cfg):
        limits = Limits(**history["limits"])
        if limits.reached(saved.step, saved.kept["elapsed"]):
            log.info(f"trained already: {saved.step:,} steps; what comes after it is done again")
            return Limits(steps=saved.step)
        return limits
    trainer = cfg.trainer
    by_epochs = max(1, round(trainer.epochs * windows)) if trainer.epochs else None
    steps = min((bound for bound in (trainer.max_steps, by_epochs) if bound), default=None)
    whole = None if saved else cfg.minutes
    if not (steps or trainer.minutes or whole):
        raise UserError("the resumed run has no end: give trainer.max_steps, trainer.epochs or trainer.minutes")
    limit = training_minutes(trainer.minutes, whole, spent, cfg.evaluation.minutes)
    if whole is not None:
        kept = f"{cfg.evaluation.minutes:g} kept for the evaluation"
        log.info(f"training for {limit:.1f} min at most: of {whole:g} in all, {spent:.1f} are spent, {kept}")
    return Limits(steps, limit and 60 * limit)


def run_training(job: Job, module: HeadModule, prepared: Prepared) -> None:
    """Fit with checkpoints, validation and bar; Ctrl-C leaves a checkpoint."""
    cfg = job.cfg
    job.checkpoints.mkdir(parents=True, exist_ok=True)
    callbacks: list[pl.Callback] = []
    prompts = document_prompts(prepared.validation, cfg.trainer.validate_prompts or None)
    validate_every = cfg.trainer.validate_every if prompts else 0
    if validate_every:
        settings = settings_of(cfg.decode, seed=cfg.seed, temperature=0.0)
        # Short answers: the training clock runs on while the head is looked at.
        settings = replace(settings, baseline=False, max_new_tokens=min(VALIDATION_TOKENS, settings.max_new_tokens))
        callbacks.append(Validate(prompts, settings, validate_every))
    every, keep = cfg.trainer.checkpoint_every, cfg.trainer.checkpoints
    callbacks.append(KeepCheckpoints(job.checkpoints, every, keep, validate_every))
    if cfg.trainer.progress:
        callbacks.append(Bar())
    resume = job.saved and job.saved.path
    with job.loggers() as loggers, graceful(module) as stop:
        try:
            fit(module, cfg.trainer, [*callbacks, stop], loggers, resume, job.folder)
        except SystemExit:  # how Lightning ends on a second signal
            if not module.stop_wanted:
                raise
    if module.stop_wanted:
        raise stop.error
    log.info(f"trained {module.global_step:,} steps in {finish.minutes(module.elapsed)}")
