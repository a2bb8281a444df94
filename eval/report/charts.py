"""The page's plots: matplotlib's panels as SVG whose colours are the page's, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape

from matplotlib import rc_context
from matplotlib.ticker import MaxNLocator

from eval.plots import (
    COLOURS,
    TRAINING,
    Metrics,
    accuracies_of,
    alpha_panel,
    any_points,
    new_figure,
    plain,
    shares_line,
    speedup_panel,
    styles,
    tau_panel,
    with_profile,
)

COLOUR = {colour: f"var(--c{n})" for n, colour in enumerate(COLOURS, 1)} | {
    "#000000": "var(--strong)",  # axes and ticks
    "#e3e3e3": "var(--line)",
    "#999999": "var(--strong)",
    "#ffffff": "var(--card)",
}


def html_plots(*plots: str) -> str:
    body = "".join(plots)
    return f'<div class="plots">{body}</div>' if body else ""


def html_plot(title: str, remark: str, draw: Callable) -> str:
    """A figure with what `draw(axes)` draws."""
    caption = f"<figcaption><h3>{escape(title)}</h3><p>{escape(remark)}</p></figcaption>"
    return f"<figure>{caption}{svg_of(draw, title)}</figure>"


def svg_of(draw: Callable, title: str, size: tuple[float, float] = (4.6, 3.1)) -> str:
    """size: inches, of which a phone shows about as many points as there are."""
    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 10.5, "legend.fontsize": 9}):
        figure, (axes,) = new_figure(1, size)
        draw(axes)
        axes.set_title("")
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    body = text[text.index(">", text.index("<svg")) + 1 :]
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)  # page.css has the style
    body = re.sub(
        r' id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|xtick|ytick|legend|FillBetween\w*)_\d+"', "", body
    )
    body = re.sub(r"#[0-9a-f]{6}\b", lambda found: COLOUR.get(found[0], found[0]), body)
    width, height = (72 * inches for inches in size)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">{body.strip()}'


def acceptance_plots(runs: dict[str, dict]) -> list[str]:
    """n-alpha by depth, tau and speed-up by N. runs: label -> alpha.json's values."""
    if not (runs := with_profile(runs)):
        return []
    plots = [
        html_plot(
            "Acceptance by depth",
            "n-\u03b1: the chance that draft n passes once all before it did; the band is its 95 % interval.",
            lambda axes: alpha_panel(axes, runs),
        ),
        html_plot(
            "Tokens per verify call",
            "\u03c4 for a chain of N drafts, from the measured n-\u03b1; the star is what the loop gave.",
            lambda axes: tau_panel(axes, runs),
        ),
    ]
    if any(values["predicted"] for values in runs.values()):
        remark = "From n-\u03b1 and the times of a round's parts; below the dashed line drafts don't pay."
        plots.append(html_plot("Speed-up by N", remark, lambda axes: speedup_panel(axes, runs)))
    return plots


def exposure_plots(values: dict, metrics: Metrics) -> list[str]:
    """Teacher-forced against free-running, and exposure bias; the first from training's accuracy alone where an
    older run has nothing else."""
    exposure, profile = values["exposure"], values["alpha_by_depth"]
    trained = last_accuracies(metrics)
    lines: dict[str, list[float | None]] = {}
    if exposure:
        lines["teacher-forced: true features"] = exposure["teacher_forced"]
        lines["own features, the text's tokens"] = exposure["own_given_tokens"]
    if trained:
        lines["own features, training text"] = trained
    plots = []
    if lines and profile and profile[0] is not None:
        lines["free-running: n-\u03b1 in the loop"] = profile
        plots.append(
            html_plot(
                "Teacher-forced against free-running",
                "Share of right drafts by depth. Teacher-forced, every anchor counts, whatever passed before it.",
                lambda axes: lines_panel(axes, lines),
            )
        )
    if exposure:
        plots.append(
            html_plot(
                "Exposure bias",
                "The same drafts, made from the verifier's true features and from the head's own: the gap is what "
                "reading its own output costs; points alone: too few texts.",
                lambda axes: exposure_panel(axes, exposure),
            )
        )
    return plots


def last_accuracies(metrics: Metrics) -> list[float]:
    """Training accuracy by TTT step, the mean over the last tenth of its points."""
    found = []
    for points in accuracies_of(metrics).values():
        last = [value for _, value in points[-max(1, len(points) // 10) :]]
        found.append(sum(last) / len(last))
    return found


def lines_panel(axes, lines: dict[str, list[float | None]]) -> None:
    """Shares by depth, one line each."""
    for style, (label, values) in zip(styles(), lines.items(), strict=False):
        points = [(n, value) for n, value in enumerate(values, 1) if value is not None]
        axes.plot([n for n, _ in points], [value for _, value in points], label=label, **style)
    _by_depth(axes)


def exposure_panel(axes, exposure: dict) -> None:
    """True against own features on the same drafts."""
    for colour, marker, name in ((COLOURS[1], "s", "true"), (COLOURS[0], "o", "own")):
        style = {"color": colour, "marker": marker, "label": f"{name} features"}
        shares_line(axes, exposure, f"{name}_accuracy", first=1, **style)
    _by_depth(axes)


def _by_depth(axes) -> None:
    axes.set(xlabel="depth n", ylabel="share right", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)


def gap_plots(runs: dict[str, dict]) -> list[str]:
    """Exposure bias of several runs."""
    gaps = {label: values["exposure"] for label, values in runs.items() if values["exposure"]}
    if not gaps:
        return []

    def draw(axes) -> None:
        for style, (label, exposure) in zip(styles(), gaps.items(), strict=False):
            shares_line(axes, exposure, "gap", first=1, label=plain(label), **style)
        _by_depth(axes)
        axes.set(ylabel="true less own", ylim=(None, None))

    remark = "What the head loses by depth to reading its own features in place of the verifier's, on the same drafts."
    return [html_plot("Exposure bias", remark, draw)]


def training_plots(runs: dict[str, Metrics]) -> list[str]:
    """Loss, accuracy (of a single run) and held-out tau over optimizer steps, where they were logged."""
    remarks = {
        "train/loss": ("Training loss", "By optimizer step."),
        "train/accuracy_0": ("Training accuracy by TTT step", "Step k drafts with k of the head's own features read."),
        "val/tau": ("Free-running \u03c4 while training", "The speculative loop on held-out prompts."),
    }
    plots = []
    for panel, column in TRAINING.items():
        if any_points(runs, panel) and not (len(runs) > 1 and column == "train/accuracy_0"):
            plots.append(html_plot(*remarks[column], lambda axes, panel=panel: panel(axes, runs)))
    return plots
