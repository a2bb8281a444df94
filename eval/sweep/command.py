"""What `python -m eval.sweep` does: each point measured in the loop beside plain decoding, and kept when it is done."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from conf.cli import Outcome
from conf.errors import UserError
from conf.terminal import TextConsole
from data.files import key_of, read_json, write_json
from data.memory import slots_that_fit
from data.progress import progress_bar
from eval.command import Candidate, load_candidate, settings_of
from eval.measure import EvalSettings, run_prompts, use_threads
from eval.prompts import Prompt, questions
from eval.sweep.context import Conversations
from eval.sweep.points import AXES, Point, Rates, coordinates, duration, obstacle, points_of, row_key, texts_at
from eval.sweep.row import DEFINITIONS, row_of
from eval.sweep.show import draw, remarks, tables

log = logging.getLogger(__name__)

TRIED = 12  # tokens of the text by which the time is estimated


def run(cfg) -> Outcome:
    """cfg: conf.schema.SweepCommandConf. Writes sweep.json after every point, then the plots.

    The same command again goes on after the points that are there. Raises UserError for values that no point can have,
    and for a folder that holds a sweep of other settings.
    """
    points = points_of(cfg)
    verifier, candidate = load_candidate(cfg)
    with use_threads(cfg.threads):
        sweep = Sweep(cfg, verifier, candidate, points)
        sweep.measure()
    values = sweep.values
    TextConsole(stderr=cfg.json).print(*tables(values), *values["remarks"], sep="\n")
    if cfg.plots:
        draw(values, sweep.folder)
    return Outcome(sweep.file, values)


class Sweep:
    """values: sweep.json. folder: where it lies."""

    def __init__(self, cfg, verifier, candidate: Candidate, points: Sequence[Point]):
        self.cfg, self.verifier, self.candidate = cfg, verifier, candidate
        asked = questions(cfg.prompts, cfg.limit)
        settings = _settings(cfg, verifier, candidate, [row["id"] for row in asked])
        run = Path(cfg.run or "outputs/draft").expanduser()
        self.folder = Path(cfg.out) if cfg.out else run / f"sweep-{key_of(settings)[:8]}"
        self.file = self.folder / "sweep.json"
        before = read_json(self.file)
        if before and before.get("settings") != settings:
            raise UserError(f"{self.file} holds a sweep of other settings: give another out=, or leave it out")
        self.done = {row_key(row): row for row in before.get("points", [])}
        possible, self.left_out = self._sorted(points, asked)
        self.todo = [point for point in possible if point not in self.done]
        longest = max((point.context for point in self.todo), default=0)
        conversations = Conversations(verifier, asked, cfg.earlier, longest)
        self.prompts = {context: conversations.prompts(context) for context in {0, *(p.context for p in self.todo)}}
        self.settings, self.middle = settings, points_of(cfg)[0] if not cfg.grid else None
        self.folder.mkdir(parents=True, exist_ok=True)

    def _sorted(self, points: Sequence[Point], asked: list[dict]) -> tuple[list[Point], list[dict]]:
        """Those that there can be, and the others with the reason."""
        own = Conversations(self.verifier, asked, [], 0).prompts(0)
        longest, possible, left_out = max(len(prompt.input_ids) for prompt in own), [], []
        positions, slots = self.verifier.head_geometry["max_position_embeddings"], slots_that_fit(self.verifier)
        for point in points:
            settings = self.settings_at(point)
            rows = max(point.context, longest) + settings.room
            reason = obstacle(point, self.candidate.drafter(settings).depth, rows, positions, slots)
            possible += [] if reason else [point]
            left_out += [coordinates(point) | {"reason": reason}] if reason else []
            if reason:
                log.info(f"left out: {point}: {reason}")
        if not possible:
            raise UserError(f"expected a point that can be measured, found none: {left_out[0]['reason']}")
        return possible, left_out

    def settings_at(self, point: Point) -> EvalSettings:
        decode = replace(self.cfg.decode, batch=point.batch, depth=point.depth)
        return settings_of(decode, self.cfg.seed, temperature=point.temperature)

    def measure(self) -> None:
        """Every point that isn't there yet."""
        if not self.todo:
            log.info(f"all {len(self.done)} points are there")
            return self._write()
        expected = self._estimate()
        total, spent, met, begun = sum(expected.values()), 0.0, 0.0, time.monotonic()
        known = f", {len(self.done)} are there" if self.done else ""
        log.info(f"{len(self.todo)} points to measure{known}: about {duration(total)}")
        with progress_bar() as bar:
            task = bar.add_task("sweep", total=max(1, round(total)), rate="")
            for index, point in enumerate(self.todo):
                bar.update(task, rate=f"s, point {index + 1} of {len(self.todo)}: {point}")
                self.done[point] = row = self._row(point)
                self._write()
                met, spent = met + expected[point], time.monotonic() - begun
                bar.update(task, completed=round(met))
                left = (total - met) * spent / met
                log.info(f"{index + 1} of {len(self.todo)}: {point}: {_said(row)}; about {duration(left)} left")
        return None

    def _row(self, point: Point) -> dict:
        settings, prompts = self.settings_at(point), self.prompts[point.context]
        texts = texts_at(point, len(prompts), self.cfg.repeats)
        begun = time.monotonic()
        taken = [prompts[index % len(prompts)] for index in range(texts)]
        runs = run_prompts(self.verifier, self.candidate.drafter(settings), taken, settings, progress=False)
        return row_of(self.verifier, point, settings, runs) | {"seconds": round(time.monotonic() - begun, 1)}

    def _estimate(self) -> dict[Point, float]:
        """Seconds of each point, by one short text at the first of them."""
        point = replace(self.todo[0], batch=1, context=0)
        settings = self.settings_at(point)
        settings = replace(settings, max_new_tokens=min(TRIED, settings.max_new_tokens))
        prompts = self.prompts[0]
        tried = run_prompts(self.verifier, self.candidate.drafter(settings), prompts[:2], settings, progress=False)
        rates, mean = Rates.of(tried), _mean_length(prompts)
        return {
            point: rates.seconds(
                point,
                texts_at(point, len(prompts), self.cfg.repeats),
                max(point.context, mean),
                self.cfg.decode.max_new_tokens,
            )
            for point in self.todo
        }

    @property
    def values(self) -> dict:
        values = {
            "settings": self.settings,
            "middle": None if self.middle is None else coordinates(self.middle),
            "axes": list(AXES),
            "points": list(self.done.values()),
            "left_out": self.left_out,
            "missing": len([point for point in self.todo if point not in self.done]),
            "definitions": DEFINITIONS,
        }
        return values | {"remarks": remarks(values)}

    def _write(self) -> None:
        write_json(self.file, self.values)


def _settings(cfg, verifier, candidate: Candidate, ids: list[str]) -> dict:
    """What all points of a sweep have in common; with other ones it is another sweep."""
    decode = cfg.decode
    return {
        "verifier": verifier.name,
        "verifier_hash": verifier.weights_hash,
        "head": candidate.name,
        "head_hash": candidate.hash,
        "device": str(verifier.device),
        "dtype": decode.dtype,
        "threads": torch.get_num_threads(),
        "mode": decode.mode,
        "shape": None if decode.shape is None else [*decode.shape],
        "branch": decode.branch,
        "total_tokens": decode.total_tokens,
        "min_confidence": decode.min_confidence,
        "points": decode.points,
        "top_p": decode.top_p,
        "top_k": decode.top_k,
        "max_new_tokens": decode.max_new_tokens,
        "prompts": ids,
        "earlier": [cfg.earlier] if isinstance(cfg.earlier, str) else list(cfg.earlier),
        "repeats": cfg.repeats,
        "seed": cfg.seed,
    }


def _mean_length(prompts: Sequence[Prompt]) -> float:
    return sum(len(prompt.input_ids) for prompt in prompts) / len(prompts)


def _said(row: dict) -> str:
    tau, speedup = row["tau"], row["speedup"]
    return f"tau {tau:.3f}, speed-up {speedup:.2f}" if tau and speedup else "nothing was decoded"
