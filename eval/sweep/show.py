"""A sweep as tables, lines and plots."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from eval.plots import COLOURS, LINE, new_figure, save_figure
from eval.tables import number

LABELS = {
    "temperature": "temperature",
    "batch": "sequences at once",
    "context": "tokens of prompt",
    "depth": "drafts per verify call N",
}
SHORT = {"temperature": "temp", "depth": "N"}


def along(values: dict, axis: str) -> list[dict]:
    """Rows that differ from the middle in this axis alone, in its order; of a grid, from the first row."""
    points = values["points"]
    middle = values["middle"] or (points and points[0]) or {}
    others = [name for name in values["axes"] if name != axis]
    found = [row for row in points if all(row[name] == middle[name] for name in others)]
    return sorted(found, key=lambda row: row[axis])


def shown_axes(values: dict) -> list[str]:
    """Axes along which there is more than one point."""
    return [axis for axis in values["axes"] if len(along(values, axis)) > 1]


def tables(values: dict) -> list[Table]:
    """One for each axis; of a grid, all of its points in one."""
    if values["middle"] is None:
        return [_table("all points", values["axes"], values["points"])]
    found = [_table(_title(values, axis), [axis], along(values, axis)) for axis in shown_axes(values)]
    return found or [_table("one point", values["axes"], values["points"])]


def _title(values: dict, axis: str) -> str:
    fixed = [f"{name} {_cell(name, values['middle'][name])}" for name in values["axes"] if name != axis]
    return f"{LABELS[axis]} ({', '.join(fixed)})"


def _cell(axis: str, value: float) -> str:
    return "own" if axis == "context" and value == 0 else f"{value:g}"


def _table(title: str, axes: list[str], rows: list[dict]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    long = ["prompt"] if "context" in axes else []
    for name in [*axes, *long, "tau", "95 %", "alpha", "tok/s", "plain", "speed-up", "95 %"]:
        table.add_column(SHORT.get(name, name), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(_cell(axis, row[axis]) for axis in axes),
            *(number(row["prompt_tokens"], 0) for _ in long),
            number(row["tau"]),
            _pair(row["tau_interval"]),
            number(row["alpha"]),
            number(row["tokens_per_second"], 1),
            number(row["baseline_tokens_per_second"], 1),
            number(row["speedup"], 2),
            _pair(row["speedup_interval"]) or f"({_pair(row['speedup_range'])})",
        )
    return table


def _pair(interval: list[float] | None) -> str:
    """In brackets above: of too few turns for an interval, the least and the most."""
    return "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def remarks(values: dict) -> list[str]:
    """What pays and what doesn't along each axis, and what went wrong."""
    lines = []
    for axis in shown_axes(values):
        rows = [row for row in along(values, axis) if row["speedup"]]
        if not rows:
            continue
        best = max(rows, key=lambda row: row["speedup"])
        pays = [_cell(axis, row[axis]) + _doubt(row) for row in rows if row["speedup"] > 1]
        said = ", ".join(pays) or "at none of these"
        lines.append(
            f"{LABELS[axis]}: faster than without drafts: {said}; best {_cell(axis, best[axis])} "
            f"({best['speedup']:.2f})"
        )
    wrong = sum(row["differences"] or 0 for row in values["points"])
    if wrong:
        lines.append(f"{wrong} greedy texts are not the verifier's own: see `differences`")
    if values["left_out"]:
        lines.append(f"{len(values['left_out'])} points could not be measured: see `left_out`")
    return lines


def _doubt(row: dict) -> str:
    """A mark where the speed-up may as well be 1."""
    return "" if row["speedup_interval"] and row["speedup_interval"][0] > 1 else " ?"


def draw(values: dict, folder: Path) -> list[Path]:
    """sweep-AXIS.png: tau, tokens a second and the speed-up along each axis that has more than one point."""
    return [_plot(along(values, axis), axis, folder / f"sweep-{axis}.png") for axis in shown_axes(values)]


def _plot(rows: list[dict], axis: str, path: Path) -> Path:
    figure, axes = new_figure(3)
    rows = [row for row in rows if row["tau"] and row["speedup"]]
    xs = [row["prompt_tokens"] if axis == "context" else row[axis] for row in rows]
    _line(axes[0], xs, rows, "tau", "tau_interval")
    axes[0].set(ylabel="tau", title="Tokens per verify call", ylim=(1, None))
    _line(axes[1], xs, rows, "tokens_per_second", None, "with drafts")
    _line(axes[1], xs, rows, "baseline_tokens_per_second", None, "without", COLOURS[1])
    axes[1].set(ylabel="tokens a second", title="Speed, all sequences together", ylim=(0, None))
    axes[1].legend(frameon=False)
    _line(axes[2], xs, rows, "speedup", "speedup_interval")
    axes[2].axhline(1, color="#999999", lw=1, ls="--")
    axes[2].set(ylabel="speed-up", title="Speed-up over plain decoding")
    for one in axes:
        one.set_xlabel(LABELS[axis])
        if axis == "batch":
            one.set_xscale("log", base=2)
            one.set_xticks(xs, [f"{x:g}" for x in xs])
        elif axis == "depth":
            one.set_xticks(xs)
    return save_figure(figure, path)


def _line(
    axes, xs: list[float], rows: list[dict], name: str, interval: str | None, label="", colour=COLOURS[0]
) -> None:
    axes.plot(xs, [row[name] for row in rows], color=colour, label=label, **LINE)
    if interval and all(row[interval] for row in rows):
        low, high = zip(*(row[interval] for row in rows), strict=True)
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, lw=0)
