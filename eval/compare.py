"""Runs side by side on the same prompts: acceptance, tau, and the difference to the first with its interval.

    python -m eval.compare runs=[outputs/A,outputs/B] names=[no-TTT,TTT]

Runs of one name (other seeds) are pooled. Differences are paired: the same prompts, drawn anew together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conf.cli import Outcome, main
from conf.errors import UserError
from data.files import write_json
from eval.counts import Counts, bootstrap_tau, paired_bootstrap, pool
from eval.plots import plot_alpha_by_depth
from eval.tables import number, span

SAME = ("verifier_hash", "decode", "depth", "temperature", "top_p", "top_k", "max_new_tokens", "dtype")


@dataclass(frozen=True)
class Arm:
    """The runs of one name: their alpha.json's values, and the counts of each prompt, summed over them."""

    name: str
    runs: list[dict]
    by_prompt: list[Counts]

    @property
    def counts(self) -> Counts:
        return pool(self.by_prompt)


def read_alpha(run: Path | str) -> dict:
    """The values of an alpha.json, or of the one in a folder. UserError when there is none."""
    path = Path(run)
    path = path / "alpha.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"expected an alpha.json at {run}, found none: measure the run first, python -m eval run={run}")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); measure the run again") from error


def read_arms(runs: list[str], names: list[str]) -> list[Arm]:
    """Arms in the order of their names. UserError when two runs were not measured alike."""
    values = [read_alpha(run) for run in runs]
    for run, value in zip(runs, values, strict=True):
        for name in SAME:
            if value[name] != values[0][name]:
                raise UserError(
                    f"expected runs that were measured alike, found {name} {values[0][name]} in {runs[0]} and "
                    f"{value[name]} in {run}: measure both again with the same settings"
                )
        ids = [[row["id"] for row in one["prompts"]] for one in (values[0], value)]
        if ids[0] != ids[1]:
            raise UserError(
                f"expected the same prompts, found {len(ids[0])} in {runs[0]} and {len(ids[1])} others in {run}: "
                "measure both again with the same prompts and limit"
            )
    arms = []
    for name in dict.fromkeys(names):
        some = [value for value, own in zip(values, names, strict=True) if own == name]
        by_prompt = [pool(counts_of(row) for row in rows) for rows in zip(*(v["prompts"] for v in some), strict=True)]
        arms.append(Arm(name, some, by_prompt))
    return arms


def counts_of(row: dict) -> Counts:
    """A prompt's row of alpha.json as counts, as far as a chain's tau and n-alpha need them."""
    return Counts(
        verify_calls=row["verify_calls"],
        drafted=row["drafted"],
        accepted=row["accepted"],
        emitted=row["verify_calls"] + row["accepted"],
        drafted_by_depth=[row["verify_calls"]] * len(row["tested_by_depth"]),
        tested_by_depth=list(row["tested_by_depth"]),
        accepted_by_depth=list(row["accepted_by_depth"]),
    )


def arm_row(arm: Arm, base: Arm) -> dict:
    """What is said of an arm; tau_difference is to `base`, None for itself."""
    runs, counts = arm.runs, arm.counts
    taus = [run["tau"] for run in runs]
    predicted = [run["predicted"] for run in runs if run["predicted"]]
    return {
        "runs": len(runs),
        "tau": counts.tau,
        "tau_by_run": taus,
        "tau_interval": bootstrap_tau(arm.by_prompt),
        "alpha_by_depth": counts.alpha_by_depth,
        "tau_difference": None if arm is base else counts.tau - base.counts.tau,
        "tau_difference_interval": None if arm is base else paired_bootstrap(arm.by_prompt, base.by_prompt),
        "cost_ratio": _mean(run["cost_ratio"] for run in runs),
        "n_star": [one["n_star"] for one in predicted],
        "predicted_speedup": _mean(one["speedup"] for one in predicted),
        "speedup": _mean(run["speedup"] for run in runs),
    }


def _mean(values) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


COLUMNS = (
    "arm",
    "runs",
    "n-alpha by depth",
    "tau",
    "95 %",
    "tau by run",
    "to the first",
    "95 % ",
    "cost",
    "N*",
    "speed-up",
)


def table_rows(rows: dict[str, dict]) -> list[tuple[str, ...]]:
    """As `COLUMNS`; the speed-up is the measured one, else the predicted one at N*, marked with a p."""
    lines = []
    for name, row in rows.items():
        measured, predicted = row["speedup"], row["predicted_speedup"]
        lines.append(
            (
                name,
                str(row["runs"]),
                " ".join(number(a).removeprefix("0") for a in row["alpha_by_depth"]),
                number(row["tau"]),
                span(row["tau_interval"]),
                " ".join(number(tau) for tau in row["tau_by_run"]) if row["runs"] > 1 else "",
                "" if row["tau_difference"] is None else f"{row['tau_difference']:+.3f}",
                span(row["tau_difference_interval"]),
                number(row["cost_ratio"]),
                " ".join(str(n) for n in row["n_star"]),
                number(measured, 2) if measured is not None else f"{number(predicted, 2)} p",
            )
        )
    return lines


def markdown(rows: dict[str, dict]) -> str:
    """The table to paste."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *table_rows(rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


@main("compare")
def compare(cfg) -> Outcome:
    """python -m eval.compare: see the module. Writes comparison.json, comparison.md and a plot."""
    if not cfg.runs or isinstance(cfg.runs, str) or len(cfg.runs) < 2:
        raise UserError("give two runs or more to compare: python -m eval.compare runs=[DIR,DIR]")
    names = list(cfg.names or [Path(run).name for run in cfg.runs])
    if len(names) != len(cfg.runs):
        raise UserError(f"expected a name for each of {len(cfg.runs)} runs, found {len(names)} names")
    arms = read_arms([str(run) for run in cfg.runs], [str(name) for name in names])
    rows = {arm.name: arm_row(arm, arms[0]) for arm in arms}
    folder = Path(cfg.out) if cfg.out else Path("outputs") / f"comparison-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder.mkdir(parents=True, exist_ok=True)
    values = {"base": arms[0].name, "prompts": len(arms[0].by_prompt), "arms": rows}
    write_json(folder / "comparison.json", values)
    (folder / "comparison.md").write_text(markdown(rows))
    plot_alpha_by_depth({arm.name: arm.runs[0] for arm in arms}, folder / "alpha_by_depth.png")
    table = Table(title=f"{len(arms[0].by_prompt)} prompts, differences to {arms[0].name}")
    for column in COLUMNS:
        table.add_column(column)
    for line in table_rows(rows):
        table.add_row(*line)
    Console(stderr=cfg.json).print(table)
    return Outcome(folder / "comparison.md", values)


if __name__ == "__main__":
    compare()
