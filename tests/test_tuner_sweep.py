"""The tuner by a sweep: gates and tiers whose right answers are reckoned by hand, and a real sweep of a tiny run."""

import json
from dataclasses import replace

import pytest
from test_report import alpha_values
from test_theory_page import TIMES, measured, rewritten  # noqa: F401 - a fixture

import eval.sweep.command as sweeping
import fuzz
from conf.cli import load
from eval.tuner.command import run
from eval.tuner.evidence import evidence_of
from eval.tuner.page import page
from eval.tuner.published import Profile, cooled
from eval.tuner.record import record
from eval.tuner.rules import recommend
from eval.tuner.swept import at


@pytest.fixture
def head(measured, tmp_path):  # noqa: F811
    """A run whose chain of 2 gives 2.36 tokens for 1.55 steps: 1.52x. One draft: 1.8 for 1.35, 1.33x."""
    intervals = json.loads((measured / "alpha.json").read_text())["intervals"]
    known = {"alpha_by_depth": [0.8, 0.7, None], "accepted_by_position": [0.8, 0.56, None], "times": TIMES,
             "tested_by_depth": [100, 80, 0], "accepted_by_depth": [80, 56, 0], "speedup": 1.5,
             "predicted_speedup": 1.5, "prompt_lookup_tau": None,
             "intervals": intervals | {"alpha_by_depth": [[0.7, 0.9], [0.6, 0.8], None]}}  # fmt: skip
    folder = rewritten(tmp_path / "run", measured, **known)
    (folder / "head").symlink_to(measured / "head")
    return folder


def row(first=80, second=56, **changes):
    """A point of a sweep: so many of 100 first drafts passed, and so many of the second ones behind them."""
    point = {"temperature": 0.0, "batch": 1, "context": 0, "depth": 2, "prompt_tokens": 500.0,
             "tau": 1 + (first + second) / 100, "accepted_by_depth": [first, second], "tested_by_depth": [100, first],
             "prompt_lookup_tau": None, "speedup": None, "speedup_interval": None, "times": None}  # fmt: skip
    return point | changes


def times(decode, verify, draft=0.1):
    return {"t_decode": decode, "t_verify": verify, "t_draft_first": draft, "t_draft": draft / 2, "t_other": draft / 2}


def sweep_of(head, *rows, missing=0, **settings):
    values = json.loads((head / "alpha.json").read_text())
    known = {name: values[name] for name in ("verifier_hash", "head_hash", "device", "dtype", "threads")}
    file = head / "mine.json"
    settings = known | {"mode": "chain"} | settings
    file.write_text(json.dumps({"settings": settings, "points": list(rows), "missing": missing}))
    return file


def tuned(command, head, *words):
    code, out, err = command("tuner", run, f"run={head}", "workload.engine=vllm", *words, "json=true")
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


# --- temperature --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "warmer, up_to",
    [
        ([], 1.0),  # published: less 10.5 % at T=1, and nothing is known above
        # E(T) = 1 + (.8 - .5 T) (1 + .7 - .2 T) > 1.55: 1.616 at .8, 1.532 at .9
        ([row(30, 15, temperature=1.0)], 0.8),
        # E(T) = 1 + 1.5 (.42 - .14 (T - 1) / .3) > 1.55: 1.56 at 1.1, 1.49 at 1.2
        ([row(42, 21, temperature=1.0), row(28, 14, temperature=1.3)], 1.1),
    ],
)
def test_the_gate_rests_on_measured_acceptance(warmer, up_to, head, command):
    values = tuned(command, head, f"sweep={sweep_of(head, row(), *warmer)}")
    heat = values["temperature"]
    assert heat["up_to"] == up_to and heat["measured"] == [0.0, *(one["temperature"] for one in warmer)]
    assert heat["origin"] == ("measured" if warmer else "assumption") and values["recommendation"]["n"] == 2
    assert f"up to T={up_to:g} ({heat['origin']}), measured at T=0" in page(values)
    assert any("doesn't move temperature" in note for note in values["notes"]) == (not warmer)


def test_the_workloads_temperature_has_its_own_acceptance(head, command):
    warmer = row(60, 30, temperature=1.0)
    values = tuned(command, head, f"sweep={sweep_of(head, row(), warmer)}", "workload.temperature=0.5")
    alpha = values["numbers"][0]
    assert alpha["value"] == pytest.approx([0.7, 0.6]) and alpha["origin"] == "measured"  # the middle of .8 .7, .6 .5
    assert "between T=0" in alpha["source"] and "mine.json" in alpha["source"]
    assert values["recommendation"]["tokens_per_verify"] == pytest.approx(1 + 0.7 + 0.42)
    rows = {one["name"]: one for one in values["numbers"]}
    assert rows["n-alpha by T"]["value"] == {"0": 0.8, "1": 0.6}
    assert "| 0: 0.800, 1: 0.600 | measured |" in page(values)


def test_between_and_beyond_measured_temperatures():
    def profile(t, *alphas):
        return Profile("eagle3", alphas, alphas, alphas, "measured", f"at {t}", t)

    cold, warm = profile(0.2, 0.8, 0.7), profile(0.6, 0.6, 0.3, 0.1)
    assert at([warm, cold], 0.3).point == pytest.approx((0.75, 0.6))  # no deeper than both were measured
    assert at([warm, cold], 0.2) is cold and at([warm, cold], 0.6) is warm
    assert at([warm, cold], 0.0) is cold  # a lower bound
    assert at([warm, cold], 1.0) == cooled(warm, 1.0) and at([warm, cold], 1.0).origin == "assumption"


def test_a_measured_temperature_lifts_the_refusal(head, command):
    words = [f"run={head}", "workload=creative_no_telemetry"]
    cool, hot = row(70, 49, temperature=0.9), row(60, 30, temperature=1.3)
    for rows, refused in (((row(), cool), ["calibrate"]), ((row(), cool, hot), [])):
        values = tuned(command, head, *words, f"sweep={sweep_of(head, *rows)}")
        assert [one["rule"] for one in values["refusals"]] == refused
    assert values["numbers"][0]["value"] == pytest.approx([0.65, 0.6])  # T=1.1, between .9 and 1.3
    assert any("speed-ups are of cpu: not used" in note for note in values["notes"])  # the workload is an H100's
    assert values["batches"][0]["measured"] is None


def test_prompt_lookup_by_temperature_too(head, command):
    other = rewritten(head, head, prompt_lookup_tau=2.0)
    rows = [row(prompt_lookup_tau=2.0), row(20, 4, temperature=1.0, prompt_lookup_tau=1.5)]
    values = tuned(command, other, f"sweep={sweep_of(other, *rows)}", "workload.temperature=1")
    found = {one["family"]: one for one in values["families"]}
    assert found["prompt_lookup"]["alpha"] == pytest.approx((3**0.5 - 1) / 2)  # 1 + a + a a = 1.5
    assert found["prompt_lookup"]["origin"] == "measured" and values["n"]["candidates"][0]["depth"] == 1


# --- sequences at once --------------------------------------------------------------------------------------------


def test_tiers_rest_on_measured_times(head, command):
    """At 4 a round of 2 takes .9 + .1 + .05 + .05, a step .5: 2.36 x .5 / 1.1. At 8 a step .4: no N pays."""
    four = row(batch=4, times=times(0.5, {"3": 0.9}), speedup=1.05, speedup_interval=[1.0, 1.1])
    eight = row(batch=8, times=times(0.4, {"3": 0.9}), speedup=0.8, speedup_interval=None)
    without, values = (tuned(command, head, *words) for words in
                       ([], [f"sweep={sweep_of(head, row(), four, eight)}"]))  # fmt: skip
    tiers, before = ({one["batch"]: one for one in found["batches"]} for found in (values, without))
    assert before[8]["shape"] == "chain" and before[8]["chain_speedup"] > 1
    assert tiers[4]["chain_n"] == 2 and tiers[4]["chain_speedup"] == pytest.approx(2.36 * 0.5 / 1.1)
    # the verify of two rows lies halfway between a step and that of three
    assert tiers[8]["chain_n"] == 1 and tiers[8]["chain_speedup"] == pytest.approx(1.8 * 0.4 / (0.65 + 0.1 + 0.05))
    assert tiers[8]["shape"] == "none" and {"batch >= 8"} <= {one["when"] for one in values["telemetry"]["alarms"]}
    assert tiers[1] == before[1] and tiers[2] == before[2]  # the run's own, and reckoned from it
    assert "mine.json at batch 4, T=0, prompts of 500 tokens" in tiers[4]["times"]
    assert tiers[4]["measured"] == {"n": 2, "speedup": 1.05, "interval": [1.0, 1.1]}
    text = page(values)
    assert "| N=2: 1.05x (1.00 to 1.10) |" in text and "| N=2: 0.80x (few turns) |" in text
    rows = {one["name"]: one["value"] for one in values["numbers"]}
    assert rows["speed-up by sequences"] == {"4": 1.05, "8": 0.8}
    lost = four | {"speedup": 0.9, "speedup_interval": [0.8, 0.99]}  # the chain that the formula would take there
    values = tuned(command, head, f"sweep={sweep_of(head, row(), lost)}")
    assert {one["batch"]: one["shape"] for one in values["batches"]}[4] == "none"


def test_a_batch_that_only_the_sweep_measured(head, command):
    four = row(batch=4, times=times(0.5, {"3": 0.9}), speedup=1.0, speedup_interval=[0.9, 1.1])
    words = [f"sweep={sweep_of(head, row(), four)}", "workload.batch=4"]
    values = tuned(command, head, *words)
    assert values["latency"]["plain_ms"] == 2000 and values["latency"]["round_ms"] == pytest.approx(4400)
    given, error = values["recommendation"], 2.36 * 0.5 / 1.1  # of the loop's 1.00
    assert given["speedup"] == pytest.approx(2.36 * 0.5 / 1.1)
    assert given["speedup_low"] == pytest.approx((1 + 0.7 + 0.42) * 0.5 / 1.1 / error)


def test_times_of_several_n_at_a_batch(head, command):
    """Each in its own steps: load that met both ways cancels. A chain of one says nothing of later drafts."""
    rows = [row(80, 0, batch=4, depth=1, times=times(1.0, {"2": 1.2}) | {"t_draft": None}),
            row(batch=4, times=times(0.5, {"3": 0.9})), row(batch=4, context=9000, prompt_tokens=9000.0,
                                                            times=times(9.0, {"3": 9.0}))]  # fmt: skip
    values = tuned(command, head, f"sweep={sweep_of(head, *rows)}", "workload.batch=4")
    one, two = values["n"]["candidates"]
    first, other = (0.1 + 0.2) / 2, (0.05 + 0.1) / 2
    assert one["speedup"] == pytest.approx(1.8 / (1.2 + first + other))
    assert two["speedup"] == pytest.approx(2.36 / (1.8 + first + 0.1 + other))


# --- N ------------------------------------------------------------------------------------------------------------


def test_measured_speedups_stand_beside_the_predicted(head, command):
    rows = [row(80, 0, depth=1, speedup=1.3, speedup_interval=[1.2, 1.4]),
            row(speedup=1.1, speedup_interval=[1.05, 1.2]),
            row(temperature=1.0, speedup=9.0), row(batch=2, speedup=9.0)]  # fmt: skip
    values = tuned(command, head, f"sweep={sweep_of(head, *rows)}")
    assert [one["measured"]["speedup"] for one in values["n"]["candidates"]] == [1.3, 1.1]
    assert "| 1.20 to 1.40) |" not in page(values) and "| 1.30x (1.20 to 1.40) |" in page(values)
    notes = [note for note in values["notes"] if "in the loop" in note]
    assert notes == ["N=2: 1.52x by the formula, 1.10x (1.05 to 1.20) in the loop"] and not values["refused"]


def test_a_choice_that_lost_in_the_loop_is_refused(head, command):
    lost = row(speedup=0.8, speedup_interval=[0.7, 0.9])
    values = tuned(command, head, f"sweep={sweep_of(head, lost)}")
    [refusal] = values["refusals"]
    assert refusal["rule"] == "break_even" and "N=2 gives 0.80x (0.70 to 0.90)" in refusal["reason"]
    for other in (row(80, 0, depth=1, speedup=0.95, speedup_interval=[0.9, 1.01]), None):
        rows = [lost, other] if other else [row(depth=1, speedup=0.8, speedup_interval=[0.7, 0.9])]
        assert not tuned(command, head, f"sweep={sweep_of(head, *rows)}")["refused"]  # it may pay, or wasn't measured


# --- remarks and mistakes -----------------------------------------------------------------------------------------


def test_remarks(head, command):
    rows = [row(30, 10), row(tau=None, batch=4), row(temperature=1.0)]
    file = sweep_of(head, *(one | {"prompt_tokens": 90.0} for one in rows), missing=3, threads=64)
    notes = " ".join(tuned(command, head, f"sweep={file}")["notes"])
    for hint in ("doesn't move batch, context, depth", "1 points of", "3 points are missing", "threads 64 and 1",
                 "EAGLE-3 at T=0: 0.30 of the sweep's first drafts pass, 0.80 of the run's",
                 "have 512 tokens, the sweep's 90 at most: contexts=[512]"):  # fmt: skip
        assert hint in notes, notes
    folder = head / "sweep-12345678"
    folder.mkdir()
    file.rename(folder / "sweep.json")
    assert any(f"sweep={folder} tunes by it too" in note for note in tuned(command, head)["notes"])
    assert not any("tunes by it" in note for note in tuned(command, head, f"sweep={folder}")["notes"])


def test_mistakes_are_one_line(head, tmp_path, command):
    cut, plain = tmp_path / "cut.json", tmp_path / "plain.json"
    cut.write_text(sweep_of(head, row()).read_text()[:200])
    plain.write_text(json.dumps({"points": []}))

    def refused(hint, sweep, *words):
        code, _, err = command("tuner", run, *(words or [f"run={head}"]), f"sweep={sweep}", f"out={tmp_path}/out")
        assert code == 2 and hint in err and len(err.splitlines()) == 1, err

    refused("is damaged", cut)
    refused("isn't a sweep.json of this version (settings: Field required): run python -m eval.sweep again", plain)
    refused("expected a sweep.json in", tmp_path)
    refused("give run=DIR too", plain, "workload=chat_8b_h100")
    for hint, rows, settings in (
        ("expected a sweep of the run's head and verifier", [row()], {"head_hash": "f" * 64}),
        ("found others: sweep run=DIR itself", [row()], {"verifier_hash": "f" * 64}),
        ("expected a sweep of chains", [row()], {"mode": "tree"}),
        ("expected points with tested drafts", [], {}),
        ("expected points with tested drafts", [row(tau=None), row(0, 0, tested_by_depth=[0, 0])], {}),
        ("more drafts were accepted than tested", [row(80, 90)], {}),
        ("points.0.times.t_decode", [row(times=times(0.0, {"3": 1.0}))], {}),
        ("points.0.times.t_verify", [row(times=times(1.0, {}))], {}),
    ):
        refused(hint, sweep_of(head, *rows, **settings))


ALPHA = alpha_values()
SWEEP = {
    "settings": {name: ALPHA[name] for name in ("verifier_hash", "head_hash", "device", "dtype", "threads")}
    | {"mode": "chain"},
    "points": [row(prompt_lookup_tau=1.1), row(temperature=1.0, speedup=1.1, speedup_interval=[1.0, 1.2]),
               row(batch=4, speedup=1.1, times=times(0.5, {"3": 0.9}))],
    "missing": 0,
}  # fmt: skip
ASKED = load("tuner", ["family=eagle3", "workload.engine=sglang", "workload.temperature=0.5", "workload.batch=4"])


@fuzz.fuzz(fuzz.jsons(SWEEP), json.dumps(SWEEP).encode())
def test_any_sweep(data, folder):
    (folder / "alpha.json").write_text(json.dumps(ALPHA))
    (folder / "sweep.json").write_bytes(data)
    cfg = replace(ASKED, run=str(folder), sweep=str(folder))
    values = record(recommend(cfg.workload, evidence_of(cfg)))
    assert page(values) and json.dumps(values, allow_nan=False)


# --- a real one ---------------------------------------------------------------------------------------------------


def test_a_real_sweep(measured, tmp_path, command):  # noqa: F811
    words = [f"run={measured}", f"prompts={measured}/prompts.jsonl", "decode.max_new_tokens=12", "decode.depth=3",
             "repeats=1", "temperatures=[1]", "batches=[2]", "contexts=[]", "depths=[1]", "plots=false",
             f"out={tmp_path}/sweep"]  # fmt: skip
    assert command("sweep", sweeping.run, *words)[0] == 0
    points = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["points"]
    middle, hot, pair, one = points
    alpha = json.loads((measured / "alpha.json").read_text())
    assert middle["alpha_by_depth"] == alpha["alpha_by_depth"]  # the same prompts: no remark on them
    # under this name it is the only draft that was measured: nothing else can be chosen
    words = [f"sweep={tmp_path}/sweep", f"out={tmp_path}", "family=prompt_lookup"]
    values = tuned(command, measured, *words)
    rows = {row["name"]: row for row in values["numbers"]}
    assert rows["n-alpha by T"]["value"] == {"0": alpha["alpha_by_depth"][0], "1": hot["alpha_by_depth"][0]}
    assert rows["speed-up by N"]["value"] == {"1": one["speedup"], "3": middle["speedup"]}
    tier = values["batches"][1]
    assert tier["batch"] == 2 and tier["measured"]["speedup"] == pair["speedup"] and "at batch 2" in tier["times"]
    assert not any("on the same prompts" in note for note in values["notes"])
    values = tuned(command, measured, *words, "workload.temperature=1")
    known = [a for a in hot["alpha_by_depth"] if a is not None]
    assert values["numbers"][0]["value"] == known and values["numbers"][0]["origin"] == "measured"
    assert (tmp_path / "tuner.md").read_text().startswith("# ")
