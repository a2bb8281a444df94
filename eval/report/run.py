"""The page of one run, and its plots as PNGs."""

from __future__ import annotations

from pathlib import Path

from conf.parse import json_file
from eval.alpha_file import read_alpha
from eval.plots import plot_alpha_by_depth, plot_summary, plot_tau_by_n, plot_training, read_metrics
from eval.report.charts import acceptance_plots, exposure_plots, html_plots, training_plots
from eval.report.page import (
    flattened,
    html_bars,
    html_cards,
    html_folded,
    html_header,
    html_page,
    html_section,
    html_table,
)
from eval.report.tokens import token_view
from eval.rounds import read_rounds
from eval.tables import category_rows, depth_rows, headline_rows, number, span
from eval.theory import Times

SECTIONS = (
    ("acceptance", "Acceptance"),
    ("tokens", "Token by token"),
    ("training", "Training"),
    ("time", "Time"),
    ("numbers", "Numbers"),
    ("provenance", "Provenance"),
)
PARTS = (
    ("draft, first pass", "var(--c1)"),
    ("draft, later steps", "var(--c6)"),
    ("verify call", "var(--c2)"),
    ("rest of the round", "var(--c7)"),
    ("without drafts", "var(--c3)"),
)
PHASES = tuple(f"var(--c{n})" for n in range(1, 9))


def write_plots(folder: Path, run_folder: Path | None = None) -> list[Path]:
    """The PNGs that there are numbers for, in `folder`, from its alpha.json and the run's metrics.csv."""
    folder, run_folder = Path(folder), Path(run_folder or folder)
    values = read_alpha(folder)
    label = values["head"] or run_folder.name
    made = [
        plot_summary({label: values}, _title(values, label), folder / "summary.png"),
        plot_alpha_by_depth({label: values}, folder / "alpha_by_depth.png"),
        plot_tau_by_n({label: values}, folder / "tau_by_n.png"),
        plot_training(read_metrics(run_folder / "metrics.csv"), folder / "training.png"),
    ]
    return [path for path in made if path]


def _title(values: dict, label: str) -> str:
    """Verifier, head and tau, short enough for one line above two panels."""
    verifier, head = values["verifier"].rstrip("/").split("/")[-1], short(label)
    sampling = "T=0" if values["temperature"] == 0 else f"T={values['temperature']:g}"
    return f"{verifier}, {head}: tau {number(values['tau'], 2)} at N={values['depth']}, {sampling}"


def short(label: str) -> str:
    """The last two parts of a path."""
    return "/".join(str(label).rstrip("/").split("/")[-2:])


def write_report(folder: Path, run_folder: Path | None = None, out: Path | None = None) -> Path:
    """The page and its PNGs, from folder/alpha.json and rounds.json and the run's metrics.csv and provenance.json.

    run_folder: where training wrote; by default `folder` itself. out: the page, by default folder/report.html;
    the PNGs lie in `folder` in any case.
    """
    folder, run_folder = Path(folder), Path(run_folder or folder)
    values = read_alpha(folder)
    label = str(values["head"] or run_folder.name)
    write_plots(folder, run_folder)
    metrics = read_metrics(run_folder / "metrics.csv")
    file = run_folder / "provenance.json"
    origin = json_file(file) if file.is_file() else {}
    texts = read_rounds(folder, values["samples"])
    parts = [
        html_header(f"draft head for {short(values['verifier'])}", short(label), how(values), SECTIONS),
        headline(values),
        html_section(
            "acceptance",
            "Acceptance",
            html_plots(*acceptance_plots({label: values}), *exposure_plots(values, metrics)),
            _folded_table(
                "by depth, in numbers", ("depth", "n-alpha", "95 %", "unconditional", "tested"), depth_rows(values)
            ),
        ),
        html_section(
            "tokens", "Token by token", token_view(texts, f"python -m eval run={values['head'] or run_folder}")
        ),
        html_section("training", "Training", html_plots(*training_plots({label: metrics}))),
        html_section("time", "Where the time goes", time_per_token({"with drafts": values}), _phases(origin)),
        html_section(
            "numbers",
            "Numbers",
            html_table(("", "", ""), headline_rows(values), wrap_last=True),
            "<h3>By category</h3>",
            html_table(("category", "prompts", "tau", "alpha", "lookup tau", "speed-up"), category_rows(values)),
            _times(values),
            _differences(values),
        ),
        html_section(
            "provenance",
            "Provenance",
            _folded_table("verifier, head, data, versions", ("", ""), _provenance(values, origin)),
            _folded_table("what the numbers mean", ("", ""), list(values["definitions"].items())),
        ),
    ]
    return html_page(out or folder / "report.html", short(label), parts, script=bool(texts))


def how(values: dict) -> str:
    """What was measured, in a line."""
    sampling = "greedy" if values["temperature"] == 0 else f"temperature {values['temperature']:g}"
    return (
        f"{values['decode']} of {values['depth']} drafts, {sampling}, {len(values['prompts'])} prompts of up to "
        f"{values['max_new_tokens']} new tokens, {values['dtype']} on {values['threads']} threads ({values['device']})"
    )


def headline(values: dict) -> str:
    """What one wants to know first."""
    intervals, speedup = values["intervals"], values["speedup"]
    identical = {True: ("identical", "word good"), False: ("differs", "word bad"), None: ("not asked", "word")}
    same, colour = identical[values["identical_to_baseline"]]
    predicted = number(values["predicted_speedup"], 2)
    cards = [
        ("\u03c4", number(values["tau"], 2), _interval(intervals["tau"], 2, "tokens per verify call"), ""),
        ("\u03b1", number(values["alpha"], 3), _interval(intervals["alpha"], 3, "of the tested drafts accepted"), ""),
        (
            "speed-up",
            "-" if speedup is None else f"{speedup:.2f}\u00d7",
            f"over the verifier alone; predicted {predicted}",
            "" if speedup is None else "good" if speedup > 1 else "bad",
        ),
        (
            "tokens/s",
            number(values["tokens_per_second"], 1),
            f"decoding; the verifier alone {number(values['baseline_tokens_per_second'], 1)}",
            "",
        ),
        ("text", same, f"to the verifier's own, {len(values['ties'])} numerical ties", colour),
        ("lookup \u03c4", number(values["prompt_lookup_tau"], 2), "prompt lookup on the same texts, no head", ""),
    ]
    return html_cards(cards)


def _interval(interval: list[float] | None, digits: int, meaning: str) -> str:
    return f"{meaning}; 95 %: {span(interval, digits)}" if interval else meaning


def time_per_token(runs: dict[str, dict]) -> str:
    """Milliseconds of a token, with drafts and without, by what they are spent on."""
    bars = []
    for name, values in runs.items():
        if values["times"] is None or not values["times"]["t_verify"] or not values["tau"]:
            continue
        t = values["times"]
        by_width = {int(width): seconds for width, seconds in t["t_verify"].items()}
        times = Times(t["t_decode"], by_width, t["t_draft_first"], t["t_draft"], t["t_other"])
        later = max(0, values["depth"] - 1) * times.draft
        spent = [times.draft_first, later, times.verify((values["nodes"] or values["depth"]) + 1), times.other]
        bars.append((name, [1e3 * part / values["tau"] for part in spent] + [0.0]))
        bars.append(("without drafts" if len(runs) == 1 else f"{name}, alone", [0.0] * 4 + [1e3 * times.decode]))
    if not bars:
        return ""
    note = "<p class='soft'>Per token: the median times of a round of full depth, divided by \u03c4.</p>"
    return "<h3>Decoding</h3>" + note + html_bars(bars, PARTS, "ms")


def _phases(origin: dict) -> str:
    """How long the run took, phase by phase."""
    seconds = origin.get("seconds")
    spent = {k: s for k, s in seconds.items() if _is_time(s)} if isinstance(seconds, dict) else {}
    if not sum(spent.values()):
        return ""
    spent = dict(list(spent.items())[: len(PHASES)])
    told = [f"{name} {f'{s:.0f} s' if s < 100 else f'{s / 60:.1f} min'}" for name, s in spent.items()]
    keys = list(zip(told, PHASES, strict=False))
    return "<h3>The run</h3>" + html_bars([("in all", [s / 60 for s in spent.values()])], keys, "min")


def _is_time(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _folded_table(title: str, head: tuple[str, ...], rows: list) -> str:
    return html_folded(title, html_table(head, rows, wrap_last=not any(head)))


def _times(values: dict) -> str:
    times = values["times"]
    if times is None:
        return ""
    rows = [("a plain step", times["t_decode"])]
    rows += [(f"verify of {width} rows", seconds) for width, seconds in times["t_verify"].items()]
    rows += [("draft, first pass", times["t_draft_first"]), ("draft, each later step", times["t_draft"])]
    rows += [("rest of a round", times["t_other"])]
    table = html_table(("median", "ms"), [(n, f"{1e3 * s:.2f}") for n, s in rows])
    return "<h3>Times</h3>" + table + f'<p class="soft">draft step / verify: {number(values["cost_ratio"])}</p>'


def _differences(values: dict) -> str:
    rows = [(d["prompt"], d["position"], f"{d['gap']:.2e}", "tie") for d in values["ties"]]
    rows += [(d["prompt"], d["position"], f"{d['gap']:.2e}", "difference") for d in values["differences"]]
    table = html_table(("prompt", "token", "top-two gap", "kind"), rows)
    return "<h3>Where the text leaves plain decoding</h3>" + table if rows else ""


def _provenance(values: dict, origin: dict) -> list[tuple[str, str]]:
    rows = [
        ("verifier", f"{values['verifier']} {values['verifier_hash']}"),
        ("head", f"{values['head'] or '-'} {values['head_hash'] or ''}"),
        ("seed", str(values["seed"])),
    ]
    return rows + flattened(origin)
