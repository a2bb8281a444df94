"""Seconds of rounds and bytes of caches: measured by a run, or reckoned from a verifier's shape and a machine.

Reckoned: a call reads the weights and the caches once, and does 2 * parameters operations a row; the two add up. A
draft step does the same with its own weights, among them the verifier's LM head or the head's own R rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import isotonic_regression

from conf.errors import UserError
from conf.workload import WorkloadConf
from eval.theory.model import Times, batch_times

DEEP = 64  # drafts, and nodes of a tree, that costs are reckoned for
DRAFT_ROWS = 32_000  # R of EAGLE-3's LM head
MEDUSA_HEADS = 5
LOOKAHEAD_ROWS = 30  # of its own in each verify call: an assumption
# Reached of a machine's bandwidth: SGLang's docs have 158 tokens/s of Llama-3.1-8B on an H100, which 3350 GB/s would
# make 209. Reached of its products, and seconds that a round adds on a GPU: such that EAGLE-3's chain of 3 gains what
# was published there by sequences at once (published.BATCHED, which tests/test_tuner_numbers.py holds them to).
READ, MULTIPLIED, LAUNCH = 0.76, 0.35, 2.4e-3
ADDED = 2.0  # reckoned costs of drafting may be this many times more, or less
LEAST = 0.05  # relative error of measured times, at the least
SHAPE = ("parameters", "layers", "hidden", "vocab", "kv_heads", "head_dim")
GIB = 2**30


@dataclass(frozen=True)
class Costs:
    """times: of all sequences of a batch together, rows counted for one of them.

    error: relative, of a measured round; None: what drafting adds to a plain step may be ADDED times more or less.
    """

    times: Times
    origin: str
    source: str
    error: float | None = None

    def round(self, depth: int, rows: int, sign: int = 0) -> float:
        """Seconds of a round of `depth` draft steps and `rows` rows. sign: 1 pessimistic, -1 optimistic, 0 likely."""
        seconds = self.times.round(depth, rows)
        if self.error is not None:
            return seconds * (1 + self.error) ** sign
        return self.times.decode + (seconds - self.times.decode) * ADDED**sign

    def speedup(self, expected: float, depth: int, rows: int, sign: int = 0) -> float:
        """sign: as in `round`; of the range, `expected` then is the low or high one too."""
        return expected * self.times.decode / self.round(depth, rows, sign)


def measured_costs(record: dict, batch: int, of: str = "the run") -> Costs:
    """From an alpha.json. of: who measured.

    Its error is how far the speed-up that it predicts is from the one that it measured. Noise is no gain:
    a wider call is never taken to be cheaper, nor any than a plain step.
    """
    found, promised = record["speedup"], record["predicted_speedup"]
    error = max(LEAST, abs(promised / found - 1)) if found and promised else LEAST
    times, run_batch = Times.of_record(record["times"]), record["batch"]
    rising = np.maximum(times.decode, isotonic_regression([s for _, s in sorted(times.verify_by_width.items())]).x)
    times = replace(times, verify_by_width=dict(zip(sorted(times.verify_by_width), rising.tolist(), strict=True)))
    source = f"times of {of}, {record['dtype']}, {record['threads']} threads, {record['device']}"
    if run_batch == batch:  # a run has a sequence's share of its call
        times = Times(times.decode * batch, {rows: s * batch for rows, s in times.verify_by_width.items()},
                      times.draft_first * batch, times.draft * batch, times.other * batch)  # fmt: skip
    else:
        assert run_batch == 1, run_batch
        times = batch_times(times, batch, DEEP)
        source += f", reckoned for {batch} sequences by width"
    return Costs(times, "measured", source, error)


def roofline(load: WorkloadConf, family: str, batch: int | None = None) -> Costs:
    """Reckoned for a family of drafts. Raises UserError where the workload doesn't say enough."""
    need(load, (*SHAPE, "bandwidth", "tflops"), "times are reckoned from the verifier's shape and the machine")
    batch = load.batch if batch is None else batch
    bandwidth, products = load.bandwidth * 1e9 * READ, load.tflops * 1e12 * MULTIPLIED

    def call(parameters: float, layers: float, rows: int) -> float:
        read = parameters * load.weight_bits / 8 + batch * context(load) * kv_bytes(load) * layers / load.layers
        return read / bandwidth + 2 * parameters * batch * rows / products

    first, later = (call(size, family.startswith("eagle"), 1) if size else 0.0 for size in draft_sizes(load, family))
    other = 0.0 if "cpu" in (load.accelerator or "").lower() else LAUNCH
    by_rows = {rows: call(load.parameters * 1e9, load.layers, rows) for rows in range(1, DEEP + LOOKAHEAD_ROWS + 2)}
    machine = f"{load.bandwidth:g} GB/s and {load.tflops:g} TFLOPS of {load.accelerator or 'the machine'}"
    source = f"reckoned: {machine}, {READ:.0%} and {MULTIPLIED:.0%} of them reached; {load.weight_bits:g}-bit weights"
    return Costs(own_rows(Times(by_rows[1], by_rows, first, later, other), family), "assumption", source)


def own_rows(times: Times, family: str) -> Times:
    """Lookahead looks for its drafts in the verify call itself, with rows of its own."""
    if family != "lookahead":
        return times
    verify = {rows: times.verify(rows + (LOOKAHEAD_ROWS if rows > 1 else 0)) for rows in range(1, DEEP + 2)}
    return replace(times, verify_by_width=verify)


def draft_sizes(load: WorkloadConf, family: str) -> tuple[float, float]:
    """Parameters that the first draft step reads, and each later one."""
    ends, hidden = 2 * load.vocab * load.hidden, load.hidden
    layer = max(0.0, load.parameters * 1e9 - ends) / load.layers
    if family in ("eagle1", "eagle2"):
        return (size := layer + load.vocab * hidden), size
    if family == "eagle3":
        return (size := layer + min(DRAFT_ROWS, load.vocab) * hidden), size
    if family == "medusa":  # all heads in one pass
        return MEDUSA_HEADS * hidden**2 + load.vocab * hidden, 0.0
    if family == "independent":
        return (size := (load.draft_parameters or 0.0) * 1e9), size
    return 0.0, 0.0


def context(load: WorkloadConf) -> float:
    """Tokens of a sequence whose keys and values a call reads, on average."""
    return load.prompt_tokens + load.answer_tokens / 2


def kv_bytes(load: WorkloadConf) -> float:
    """Of a token in the verifier's cache."""
    return 2 * load.layers * load.kv_heads * load.head_dim * load.kv_bits / 8


@dataclass(frozen=True)
class Memory:
    """GiB at this batch: weights of verifier and draft, caches of whole sequences, and rows of a round that may go.

    rows: of one sequence that what is left holds; None where the budget isn't known.
    """

    budget: float | None
    weights: float
    draft: float
    caches: float
    bytes_a_row: float
    rows: int | None

    def scratch(self, rows: int, batch: int) -> float:
        """GiB of the rows of a round, of all sequences."""
        return batch * rows * self.bytes_a_row / GIB


def memory_of(load: WorkloadConf, family: str, batch: int | None = None) -> Memory | None:
    """None where the verifier's shape isn't given. The draft's cache has a layer for the verifier's `layers`."""
    if any(getattr(load, name) is None for name in SHAPE):
        return None
    batch = load.batch if batch is None else batch
    weights = load.parameters * 1e9 * load.weight_bits / 8 / GIB
    draft = max(draft_sizes(load, family)) * load.weight_bits / 8 / GIB
    layers = load.layers + (1 if family.startswith("eagle") else 0)
    row = kv_bytes(load) * layers / load.layers
    caches = batch * (load.prompt_tokens + load.answer_tokens) * row / GIB
    left = None if load.memory is None else load.memory - weights - draft - caches
    rows = None if left is None else max(0, int(left * GIB / (batch * row)))
    return Memory(load.memory, weights, draft, caches, row, rows)


def need(load: WorkloadConf, names: tuple[str, ...], why: str) -> None:
    """Raises UserError that names what is missing or not above zero."""
    missing = [f"workload.{name}" for name in names if not (getattr(load, name) or 0) > 0]
    if missing:
        raise UserError(f"{why}: give {', '.join(missing)}, or run=DIR with measured times")
