"""The training step: one window of micro-batches, gradients divided once, one optimizer step."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conf.errors import UserError
from conf.schema import OptimConf
from models.export.warm import chance_warning
from models.losses import StepCounts, head_loss
from models.objectives import Labels, Logits, Objective
from models.on_policy import own_labels
from models.states import VerifierStates
from train import guard
from train.checkpoints import restore_rng, rng_states
from train.optim import build_optimizer
from train.schedule import Limits, lr_scale

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepSettings:
    """What the training step needs of the run's settings. reproducers: where to leave what was not finite; None: no
    file is written."""

    optim: OptimConf
    limits: Limits
    objective: Objective
    accumulate: int = 1
    log_every: int = 10
    nonfinite: str = "stop"
    reproducers: Path | None = None


class Batches:
    """Endless (states, place after them) pairs of a PackedLoader.

    Lightning fetches one batch ahead, so the loader's own place is not the training's: each batch brings its.
    """

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[VerifierStates, dict]]:
        for states in self.loader:
            yield states, self.loader.state_dict()


class HeadModule(pl.LightningModule):
    """Trains `head` on the verifier's states; the verifier is held outside the module tree and never saved.

    Manual optimisation: micro-batches backward sums; at the window's end the sums of weights are added over
    ranks and every gradient is divided once (MATH, normalisation), then clipped by norm, then stepped.
    Counts stay on the device and are read every `log_every` steps; whether loss and gradients are finite is read in
    every step, before it changes anything.
    """

    def __init__(self, head, verifier, loader, settings: StepSettings, warm: bool = False):
        """warm: the head was trained before, so that accuracy at chance in the first steps is worth a warning."""
        super().__init__()
        self.automatic_optimization = False
        self.head = head
        self.verifier = verifier  # no nn.Module, so nothing of it is registered
        self.loader, self.settings, self.warm = loader, settings, warm
        self.elapsed = 0.0  # seconds of training, earlier runs included
        self.stop_wanted = False  # set by a signal; ranks agree on it at the window's end
        self.metrics: dict[str, float] = {}
        self.tokens = 0
        self.settled = True  # weights, moments, place and counts are those of one and the same step
        self.skipped = self.skipped_in_a_row = 0  # steps whose loss or gradient was not finite
        self.validated: dict[str, float] = {}  # step and what validation found there last
        self.history: dict[str, Any] = {}  # of the whole run, for checkpoints: ends, and processes that worked at it
        self._draft_logits = verifier.draft_logits(None if head.vocab.is_identity else head.vocab.ids_R)
        self._place: dict | None = None
        self._window = guard.Window()
        self._counts: StepCounts | None = None
        self._since = (0.0, 0)
        self._rng: dict | None = None

    # --- the step ---------------------------------------------------------------------------------------

    def training_step(self, batch: tuple[VerifierStates, dict], index: int) -> None:
        states, place = batch
        seed = batch_seed(place, self.global_rank)
        loss, weight, counts = head_loss(self.head, states, self.labels(states), self.settings.objective, seed)
        self._window.add(place, loss, weight, counts, states.input_ids_BT.numel())
        last = len(self._window) == self.settings.accumulate
        # Strategies of several ranks would exchange gradients in every backward; once a window is enough.
        alone = nullcontext if last else getattr(self.trainer.strategy, "block_backward_sync", nullcontext)
        # Autocast still holds here, and on CUDA may have bfloat16 gradients multiplied as float16 (pytorch #105682).
        with alone(), torch.autocast(loss.device.type, enabled=False):
            self.manual_backward(loss)
        if last:
            self._step()

    def labels(self, states: VerifierStates) -> Labels:
        return labels_of(self.head, self.verifier, states, self._draft_logits, self.settings.objective)

    def _step(self) -> None:
        """End of a window: agree over ranks, divide, look, clip, step, and read the counts when it is time."""
        optimizer, limits, window = self.optimizers(), self.settings.limits, self._window
        self._window = guard.Window()
        weight, loss, stop, elapsed = self._agreed(torch.stack(window.weights).sum(), torch.stack(window.losses).sum())
        progress = limits.progress(self.global_step + 0.5, elapsed)
        scale = lr_scale(progress, self.settings.optim.warmup_ratio, self.settings.optim.final_lr_ratio)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
        gradients = [p.grad for p in self.head.parameters() if p.grad is not None]
        scale_gradients(gradients, self.trainer.world_size / weight.clamp_min(1e-12))
        norm = torch.nn.utils.get_total_norm(gradients)
        # The one number that every step reads from the device. Gradients and loss are sums over ranks: all agree.
        finite = bool(torch.isfinite(norm + loss.to(norm.device)))
        self._judge(finite, window)
        clip = self.settings.optim.clip or torch.inf
        torch.nn.utils.clip_grads_with_norm_(self.head.parameters(), clip, norm)
        self.settled = False
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self._place, self.tokens = window.places[-1], self.tokens + window.tokens
        if finite:
            self._counts = window.counts if self._counts is None else self._counts + window.counts
        if self.global_step % self.settings.log_every == 0:
            self._log(norm, scale, elapsed)
        self.settled = True
        if stop or limits.reached(self.global_step, elapsed):
            self.stop_wanted |= stop
            self.trainer.should_stop = True

    def _judge(self, finite: bool, window: guard.Window) -> None:
        """A step that is not finite ends the run, or is skipped: without gradients the optimizer changes neither
        weights nor moments, and the step is counted as every other."""
        if finite:
            self.skipped_in_a_row = 0
            return
        skip = self.settings.nonfinite == "skip" and self.skipped_in_a_row < guard.IN_A_ROW
        if not (skip and self.skipped_in_a_row):  # of several in a row the first is told
            what, advice = guard.fault(self, window)
            line = f"step {self.global_step + 1}: {what}"
            if not skip:
                raise UserError(f"{line}; {self._reproducer(window, what)}{advice}")
            log.warning(f"{line}; the step is skipped")
        self.settled = False
        self.skipped, self.skipped_in_a_row = self.skipped + 1, self.skipped_in_a_row + 1
        self.optimizers().zero_grad(set_to_none=True)

    def _reproducer(self, window: guard.Window, what: str) -> str:
        """Leaves the file; returns how to replay it, for a message."""
        if self.settings.reproducers is None:
            return ""
        rank = f"-rank{self.global_rank}" if self.trainer.world_size > 1 else ""
        path = self.settings.reproducers / f"step-{self.global_step + 1:08d}{rank}.pt"
        seeds = [batch_seed(place, self.global_rank) for place in window.places]
        guard.save_reproducer(path, self, window, what, seeds, str(self.trainer.precision))
        return f"see it again with python -m train.reproduce file={path}; "

    def _agreed(self, weight: Tensor, loss: Tensor) -> tuple[Tensor, Tensor, bool, float]:
        """Sums of weights and losses over ranks; whether any rank was told to stop; rank 0's clock. One rank: no
        waiting."""
        self.elapsed = self._clock()
        if self.trainer.world_size == 1:
            return weight, loss, self.stop_wanted, self.elapsed
        clock = self.elapsed if self.global_rank == 0 else 0.0
        shared = torch.tensor([0.0, 0.0, self.stop_wanted, clock], dtype=torch.float64, device=weight.device)
        shared[0], shared[1] = weight, loss
        dist.all_reduce(shared)
        _, _, stop, self.elapsed = shared.tolist()
        return shared[0].to(weight.dtype), shared[1], stop > 0, self.elapsed

    def _log(self, norm: Tensor, scale: float, elapsed: float) -> None:
        """Means over everything since the last time; with one rank the only place here that waits for the device."""
        means = {"train/skipped": self.skipped} if self.settings.nonfinite == "skip" else {}
        if self._counts is None:  # every step since then was skipped
            self.write(means)
            return
        sums = torch.stack([getattr(self._counts, f.name).double() for f in fields(StepCounts)])
        if self.trainer.world_size > 1:
            dist.all_reduce(sums)
        values = dict(zip((f.name for f in fields(StepCounts)), sums.tolist(), strict=True))
        self._counts = None
        loss = sum(values["loss_K"]) / max(sum(values["weight_K"]), 1e-12)
        if self.warm:
            self.warm, first = False, values["total_K"][0]
            share = values["correct_K"][0] / max(first, 1)
            if line := chance_warning(share, round(first), self.head, self.verifier):
                log.warning(line)
        seconds, tokens = elapsed - self._since[0], self.tokens - self._since[1]
        self._since = (elapsed, self.tokens)
        means |= {"train/loss": loss, "train/gradient_norm": float(norm), "train/lr_scale": scale}
        means |= {"train/tokens_per_second": self.trainer.world_size * tokens / max(seconds, 1e-9)}
        means |= {"train/seconds": elapsed, "train/tokens": float(self.trainer.world_size * self.tokens)}
        for k, total in enumerate(values["total_K"]):
            means[f"train/accuracy_{k}"] = values["correct_K"][k] / max(total, 1)
            means[f"train/overlap_{k}"] = values["overlap_K"][k] / max(total, 1)
        self.metrics |= means  # what validation found last stays in sight
        self.write(means)

    def write(self, metrics: dict[str, float]) -> None:
        """To every logger, at the current optimizer step."""
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.global_step)

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0 to 1."""
        return self.settings.limits.progress(self.global_step, self.elapsed)

    # --- what Lightning asks for --------------------------------------------------------------------------

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.head, self.settings.optim)

    def train_dataloader(self) -> Batches:
        return Batches(self.loader)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        states, place = batch
        return states.to(device), place

    def on_fit_start(self) -> None:
        ours, lightnings = (self.loader.rank, self.loader.world), (self.global_rank, self.trainer.world_size)
        if ours != lightnings:
            raise UserError(
                f"the data was dealt out for rank {ours[0]} of {ours[1]}, Lightning runs rank {lightnings[0]} of "
                f"{lightnings[1]}: set trainer.devices and trainer.num_nodes to what was started"
            )
        if self.trainer.world_size > 1:
            self._agree_before_the_start()

    def _agree_before_the_start(self) -> None:
        """Every rank prepared its data alone: UserError on all of them where two differ. Rank 0's limits hold."""
        strategy = self.trainer.strategy
        hashes = (self.loader.data_hash, self.head.vocab.hash)
        own = torch.tensor([int(text[:15], 16) for text in hashes], device=strategy.root_device)
        every = [torch.empty_like(own) for _ in range(self.trainer.world_size)]
        dist.all_gather(every, own)
        check_same(torch.stack(every).tolist())
        self.settings = replace(self.settings, limits=strategy.broadcast(self.settings.limits))

    def on_train_start(self) -> None:
        before, begun = self.elapsed, time.monotonic()
        self._clock = lambda: before + time.monotonic() - begun
        self._since = (before, self.tokens)
        if self._rng is not None:
            restore_rng(self._rng)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """The state after the last whole window, in plain types, so that weights_only loading works."""
        checkpoint["eyrie"] = {
            "verifier": {"name": self.verifier.name, "weights_hash": self.verifier.weights_hash},
            "loader": self._place or self.loader.state_dict(),
            "elapsed": self.elapsed,
            "tokens": self.tokens,
            "head": {"config": self.head.config.to_dict(), "d2t": self.head.vocab.d2t},
            "counts": None if self._counts is None else asdict(self._counts),
            "skipped": [self.skipped, self.skipped_in_a_row],
            "validated": self.validated,
            "rng": rng_states(),
        }
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        kept = checkpoint["eyrie"]
        check_verifier(kept.get("verifier"), self.verifier)
        self.loader.load_state_dict(kept["loader"])
        self._place = kept["loader"]
        self.elapsed, self.tokens = kept["elapsed"], kept["tokens"]
        self.skipped, self.skipped_in_a_row = kept.get("skipped", (0, 0))
        self.validated, self._rng = kept.get("validated", {"step": checkpoint["global_step"]}), kept.get("rng")
        if kept["counts"] is not None:
            self._counts = StepCounts(**{name: value.to(self.device) for name, value in kept["counts"].items()})


def labels_of(head, verifier, states: VerifierStates, logits: Logits, objective: Objective) -> Labels:
    """The verifier's laws that a batch is taught by. logits: of the draft columns (`Verifier.draft_logits`)."""
    if objective.tokens == "own":
        return own_labels(head, verifier, states, logits, objective.steps)
    return Labels.given(states, logits, objective.steps)


def batch_seed(place: dict, rank: int) -> int:
    """The seed of one micro-batch's noise. place: a PackedLoader's after it, so that a resumed run draws the same."""
    words = (place["seed"] & (2**64 - 1), rank, place["epoch"], place["step"])
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def check_same(hashes: list[list[int]]) -> None:
    """hashes: of each rank, [training data, draft vocabulary] as numbers. UserError where ranks differ."""
    for what, numbers in zip(("training documents", "draft vocabulary"), zip(*hashes, strict=True), strict=True):
        if len(set(numbers)) > 1:
            found = ", ".join(f"rank {rank} {number:x}" for rank, number in enumerate(numbers))
            raise UserError(
                f"expected the same {what} on every rank, found hashes {found}: let all share one EYRIE_CACHE, or "
                "prepare the data once and give it as data.path with data.answers=given"
            )


def check_verifier(trained: dict | None, verifier) -> None:
    """UserError when a checkpoint (`trained`: name and weights_hash; None in old ones) is of another verifier."""
    if trained and trained["weights_hash"] != verifier.weights_hash:
        raise UserError(
            f"the checkpoint was trained for {trained['name']} (weights_hash {trained['weights_hash'][:12]}), this is "
            f"{verifier.name} (weights_hash {verifier.weights_hash[:12]}): resume with the verifier it was trained for"
        )


def scale_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply every gradient in place by a tensor of one element, without reading it."""
    if gradients:
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
