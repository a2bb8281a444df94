"""A diagnosis as tables, lines and a plot."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from eval.plots import COLOURS, new_figure, save_figure
from eval.tables import number, span

SAID = 3  # examples that are shown of the largest cause


def tables(values: dict) -> list[Table]:
    """Causes by depth, categories, and the verifier's confidence."""
    return [_causes(values), *([_categories(values)] if len(values["categories"]) > 1 else []), _confidence(values)]


def _new(title: str, first: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _causes(values: dict) -> Table:
    depths = [str(k + 1) for k in range(values["depth"])]
    title = f"{values['misses']} first misses in {values['verify_calls']} calls, by depth and cause"
    table = _new(title, "cause", "share", "misses", "tau +", *depths, "rev.")
    for row in values["causes"]:
        if row["not_asked"]:
            table.add_row(row["title"], *["n/a"] * (3 + len(depths)), "")
            continue
        by_depth = (str(count) for count in row["by_depth"])
        table.add_row(
            row["title"],
            number(row["share"], 0, 100) + " %",
            str(row["misses"]),
            number(row["tau_gain_at_least"], 2),
            *by_depth,
            "" if row["reversed"] is None else str(row["reversed"]),
            style="bold" if row["cause"] == values["largest"] else "",
        )
    table.add_section()
    tested, accepted = values["tested_by_depth"], values["accepted_by_depth"]
    table.add_row("accepted", "", str(sum(accepted)), "", *map(str, accepted), "")
    alphas = [number(a / t if t else None, 2) for a, t in zip(accepted, tested, strict=True)]
    table.add_row("n-alpha", "", "", "", *alphas, "")
    return table


def _categories(values: dict) -> Table:
    table = _new("first drafts by category", "category", "tested", "accepted", "95 %", "others", "far below")
    for row in values["categories"]:
        far = f"yes: {row['excess']:.0f} more" if row["far"] else ""
        table.add_row(row["category"], str(row["tested"]), number(row["share"]), span(row["interval"], 2),
                      number(row["others"]), far)  # fmt: skip
    return table


def _confidence(values: dict) -> Table:
    table = _new("first drafts by the verifier's best probability", "best", "tested", "accepted", "95 %")
    for row in values["by_confidence"]:
        bounds = f"{row['from']:g} to {row['to']:g}"
        table.add_row(bounds, str(row["tested"]), number(row["share"]), span(row["interval"], 2))
    return table


def lines(values: dict) -> list[str]:
    """What isn't asked for and why, examples, and what to try first."""
    found = [f"n/a, {row['title']}: {row['not_asked']}" for row in values["causes"] if row["not_asked"]]
    if values["largest"] is None:
        return [*found, "no draft was rejected: nothing to explain"]
    largest = next(row for row in values["causes"] if row["cause"] == values["largest"])
    found.append(f"most misses: {largest['title']} ({largest['share']:.0%}): {largest['meaning']}")
    for one in values["examples"].get(values["largest"], [])[:SAID]:
        found.append(
            f"  after {one['after']!r}: {one['verifier']!r}, drafted {one['drafted']!r} (depth {one['depth']})"
        )
    advice = values["advice"]
    return [*found, f"try first: {advice['text']}", f"    {advice['command']}"]


def plot(values: dict, path: Path) -> Path:
    """Of the tested drafts of each depth, the accepted ones and the misses by cause, stacked; and the causes in all."""
    figure, axes = new_figure(2)
    depths = list(range(1, values["depth"] + 1))
    tested = [max(count, 1) for count in values["tested_by_depth"]]
    bottom = [a / t for a, t in zip(values["accepted_by_depth"], tested, strict=True)]
    axes[0].bar(depths, bottom, color="#d9dee3", label="accepted")
    asked = [row for row in values["causes"] if not row["not_asked"]]
    for colour, row in zip(COLOURS, asked, strict=False):
        heights = [count / t for count, t in zip(row["by_depth"], tested, strict=True)]
        axes[0].bar(depths, heights, bottom=bottom, color=colour, label=row["title"])
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes[0].set(xlabel="depth n", ylabel="share of tested drafts", title="Accepted, and missed by cause", ylim=(0, 1))
    axes[0].set_xticks(depths, [f"{n}\n({count})" for n, count in zip(depths, values["tested_by_depth"], strict=True)])
    names, counts = [row["title"] for row in asked], [row["misses"] for row in asked]
    axes[1].barh(names[::-1], counts[::-1], color=list(COLOURS[: len(asked)])[::-1])
    axes[1].set(xlabel="first misses", title=f"{values['misses']} misses by cause")
    axes[1].grid(visible=False)
    return save_figure(figure, path)
