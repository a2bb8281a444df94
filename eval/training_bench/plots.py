"""Tokens a second and memory along one axis of a sweep."""

from __future__ import annotations

from pathlib import Path

from eval.plots import COLOURS, LINE, new_figure, save_figure

LABELS = {"tokens": "tokens T", "fraction": "answer's share of the tokens", "steps": "draft steps K",
          "draft_vocab": "draft vocabulary R"}  # fmt: skip


def plot_axis(rows: list[dict], axis: str, others: dict, path: Path) -> Path:
    """rows: of eval.training_bench.run, that differ in `axis` alone; others: what the rest of the shape is."""
    figure, (speed, memory) = new_figure(2)
    names = list(dict.fromkeys(row["name"] for row in rows))
    for colour, name in zip(COLOURS, names, strict=False):
        found = sorted((row for row in rows if row["name"] == name and "missing" not in row), key=lambda row: row[axis])
        at = [row[axis] for row in found]
        speed.plot(at, [row["tokens_per_second"] for row in found], color=colour, label=name, **LINE)
        memory.plot(at, [row["growth_bytes"] / 1e9 for row in found], color=colour, label=name, **LINE)
    speed.set(xlabel=LABELS[axis], ylabel="tokens/s", title="Training tokens a second", yscale="log")
    memory.set(xlabel=LABELS[axis], ylabel="GB", title="Growth of peak memory in a step")
    memory.set_ylim(bottom=0)
    memory.legend(frameon=False, fontsize=8)
    shape = ", ".join(f"{LABELS[name]} {value:g}" for name, value in others.items())
    figure.suptitle(shape, fontsize=9)
    return save_figure(figure, path)
