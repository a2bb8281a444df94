"""How much memory is free, and what a cache slot of the verifier takes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from models.states import DocumentStates
    from models.verifier import Verifier

SHARE = 0.25  # of what is free: weights are there already, but activations and other processes want some too


def free_bytes(device: torch.device) -> int:
    """Free memory of the GPU, or of the machine: what Linux says is available, elsewhere half of all there is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def slot_bytes(verifier: Verifier) -> int:
    """Bytes of one token's keys and values over all layers."""
    shape = verifier.head_geometry
    return 2 * verifier.num_layers * shape["num_key_value_heads"] * shape["head_dim"] * verifier.dtype.itemsize


def slots_that_fit(verifier: Verifier) -> int:
    """How many cache slots `SHARE` of the free memory holds."""
    return int(SHARE * free_bytes(verifier.device)) // slot_bytes(verifier)


def rows_that_fit(verifier: Verifier, rows: int, capacity: int, slots: int | None = None) -> int:
    """`rows`, or as many sequences of `capacity` as the slots are enough for; at least one.

    slots: None takes `slots_that_fit`, which is another number every time.
    """
    slots = slots_that_fit(verifier) if slots is None else slots
    return max(1, min(rows, slots // capacity))


class KeptStates(dict[str, "DocumentStates"]):
    """States by the hash of their document's ids, until they fill `SHARE` of the memory that is free at first."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.room = int(SHARE * free_bytes(device))

    def add(self, key: str, states: DocumentStates) -> None:
        """Keep them while there is room; what is not kept is computed again by whoever needs it."""
        if states.nbytes <= self.room:
            self.room -= states.nbytes
            self[key] = states
