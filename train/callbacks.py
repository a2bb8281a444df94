"""What happens around the training step: checkpoints, validation in the speculative loop, the progress bar."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from eval.alpha import evaluate
from eval.measure import EvalSettings
from eval.prompts import Prompt
from eval.speculative.scorers import drafter_for
from train.module import HeadModule

log = logging.getLogger(__name__)


class KeepLast(pl.Callback):
    """`last.ckpt`, whole or not at all: every `every` steps, at the end, and when an exception ends the run."""

    def __init__(self, folder: Path, every: int):
        self.path, self.every, self.saved = folder / "last.ckpt", every, -1

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if self.every and trainer.global_step % self.every == 0:
            self.save(trainer)

    def on_train_end(self, trainer, module) -> None:
        self.save(trainer)

    def on_exception(self, trainer, module, exception) -> None:
        # Several ranks cannot agree to save while one of them is failing; theirs is the last regular checkpoint.
        finite = all(bool(p.isfinite().all()) for p in module.head.parameters())
        if trainer.world_size == 1 and finite:
            self.save(trainer)

    def save(self, trainer) -> None:
        if trainer.global_step in (0, self.saved):
            return
        part = self.path.with_suffix(".part")
        trainer.save_checkpoint(part)
        if trainer.is_global_zero:
            os.replace(part, self.path)
        self.saved = trainer.global_step


class Validate(pl.Callback):
    """Free-running acceptance on held-out prompts every `every` steps; the head goes back to training after it."""

    def __init__(self, prompts: Sequence[Prompt], settings: EvalSettings, every: int):
        self.prompts, self.settings, self.every = list(prompts), settings, every
        self.done = 0

    def on_train_batch_end(self, trainer, module: HeadModule, outputs, batch, batch_idx) -> None:
        step = trainer.global_step
        if not self.every or step % self.every or step == self.done or not trainer.is_global_zero:
            return
        self.done = step
        values = free_running(module, self.prompts, self.settings)
        module.metrics |= values
        module.write(values)


def free_running(module: HeadModule, prompts: Sequence[Prompt], settings: EvalSettings) -> dict[str, float]:
    """val/tau and val/alpha_k of the head as it stands."""
    module.head.eval()
    try:
        with torch.no_grad():
            drafter = drafter_for(module.head, settings.shape, settings.sampling, settings.points)
            report = evaluate(module.verifier, lambda: drafter, prompts, settings, progress=False)
    finally:
        module.head.train()
    depths = {f"val/alpha_{k}": alpha for k, alpha in enumerate(report.alpha_by_depth) if alpha is not None}
    return {"val/tau": report.tau, **depths}


class Bar(pl.Callback):
    """Per cent done, loss, accuracy of the first three steps, tau of the last validation, rate, time left.

    Where standard error is no terminal: a line every half minute.
    """

    EVERY = 30.0

    def __init__(self):
        console = Console(stderr=True)
        # A narrow bar: the numbers are what one watches, and 80 columns must hold them.
        self.bar = Progress(
            BarColumn(bar_width=8),
            TaskProgressColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.task = None
        self.spoken = time.monotonic()

    def on_train_start(self, trainer, module) -> None:
        if trainer.is_global_zero:
            self.bar.start()
            self.task = self.bar.add_task("training", total=100, completed=100 * module.progress)

    def on_train_batch_end(self, trainer, module: HeadModule, outputs, batch, batch_idx) -> None:
        if self.task is None:
            return
        text = f"step {trainer.global_step:,} {summary(module.metrics)}"
        self.bar.update(self.task, completed=100 * module.progress, description=text)
        if self.bar.disable and time.monotonic() - self.spoken > self.EVERY:
            self.spoken = time.monotonic()
            log.info(f"training {module.progress:.0%}: {text}{time_left(module.progress, module.elapsed)}")

    def teardown(self, trainer, module, stage) -> None:
        self.bar.stop()


def time_left(progress: float, elapsed: float) -> str:
    """`, 2:05 left` at the pace so far; nothing before there is one."""
    if not progress:
        return ""
    seconds = round(elapsed * (1 - progress) / progress)
    return f", {seconds // 60}:{seconds % 60:02d} left"


def summary(metrics: dict[str, float]) -> str:
    """`loss 2.310, acc 0.41 0.22 0.10, tau 1.32, 1,234 tokens/s` of what has been measured so far."""
    parts = []
    if "train/loss" in metrics:
        accuracy = [metrics[f"train/accuracy_{k}"] for k in range(3) if f"train/accuracy_{k}" in metrics]
        parts = [f"loss {metrics['train/loss']:.3f}", "acc " + " ".join(f"{value:.2f}" for value in accuracy)]
    if "val/tau" in metrics:
        parts.append(f"tau {metrics['val/tau']:.2f}")
    if "train/tokens_per_second" in metrics:
        parts.append(f"{metrics['train/tokens_per_second']:,.0f} tokens/s")
    return ", ".join(parts)


@contextmanager
def graceful(module: HeadModule) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM ends training after the step at hand; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum, frame) -> None:
        if module.stop_wanted:
            raise KeyboardInterrupt
        module.stop_wanted = True
        print("stopping after this step; once more stops at once", file=sys.stderr)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
