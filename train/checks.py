"""What can be known to be wrong before anything is loaded: every check of a run's settings that needs no verifier."""

from __future__ import annotations

from dataclasses import fields
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import get_args

from lightning.fabric.connector import _PRECISION_INPUT_STR, _PRECISION_INPUT_STR_ALIAS  # Lightning has no public list
from lightning.pytorch.strategies import StrategyRegistry

from conf.errors import UserError
from conf.schema import HeadConf, TrainConf
from data.prepare import conversion, needs_verifier
from data.quantize import STORE_DTYPES
from data.sources import sources_of
from data.suites import read_suite, suite_names
from eval.command import settings_of
from eval.prompts import spaced
from models import heads
from models.heads.eagle1 import START
from models.loading import DTYPES
from train.build import STARTS, SWITCHES, objective_of
from train.fit import device_count

PRECISIONS = [get_args(names) for names in (_PRECISION_INPUT_STR, _PRECISION_INPUT_STR_ALIAS)]
NAMES = {
    "head.name": tuple(heads.KINDS),
    "head.start_lm_head": ("verifier", "random"),
    "data.supervised": ("answers", "dialogue"),
    "optim.name": ("adamw", "muon"),
    "trainer.accelerator": ("auto", "cpu", "gpu", "cuda"),
    "trainer.nonfinite": ("stop", "skip"),
    "trainer.precision": ("auto", *chain(*PRECISIONS)),
    "trainer.strategy": ("auto", *StrategyRegistry.available_strategies()),
    "data.store_dtype": ("auto", *STORE_DTYPES),
    "decode.dtype": tuple(DTYPES),
    "verifier.dtype": ("auto", *DTYPES),
}
POSITIVE = ("head.ttt_steps", "head.heads", "head.blocks", "head.layers")
POSITIVE += ("trainer.accumulate", "trainer.tokens_per_step", "trainer.log_every", "trainer.checkpoints")
POSITIVE += ("data.concurrency", "trainer.num_nodes")
NOT_NEGATIVE = ("minutes", "evaluation.minutes", "optim.lr", "optim.matrix_lr", "optim.eps", "optim.weight_decay")
NOT_NEGATIVE += ("optim.clip",)
NOT_NEGATIVE += tuple(f"trainer.{name}" for name in ("max_steps", "minutes", "epochs"))
NOT_NEGATIVE += tuple(f"trainer.{name}" for name in ("validate_every", "validate_prompts", "checkpoint_every"))
SHARES = ("optim.warmup_ratio", "optim.final_lr_ratio", "optim.momentum")
# Settings that not every kind of head has, and whose they are; the budgets' head.ttt_steps is left out.
EAGLE = ("eagle1", "eagle3")
OWNERS = {f"objective.{name}": EAGLE for name in ("feature_weight", "survival", "tokens")}
OWNERS |= {"objective.noise": (*EAGLE, "medusa")}
OWNERS |= {
    f"head.{item.name}": kinds
    for item in fields(HeadConf)
    if (kinds := tuple(kind for kind, switches in SWITCHES.items() if item.name in switches))
}


def check(cfg: TrainConf) -> None:
    """Raises UserError, one line, for the first setting that cannot work."""
    if cfg.resume == "":
        raise UserError("expected resume= to name a run folder, found nothing: leave it out for a new run")
    for name, allowed in NAMES.items():
        if (value := _setting(cfg, name)) not in allowed:
            raise UserError(f"{name} must be {' or '.join(allowed)}, found {value}")
    for name in POSITIVE:
        if (value := _setting(cfg, name)) < 1:
            raise UserError(f"{name} must be 1 or more, found {value}")
    for name in NOT_NEGATIVE:
        if (value := _setting(cfg, name)) is not None and not value >= 0:
            raise UserError(f"{name} must be 0 or more, found {value}")
    for name in SHARES:
        if not 0 <= (value := _setting(cfg, name)) <= 1:
            raise UserError(f"{name} must lie in 0..1, found {value}")
    if len(cfg.optim.betas) != 2 or not all(0 <= beta < 1 for beta in cfg.optim.betas):
        raise UserError(f"optim.betas must be two numbers from 0 to below 1, found {cfg.optim.betas}")
    if not 0 <= cfg.seed < 1 << 32:
        raise UserError(f"seed must lie in 0..{(1 << 32) - 1}, found {cfg.seed}")
    if cfg.trainer.tflops is not None and not cfg.trainer.tflops > 0:
        raise UserError(
            f"trainer.tflops is a device's rate in 1e12 a second: expected above 0, found {cfg.trainer.tflops}"
        )
    if cfg.head.start_lm_head == "random" and not cfg.head.train_lm_head:
        raise UserError("a random LM head must be trained: head.train_lm_head=true, or head.start_lm_head=verifier")
    check_head(cfg)
    check_verifier(cfg)
    check_end(cfg)
    needs_verifier(cfg.data)
    conversion(cfg.data)
    if cfg.data.path is not None:
        sources_of(cfg.data.path)
    settings_of(cfg.decode, seed=cfg.seed, threads=cfg.threads)
    for suite in suites(cfg):
        spaced(read_suite(suite), cfg.evaluation.limit)


def check_head(cfg: TrainConf) -> None:
    """What a kind of head can't do, settings of another kind, and a start that is not there.

    A resumed run needs no start: its checkpoint holds all that it had from there.
    """
    kind = cfg.head.name
    if not (cfg.resume or cfg.head.start in STARTS or Path(cfg.head.start).expanduser().is_dir()):
        raise UserError(f"head.start must be verifier, random, or a folder that holds a head, found {cfg.head.start}")
    if kind in ("eagle1", "medusa") and cfg.verifier.aux_layers not in (None, [-1]):
        raise UserError(f"head={kind} reads the last hidden state alone: leave verifier.aux_layers unset")
    if kind == "eagle1" and cfg.head.draft_vocab_size is not None:
        raise UserError("head=eagle1 drafts with the verifier's own LM head: leave head.draft_vocab_size unset")
    if kind == "eagle1" and cfg.head.start == "verifier":
        raise UserError(START)
    plain = TrainConf()
    for name, kinds in OWNERS.items():
        found, default = _setting(cfg, name), _setting(plain, name)
        if kind not in kinds and found != default:
            raise UserError(
                f"{name} is for {' and '.join(kinds)} heads: expected {default} for {kind}, found {found}; "
                "leave it out, or choose another head"
            )
    objective_of(cfg)


def check_verifier(cfg: TrainConf) -> None:
    """Where its layers lie, and what can't be done without them."""
    verifier, ranks = cfg.verifier, device_count(cfg.trainer) * cfg.trainer.num_nodes
    if verifier.device_map is None and verifier.max_memory is not None:
        raise UserError("verifier.max_memory says how verifier.device_map fills devices: set verifier.device_map=auto")
    if verifier.device_map is not None and verifier.device != "auto":
        raise UserError("verifier.device_map places the layers: leave verifier.device unset")
    if verifier.device_map is not None and ranks > 1:
        raise UserError(
            f"a verifier with a device_map serves one process, found {ranks} ranks: capture its states first "
            "(python -m data task=capture), then train with verifier.whole=false and without device_map"
        )
    if verifier.whole:
        return
    own = cfg.objective.tokens == "own"
    if not cfg.data.store or cfg.trainer.validate_every or cfg.study.arms or own or verifier.device_map is not None:
        raise UserError(
            "without the verifier's layers (verifier.whole=false) a head is trained from stored states, not decoded: "
            "set data.store=true and trainer.validate_every=0, without study, device_map or objective.tokens=own"
        )


def check_end(cfg: TrainConf) -> None:
    """A run must end."""
    ends = [cfg.trainer.max_steps, cfg.trainer.epochs, cfg.trainer.minutes, cfg.minutes]
    if not any(ends):
        raise UserError("the run has no end: give trainer.max_steps, trainer.epochs or trainer.minutes, or a budget")


def suites(cfg: TrainConf) -> list[str]:
    """evaluation.prompts as a list; UserError when it is empty."""
    names = suite_names(cfg.evaluation.prompts, "evaluation.prompts")
    if not names:
        raise UserError("no prompts named: give evaluation.prompts=[humaneval,eyrie], or JSONL files")
    return names


def _setting(cfg: TrainConf, name: str):
    return attrgetter(name)(cfg)
