"""One self-contained page for a run, or for several side by side.

python -m eval.report runs=outputs/a/TIME
python -m eval.report runs=[outputs/a/TIME,outputs/b/TIME] out=compare.html
"""

from __future__ import annotations

import base64
from datetime import datetime
from html import escape
from pathlib import Path

from conf.cli import Outcome, main
from conf.errors import UserError
from conf.parse import json_file
from data.files import replacing
from eval.alpha_file import read_alpha
from eval.plots import plot_alpha_by_depth, plot_summary, plot_tau_by_n, plot_training, read_metrics
from eval.tables import category_rows, depth_rows, headline_rows, number

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5b6472; --line: #dfe3e8; --page: #f6f7f9; --card: #fff;
  --a: #cfe5f2; --b: #f9e0b8; --accent: #2a6f97; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa4b2; --line: #343b46; --page: #14171c;
  --card: #1d2128; --a: #234b63; --b: #5c4516; --accent: #7cbfe3; } }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.2rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .7rem; } p { margin: .3rem 0; }
.soft { color: var(--soft); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .8rem; margin: 1.4rem 0; }
.card, figure, .sample { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
.card { padding: .8rem 1rem; } .card b { display: block; font-size: 1.7rem; color: var(--accent); line-height: 1.25; }
figure { margin: 1rem 0; padding: .6rem; background: #fff; }
figure img { display: block; max-width: 100%; height: auto; margin: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; background: var(--card); border: 1px solid var(--line); font-size: .93rem; }
th, td { padding: .32rem .8rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
td.wrap { white-space: normal; text-align: left; }
.sample { padding: 1rem; margin: .8rem 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .95rem; }
.sample i { font-style: normal; border-radius: .2rem; } .sample .a { background: var(--a); }
.sample .b { background: var(--b); } .prompt { color: var(--soft); display: block; margin-bottom: .7rem;
  max-height: 9rem; overflow-y: auto; }
"""


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
    verifier, head = values["verifier"].rstrip("/").split("/")[-1], "/".join(str(label).split("/")[-2:])
    sampling = "T=0" if values["temperature"] == 0 else f"T={values['temperature']:g}"
    return f"{verifier}, {head}: tau {number(values['tau'], 2)} at N={values['depth']}, {sampling}"


def write_report(folder: Path, run_folder: Path | None = None, out: Path | None = None) -> Path:
    """The page and its PNGs, from folder/alpha.json and the run's metrics.csv and provenance.json.

    run_folder: where training wrote; by default `folder` itself. out: the page, by default folder/report.html;
    the PNGs lie in `folder` in any case.
    """
    folder, run_folder = Path(folder), Path(run_folder or folder)
    values = read_alpha(folder)
    label = values["head"] or run_folder.name
    shown_twice = {"alpha_by_depth.png"} | (set() if values["predicted"] else {"tau_by_n.png"})  # in the summary too
    pictures = [path for path in write_plots(folder, run_folder) if path.name not in shown_twice]
    parts = [
        f"<h1>{escape(str(label))}</h1>",
        f'<p class="soft">draft head for {escape(values["verifier"])}: {escape(_how(values))}</p>',
        _cards(values),
        *[html_picture(path) for path in pictures],
        "<h2>Numbers</h2>" + html_table(("", "", ""), headline_rows(values)),
        "<h2>Acceptance by depth</h2>"
        + html_table(("depth", "n-alpha", "95 %", "unconditional", "tested"), depth_rows(values)),
        "<h2>By category</h2>"
        + html_table(("category", "prompts", "tau", "alpha", "lookup tau", "speed-up"), category_rows(values)),
        _times(values),
        _differences(values),
        _samples(values),
        _provenance(values, run_folder),
        _definitions(values),
    ]
    return html_page(out or folder / "report.html", str(label), parts)


def write_comparison(runs: list[Path], out: Path) -> Path:
    """One page over several runs: their numbers in a table, their profiles in one picture."""
    if len(runs) < 2:
        raise UserError(f"expected two runs or more to compare, found {len(runs)}")
    names = run_labels(runs)
    values = {name: read_alpha(Path(run)) for name, run in zip(names, runs, strict=True)}
    pictures = [
        plot_alpha_by_depth(values, out.with_name(out.stem + "_alpha_by_depth.png")),
        plot_tau_by_n(values, out.with_name(out.stem + "_tau_by_n.png")),
    ]
    head = ("run", "decode", "tau", "alpha", "speed-up", "tokens/s", "lookup tau", "identical", "prompts")
    rows = [
        (name, f"{v['decode']} {v['depth']}, T={v['temperature']:g}", number(v["tau"]), number(v["alpha"]),
         number(v["speedup"], 2), number(v["tokens_per_second"], 1), number(v["prompt_lookup_tau"]),
         {True: "yes", False: "no", None: "-"}[v["identical_to_baseline"]], str(len(v["prompts"])))
        for name, v in values.items()
    ]  # fmt: skip
    deepest = max(len(v["alpha_by_depth"]) for v in values.values())
    profile = [
        (name, *[number(a) for a in v["alpha_by_depth"]], *["-"] * (deepest - len(v["alpha_by_depth"])))
        for name, v in values.items()
    ]
    warnings = "" if _same_prompts(values) else "<p>These runs were measured on different prompts or settings.</p>"
    parts = [
        f"<h1>{len(runs)} runs</h1>",
        warnings,
        html_table(head, rows),
        *[html_picture(path) for path in pictures if path],
        "<h2>n-alpha by depth</h2>" + html_table(("run", *map(str, range(1, deepest + 1))), profile),
        _definitions(next(iter(values.values()))),
    ]
    return html_page(out, f"{len(runs)} runs", parts)


def run_labels(runs: list[Path]) -> list[str]:
    """The folders' last parts, longer where they would be the same."""
    parts = [Path(run).resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError("the same run is named twice")


def _same_prompts(values: dict[str, dict]) -> bool:
    keys = {
        (tuple(p["id"] for p in v["prompts"]), v["temperature"], v["max_new_tokens"], v["verifier_hash"])
        for v in values.values()
    }
    return len(keys) == 1


def _how(values: dict) -> str:
    sampling = "greedy" if values["temperature"] == 0 else f"temperature {values['temperature']:g}"
    return (
        f"{values['decode']} of {values['depth']} drafts, {sampling}, {len(values['prompts'])} prompts of up to "
        f"{values['max_new_tokens']} new tokens, {values['dtype']} on {values['threads']} threads ({values['device']})"
    )


def _cards(values: dict) -> str:
    cards = [
        ("tau", number(values["tau"], 2), "tokens per verify call"),
        ("alpha", number(values["alpha"], 3), "accepted of tested drafts"),
        ("speed-up", number(values["speedup"], 2) + ("x" if values["speedup"] else ""), "over the verifier alone"),
        ("tokens/s", number(values["tokens_per_second"], 1), "decode only"),
    ]
    body = "".join(f'<div class="card">{n}<b>{v}</b><span class="soft">{d}</span></div>' for n, v, d in cards)
    return f'<div class="cards">{body}</div>'


def html_table(head, rows, wrap_last: bool = False) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head) if any(head) else ""
    lines = []
    for row in rows:
        cells = [f"<td>{escape(str(cell))}</td>" for cell in row]
        if wrap_last:
            cells[-1] = cells[-1].replace("<td>", '<td class="wrap">', 1)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><tr>{top}</tr>{"".join(lines)}</table></div>'


def html_picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,{data}"></figure>'


def _times(values: dict) -> str:
    times = values["times"]
    if times is None:
        return ""
    rows = [("a plain step", times["t_decode"])]
    rows += [(f"verify of {width} rows", seconds) for width, seconds in times["t_verify"].items()]
    rows += [("draft, first pass", times["t_draft_first"]), ("draft, each later step", times["t_draft"])]
    rows += [("rest of a round", times["t_other"])]
    note = f'<p class="soft">draft step / verify: {number(values["cost_ratio"])}</p>'
    return "<h2>Times</h2>" + html_table(("median", "ms"), [(n, f"{1e3 * s:.2f}") for n, s in rows]) + note


def _differences(values: dict) -> str:
    rows = [(d["prompt"], d["position"], f"{d['gap']:.2e}", "tie") for d in values["ties"]]
    rows += [(d["prompt"], d["position"], f"{d['gap']:.2e}", "difference") for d in values["differences"]]
    if not rows:
        return ""
    return "<h2>Where the text leaves plain decoding</h2>" + html_table(
        ("prompt", "token", "top-two gap", "kind"), rows
    )


def _samples(values: dict) -> str:
    """Texts with each round's accepted drafts tinted, two tints taking turns; the verifier's own tokens are plain."""
    texts = []
    for sample in values["samples"]:
        pieces = []
        for turn, (accepted, own) in enumerate(sample["rounds"]):
            tint = "ab"[turn % 2]
            pieces += [f'<i class="{tint}">{escape(piece)}</i>' for piece in accepted]
            pieces.append(escape(own))
        prompt = f'<span class="prompt">{escape(sample["prompt"])}</span>'
        texts.append(f'<div class="sample">{prompt}{"".join(pieces)}</div>')
    note = '<p class="soft">Tinted: drafts that were accepted, a tint a round. Plain: the verifier\'s own tokens.</p>'
    return "<h2>Texts</h2>" + note + "".join(texts) if texts else ""


def _provenance(values: dict, run_folder: Path) -> str:
    rows = [
        ("verifier", f"{values['verifier']} {values['verifier_hash']}"),
        ("head", f"{values['head'] or '-'} {values['head_hash'] or ''}"),
        ("seed", str(values["seed"])),
    ]
    file = run_folder / "provenance.json"
    if file.is_file():
        rows += flattened(json_file(file))
    return "<h2>Provenance</h2>" + html_table(("", ""), rows, wrap_last=True)


def flattened(values: dict, prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        rows += flattened(value, name + ".") if isinstance(value, dict) else [(name, str(value))]
    return rows


def _definitions(values: dict) -> str:
    return "<h2>What the numbers mean</h2>" + html_table(("", ""), list(values["definitions"].items()), wrap_last=True)


def html_page(path: Path, title: str, parts: list[str]) -> Path:
    """Writes the page whole or not at all."""
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        part.write_text(page, encoding="utf-8")
    return path


def report(cfg) -> Outcome:
    """cfg: conf.schema.ReportCommandConf. One run gets its own page again, several get a comparison."""
    runs = [cfg.runs] if isinstance(cfg.runs, str) else list(cfg.runs or [])
    if not runs:
        raise UserError("give the runs to show: python -m eval.report runs=[outputs/NAME/TIME,...] out=FILE")
    runs = [Path(str(run)) for run in runs]
    out = Path(cfg.out) if cfg.out else None
    if len(runs) == 1:
        return Outcome(write_report(runs[0], out=out))
    return Outcome(write_comparison(runs, out or Path("outputs", f"comparison-{_now()}", "comparison.html")))


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}"


if __name__ == "__main__":
    main("report")(report)()
