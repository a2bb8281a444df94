"""Our training step and the naive one as a process that takes turns with rivals:  python -m eval.training_bench.worker

One JSON object a line on standard input, one answer a line on standard output (eval.training_bench.rival asks):

{"setting": FILE, "rival": "ours" | "naive", "freeze_lm_head": bool, "threads": N}    first; answers with versions
{"do": "step"}                a training step: seconds of each part, growth of peak memory over the state before
{"do": "gradients", "out": FILE, "by_step": bool}    the loss, its gradients into FILE; by_step: KL, a mean a step
{"do": "rates", "products": [[m, k, n, times], ..]}    FLOP/s of bare matrix products
{"do": "profile"}             time of teacher, forward and backward by kind of operation
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from eval.training_bench.naive import naive_losses, naive_teacher
from eval.training_bench.profile import profile_of
from eval.training_bench.setting import Loaded, read_setting, top_and_lse
from eval.training_bench.work import Product, rates
from models.losses import head_loss
from models.objectives import Labels, Objective

CLIP = 1.0


class Ours:
    """The step as train/module.py takes it. teaching: seconds that the teacher took inside of the last loss."""

    def __init__(self, loaded: Loaded):
        self.loaded, self.teaching = loaded, 0.0
        self.objective = Objective(steps=loaded.setting.steps)
        lm_RD = loaded.lm_VD[loaded.head.vocab.ids_R]

        def draft_logits(last_ND: Tensor) -> Tensor:
            begun = time.perf_counter()
            logits_NR = F.linear(last_ND, lm_RD).float()
            self.teaching += time.perf_counter() - begun
            return logits_NR

        self.draft_logits = draft_logits

    def teach(self) -> Labels:
        return Labels.given(self.loaded.states, self.draft_logits, self.loaded.setting.steps)

    def loss(self, labels: Labels, by_step: bool) -> Tensor:
        assert not by_step, "our loss is one mean over all draft steps"
        self.teaching = 0.0
        loss, weight, _ = head_loss(self.loaded.head, self.loaded.states, labels, self.objective)
        return loss / weight

    def full_vocabulary(self) -> None:
        """What is left to capture in a run whose states are stored, and is part of a step where they aren't."""
        top_and_lse(self.loaded.states.last_PD, self.loaded.lm_VD)


class Naive:
    """eval.training_bench.naive: cross-entropy and one mean over all draft steps, or as the peer's (`by_step`)."""

    teaching = 0.0

    def __init__(self, loaded: Loaded):
        self.loaded = loaded

    def teach(self) -> tuple[Tensor, Tensor]:
        return naive_teacher(self.loaded.head, self.loaded.last_TD, self.loaded.lm_VD)

    def loss(self, teacher: tuple[Tensor, Tensor], by_step: bool) -> Tensor:
        loaded, decay = self.loaded, Objective.step_decay
        sums = naive_losses(loaded.head, loaded.states, teacher, loaded.setting.steps, divergence=by_step)
        loss = weight = 0.0
        for k, (total, count) in enumerate(sums):
            if by_step:
                loss, weight = loss + decay**k * total / count, 1.0
            else:
                loss, weight = loss + decay**k * total, weight + decay**k * count
        return loss / weight

    full_vocabulary = None  # part of the teacher


class Trainer:
    """Takes steps and says what they took."""

    def __init__(self, ask: dict):
        torch.set_num_threads(ask["threads"])
        loaded = read_setting(ask["setting"])
        self.head, self.setting = loaded.head, loaded.setting
        self.head.lm_head.weight.requires_grad_(not ask["freeze_lm_head"])
        self.rival = {"ours": Ours, "naive": Naive}[ask["rival"]](loaded)
        self.learnt = [p for p in self.head.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.learnt, lr=1e-5)

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.setting.autocast)

    def step(self) -> dict:
        """The optimizer's part and the full-vocabulary argmax lie outside of what memory is measured of."""
        self.optimizer.zero_grad(set_to_none=True)
        before, marks = forget_peak(), [time.perf_counter()]

        def done() -> None:
            marks.append(time.perf_counter())

        with self.autocast():
            teacher = self.rival.teach()
            done()
            loss = self.rival.loss(teacher, by_step=False)
        del teacher
        done()
        loss.backward()
        done()
        growth = peak_bytes() - before
        marks.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(self.learnt, CLIP)
        self.optimizer.step()
        done()
        teach, forward, backward, _, optimizer = (b - a for a, b in zip(marks, marks[1:], strict=False))
        inside = self.rival.teaching
        parts = {"verifier": teach + inside, "forward": forward - inside, "backward": backward, "optimizer": optimizer}
        if self.rival.full_vocabulary is not None:
            begun = time.perf_counter()
            self.rival.full_vocabulary()
            parts["argmax"] = time.perf_counter() - begun
        return {"seconds": teach + forward + backward, "parts": parts, "growth": growth}

    def backward(self, by_step: bool = False) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            loss = self.rival.loss(self.rival.teach(), by_step)
        loss.backward()
        return loss.detach()

    def gradients(self, out: str, by_step: bool) -> dict:
        loss = self.backward(by_step)
        save_file({name: p.grad for name, p in self.head.named_parameters() if p.grad is not None}, out)
        return {"loss": loss.item()}

    def answer(self, ask: dict) -> dict:
        match ask.pop("do"):
            case "step":
                return self.step()
            case "gradients":
                return self.gradients(**ask)
            case "rates":
                wanted = [Product(*sizes) for sizes in ask["products"]]
                return rates(wanted, getattr(torch, self.setting.dtype))
            case "profile":
                self.backward()
                return profile_of(self.backward)
        raise ValueError(f"unknown question {ask}")


def give_back() -> None:
    """What loading freed goes back to the system, where libc can (glibc): a step would hide its growth in it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> int:
    """Bytes of this process now, from where its peak is counted on. Not on Linux: 0, and no peak."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS:")
    return 0


def peak_bytes() -> int:
    with suppress(OSError):
        return _status("VmHWM:")
    return 0


def _status(name: str) -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) * 1024


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    trainer = None
    for line in sys.stdin:
        ask = json.loads(line)
        if trainer is None:
            trainer, found = Trainer(ask), {"versions": {"torch": torch.__version__}}
            give_back()
        else:
            found = trainer.answer(ask)
        print(json.dumps(found), file=out, flush=True)


if __name__ == "__main__":
    main()
