"""Puts the Trainer together and runs it."""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy

from conf.schema import LoggerConf, TrainerConf
from models.loading import native_dtype
from train.module import HeadModule

# Lightning's advice on things that are so on purpose.
EXPECTED = (
    r".*does not have many workers.*",
    r".*GPU available but not used.*",
    r".*Experiment logs directory.*exists and is not empty.*",
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
    return max(1, int(cfg.devices))


def strategy(cfg: TrainerConf) -> str | DDPStrategy:
    """DDP without broadcasting buffers: the head's are the verifier's embedding and constants. Gradients lie in its
    buckets, not beside them.
    """
    several = device_count(cfg) * cfg.num_nodes > 1
    if cfg.strategy == "ddp" or (cfg.strategy == "auto" and several):
        return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)
    return cfg.strategy


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


class MetricsFile(CSVLogger):
    """`metrics.csv` in the run folder; a resumed run keeps the rows up to its checkpoint."""

    def __init__(self, folder: Path, resumed_step: int = 0):
        super().__init__(folder, name="", version="", flush_logs_every_n_steps=1)
        self.kept = _rows(folder / "metrics.csv", resumed_step) if resumed_step else []

    def log_metrics(self, metrics, step=None) -> None:
        if self.kept:
            kept, self.kept = self.kept, []
            for row in kept:
                self.experiment.log_metrics(row, row["step"])
        super().log_metrics(metrics, step)


def _rows(path: Path, last_step: int) -> list[dict]:
    if not path.is_file():
        return []
    with path.open(newline="") as stream:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(stream)]
    return [row | {"step": int(row["step"])} for row in rows if row["step"] <= last_step]
