"""One page over several runs: a table of heads, their differences, their curves in one picture."""

from __future__ import annotations

from pathlib import Path

from conf.errors import UserError
from eval.compare import acceptance_rows, comparison, measured_in, read_alpha, read_arms, run_labels, run_rows
from eval.plots import plot_alpha_by_depth, plot_tau_by_n, read_metrics
from eval.report.charts import acceptance_plots, gap_plots, html_plots, training_plots
from eval.report.page import html_cards, html_folded, html_header, html_page, html_section, html_table, words
from eval.report.run import how, short, time_per_token
from eval.report.tokens import token_view
from eval.rounds import TextRounds, read_rounds
from eval.tables import number

SECTIONS = (("heads", "Heads"), ("acceptance", "Acceptance"), ("tokens", "Token by token"), ("training", "Training"),
            ("time", "Time"))  # fmt: skip


def write_comparison(runs: list[Path], out: Path) -> Path:
    """The page, and the PNGs of its acceptance plots beside it. Raises UserError for fewer than two runs.

    Runs that weren't measured alike are shown, with what differs, and without paired differences.
    """
    if len(runs) < 2:
        raise UserError(f"expected two runs or more to compare, found {len(runs)}")
    names = run_labels(runs)
    values = {name: read_alpha(str(run)) for name, run in zip(names, runs, strict=True)}
    metrics = {
        name: read_metrics(_trained(run, values[name]) / "metrics.csv") for name, run in zip(names, runs, strict=True)
    }
    for plot, what in ((plot_alpha_by_depth, "alpha_by_depth"), (plot_tau_by_n, "tau_by_n")):
        plot(values, out.with_name(f"{out.stem}_{what}.png"))
    texts = {name: found[0] for name, run in zip(names, runs, strict=True) if (found := _texts(run, values[name]))}
    first = next(iter(values.values()))
    parts = [
        html_header(f"draft heads for {short(first['verifier'])}", f"{len(runs)} runs", how(first), SECTIONS),
        _best(values),
        html_section("heads", "Heads", *_heads([str(run) for run in runs], names, values)),
        html_section(
            "acceptance", "Acceptance", html_plots(*acceptance_plots(values), *gap_plots(values)), _profile(values)
        ),
        html_section(
            "tokens",
            "Token by token",
            token_view(list(texts.values()), "python -m eval run=DIR, for each run", list(texts)),
        ),
        html_section("training", "Training", html_plots(*training_plots(metrics))),
        html_section("time", "Where the time goes", time_per_token(values)),
        html_section(
            "meaning",
            "What the numbers mean",
            html_folded("definitions", html_table(("", ""), list(first["definitions"].items()), wrap_last=True)),
        ),
    ]
    return html_page(out, f"{len(runs)} runs", parts, script=bool(texts))


def _texts(run: Path, values: dict) -> list[TextRounds]:
    folder = measured_in(str(run))
    return read_rounds(folder if folder.is_dir() else folder.parent, values["samples"])


def _trained(run: Path, values: dict) -> Path:
    """Where a run's metrics.csv lies: in the folder itself, or an evaluation's in the one that it measured."""
    return next((f for f in (run, run.parent, Path(values["head"] or run)) if (f / "metrics.csv").is_file()), run)


def _best(values: dict[str, dict]) -> str:
    """The headline: the run that is best at each of three things."""
    cards = []
    for name, key, digits, unit in (
        ("\u03c4", "tau", 2, ""),
        ("\u03b1", "alpha", 3, ""),
        ("speed-up", "speedup", 2, "\u00d7"),
    ):
        known = {label: v[key] for label, v in values.items() if v[key] is not None}
        if known:
            best = max(known, key=known.get)
            cards.append((f"best {name}", f"{known[best]:.{digits}f}{unit}", best, ""))
    return html_cards(cards)


def _heads(runs: list[str], names: list[str], values: dict[str, dict]) -> list[str]:
    head = ("run", "decode", "tau", "alpha", "speed-up", "tokens/s", "lookup tau", "identical", "prompts")
    rows = [
        (name, f"{v['decode']} {v['depth']}, T={v['temperature']:g}", number(v["tau"]), number(v["alpha"]),
         number(v["speedup"], 2), number(v["tokens_per_second"], 1), number(v["prompt_lookup_tau"]),
         {True: "yes", False: "no", None: "-"}[v["identical_to_baseline"]], str(len(v["prompts"])))
        for name, v in values.items()
    ]  # fmt: skip
    try:
        arms = read_arms(runs, names)
    except UserError as error:
        why = f"Without paired differences, for these runs were measured on different prompts or settings: {error}"
        return [html_table(head, rows), f'<p class="warn">{words(why)}</p>']
    found = comparison(arms, arms[0])
    paired = [html_table(heads, lines) for heads, *lines in (acceptance_rows(found), run_rows(found))]
    note = f"<p class='soft'>Differences are paired: the same {found['prompts']} prompts, drawn anew together.</p>"
    return [html_table(head, rows), note, *paired]


def _profile(values: dict[str, dict]) -> str:
    deepest = max(len(v["alpha_by_depth"]) for v in values.values())
    rows = [
        (name, *[number(a) for a in v["alpha_by_depth"]], *["-"] * (deepest - len(v["alpha_by_depth"])))
        for name, v in values.items()
    ]
    return html_folded("n-alpha by depth, in numbers", html_table(("run", *map(str, range(1, deepest + 1))), rows))
