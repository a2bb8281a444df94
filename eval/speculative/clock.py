"""Wall-clock seconds that wait for the device first."""

from __future__ import annotations

import time

import torch


class Clock:
    """`now()` in seconds; on an accelerator it waits until the queued work is done."""

    def __init__(self, device: torch.device | str):
        self.wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else None

    def now(self) -> float:
        if self.wait is not None:
            self.wait()
        return time.perf_counter()
