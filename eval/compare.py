"""Measured runs side by side on the same prompts: acceptance, tau, and its difference to one of them.

python -m eval.compare runs=[outputs/A/TIME,outputs/B/TIME] names=[no-TTT,TTT]

Runs of one name (other seeds) are pooled. Differences are paired: the same prompts, drawn anew together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Group
from rich.table import Table

from conf.cli import Outcome, main
from conf.errors import UserError
from conf.terminal import TextConsole
from data.files import write_json
from eval import alpha_file
from eval.counts import Counts, bootstrap_tau, paired_bootstrap, pool, wilson
from eval.plots import plot_summary
from eval.tables import markdown_table, number, span

SAME = (
    "verifier_hash",
    "decode",
    "depth",
    "nodes",
    "batch",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "dtype",
)
COUNTED = {"prompt_tokens", "verify_calls", "drafted", "accepted", "tested_by_depth", "accepted_by_depth"}
DEFINITIONS = {
    "tau": "1 + accepted / verify_calls, counts pooled over prompts and runs.",
    "tau_interval": "95 %: prompts drawn anew, with their counts of all runs. It holds for these heads: another seed's "
    "training is not among what varies.",
    "tau_by_run": "of each run, then their mean and range: what another seed changes.",
    "tau_difference": "tau less the base's, and its 95 % interval when the same prompts are drawn anew for both.",
    "alpha_by_depth": "n-alpha: P(draft n accepted | drafts 1..n-1 accepted), and Wilson's 95 % intervals.",
    "cost_ratio": "draft step / verify call at this depth, the runs' mean.",
    "n_star": "of each run, the depth with the best predicted speed-up; 0 where none is faster than plain decoding.",
    "predicted_speedup": "at that depth, from measured acceptance and times; the runs' mean.",
    "speedup": "measured in the loop at the depth that was run; the runs' mean. None for replayed runs.",
}  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """The runs of one name: their alpha.json's values, and the counts of each prompt, summed over them."""

    name: str
    runs: list[dict]
    by_prompt: list[Counts]


def measured_in(run: str) -> Path:
    """The folder that holds a run's alpha.json (its own, else its latest evaluation's), or the file that was named."""
    path = Path(run)
    if path.is_dir() and not (path / "alpha.json").is_file():
        path = max(path.glob("eval-*/alpha.json"), default=path / "alpha.json").parent
    return path


def read_alpha(run: str) -> dict:
    """alpha.json of a run or evaluation folder, of a run's latest evaluation, or such a file. Raises UserError."""
    return alpha_file.read_alpha(measured_in(run))


def run_labels(runs: list[Path] | list[str]) -> list[str]:
    """The folders' last parts, longer where they would be the same. UserError when one is named twice."""
    parts = [Path(run).resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError("the same run is named twice")


def read_arms(runs: list[str], names: list[str]) -> list[Arm]:
    """Arms in the order of their names. UserError when two runs were not measured alike."""
    values = [read_alpha(run) for run in runs]
    first = values[0]
    for run, value in zip(runs, values, strict=True):
        for name in SAME:
            ours, theirs = first.get(name), value.get(name)
            if ours != theirs:
                raise UserError(
                    f"expected runs that were measured alike, found {name} {ours} in {runs[0]} and {theirs} "
                    f"in {run}: measure both with the same settings"
                )
        if missing := [row["id"] for row in value["prompts"] if COUNTED - {k for k, x in row.items() if x is not None}]:
            raise UserError(
                f"expected the counts of every prompt in {run}, found none of {missing[0]}: measure it anew"
            )
        asked, own = ([(row["id"], row["prompt_tokens"]) for row in one["prompts"]] for one in (first, value))
        if asked != own:
            raise UserError(
                f"expected the same prompts, found {len(asked)} in {runs[0]} and {len(own)} others in {run}: measure "
                "both with the same prompts and limit"
            )
    arms = []
    for name in dict.fromkeys(names):
        some = [value for value, own in zip(values, names, strict=True) if own == name]
        by_prompt = [pool(counts_of(row) for row in rows) for rows in zip(*(v["prompts"] for v in some), strict=True)]
        arms.append(Arm(name, some, by_prompt))
    return arms


def counts_of(row: dict) -> Counts:
    """A prompt's row of an alpha.json as counts; how often each depth was drafted is not in it."""
    return Counts(
        verify_calls=row["verify_calls"],
        drafted=row["drafted"],
        accepted=row["accepted"],
        emitted=row["verify_calls"] + row["accepted"],
        drafted_by_depth=[0] * len(row["tested_by_depth"]),
        tested_by_depth=list(row["tested_by_depth"]),
        accepted_by_depth=list(row["accepted_by_depth"]),
    )


def arm_row(arm: Arm, base: Arm) -> dict:
    """What is said of an arm (`DEFINITIONS`). None: it wasn't measured, or it is the base and differs by nothing."""
    counts = pool(arm.by_prompt)
    taus = [run["tau"] for run in arm.runs]
    pairs = list(zip(counts.accepted_by_depth, counts.tested_by_depth, strict=True))
    predicted = [run["predicted"] for run in arm.runs if run["predicted"]]
    difference = {"tau_difference": None, "tau_difference_interval": None}
    if arm is not base and None not in (counts.tau, pool(base.by_prompt).tau):
        difference = {
            "tau_difference": counts.tau - pool(base.by_prompt).tau,
            "tau_difference_interval": paired_bootstrap(arm.by_prompt, base.by_prompt),
        }
    return {
        "runs": len(arm.runs),
        "measured": sorted({run.get("measured", "loop") for run in arm.runs}),
        "tau": counts.tau,
        "tau_interval": bootstrap_tau(arm.by_prompt),
        "tau_by_run": taus,
        "tau_mean": mean(taus),
        "tau_range": None if None in taus else [min(taus), max(taus)],
        **difference,
        "alpha_by_depth": counts.alpha_by_depth,
        "alpha_by_depth_interval": [wilson(accepted, tested) for accepted, tested in pairs],
        "cost_ratio": mean(run["cost_ratio"] for run in arm.runs),
        "n_star": [one["n_star"] for one in predicted],
        "predicted_speedup": mean(one["speedup"] for one in predicted),
        "speedup": mean(run["speedup"] for run in arm.runs),
    }


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that there are; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def comparison(arms: list[Arm], base: Arm) -> dict:
    """comparison.json."""
    first = arms[0].runs[0]
    return {
        "base": base.name,
        "prompts": len(base.by_prompt),
        **{name: first.get(name) for name in ("verifier", *SAME)},
        "arms": {arm.name: arm_row(arm, base) for arm in arms},
        "definitions": DEFINITIONS,
    }


def acceptance_rows(values: dict) -> list[tuple[str, ...]]:
    """Heads, then a line an arm: what is accepted, and what of it is the arm's doing."""
    heads = ("arm", "n-alpha by depth", "tau", "95 %", f"less {values['base']}'s", "95 %, paired")
    lines = [
        (
            name,
            " ".join(number(alpha).removeprefix("0") for alpha in row["alpha_by_depth"]),
            number(row["tau"]),
            span(row["tau_interval"]),
            "" if row["tau_difference"] is None else f"{row['tau_difference']:+.3f}",
            span(row["tau_difference_interval"]),
        )
        for name, row in values["arms"].items()
    ]
    return [heads, *lines]


def run_rows(values: dict) -> list[tuple[str, ...]]:
    """Heads, then a line an arm: its runs, what a draft costs and what it is worth."""
    heads = ("arm", "runs", "mean tau (range)", "cost ratio", "N*", "speed-up at N*", f"measured at {values['depth']}")
    lines = [
        (
            name,
            f"{row['runs']} ({' and '.join(row['measured'])})",
            number(row["tau_mean"]) + (f" ({span(row['tau_range'])})" if row["runs"] > 1 and row["tau_range"] else ""),
            number(row["cost_ratio"]),
            " ".join(map(str, sorted(set(row["n_star"])))) or "-",
            number(row["predicted_speedup"], 2),
            number(row["speedup"], 2),
        )
        for name, row in values["arms"].items()
    ]
    return [heads, *lines]


def title(values: dict) -> str:
    """One line that says what was compared and how."""
    how = f"{values['decode']} of {values['depth']}, temperature {values['temperature']:g}"
    return f"{values['verifier'].rstrip('/').split('/')[-1]}, {how}, {values['prompts']} prompts"


def markdown(values: dict) -> str:
    """Both tables to paste, with what their numbers mean."""
    blocks = [markdown_table(heads, lines) for heads, *lines in (acceptance_rows(values), run_rows(values))]
    definitions = "\n".join(f"- {name}: {text}" for name, text in values["definitions"].items())
    return "\n\n".join([title(values), *blocks, definitions]) + "\n"


def tables(values: dict) -> Group:
    """Both tables for the terminal."""
    shown = []
    for heads, *lines in (acceptance_rows(values), run_rows(values)):
        table = Table(title=None if shown else title(values))
        for head in heads:
            table.add_column(head, overflow="fold")
        for line in lines:
            table.add_row(*line)
        shown.append(table)
    return Group(*shown)


def plot(arms: list[Arm], values: dict, path: Path) -> Path | None:
    """n-alpha by depth and tau by N, an arm a line; None when nothing was accepted or missed."""
    lines = {}
    for arm in arms:
        row = values["arms"][arm.name]
        intervals = {"alpha_by_depth": row["alpha_by_depth_interval"]}
        lines[arm.name] = row | {"depth": values["depth"], "intervals": intervals}
    return plot_summary(lines, title(values), path)


def compare(cfg) -> Outcome:
    """cfg: conf.schema.CompareCommandConf. Writes comparison.json, comparison.md and comparison.png."""
    runs = [str(run) for run in ([cfg.runs] if isinstance(cfg.runs, str) else cfg.runs or [])]
    if len(runs) < 2:
        raise UserError(f"expected two runs or more, found {len(runs)}: python -m eval.compare runs=[DIR,DIR]")
    labels = run_labels(runs)
    names = [str(name) for name in ([cfg.names] if isinstance(cfg.names, str) else cfg.names or labels)]
    if len(names) != len(runs):
        raise UserError(f"expected a name for each of {len(runs)} runs, found {len(names)} names: {' '.join(names)}")
    base = names[0] if cfg.base is None else dict(zip(runs, names, strict=True)).get(str(cfg.base), str(cfg.base))
    if base not in names:
        raise UserError(f"expected base to be one of the runs or names, found {base}: choose from {', '.join(names)}")
    arms = read_arms(runs, names)
    values = comparison(arms, next(arm for arm in arms if arm.name == base))
    folder = Path(cfg.out) if cfg.out else Path("outputs", f"comparison-{datetime.now():%Y-%m-%d_%H-%M-%S}")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", values)
    (folder / "comparison.md").write_text(markdown(values))
    plot(arms, values, folder / "comparison.png")
    TextConsole(stderr=cfg.json).print(tables(values))
    return Outcome(folder / "comparison.md", values | {"comparison_json": str(folder / "comparison.json")})


if __name__ == "__main__":
    main("compare")(compare)()
