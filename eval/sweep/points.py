"""The points of a sweep: where each axis is cut, which points there can't be, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

from conf.errors import UserError
from eval.command import shape_of
from eval.measure import PromptRun

AXES = {"temperature": "temperatures", "batch": "batches", "context": "contexts", "depth": "depths"}
SHRINK = 0.4  # a token's share of a call is taken to fall as batch ** -SHRINK, until it is measured


@dataclass(frozen=True)
class Point:
    """Where it is measured. context: tokens of a prompt, 0 for prompts as they are. depth: N, drafts of a chain."""

    temperature: float
    batch: int
    context: int
    depth: int

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, batch {self.batch}, context {self.context or '-'}, N {self.depth}"


def points_of(cfg) -> list[Point]:
    """cfg: conf.schema.SweepCommandConf. The middle first, then one axis at a time, or every combination.

    Raises UserError for a value that no point can have.
    """
    decode = cfg.decode
    temperature = decode.temperature if cfg.temperature is None else cfg.temperature
    middle = Point(float(temperature), decode.batch, cfg.context, shape_of(decode).depth)
    values = {axis: list(getattr(cfg, name)) for axis, name in AXES.items()}
    if decode.shape is not None and values["depth"]:
        raise UserError("a fixed tree has no N to sweep over: give depths=[] with decode.shape")
    for axis, least in {"temperature": 0, "batch": 1, "context": 0, "depth": 1}.items():
        if wrong := [value for value in [getattr(middle, axis), *values[axis]] if value < least]:
            raise UserError(f"expected {AXES[axis]} of {least} or more, found {wrong[0]}")
    if cfg.grid:
        cells = product(*(values[axis] or [getattr(middle, axis)] for axis in AXES))
        return list(dict.fromkeys(Point(float(cell[0]), *cell[1:]) for cell in cells))
    moved = [
        replace(middle, **{axis: type(getattr(middle, axis))(value)}) for axis in AXES for value in sorted(values[axis])
    ]
    return list(dict.fromkeys([middle, *moved]))


def texts_at(point: Point, prompts: int, repeats: int) -> int:
    """How many texts are decoded each way: full batches, as many of them with drafts first as last."""
    turns = 2 * point.batch
    return -(-max(prompts * repeats, turns) // turns) * turns


def obstacle(point: Point, drafts: int, rows: int, positions: int, slots: int) -> str | None:
    """Why there can't be such a point, or None.

    drafts: the levels that the drafter has there. rows: cache slots that a sequence needs. positions: the verifier's.
    slots: that fit into the memory.
    """
    if drafts != point.depth:
        return f"it drafts {drafts} at most"
    if rows > positions:
        return f"{rows} positions of {positions}"
    if rows * point.batch > slots:
        return f"{rows * point.batch} cache slots; {slots} fit into the memory that is free"
    return None


@dataclass(frozen=True)
class Rates:
    """Seconds of a prompt's token, of a token with drafts, and of one without."""

    prefill: float
    drafted: float
    plain: float

    @classmethod
    def of(cls, runs: Sequence[PromptRun]) -> Rates:
        """From a few texts, one at a time, decoded both ways."""

        def a_token(texts) -> float:
            return sum(text.seconds for text in texts) / max(1, sum(len(text.tokens) - 1 for text in texts))

        plain = [run.baseline for run in runs]
        prefill = sum(text.prefill_seconds for text in plain) / sum(len(run.prompt.input_ids) for run in runs)
        return cls(prefill, a_token([run.speculative for run in runs]), a_token(plain))

    def seconds(self, point: Point, texts: int, prompt_tokens: float, new_tokens: int) -> float:
        """What a point will take; both ways read the prompt."""
        share = point.batch**-SHRINK
        return texts * (2 * prompt_tokens * self.prefill + new_tokens * (self.drafted + self.plain) * share)


def duration(seconds: float) -> str:
    """In words."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"


def row_key(row: dict) -> Point:
    """The point that a row of sweep.json is about."""
    return Point(**{name: row[name] for name in AXES})


def coordinates(point: Point) -> dict:
    return asdict(point)
