"""Runs side by side: paired differences, pooled seeds, and runs that are no pair."""

import json
from functools import partial

import pytest
from test_report import alpha_values

from eval.compare import compare, counts_of, mean
from eval.counts import Counts, bootstrap_tau, paired_bootstrap


def rounds(accepted: int, calls: int) -> Counts:
    return Counts(verify_calls=calls, accepted=accepted)


def test_paired_bootstrap_by_hand():
    """Of two prompts a resample holds both (half the time), or one of them twice (a quarter each)."""
    ours, base = [rounds(3, 2), rounds(1, 2)], [rounds(1, 2), rounds(1, 2)]
    assert paired_bootstrap(ours, base) == [0.0, 1.0]  # differences 0, .5 and 1
    # Pooled: long prompts weigh more. Both: 10 / 12 - 1 / 12; the first twice: 0; the second twice: .9.
    ours, base = [rounds(1, 2), rounds(9, 10)], [rounds(1, 2), rounds(0, 10)]
    assert paired_bootstrap(ours, base) == pytest.approx([0.0, 0.9])


def test_what_both_share_is_no_part_of_the_difference():
    base = [rounds(9, 10), rounds(0, 10), rounds(4, 10)]
    better = [rounds(c.accepted + 1, 10) for c in base]
    low, high = bootstrap_tau(better)
    assert high - low > 0.5
    assert paired_bootstrap(better, base) == pytest.approx([0.1, 0.1])
    assert paired_bootstrap(base, base) == [0.0, 0.0]
    assert paired_bootstrap(base[:1], base[:1]) is None  # one prompt has no spread
    assert paired_bootstrap([rounds(0, 0)] * 3, base) is None


# --- the command ----------------------------------------------------------------------------------------------


def prompt_row(name: str, tested: list[int], accepted: list[int]) -> dict:
    return {
        "id": name, "category": "toy", "prompt_tokens": 5, "verify_calls": tested[0], "drafted": 2 * tested[0],
        "accepted": sum(accepted), "tested_by_depth": tested, "accepted_by_depth": accepted,
    }  # fmt: skip


BASE = [prompt_row("a", [10, 5], [5, 1]), prompt_row("b", [20, 4], [4, 2]), prompt_row("c", [10, 2], [2, 1])]
BETTER = [prompt_row("a", [8, 6], [6, 3]), prompt_row("b", [16, 8], [8, 4]), prompt_row("c", [8, 4], [4, 2])]
BEST = [prompt_row("a", [6, 6], [6, 6]), prompt_row("b", [12, 9], [9, 6]), prompt_row("c", [6, 6], [6, 4])]


def written(folder, rows: list[dict], **changes) -> str:
    """A folder with the alpha.json of these prompts; returns its name."""
    counts = Counts()
    for row in rows:
        counts += counts_of(row)
    values = {
        "tau": counts.tau, "alpha_by_depth": counts.alpha_by_depth, "by_category": {},
        "tested_by_depth": counts.tested_by_depth, "accepted_by_depth": counts.accepted_by_depth,
        "accepted_by_position": counts.alpha_by_depth,
        "intervals": {"tau": None, "alpha": None, "alpha_by_depth": [[0, 1]] * 2},
        "prompts": rows, "verifier": "org/toy", "verifier_hash": "ab", "decode": "chain", "depth": 2,
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 64, "dtype": "float32", "cost_ratio": 0.1,
        "measured": "replay", "speedup": None, "predicted": {"n_star": 2, "speedup": 1.25, "speedup_by_n": {}},
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "alpha.json").write_text(json.dumps(alpha_values() | values | changes))
    return str(folder)


@pytest.fixture
def call(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(command, "compare", compare)


def test_two_runs_and_their_difference(call, tmp_path):
    a, b = written(tmp_path / "x" / "plain", BASE), written(tmp_path / "x" / "ttt", BETTER, cost_ratio=None)
    code, out, err = call(f"runs=[{a},{b}]", "out=there", "json=true")
    assert code == 0, err
    values = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "there" / "comparison.json").read_text())["arms"] == values["arms"]
    assert (values["base"], values["prompts"], list(values["arms"])) == ("plain", 3, ["plain", "ttt"])
    plain, ttt = values["arms"].values()
    assert plain["tau"] == 1 + 15 / 40 and ttt["tau"] == 1 + 27 / 32
    assert ttt["alpha_by_depth"] == [18 / 32, 9 / 18] and len(ttt["alpha_by_depth_interval"]) == 2
    assert plain["tau_difference"] is plain["tau_difference_interval"] is None
    assert ttt["tau_difference"] == 27 / 32 - 15 / 40
    low, high = ttt["tau_difference_interval"]
    assert 0 < low < ttt["tau_difference"] < high
    assert ttt["tau_interval"][0] < ttt["tau"] < ttt["tau_interval"][1]
    assert (plain["cost_ratio"], ttt["cost_ratio"]) == (0.1, None)
    assert (plain["n_star"], plain["predicted_speedup"], plain["speedup"]) == ([2], 1.25, None)
    text = (tmp_path / "there" / "comparison.md").read_text()
    assert "| ttt | .562 .500 | 1.844 | 1.750 to 2.125 | +0.469 |" in text and "another seed" in text
    assert "| plain | 1 (replay) | 1.375 | 0.100 | 2 | 1.25 | - |" in text
    assert (tmp_path / "there" / "comparison.png").stat().st_size > 5000
    assert "+0.469" in err and "1.844" in err and "…" not in err  # at 80 columns


def test_seeds_of_one_name_are_pooled(call, tmp_path):
    a, b, c = (written(tmp_path / name, rows) for name, rows in (("a", BASE), ("b", BETTER), ("c", BEST)))
    words = (f"runs=[{b},{a},{c}]", "names=[ttt,plain,ttt]", "json=true")
    for base in ("plain", a):
        code, out, err = call(*words, f"base={base}", f"out={tmp_path}/of-{base[-1]}")
        assert code == 0, err
        values = json.loads(out.splitlines()[-1])
        assert values["base"] == "plain" and list(values["arms"]) == ["ttt", "plain"]
        ttt = values["arms"]["ttt"]
        taus = [1 + 27 / 32, 1 + 37 / 24]
        assert ttt["tau_by_run"] == taus and ttt["tau_range"] == taus and ttt["tau_mean"] == sum(taus) / 2
        assert ttt["tau"] == 1 + (27 + 37) / (32 + 24) and ttt["runs"] == 2
        assert ttt["alpha_by_depth"] == [(18 + 21) / (32 + 24), (9 + 16) / (18 + 21)]
        assert ttt["tau_difference"] == pytest.approx(64 / 56 - 15 / 40)
        by_hand = [rounds(9 + 12, 8 + 6), rounds(12 + 15, 16 + 12), rounds(6 + 10, 8 + 6)]
        base_counts = [rounds(6, 10), rounds(6, 20), rounds(3, 10)]
        assert ttt["tau_difference_interval"] == paired_bootstrap(by_hand, base_counts)
    assert "| ttt | 2 (replay) | 2.193 (1.844 to 2.542) |" in (tmp_path / "of-a" / "comparison.md").read_text()


def test_a_runs_latest_evaluation_and_a_file(call, tmp_path):
    written(tmp_path / "run" / "eval-2026-01-01_00-00-00", BETTER)
    written(tmp_path / "run" / "eval-2026-01-02_00-00-00", BEST, measured="loop", speedup=1.5)
    old = written(tmp_path / "old", BASE)
    values = json.loads((tmp_path / "old" / "alpha.json").read_text())
    del values["measured"]  # as before there was another way
    (tmp_path / "old" / "alpha.json").write_text(json.dumps(values))
    code, out, err = call(f"runs=[{old}/alpha.json,run]", "names=[old,new]", "json=true", "out=o")
    assert code == 0, err
    arms = json.loads(out.splitlines()[-1])["arms"]
    assert arms["new"]["tau"] == 1 + 37 / 24 and arms["new"]["speedup"] == 1.5
    assert arms["old"]["measured"] == arms["new"]["measured"] == ["loop"]


@pytest.mark.parametrize(
    "changes, hint",
    [
        ({"verifier_hash": "cd"}, "verifier_hash ab"),
        ({"depth": 3}, "depth 2"),
        ({"temperature": 1.0}, "temperature 0.0"),
        ({"max_new_tokens": 32}, "max_new_tokens 64"),
        ({"prompts": BETTER[:2]}, "the same prompts"),
        ({"prompts": [BETTER[0] | {"prompt_tokens": 6}, *BETTER[1:]]}, "the same prompts"),
    ],
)
def test_runs_that_were_not_measured_alike_are_refused(call, tmp_path, changes, hint):
    a, b = written(tmp_path / "a", BASE), written(tmp_path / "b", BETTER, **changes)
    code, _, err = call(f"runs=[{a},{b}]", "out=there")
    assert code == 2 and len(err.splitlines()) == 1 and hint in err and b in err
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    "words, hint",
    [
        ([], "found 0"),
        (["runs=a"], "found 1"),
        (["runs=[a,a]"], "named twice"),
        (["runs=[a,b]", "names=[x]"], "found 1 names: x"),
        (["runs=[a,b]", "base=c"], "choose from a, b"),
        (["runs=[a,c]"], "alpha.json in c"),
        (["runs=[a,damaged]"], "damaged"),
        (["runs=[a,b]", "bass=a"], "base"),
    ],
)
def test_mistakes_are_one_line(call, tmp_path, words, hint):
    written(tmp_path / "a", BASE)
    written(tmp_path / "b", BASE)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "alpha.json").write_text("{")
    code, _, err = call(*words)
    assert code == 2 and hint in err and len(err.splitlines()) == 1


def test_runs_without_a_verify_call_have_no_tau(call, tmp_path):
    none = [prompt_row(name, [0, 0], [0, 0]) for name in "abc"]
    a, b = written(tmp_path / "a", none, predicted=None), written(tmp_path / "b", BASE)
    code, out, err = call(f"runs=[{a},{b}]", "json=true", "out=o")
    assert code == 0, err
    arms = json.loads(out.splitlines()[-1])["arms"]
    assert arms["a"]["tau"] is arms["a"]["tau_interval"] is arms["b"]["tau_difference"] is None
    assert arms["a"]["predicted_speedup"] is None and mean([None]) is None
