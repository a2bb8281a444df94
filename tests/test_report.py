"""Plots and the page: made from a run folder's files alone, self-contained, whole."""

import json
from functools import partial

import pytest

from conf.errors import UserError
from eval.alpha import DEFINITIONS, times_to_dict
from eval.counts import wilson
from eval.plots import read_metrics
from eval.report import read_alpha, report, write_comparison, write_report
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


def test_the_page_is_one_file_with_everything(tmp_path):
    folder = run_folder(tmp_path / "run", METRICS)
    page = write_report(folder).read_text()
    for name in ("summary.png", "alpha_by_depth.png", "tau_by_n.png", "training.png"):
        assert (folder / name).stat().st_size > 5000
    assert page.count("data:image/png;base64,") == 3 and page.index('alt="summary"') < page.index('alt="tau_by_n"')
    assert "http://" not in page and "https://" not in page and "<link" not in page and "<script" not in page
    assert "Say &lt;b&gt;hi&lt;/b&gt;" in page and '<i class="b"> there</i><i class="b">,</i> my' in page
    assert "2.15" in page and "versions.torch" in page and DEFINITIONS["tau"][:30] in page and "2.00e-05" in page


def test_the_page_of_an_evaluation_without_times_or_training(tmp_path):
    folder = run_folder(
        tmp_path / "run", times=None, predicted=None, cost_ratio=None, speedup=None, tokens_per_second=None,
        baseline_tokens_per_second=None, identical_to_baseline=None, ties=[], samples=[],
    )  # fmt: skip
    page = write_report(folder).read_text()
    assert page.count("data:image/png;base64,") == 1 and "None" not in page


def test_comparison_of_runs(tmp_path):
    a = run_folder(tmp_path / "a" / "1")
    intervals = alpha_values()["intervals"] | {"alpha_by_depth": [[0.6, 0.8], [0.5, 0.7]]}
    b = run_folder(tmp_path / "b" / "1", tau=2.9, alpha_by_depth=[0.7, 0.6], accepted_by_position=[0.7, 0.42],
                   tested_by_depth=[10, 7], accepted_by_depth=[7, 4], temperature=1.0, intervals=intervals)  # fmt: skip
    page = write_comparison([a, b], tmp_path / "compare.html").read_text()
    assert "a/1" in page and "b/1" in page and "2.900" in page
    assert "different prompts or settings" in page
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
