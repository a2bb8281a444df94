"""alpha.json as tables for the terminal, and any table as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.table import Table


def number(value: float | None, digits: int = 3, scale: float = 1.0) -> str:
    """A number as text, a dash where there is none."""
    return "-" if value is None else f"{value * scale:.{digits}f}"


def span(interval: list[float] | None, digits: int = 3) -> str:
    """A 95 % interval as text."""
    return "" if interval is None else f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown, without a line end behind it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def headline_rows(values: dict) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the numbers that one looks at first."""
    ties, differences = len(values["ties"]), len(values["differences"])
    identical = {True: "yes", False: "NO", None: "-"}[values["identical_to_baseline"]]
    predicted = values.get("predicted_speedup")
    machine = f"{values['dtype']}, {values['threads']} threads, {values['device']}"
    return [
        ("measured by", values.get("measured", "loop"), machine),
        ("tau", number(values["tau"]), span(values["intervals"]["tau"])),
        ("alpha", number(values["alpha"]), span(values["intervals"]["alpha"])),
        ("speed-up", number(values["speedup"], 2), f"over the verifier alone; predicted {number(predicted, 2)}"),
        ("tokens per second", number(values["tokens_per_second"], 1), "speculative"),
        ("", number(values["baseline_tokens_per_second"], 1), "verifier alone"),
        ("identical to baseline", identical, f"{ties} at ties, {differences} others" if ties or differences else ""),
        ("prompt lookup tau", number(values["prompt_lookup_tau"]), "same texts, no head"),
        ("repetition", number(values["repetition_rate"], 1, 100) + " %", "tokens in repeated 8-grams"),
        ("out of vocabulary", number(values["out_of_vocab_rate"], 1, 100) + " %", "tokens no draft can be"),
        ("cost ratio", number(values["cost_ratio"]), "draft step / verify"),
    ]


def alpha_tables(values: dict) -> Group:
    """Headline numbers, n-alpha by depth, and categories, of an alpha.json's values."""
    how = f"{values['decode']} of {values['depth']}"
    if values.get("nodes", values["depth"]) != values["depth"]:
        how += f" levels and {values['nodes']} nodes"
    how += f", temperature {values['temperature']:g}" + (
        f", batch {values['batch']}" if values.get("batch", 1) > 1 else ""
    )
    title = f"{how}, {len(values['prompts'])} prompts"
    head = Table(title=title, show_header=False)
    for row in headline_rows(values):
        head.add_row(*row)
    depths = Table(title="acceptance by depth")
    for name in ("depth", "n-alpha", "95 %", "cumulative", "tested"):
        depths.add_column(name, justify="right")
    for row in depth_rows(values):
        depths.add_row(*row)
    parts = Table(title="by category")
    for name in ("category", "prompts", "tau", "alpha", "lookup tau", "speed-up"):
        parts.add_column(name, justify="left" if name == "category" else "right")
    for row in category_rows(values):
        parts.add_row(*row)
    return Group(head, depths, parts)


def depth_rows(values: dict) -> list[tuple[str, ...]]:
    """(depth, n-alpha, interval, unconditional, tested)."""
    return [
        (str(k + 1), number(alpha), span(values["intervals"]["alpha_by_depth"][k]), number(total), str(tested))
        for k, (alpha, total, tested) in enumerate(
            zip(values["alpha_by_depth"], values["accepted_by_position"], values["tested_by_depth"], strict=True)
        )
    ]


def category_rows(values: dict) -> list[tuple[str, ...]]:
    """(category, prompts, tau, alpha, prompt-lookup tau, speed-up)."""
    return [
        (name, str(part["prompts"]), number(part["tau"]), number(part["alpha"]), number(part["prompt_lookup_tau"]),
         number(part["speedup"], 2))
        for name, part in values["by_category"].items()
    ]  # fmt: skip
