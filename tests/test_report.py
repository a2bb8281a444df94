"""Plots and the page: made from a run folder's files alone, self-contained, whole."""

import base64
import hashlib
import json
import re
from functools import partial
from html.parser import HTMLParser

import pytest

from conf.errors import UserError
from eval.alpha import DEFINITIONS, times_to_dict
from eval.alpha_file import read_alpha
from eval.counts import wilson
from eval.plots import COLOURS, read_metrics
from eval.report import write_comparison, write_report
from eval.report.command import report
from eval.report.page import asset
from eval.rounds import write_rounds
from eval.theory import Times, measured_outlook

HITS, TESTED = [300, 180, 95], [500, 300, 180]


def alpha_values(**changes) -> dict:
    profile = [h / t for h, t in zip(HITS, TESTED, strict=True)]
    times = Times(0.03, {1: 0.03, 4: 0.032}, 3e-3, 2e-3, 1e-3)
    outlook = measured_outlook(profile, times)
    part = {"tau": 2.15, "alpha": 0.587, "prompts": 2, "prompt_lookup_tau": 1.2, "speedup": 1.6}
    values = {
        "tau": 2.15, "alpha": 575 / 980, "alpha_by_depth": profile, "accepted_by_position": [h / 500 for h in HITS],
        "verify_calls": 500, "drafted": 1500, "accepted": 575, "emitted": 1075, "out_of_vocab_rate": 0.03,
        "times": times_to_dict(times), "cost_ratio": 0.0625, "dtype": "float32", "threads": 2, "repetition_rate": 0.02,
        "prompt_lookup_tau": 1.2, "tokens_per_second": 55.0, "baseline_tokens_per_second": 33.0, "speedup": 1.67,
        "identical_to_baseline": True, "differences": [], "decode": "chain", "depth": 3, "temperature": 0.0,
        "ties": [{"prompt": "a", "position": 9, "gap": 2e-5, "plain": 1, "speculative": 2}],
        "top_p": 1.0, "top_k": 0, "max_new_tokens": 64, "seed": 0, "device": "cpu", "verifier": "smollm2",
        "verifier_hash": "ab" * 32, "head": "outputs/demo/1", "head_hash": "cd" * 32,
        "intervals": {"tau": [2.0, 2.3], "alpha": [0.55, 0.62],
                      "alpha_by_depth": [wilson(h, t) for h, t in zip(HITS, TESTED, strict=True)]},
        "tested_by_depth": TESTED, "accepted_by_depth": HITS, "predicted": outlook.to_dict(),
        "by_category": {"writing": part, "code": part | {"speedup": None}},
        "prompts": [{"id": "a"}, {"id": "b"}], "skipped": [],
        "samples": [{"id": "a", "category": "writing", "prompt": "Say <b>hi</b>", "rounds": [
            [[], "Hello"], [[" there", ","], " my"], [[" friend"], " &"], [[" so", " on"], ""]]}],
        "definitions": dict(DEFINITIONS),
    }  # fmt: skip
    return values | changes


def run_folder(path, metrics: str = "", **changes):
    path.mkdir(parents=True)
    (path / "alpha.json").write_text(json.dumps(alpha_values(**changes)))
    if metrics:
        (path / "metrics.csv").write_text(metrics)
        (path / "provenance.json").write_text(json.dumps({"seed": 0, "versions": {"torch": "2.13"}}))
    return path


METRICS = (
    "step,train/loss,train/accuracy_0,train/accuracy_1,val/tau\n"
    "10,3.2,0.2,0.1,\n20,2.5,0.35,0.2,1.4\n30,,,,\n40,2.0,0.41,nan,1.9\nbroken,1,1,1,1\n"
)


def test_metrics_skip_empty_and_unreadable_cells(tmp_path):
    (tmp_path / "m.csv").write_text(METRICS)
    metrics = read_metrics(tmp_path / "m.csv")
    assert metrics["train/loss"] == [(10, 3.2), (20, 2.5), (40, 2.0)]
    assert metrics["train/accuracy_1"] == [(10, 0.1), (20, 0.2)]
    assert metrics["val/tau"] == [(20, 1.4), (40, 1.9)]
    assert read_metrics(tmp_path / "absent.csv") == {}


EXPOSURE = {
    "tested": [90, 40, 9], "counted": [90, 88, 86],
    "true_accuracy": [0.6, 0.55, 0.5], "true_accuracy_interval": [[0.5, 0.7], [0.5, 0.6], None],
    "own_accuracy": [0.6, 0.4, 0.2], "own_accuracy_interval": [[0.5, 0.7], [0.3, 0.5], None],
    "gap": [0.0, 0.15, 0.3], "gap_interval": [[0.0, 0.0], [0.1, 0.2], None],
    "teacher_forced": [0.6, 0.6, 0.6], "own_given_tokens": [0.6, 0.5, 0.4],
}  # fmt: skip
NODES = {"drafts": [" a", " b", " c", "<i>"], "parents": [-1, -1, 0, 2], "draft_seconds": 0.01, "verify_seconds": 0.03}
ROUNDS = [
    {"drafts": [], "parents": [], "path": [], "own": "Hello", "kind": "first", "kept": 1},
    NODES | {"path": [0, 2], "own": " d", "kind": "correction", "kept": 3, "seconds": 0.05},
    NODES | {"path": [0, 2, 3], "own": "\u202e\n", "kind": "bonus", "kept": 4, "seconds": 0.05},
]


def with_rounds(folder, rounds=None):
    write_rounds(folder, [{"id": "a", "category": "chat", "prompt": "Say <b>hi</b>", "rounds": rounds or ROUNDS}] * 2)
    return folder


class Elements(HTMLParser):
    """The tags of a page with their attributes, and ids that must be unique."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)
        ids = [about["id"] for _, about in self.found if "id" in about]
        ours = [n for n in ids if not re.fullmatch("[mp][0-9a-f]{10}", n)]  # matplotlib's are hashes of what they name
        assert len(ours) == len(set(ours)), ours

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def count(self, tag: str, kind: str = "") -> int:
        return sum(one == tag and kind in (about.get("class") or "").split() + [""] for one, about in self.found)


def test_the_page_is_one_file_with_everything(tmp_path):
    folder = with_rounds(run_folder(tmp_path / "run", METRICS, exposure=EXPOSURE))
    page = write_report(folder).read_text()
    for name in ("summary.png", "alpha_by_depth.png", "tau_by_n.png", "training.png"):
        assert (folder / name).stat().st_size > 5000
    assert "http://" not in page and "https://" not in page and "<link" not in page
    assert Elements(page).count("svg") == Elements(page).count("figure") == 8
    order = ["acceptance", "tokens", "training", "time", "numbers", "provenance"]
    places = [page.index('class="cards"'), *(page.index(f'<section id="{name}"') for name in order)]
    assert places == sorted(places) and all(f'href="#{name}"' in page for name in order)
    assert "2.15" in page and "versions.torch" in page and DEFINITIONS["tau"][:30] in page and "2.00e-05" in page
    assert "var(--c1)" in page and COLOURS[0] not in page.replace(asset("page.css"), "")


def test_the_page_of_an_evaluation_without_times_or_training(tmp_path):
    folder = run_folder(
        tmp_path / "run", times=None, predicted=None, cost_ratio=None, speedup=None, tokens_per_second=None,
        baseline_tokens_per_second=None, identical_to_baseline=None, ties=[], samples=[],
    )  # fmt: skip
    page = write_report(folder).read_text()
    assert Elements(page).count("svg") == 2 and "None" not in page.replace("none", "")
    assert "No rounds were recorded" in page and "python -m eval run=outputs/demo/1" in page
    assert "<script" not in page and "script-src 'none'" in page


def test_who_wrote_each_token(tmp_path):
    page = write_report(with_rounds(run_folder(tmp_path / "run"))).read_text()
    start = page.index('<p class="text"')
    text = page[page.index(">", start) + 1 : page.index("</p>", start)]
    tokens = re.findall(r'<span class="t ([^"]*)" data-r="(\d)" data-d="(\d)">(.*?)</span>', text, re.S)
    assert tokens == [
        ("first", "0", "0", "Hello"),
        ("d1", "1", "1", " a"), ("d2", "1", "2", " c"), ("correction", "1", "0", " d"),
        ("d1", "2", "1", " a"), ("d2", "2", "2", " c"), ("d3", "2", "3", "&lt;i&gt;"), ("bonus", "2", "0", "\\u202e\n"),
    ]  # fmt: skip
    assert "Say &lt;b&gt;hi&lt;/b&gt;" in page and "<b>hi" not in page and "8 tokens in 2 verify calls, τ 3.50" in page
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', page, re.S)[1])
    assert data["whole"] and [row["depths"] for row in data["rounds"]] == [[], [1, 1, 2, 3], [1, 1, 2, 3]]
    assert data["rounds"][1]["drafts"] == NODES["drafts"] and data["rounds"][1]["ms"] == [10, 30, 50]
    assert page.count('<article class="sample more">') == 1 and page.count("data-pick") > 2
    digest = base64.b64encode(hashlib.sha256(asset("tokens.js").encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page


def test_a_cut_text_shows_what_was_kept(tmp_path):
    folder = with_rounds(run_folder(tmp_path / "run"), [*ROUNDS[:2], ROUNDS[2] | {"kept": 2}])
    page = write_report(folder).read_text()
    assert page.count('data-r="2"') == 4 and "6 tokens in 2 verify calls" in page  # two texts


def test_an_older_run_shows_what_passed(tmp_path):
    page = write_report(run_folder(tmp_path / "run")).read_text()
    assert (
        '<span class="t d1" data-r="1" data-d="1"> there</span><span class="t d2" data-r="1" data-d="2">,</span>'
        in page
    )
    assert "keeps what was accepted alone" in page and "refused draft<" not in page


def luminance(colour: str) -> float:
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_stands_out_from_what_is_behind_it_in_light_and_dark():
    """WCAG 2: 4.5 for text, 3 for marks and lines of a plot; deeper drafts differ in lightness alone."""
    light, dark = (dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in asset("page.css").split("@media")[:2])
    assert len(light) == len(dark) == 25
    for colours in (light, dark):
        for name in ("page", "card", "d1", "d2", "d3", "d4", "d5"):
            assert contrast(colours["ink"], colours[name]) >= 4.5, name
        for name in ("soft", "accent", "good", "bad"):
            assert min(contrast(colours[name], colours[behind]) for behind in ("page", "card")) >= 4.5, name
        for name in ("correction", "bonus", "first", "strong", *(f"c{n}" for n in range(1, 9))):
            assert contrast(colours[name], colours["card"]) >= 3, name
        shades = [luminance(colours[f"d{n}"]) for n in range(1, 6)]
        assert shades in (sorted(shades), sorted(shades, reverse=True))


def test_comparison_of_runs(tmp_path):
    a = run_folder(tmp_path / "a" / "1")
    intervals = alpha_values()["intervals"] | {"alpha_by_depth": [[0.6, 0.8], [0.5, 0.7]]}
    b = run_folder(tmp_path / "b" / "1", tau=2.9, alpha_by_depth=[0.7, 0.6], accepted_by_position=[0.7, 0.42],
                   tested_by_depth=[10, 7], accepted_by_depth=[7, 4], temperature=1.0, intervals=intervals)  # fmt: skip
    page = write_comparison([a, b], tmp_path / "compare.html").read_text()
    assert "a/1" in page and "b/1" in page and "2.900" in page
    assert "different prompts or settings" in page
    same = {"verify_calls": 5, "drafted": 15, "accepted": 4, "prompt_tokens": 9}
    rows = [{"id": n, "tested_by_depth": [5, 3, 1], "accepted_by_depth": [3, 1, 0]} | same for n in "abc"]
    more = [row | {"accepted": 6, "accepted_by_depth": [3, 2, 1], "tested_by_depth": [5, 3, 2]} for row in rows]
    c = with_rounds(run_folder(tmp_path / "c", METRICS, prompts=rows, exposure=EXPOSURE))
    d = with_rounds(run_folder(tmp_path / "d", METRICS, prompts=more, exposure=EXPOSURE))
    page = write_comparison([c, d], tmp_path / "compare.html").read_text()
    assert (
        "Differences are paired: the same 3 prompts" in page and "less c&#x27;s" in page and "<td>+0.400</td>" in page
    )
    assert Elements(page).count("svg") == 6 and Elements(page).count("article") == 2 and "best τ" in page
    (tmp_path / "e" / "eval-1").mkdir(parents=True)
    d.rename(tmp_path / "e" / "eval-2")
    assert Elements(write_comparison([c, tmp_path / "e"], tmp_path / "x.html").read_text()).count("article") == 2
    with pytest.raises(UserError, match="two runs"):
        write_comparison([a], tmp_path / "x.html")
    with pytest.raises(UserError, match="named twice"):
        write_comparison([a, a], tmp_path / "x.html")


def test_a_folder_without_numbers_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match="python -m eval"):
        read_alpha(tmp_path)
    (tmp_path / "alpha.json").write_text("{}")
    with pytest.raises(UserError, match="this version"):
        write_report(tmp_path)


def test_the_command(tmp_path, command, monkeypatch):
    call = partial(command, "report", report)
    a, b = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert call(f"runs=[{a},{b}]", f"out={tmp_path}/c.html")[:2] == (0, f"{tmp_path}/c.html")
    assert json.loads(call(f"runs={a}", "json=true")[1]) == {"path": f"{a}/report.html"}
    assert call(f"runs={a}", "out=pages/one.html")[1] == "pages/one.html"
    assert (tmp_path / "pages" / "one.html").is_file()
    before = set(tmp_path.iterdir())
    page = call("runs=[a,b]")[1]
    assert page.startswith("outputs/comparison-") and page.endswith("/comparison.html")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "outputs"}
    assert "runs" in call("--help")[1]
    for mistake in (["rnus=[x]"], [], [f"runs=[{tmp_path}]"], ["runs=[a"]):
        code, _, err = call(*mistake)
        assert code == 2 and len(err.splitlines()) == 1
