"""A sweep of the run's head: acceptance by temperature, times by batch, and speed-ups to hold the predicted against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Self

from pydantic import Field, model_validator

from conf.errors import UserError
from conf.workload import WorkloadConf
from eval.alpha_file import MOST_DEPTHS, Count, Depths, Number, Part, Span, Time, Times, Whole, check_shares, read_as
from eval.counts import ratio, wilson
from eval.tuner.costs import Costs, measured_costs
from eval.tuner.engines import FAMILIES
from eval.tuner.published import Profile, cooled

Seconds = Annotated[float, Field(gt=0, le=1e9)]
SAME_T = 0.05  # temperatures that are this close are the same
TELLS = {"temperature": "the temperature gate", "batch": "batch tiers", "context": "long prompts", "depth": "other N"}


class RowTimes(Times):
    """Seconds, a sequence's share of a call of its batch. None where there were no such draft steps."""

    t_decode: Seconds
    t_verify: Annotated[dict[Whole, Seconds], Field(min_length=1)]
    t_draft_first: Time | None
    t_draft: Time | None


class Row(Part):
    """A point of sweep.json, as far as the tuner looks at it."""

    temperature: Annotated[float, Field(ge=0, le=1e3)]
    batch: Annotated[int, Field(ge=1, le=1 << 20)]
    context: Count
    depth: Annotated[int, Field(ge=1, le=MOST_DEPTHS)]
    prompt_tokens: Annotated[float, Field(ge=0, le=1e9)]
    tau: Annotated[float, Field(ge=1, le=MOST_DEPTHS + 1)] | None
    accepted_by_depth: Annotated[list[Count], Depths]
    tested_by_depth: Annotated[list[Count], Depths]
    prompt_lookup_tau: Number | None
    speedup: Annotated[float, Field(gt=0, le=1e6)] | None
    speedup_interval: Span | None
    times: RowTimes | None

    @model_validator(mode="after")
    def _shares(self) -> Self:
        return check_shares(self)

    @property
    def alpha_values(self) -> dict:
        """What an alpha.json says of acceptance (eval.tuner.evidence)."""
        counts = list(zip(self.accepted_by_depth, self.tested_by_depth, strict=True))
        return self.model_dump() | {
            "alpha_by_depth": [ratio(*pair) for pair in counts],
            "intervals": {"alpha_by_depth": [wilson(*pair) for pair in counts]},
            "repetition_rate": None,
        }

    @property
    def predicted(self) -> float:
        """Its speed-up by its own tau and times."""
        first, later, verify = (self.times.t_draft_first or 0.0), (self.times.t_draft or 0.0), self.times.t_verify
        seconds = max(verify.values()) + first + (self.depth - 1) * later + self.times.t_other
        return self.tau * self.times.t_decode / seconds


class Settings(Part):
    verifier_hash: str
    head_hash: str | None
    mode: str
    device: str
    dtype: str
    threads: Count


class SweepFile(Part):
    settings: Settings
    points: list[Row]
    missing: Count


@dataclass(frozen=True)
class Swept:
    """A sweep of chains. rows: points where drafts were tested. empty: how many others. missing: not yet measured."""

    file: str
    settings: Settings
    rows: list[Row]
    empty: int
    missing: int

    def by_temperature(self, load: WorkloadConf) -> list[Row]:
        """Points that differ in temperature alone: the most, then the deepest, then of prompts like the workload's."""
        lines = defaultdict(list)
        for row in sorted(self.rows, key=lambda row: row.temperature):
            lines[row.batch, row.context, row.depth].append(row)
        return max(lines.values(), key=lambda line: (len(line), line[0].depth, -_distance(line[0], load),
                                                     -line[0].batch))  # fmt: skip

    def by_n(self, load: WorkloadConf, batch: int) -> dict[int, Row]:
        """Measured speed-ups by N at the workload's temperature, of prompts like its."""
        rows = [row for row in self.rows if row.batch == batch and row.speedup]
        rows = [row for row in rows if abs(row.temperature - load.temperature) <= SAME_T]
        return {row.depth: row for row in sorted(rows, key=lambda row: (row.depth, -_distance(row, load)))}

    def costs(self, load: WorkloadConf, batch: int) -> Costs | None:
        """Times at this batch, of prompts like the workload's and near its temperature; None: not measured.

        Each point's are taken in steps of its own plain decoding, for both met the same load on the machine.
        """
        rows = [row for row in self.rows if row.batch == batch and row.times]
        if not rows:
            return None
        near = min(rows, key=lambda row: (_distance(row, load), abs(row.temperature - load.temperature)))
        rows = [row for row in rows if (row.context, row.temperature) == (near.context, near.temperature)]
        decode = median(row.times.t_decode for row in rows)

        def typical(name: str, otherwise: float) -> float:
            timed = [row.times for row in rows if getattr(row.times, name) is not None]
            return decode * median(getattr(one, name) / one.t_decode for one in timed) if timed else otherwise

        first = typical("t_draft_first", 0.0)
        verify = {width: decode * s / row.times.t_decode for row in rows for width, s in row.times.t_verify.items()}
        worst = max(rows, key=lambda row: abs(row.predicted / row.speedup - 1) if row.speedup else 0.0)
        record = self.settings.model_dump() | {
            "times": {"t_decode": decode, "t_verify": {"1": decode} | verify, "t_draft_first": first,
                      "t_draft": typical("t_draft", first), "t_other": typical("t_other", 0.0)},
            "batch": batch, "speedup": worst.speedup, "predicted_speedup": worst.predicted,
        }  # fmt: skip
        at = f"batch {batch}, T={near.temperature:g}, prompts of {near.prompt_tokens:.0f} tokens"
        return measured_costs(record, batch, f"{self.file} at {at}")


def _distance(row: Row, load: WorkloadConf) -> float:
    return abs(row.prompt_tokens - load.prompt_tokens)


def read_sweep(place: str, record: dict) -> Swept:
    """sweep.json in a folder, or such a file, of the same head and verifier as an alpha.json's. Raises UserError."""
    path = Path(place).expanduser()
    file = path / "sweep.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"expected a sweep.json in {place}, found none: python -m eval.sweep run=DIR writes one")
    values = SweepFile.model_validate(read_as(SweepFile, file, "a sweep.json", "python -m eval.sweep"))
    settings, rows = values.settings, [row for row in values.points if row.tau and any(row.tested_by_depth[:1])]
    if (settings.head_hash, settings.verifier_hash) != (record["head_hash"], record["verifier_hash"]):
        raise UserError(
            f"expected a sweep of the run's head and verifier in {file}, found others: sweep run=DIR itself"
        )
    if settings.mode != "chain":
        raise UserError(f"expected a sweep of chains in {file}, found decode={settings.mode}: sweep with decode=chain")
    if not rows:
        raise UserError(
            f"expected points with tested drafts in {file}, found none: python -m eval.sweep goes on with it"
        )
    return Swept(str(file), settings, rows, len(values.points) - len(rows), values.missing)


def at(profiles: Sequence[Profile], temperature: float) -> Profile:
    """Of one draft, measured at one temperature or several: straight lines between them, by depth.

    Above the warmest the published fall; below the coldest as there, a lower bound. Depths that one of two neighbours
    lacks are left out, so that they count as missed.
    """
    below = [profile for profile in profiles if profile.temperature <= temperature]
    above = [profile for profile in profiles if profile.temperature > temperature]
    cold, warm = (find(some, key=lambda profile: profile.temperature, default=None) for find, some in
                  ((max, below), (min, above)))  # fmt: skip
    if cold is None or warm is None or cold.temperature == temperature:
        return cooled(cold or warm, temperature)
    share = (temperature - cold.temperature) / (warm.temperature - cold.temperature)
    point, low, high = (
        tuple((1 - share) * a + share * b for a, b in zip(*pair, strict=False))
        for pair in ((cold.point, warm.point), (cold.low, warm.low), (cold.high, warm.high))
    )
    source = f"between T={cold.temperature:g} ({cold.source}) and T={warm.temperature:g} ({warm.source})"
    return Profile(cold.family, point, low, high, "measured", source, temperature)


def remarks(swept: Swept, record: dict, pairs: Sequence[tuple[Profile, Profile]]) -> list[str]:
    """What a reader should know of a sweep beside the run's alpha.json. pairs: both, where of one temperature."""
    lines, ours = [], swept.settings
    still = [axis for axis in TELLS if len({getattr(row, axis) for row in swept.rows}) == 1]
    if still:
        lines.append(
            f"{swept.file} doesn't move {', '.join(still)}: no measurement of {', '.join(map(TELLS.get, still))}"
        )
    if swept.empty:
        lines.append(f"{swept.empty} points of {swept.file} have no tested drafts: not used")
    if swept.missing:
        lines.append(f"{swept.file} isn't finished, {swept.missing} points are missing: the same command goes on")
    if differing := [name for name in ("device", "dtype", "threads") if getattr(ours, name) != record[name]]:
        said = ", ".join(f"{name} {getattr(ours, name)} and {record[name]}" for name in differing)
        lines.append(f"sweep and run were measured on other machines or settings: {said}")
    for run, other in pairs:
        if other.low[0] > run.high[0] or other.high[0] < run.low[0]:
            found = f"{other.point[0]:.2f} of the sweep's first drafts pass, {run.point[0]:.2f} of the run's"
            lines.append(f"{FAMILIES[run.family]} at T={run.temperature:g}: {found}: measure both on the same prompts")
    return lines
