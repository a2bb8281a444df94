"""PNGs of a run: a summary, n-alpha by depth, tau and speed-up by N, loss and accuracy over training."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from conf.disk import writing
from conf.errors import printable
from eval.theory import expected_tokens

COLOURS = ("#2a6f97", "#d1495b", "#66a182", "#edae49", "#7b5ea7", "#6c757d", "#00798c", "#a44a3f")
LINE = {"linewidth": 2, "marker": "o", "markersize": 5}
LARGEST = 1e30  # beyond, no axis has ticks
LONGEST = 80  # characters of a title or label
STAR = {"marker": "*", "markersize": 14, "markeredgecolor": "white"}


def plot_summary(runs: dict[str, dict], title: str, path: Path) -> Path | None:
    """n-alpha by depth beside tau by N: one wide picture, sharp and legible at 900 pixels.

    runs: label -> alpha.json's values. None when no run has a profile.
    """
    if not (profiled := _with_profile(runs)):
        return None
    figure, axes = new_figure(2, size=(9, 3.7), dpi=200)
    _alpha_panel(axes[0], profiled)
    _tau_panel(axes[1], profiled)
    figure.suptitle(plain(title), fontsize=12, fontweight="bold")
    return save_figure(figure, path)


def plot_alpha_by_depth(runs: dict[str, dict], path: Path) -> Path:
    """n-alpha with Wilson intervals, one line a run. runs: label -> alpha.json's values."""
    figure, (axes,) = new_figure(1)
    _alpha_panel(axes, runs)
    return save_figure(figure, path)


def plot_tau_by_n(runs: dict[str, dict], path: Path) -> Path | None:
    """Tokens per verify call by depth N from the measured profile, and the speed-up that the times promise.

    None when no run has an accepted-by-depth profile.
    """
    if not (profiled := _with_profile(runs)):
        return None
    timed = any(values["predicted"] for values in profiled.values())
    figure, axes = new_figure(2 if timed else 1)
    _tau_panel(axes[0], profiled)
    if timed:
        _speedup_panel(axes[1], profiled)
    return save_figure(figure, path)


def _with_profile(runs: dict[str, dict]) -> dict[str, dict]:
    return {label: v for label, v in runs.items() if v["alpha_by_depth"] and v["alpha_by_depth"][0] is not None}


def _alpha_panel(axes, runs: dict[str, dict]) -> None:
    for colour, (label, values) in zip(_colours(), runs.items(), strict=False):
        points = [
            (k, alpha, interval)
            for k, (alpha, interval) in enumerate(
                zip(values["alpha_by_depth"], values["intervals"]["alpha_by_depth"], strict=True), 1
            )
            if alpha is not None
        ]
        depths, alphas = [k for k, _, _ in points], [alpha for _, alpha, _ in points]
        axes.plot(depths, alphas, color=colour, label=plain(label), **LINE)
        low, high = [i[0] for *_, i in points], [i[1] for *_, i in points]
        axes.fill_between(depths, low, high, color=colour, alpha=0.18, lw=0)
    axes.set(xlabel="depth n", ylabel="n-alpha", title="P(draft n accepted | all before were)", ylim=(0, 1))
    _finish_panel(axes, runs)


def _tau_panel(axes, runs: dict[str, dict]) -> None:
    for colour, (label, values) in zip(_colours(), runs.items(), strict=False):
        profile = [alpha for alpha in values["alpha_by_depth"] if alpha is not None]
        depths = range(1, len(profile) + 1)
        axes.plot(depths, [expected_tokens(profile[:n]) for n in depths], color=colour, label=plain(label), **LINE)
        axes.plot([values["depth"]], [values["tau"]], color=colour, **STAR)
    axes.set(xlabel="drafts per verify call N", ylabel="tau", title="Tokens per verify call (star: measured)")
    axes.set_ylim(bottom=1)
    axes.margins(y=0.12)
    _finish_panel(axes, runs)


def _speedup_panel(axes, runs: dict[str, dict]) -> None:
    for colour, (label, values) in zip(_colours(), runs.items(), strict=False):
        if values["predicted"]:
            by_n = values["predicted"]["speedup_by_n"]
            axes.plot([int(n) for n in by_n], list(by_n.values()), color=colour, label=plain(label), **LINE)
            axes.plot([values["depth"]], [values["speedup"]], color=colour, **STAR)
    axes.axhline(1, color="#999999", lw=1, ls="--")
    axes.set(xlabel="drafts per verify call N", ylabel="speed-up", title="Speed-up predicted (star: measured)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _finish_panel(axes, runs: dict[str, dict]) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(runs) > 1:
        axes.legend(frameon=False)


def plot_training(metrics: dict[str, list[tuple[float, float]]], path: Path) -> Path | None:
    """Loss, accuracy by TTT step, and held-out tau over optimizer steps. None when nothing was logged."""
    loss = metrics.get("train/loss", [])
    accuracy = {k: metrics[f"train/accuracy_{k}"] for k in range(64) if metrics.get(f"train/accuracy_{k}")}
    tau = metrics.get("val/tau", [])
    panels = [bool(loss), bool(accuracy), bool(tau)]
    if not any(panels):
        return None
    figure, axes = new_figure(sum(panels))
    axes = iter(axes)
    if loss:
        one = next(axes)
        one.plot(*zip(*loss, strict=True), color=COLOURS[0], lw=1.6)
        one.set(xlabel="optimizer step", ylabel="loss", title="Training loss")
    if accuracy:
        one = next(axes)
        for colour, (k, points) in zip(_colours(), accuracy.items(), strict=False):
            one.plot(*zip(*points, strict=True), color=colour, lw=1.4, label=f"step {k}")
        one.set(xlabel="optimizer step", ylabel="accuracy", title="Training accuracy by TTT step", ylim=(0, 1))
        one.legend(frameon=False, ncols=2, fontsize=8)
    if tau:
        one = next(axes)
        one.plot(*zip(*tau, strict=True), color=COLOURS[1], **LINE)
        one.set(xlabel="optimizer step", ylabel="tau", title="Free-running tau, held-out prompts")
        one.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    return save_figure(figure, path)


def read_metrics(path: Path) -> dict[str, list[tuple[float, float]]]:
    """metrics.csv -> (step, value) points of each column; empty and unreadable cells are left out."""
    points: dict[str, list[tuple[float, float]]] = {}
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
    number = isinstance(text, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text.strip())
    return bool(number) and abs(float(text)) < LARGEST


def plain(text: str) -> str:
    """A title or label as it is: matplotlib would take what stands between dollars for a formula."""
    text = printable(str(text))
    return (text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}...").replace("$", r"\$")


def _colours():
    while True:
        yield from COLOURS


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
