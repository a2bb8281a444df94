"""PNGs of a run: a summary, n-alpha by depth, tau and speed-up by N, loss and accuracy over training."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from conf.disk import writing
from conf.errors import printable
from eval.theory import expected_tokens

# Told apart by anyone (after Okabe and Ito), and by their markers without any colour.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8578f", "#b07a00", "#3a93c4", "#6c757d", "#7a4a1e")
MARKERS = "osD^vPXd"
LINE = {"linewidth": 2, "marker": "o", "markersize": 5}
Metrics = dict[str, list[tuple[float, float]]]  # a metrics.csv: (step, value) points of each column
LARGEST = 1e30  # beyond, no axis has ticks
LONGEST = 80  # characters of a title or label
STAR = {"marker": "*", "markersize": 14, "markeredgecolor": "white"}


def plot_summary(runs: dict[str, dict], title: str, path: Path) -> Path | None:
    """n-alpha by depth beside tau by N: one wide picture, sharp and legible at 900 pixels.

    runs: label -> alpha.json's values. None when no run has a profile.
    """
    if not (profiled := with_profile(runs)):
        return None
    figure, axes = new_figure(2, size=(9, 3.7), dpi=200)
    alpha_panel(axes[0], profiled)
    tau_panel(axes[1], profiled)
    figure.suptitle(plain(title), fontsize=12, fontweight="bold")
    return save_figure(figure, path)


def plot_alpha_by_depth(runs: dict[str, dict], path: Path) -> Path:
    """n-alpha with Wilson intervals, one line a run. runs: label -> alpha.json's values."""
    figure, (axes,) = new_figure(1)
    alpha_panel(axes, runs)
    return save_figure(figure, path)


def plot_tau_by_n(runs: dict[str, dict], path: Path) -> Path | None:
    """Tokens per verify call by depth N from the measured profile, and the speed-up that the times promise.

    None when no run has an accepted-by-depth profile.
    """
    if not (profiled := with_profile(runs)):
        return None
    timed = any(values["predicted"] for values in profiled.values())
    figure, axes = new_figure(2 if timed else 1)
    tau_panel(axes[0], profiled)
    if timed:
        speedup_panel(axes[1], profiled)
    return save_figure(figure, path)


def with_profile(runs: dict[str, dict]) -> dict[str, dict]:
    return {label: v for label, v in runs.items() if v["alpha_by_depth"] and v["alpha_by_depth"][0] is not None}


def alpha_panel(axes, runs: dict[str, dict]) -> None:
    """n-alpha with its intervals. runs: label -> alpha.json's values."""
    for style, (label, values) in zip(styles(), runs.items(), strict=False):
        points = [
            (k, alpha, interval)
            for k, (alpha, interval) in enumerate(
                zip(values["alpha_by_depth"], values["intervals"]["alpha_by_depth"], strict=True), 1
            )
            if alpha is not None
        ]
        depths, alphas = [k for k, _, _ in points], [alpha for _, alpha, _ in points]
        axes.plot(depths, alphas, label=plain(label), **style)
        low, high = [i[0] for *_, i in points], [i[1] for *_, i in points]
        axes.fill_between(depths, low, high, color=style["color"], alpha=0.18, lw=0)
    axes.set(xlabel="depth n", ylabel="n-alpha", title="P(draft n accepted | all before were)", ylim=(0, 1))
    _finish_panel(axes, runs)


def tau_panel(axes, runs: dict[str, dict]) -> None:
    """Tokens per verify call by N, from the measured profile; a star where it was measured."""
    for style, (label, values) in zip(styles(), runs.items(), strict=False):
        profile = [alpha for alpha in values["alpha_by_depth"] if alpha is not None]
        depths = range(1, len(profile) + 1)
        axes.plot(depths, [expected_tokens(profile[:n]) for n in depths], label=plain(label), **style)
        axes.plot([values["depth"]], [values["tau"]], color=style["color"], **STAR)
    axes.set(xlabel="drafts per verify call N", ylabel="tau", title="Tokens per verify call (star: measured)")
    axes.margins(y=0.12)
    axes.set_ylim(bottom=1)
    _finish_panel(axes, runs)


def speedup_panel(axes, runs: dict[str, dict]) -> None:
    """Speed-up by N, from the measured profile and times; a star where it was measured."""
    for style, (label, values) in zip(styles(), runs.items(), strict=False):
        if values["predicted"]:
            by_n = values["predicted"]["speedup_by_n"]
            axes.plot([int(n) for n in by_n], list(by_n.values()), label=plain(label), **style)
            if values["speedup"] is not None:
                axes.plot([values["depth"]], [values["speedup"]], color=style["color"], **STAR)
    axes.axhline(1, color="#999999", lw=1, ls="--")
    axes.set(xlabel="drafts per verify call N", ylabel="speed-up", title="Speed-up predicted (star: measured)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def shares_line(axes, part: dict, name: str, first: int = 0, **style) -> None:
    """A share by depth in its band, from part[name] and part[f"{name}_interval"]; `first`: the number of the first.

    Depths that too few texts have reached for an interval are faint points.
    """
    points = [(n, value) for n, value in enumerate(part[name], first) if value is not None]
    bounds = [(n, *both) for n, both in enumerate(part[f"{name}_interval"], first) if both is not None]
    sure = {n for n, *_ in bounds} or {n for n, _ in points}  # of a single text there are no intervals at all
    kept = [point for point in points if point[0] in sure]
    axes.plot([n for n, _ in kept], [value for _, value in kept], **(LINE | style))
    faint = {"marker": style.get("marker", "o"), "ms": 4, "color": style["color"], "alpha": 0.3, "ls": ""}
    axes.plot(*([x[i] for x in points if x not in kept] for i in (0, 1)), **faint)
    if bounds:
        axes.fill_between(*zip(*bounds, strict=True), color=style["color"], alpha=0.12, lw=0)


def _finish_panel(axes, runs: dict[str, dict]) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(runs) > 1:
        axes.legend(frameon=False)


def plot_training(metrics: Metrics, path: Path) -> Path | None:
    """Loss, accuracy by TTT step, and held-out tau over optimizer steps. None when nothing was logged."""
    draws = [partial(panel, runs={"": metrics}) for panel in TRAINING if any_points({"": metrics}, panel)]
    if not draws:
        return None
    figure, axes = new_figure(len(draws))
    for one, draw in zip(axes, draws, strict=True):
        draw(one)
    return save_figure(figure, path)


def loss_panel(axes, runs: dict[str, Metrics]) -> None:
    """Training loss. runs: label -> columns of metrics.csv."""
    for colour, (label, metrics) in zip(cycle(COLOURS), runs.items(), strict=False):
        if points := metrics.get("train/loss"):
            axes.plot(*zip(*points, strict=True), color=colour, lw=1.6, label=plain(label))
    axes.set(xlabel="optimizer step", ylabel="loss", title="Training loss")
    _finish_panel(axes, runs)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


def accuracy_panel(axes, runs: dict[str, Metrics]) -> None:
    """Training accuracy by TTT step, of the first run alone."""
    metrics = next(iter(runs.values()))
    for colour, (k, points) in zip(cycle(COLOURS), accuracies_of(metrics).items(), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, lw=1.4, label=f"step {k}")
    axes.set(xlabel="optimizer step", ylabel="accuracy", title="Training accuracy by TTT step", ylim=(0, 1))
    axes.legend(frameon=False, ncols=2, fontsize=8)


def held_out_panel(axes, runs: dict[str, Metrics]) -> None:
    """tau of the loop on held-out prompts while training."""
    for style, (label, metrics) in zip(styles(), runs.items(), strict=False):
        if points := metrics.get("val/tau"):
            axes.plot(*zip(*points, strict=True), label=plain(label), **style)
    axes.set(xlabel="optimizer step", ylabel="tau", title="Free-running tau, held-out prompts")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))


TRAINING = {loss_panel: "train/loss", accuracy_panel: "train/accuracy_0", held_out_panel: "val/tau"}


def any_points(runs: dict[str, Metrics], panel: Callable) -> bool:
    """Whether a panel of TRAINING has anything to show."""
    return any(metrics.get(TRAINING[panel]) for metrics in runs.values())


def accuracies_of(metrics: Metrics) -> dict[int, list[tuple[float, float]]]:
    """Training accuracy by TTT step."""
    return {k: metrics[f"train/accuracy_{k}"] for k in range(64) if metrics.get(f"train/accuracy_{k}")}


def read_metrics(path: Path) -> Metrics:
    """metrics.csv -> (step, value) points of each column; empty and unreadable cells are left out."""
    points: Metrics = {}
    if not path.is_file():
        return points
    csv.field_size_limit(2**31 - 1)  # a long cell is no number, and no reason to stop
    with path.open(newline="", encoding="utf-8", errors="replace") as lines:
        for row in csv.DictReader(lines):
            if not _is_number(row.get("step")):
                continue
            for name, value in row.items():
                if name and name != "step" and _is_number(value):
                    points.setdefault(name, []).append((float(row["step"]), float(value)))
    return points


def _is_number(text) -> bool:
    number = isinstance(text, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text)
    return bool(number) and abs(float(text)) < LARGEST


def plain(text: str) -> str:
    """A title or label as it is: matplotlib would take what stands between dollars for a formula."""
    text = printable(str(text))
    return (text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...").replace("$", r"\$")


def styles() -> Iterator[dict]:
    """How each line in turn is drawn."""
    for colour, marker in cycle(zip(COLOURS, MARKERS, strict=True)):
        yield LINE | {"color": colour, "marker": marker}


def new_figure(panels: int, size: tuple[float, float] | None = None, dpi: int = 130):
    """A figure with `panels` axes side by side, without pyplot's global state. size: inches."""
    size = size or (1 + 4.6 * panels, 3.6)
    figure = Figure(figsize=size, dpi=dpi, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", color="#e3e3e3", lw=0.8)
        one.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path)
    return path
