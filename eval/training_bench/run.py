"""Rivals at one setting, taking turns step by step, and what their steps cost."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from conf.errors import UserError
from eval.rivals import against, in_turns
from eval.training_bench.rival import FROZEN, NAIVE, OURS, Process, Rival
from eval.training_bench.setting import Setting, write_setting
from eval.training_bench.work import attention_flops, products
from models.heads.eagle3 import Eagle3Config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bench:
    """What every setting is measured with.

    geometry, aux_layers: the verifier's.  turns: timed steps of each rival.  folder: files and logs of the processes.
    peer: another trainer, None without.
    """

    geometry: dict
    aux_layers: tuple[int, ...]
    threads: int
    turns: int
    folder: Path
    peer: Rival | None = None
    naive: bool = True

    def sessions(self) -> list[list[Rival]]:
        """Rivals that take turns, ours first. Two dense ones never run together, since both hold several GB."""
        found = [[FROZEN, OURS, self.peer]] if self.peer is not None else []
        found += [[OURS, NAIVE]] if self.naive else []
        return found or [[OURS]]


@dataclass
class Measured:
    """seconds: of verifier's teacher, forward and backward in each turn.  parts: of each, by name.

    growth: bytes of peak memory over the state before, in the process's first step.
    """

    rival: Rival
    versions: dict[str, str]
    growth: int
    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)


def measure(bench: Bench, setting: Setting, sessions: list[list[Rival]] | None = None) -> list[dict]:
    """Rows of the bench, one for each rival; one that couldn't run has `missing`, the reason, in place of numbers."""
    file = bench.folder / "setting.safetensors"
    write_setting(file, setting, bench.geometry, bench.aux_layers)
    config = Eagle3Config.from_verifier(bench.geometry, bench.aux_layers, setting.draft_vocab)
    rows: dict[str, dict] = {}
    for rivals in bench.sessions() if sessions is None else sessions:
        found, speeds = _session(bench, setting, config, file, rivals)
        ours = [found[rival.name] for rival in rivals if not rival.dense]
        for name, result in found.items():
            if isinstance(result, Measured):
                row = _row(result, config, setting, speeds)
                row |= _against_ours(result, ours) if result.rival.dense else {}
            else:
                row = {"missing": result}
            rows.setdefault(name, asdict(setting) | {"name": name} | row)
    file.unlink()
    return list(rows.values())


def _session(bench: Bench, setting: Setting, config, file: Path, rivals: list[Rival]) -> tuple[dict, dict]:
    """name -> Measured, or why there is none; and FLOP/s of bare products, measured in the same turns."""
    found: dict[str, Measured | str] = {}
    running: dict[str, Process] = {}
    with ExitStack() as stack:
        for rival in rivals:
            if rival.dense and (short := _too_large(setting)):
                found[rival.name] = short
                continue
            try:
                logged = bench.folder / f"{rival.name.replace(', ', '-').replace(' ', '-')}.txt"
                process = stack.enter_context(Process(rival, file, bench.threads, logged))
                first = process.ask(do="step")
            except UserError as error:
                if not rival.dense:
                    raise
                log.warning("%s", error)
                found[rival.name] = str(error)
                continue
            running[rival.name] = process
            found[rival.name] = Measured(rival, process.about["versions"], first["growth"])
        trains = any(rival.lm_head for rival in rivals)
        wanted = [(p.m, p.k, p.n, p.times) for p in products(config, setting, trains)]
        turns = {name: lambda turn, process=process: process.ask(do="step") for name, process in running.items()}
        turns["rates"] = lambda turn: running[rivals[0].name].ask(do="rates", products=wanted)
        steps = in_turns(turns, bench.turns, warm_up=False)  # the first step was one
    for name in running:
        found[name].seconds = [step["seconds"] for step in steps[name]]
        found[name].parts = [step["parts"] for step in steps[name]]
    speeds = {kind: median(rate[kind] for rate in steps["rates"]) for kind in ("shapes", "square")}
    return found, speeds


def _row(result: Measured, config, setting: Setting, speeds: dict) -> dict:
    """useful: FLOPs that the trained parameters need at rows that count; share_*: of the speed of bare products."""
    seconds, tokens = median(result.seconds), setting.length * setting.documents
    useful = sum(product.flops for product in products(config, setting, result.rival.lm_head))
    row = {
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "parts": {name: median(parts[name] for parts in result.parts) for name in result.parts[0]},
        "growth_bytes": result.growth,
        "useful_gflop": useful / 1e9,
        "attention_gflop": attention_flops(config, setting) / 1e9,
        "share_of_shapes": useful / seconds / speeds["shapes"],
        "share_of_square": useful / seconds / speeds["square"],
        "products_gflops": {kind: speed / 1e9 for kind, speed in speeds.items()},
        "turns": result.seconds,
        "versions": result.versions,
    }
    if argmax := row["parts"].get("argmax"):
        row["tokens_per_second_with_argmax"] = tokens / (seconds + argmax)
    return row


def _against_ours(result: Measured, ours: list[Measured]) -> dict:
    """How many times faster ours was (the median of the ratios within a turn), and ours' share of its memory.

    faster, memory: of ours with the same trained parameters.  faster_as_trained: of ours with its LM head.
    """
    (same,) = (one for one in ours if one.rival.lm_head == result.rival.lm_head)
    (trained,) = (one for one in ours if one.rival.lm_head)
    return {
        "faster": against(result.seconds, same.seconds),
        "faster_as_trained": against(result.seconds, trained.seconds),
        "memory": same.growth / result.growth if result.growth else None,
        "memory_as_trained": trained.growth / result.growth if result.growth else None,
    }


def _too_large(setting: Setting) -> str | None:
    """Why a rival with whole logits and dense masks at every step should not be started; None if it may be."""
    T, K, R = setting.tokens, setting.steps, setting.draft_vocab
    needed = 5 * 4 * K * T * R + 4 * K * (K + 1) // 2 * T * T + 2**30  # five copies of the logits, one of the masks
    free = available()
    if free is None or needed < free:
        return None
    return f"not run: about {needed / 1e9:.0f} GB of memory wanted, {free / 1e9:.0f} GB free"


def available() -> int | None:
    """Bytes of memory that can still be had; None where the system doesn't say (not Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
