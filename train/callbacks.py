"""What happens around the training step: validation in the speculative loop, the progress bar, signals."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from conf.errors import Terminated
from eval.alpha import evaluate
from eval.measure import EvalSettings
from eval.prompts import Prompt
from eval.speculative.scorers import drafter_for
from train.module import HeadModule

log = logging.getLogger(__name__)


class Validate(pl.Callback):
    """Free-running acceptance on held-out prompts every `every` steps; the head goes back to training after it."""

    def __init__(self, prompts: Sequence[Prompt], settings: EvalSettings, every: int):
        self.prompts, self.settings, self.every = list(prompts), settings, every

    def on_train_start(self, trainer, module: HeadModule) -> None:
        self.look(trainer, module)  # where a run was stopped between a step and its validation

    def on_train_batch_end(self, trainer, module: HeadModule, outputs, batch, batch_idx) -> None:
        self.look(trainer, module)

    def look(self, trainer, module: HeadModule) -> None:
        step = trainer.global_step  # the same for every micro-batch of the next window
        if not (self.every and step) or step % self.every or step == module.validated.get("step"):
            return
        values = {}
        if trainer.is_global_zero:
            values = free_running(module, self.prompts, self.settings)
            module.metrics |= values
            module.write(values)
        module.validated = {"step": step, **values}


def free_running(module: HeadModule, prompts: Sequence[Prompt], settings: EvalSettings) -> dict[str, float]:
    """val/tau and val/alpha_k of the head as it stands; nothing where every answer ended before a draft."""
    module.head.eval()
    try:
        with torch.no_grad():
            drafter = drafter_for(module.head, settings.shape, settings.sampling, settings.points)
            report = evaluate(module.verifier, lambda: drafter, prompts, settings, progress=False)
    finally:
        module.head.train()
    found = {"val/tau": report.tau} | {f"val/alpha_{k}": alpha for k, alpha in enumerate(report.alpha_by_depth)}
    return {name: value for name, value in found.items() if value is not None}


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


class StopOnSignal(pl.Callback):
    """The first Ctrl-C or SIGTERM ends training after the step at hand; another, a second or more later, at once.

    A second's grace, for a terminal and a launcher may both pass on one Ctrl-C.
    """

    def __init__(self, module: HeadModule):
        self.module, self.error, self.told = module, KeyboardInterrupt, 0.0

    def on_train_start(self, trainer, module) -> None:
        # Lightning has put its own handler of SIGTERM over ours: from inside it ranks broadcast, each at another place.
        self.install()

    def install(self) -> dict:
        """Returns the handlers before."""
        return {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(self, number: int, frame) -> None:
        if not self.told:
            self.error = Terminated if number == signal.SIGTERM else KeyboardInterrupt
            self.module.stop_wanted, self.told = True, time.monotonic()
            print("stopping after this step; once more stops at once", file=sys.stderr)
        elif time.monotonic() - self.told >= 1:
            raise self.error


@contextmanager
def graceful(module: HeadModule) -> Iterator[StopOnSignal]:
    """Signals stop the training inside; the callback yielded belongs into it."""
    stop = StopOnSignal(module)
    if threading.current_thread() is not threading.main_thread():
        stop.install = dict
    before = stop.install()
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)
