"""Puts the Trainer together and runs it."""

from __future__ import annotations

import csv
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import DistError

from conf.disk import sync, writing
from conf.errors import UserError
from conf.schema import LoggerConf, TrainerConf
from data.files import replacing
from models.loading import native_dtype
from train.checkpoints import WholeFiles
from train.module import HeadModule

log = logging.getLogger(__name__)

# Lightning's advice on things that are so on purpose.
EXPECTED = (
    r".*does not have many workers.*",
    r".*GPU available but not used.*",
    r".*`broadcast_buffers` is deprecated.*",  # its successor is not in every torch that we allow
    r".*treespec, LeafSpec.* is deprecated.*",
)


def fit(
    module: HeadModule,
    cfg: TrainerConf,
    callbacks: Sequence[pl.Callback],
    loggers: Sequence[Logger] = (),
    checkpoint: Path | None = None,
    folder: Path | None = None,
) -> pl.Trainer:
    """Train until the module's limits, from `checkpoint` when given. Returns the finished Trainer."""
    device = module.verifier.device.type  # the head trains where its verifier is, whatever else there may be
    with warnings.catch_warnings():
        for message in EXPECTED:
            warnings.filterwarnings("ignore", message=message)
        trainer = pl.Trainer(
            accelerator="cpu" if device == "cpu" else cfg.accelerator,
            devices=cfg.devices,
            num_nodes=cfg.num_nodes,
            strategy=strategy(cfg),
            precision=precision(cfg, device),
            max_steps=module.settings.limits.steps or -1,
            max_epochs=-1,
            callbacks=list(callbacks),
            plugins=[WholeFiles()],
            deterministic=cfg.deterministic,
            logger=list(loggers),
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
    return trainer


def device_count(cfg: TrainerConf) -> int:
    """Devices of this machine that the settings ask for."""
    if isinstance(cfg.devices, list):
        return len(cfg.devices)
    if str(cfg.devices) in ("auto", "-1"):
        return max(1, torch.cuda.device_count()) if cfg.accelerator != "cpu" else 1
    if not str(cfg.devices).isdecimal() or int(cfg.devices) < 1:
        raise UserError(f'trainer.devices must be 1 or more, a list of them, or "auto", found {cfg.devices}')
    return int(cfg.devices)


def strategy(cfg: TrainerConf) -> str | DDPStrategy:
    """DDP without broadcasting buffers: the head's are the verifier's embedding and constants. Gradients lie in its
    buckets, not beside them.
    """
    several = device_count(cfg) * cfg.num_nodes > 1
    if cfg.strategy == "ddp" or (cfg.strategy == "auto" and several):
        return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    return cfg.strategy


def rank_lost(error: RuntimeError) -> bool:
    """Whether another rank is gone. gloo says so in words of its own, NCCL in an error of torch's."""
    return isinstance(error, DistError) or "gloo/transport" in str(error)


def precision(cfg: TrainerConf, device: str) -> str:
    """ "auto": bf16-mixed where the device multiplies bfloat16 natively."""
    if cfg.precision != "auto":
        return cfg.precision
    return "bf16-mixed" if native_dtype(device) == torch.bfloat16 else "32-true"


@contextmanager
def open_loggers(
    cfg: LoggerConf, folder: Path, name: str, settings: dict, resumed_step: int = 0
) -> Iterator[list[Logger]]:
    """metrics.csv in the run folder and, where it is wanted, wandb: offline unless WANDB_MODE says otherwise."""
    loggers: list[Logger] = [MetricsFile(folder, resumed_step)]
    if not cfg.wandb:
        yield loggers
        return
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    mode = os.environ.get("WANDB_MODE", "offline")
    with wandb.init(project=cfg.project, name=name, dir=folder, config=settings, mode=mode) as run:
        yield [*loggers, WandbLogger(experiment=run)]


class MetricsFile(Logger):
    """`metrics.csv` in the run folder, a line for every call; a resumed run keeps the lines up to its checkpoint.

    Lines are appended. The file is written anew, whole or not at all, when a column is new.
    """

    name = version = ""

    def __init__(self, folder: Path, resumed_step: int = 0):
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.csv"
        self.rows = _rows(self.path, resumed_step) if resumed_step else []
        self.columns = sorted({name for row in self.rows for name in row})
        if self.rows:
            self._write_all()
        else:
            self.path.unlink(missing_ok=True)

    def log_metrics(self, metrics, step=None) -> None:
        row = {"step": step, **metrics}
        self.rows.append(row)
        if new := row.keys() - set(self.columns):
            self.columns = sorted({*self.columns, *new})
            self._write_all()
            return
        with writing(self.path), self.path.open("a", newline="") as stream:
            csv.DictWriter(stream, self.columns).writerow(row)

    def log_hyperparams(self, *args, **kwargs) -> None:
        """They are in config.yaml."""

    def save(self) -> None:
        if self.path.is_file():
            sync(self.path)

    def _write_all(self) -> None:
        with replacing(self.path) as part, part.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)


def _rows(path: Path, last_step: int) -> list[dict[str, str]]:
    """Up to a step, as text. A last line that was cut off, or is zeros after a loss of power, is of a later one."""
    if not path.is_file():
        return []
    with path.open(newline="", errors="replace") as stream:
        lines = list(stream)
    rows = [row for row in csv.DictReader(line for line in lines if "\0" not in line) if _whole(row)]
    if (lost := len(lines) - 1 - len(rows)) > 1:
        log.warning(f"{path}: {lost} lines that can't be read are left out")
    return [{name: text for name, text in row.items() if text} for row in rows if int(row["step"]) <= last_step]


def _whole(row: dict) -> bool:
    return None not in row and None not in row.values() and row.get("step", "").isdecimal()
