"""The tuner's answers for the example workloads, its rules, and what holds whatever it is asked."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.cli import load
from conf.explain import options
from eval.theory.model import measured_outlook
from eval.tuner.engines import ENGINES, FAMILIES, availability
from eval.tuner.evidence import Evidence
from eval.tuner.page import page
from eval.tuner.published import Profile
from eval.tuner.record import record
from eval.tuner.rules import recommend

# name -> refused by, or (family, shape, levels or N, nodes, speed-up)
EXPECTED = {
    "laptop_smollm2_batch1": ("prompt_lookup", "chain", 1, 1, 1.18),
    "chat_8b_h100": ("eagle3", "chain", 6, 6, 1.96),
    "code_completion_8b": ("eagle3", "tree", 3, 6, 1.96),
    "creative_no_telemetry": ["calibrate"],
    "batch64_70b": ("eagle3", "chain", 2, 2, 1.15),
    "llamacpp_edge": ("independent", "chain", 3, 3, 1.32),
    "no_rollback": ["rollback"],
    "other_revision": ["head"],
    "medusa_legacy": ["lossy"],
}


EXAMPLES = {name: load("tuner", [f"workload={name}"]).workload for name in EXPECTED}


def answer(name, evidence=None, **changes):
    return record(recommend(replace(EXAMPLES[name], **changes), evidence or Evidence()))


def measured(*alphas, family="eagle3", temperature=0.0, spread=0.02):
    low, high = (tuple(min(1.0, max(0.0, a + sign * spread)) for a in alphas) for sign in (-1, 1))
    return Evidence(Profile(family, alphas, low, high, "measured", "counters", temperature))


def test_every_example_has_its_answer():
    assert set(EXPECTED) == set(options("workload")) and len(EXPECTED) >= 8


@pytest.mark.parametrize("name", EXPECTED)
def test_examples(name):
    values = answer(name)
    if isinstance(EXPECTED[name], list):
        assert [one["rule"] for one in values["refusals"]] == EXPECTED[name]
        assert values["refused"] and values["recommendation"] is None
        return
    given = values["recommendation"]
    assert (given["family"], given["shape"], given["n"], given["nodes"]) == EXPECTED[name][:4]
    assert given["speedup"] == pytest.approx(EXPECTED[name][4], abs=0.005)
    assert given["speedup_low"] < given["speedup"] < given["speedup_high"]


def test_a_mended_workload_is_answered():
    assert answer("medusa_legacy", acceptance="exact")["recommendation"]["family"] == "medusa"
    assert not answer("other_revision", head_verifier_revision="0e9e39f2")["refused"]  # a short form of the same
    assert not answer("creative_no_telemetry", temperature=0.5)["refused"]
    hot = measured(0.6, 0.55, 0.5, temperature=1.1)
    assert not answer("creative_no_telemetry", evidence=hot)["refused"]
    cold = measured(0.6, 0.55, 0.5, temperature=0.0)
    assert [one["rule"] for one in answer("creative_no_telemetry", evidence=cold)["refusals"]] == ["calibrate"]


# --- refusals by the numbers --------------------------------------------------------------------------------------


def test_below_break_even_the_measurement_decides():
    values = answer("chat_8b_h100", evidence=measured(0.1, 0.1))
    [refusal] = values["refusals"]
    assert refusal["rule"] == "break_even" and values["n"]["n_star"] == 0 and values["recommendation"] is None
    assert "0.10" in refusal["reason"] and "measure before" in refusal["do"]  # its times are reckoned
    assert values["n"]["candidates"][0]["pays_from"] > 0.1
    assert not answer("chat_8b_h100", evidence=measured(0.8, 0.8))["refused"]


def test_a_round_must_not_be_longer_than_p99():
    free, tight = answer("chat_8b_h100", p99_ms=None), answer("chat_8b_h100", p99_ms=10.5)
    assert tight["n"]["n_star"] == free["recommendation"]["n"] == 6
    assert tight["recommendation"]["n"] == 3 and tight["latency"]["round_ms"] <= 10.5 and tight["latency"]["p99_met"]
    assert [one["rule"] for one in answer("chat_8b_h100", p99_ms=7)["refusals"]] == ["p99"]


def test_rows_must_fit_into_memory():
    assert [one["rule"] for one in answer("chat_8b_h100", memory=15)["refusals"]] == ["memory"]
    values = answer("chat_8b_h100", batch=16)
    memory, taken = values["memory"], sum(values["memory"][part] for part in ("weights", "draft", "caches"))
    assert values["recommendation"]["n"] == 5 and memory["rows"] > 6
    rows = 16 * memory["bytes_a_row"] / 2**30
    values = answer("chat_8b_h100", batch=16, memory=taken + 3.5 * rows)
    assert values["recommendation"]["n"] == 2 and values["n"]["n_star"] == 5 and values["memory"]["rows"] == 3
    assert values["verify"]["kv_bytes"] == 3 * rows * 2**30
    assert memory["bytes_a_row"] == 2 * 33 * 8 * 128 * 2  # 32 layers and the draft's


def test_no_family_at_hand():
    values = answer("chat_8b_h100", engine="transformers", engine_version=None)
    assert values["recommendation"]["family"] == "prompt_lookup"
    assert any("EAGLE-3 would give" in note and "prompt lookup instead" in note for note in values["notes"])
    values = answer("chat_8b_h100", engine="other", rollback=True)
    assert [one["rule"] for one in values["refusals"]] == ["family"] and values["n"]["candidates"] == []


# --- engines ------------------------------------------------------------------------------------------------------


def test_downgrades_where_the_engine_lacks_a_family():
    assert any("Medusa would give" in note and "llama.cpp" in note for note in answer("llamacpp_edge")["notes"])
    for engine, family in (("sglang", "eagle2"), ("vllm", "eagle1")):
        values = answer("chat_8b_h100", engine=engine, engine_version=None, heads=["eagle1"], batch=1)
        assert values["recommendation"]["family"] == family
    assert answer("chat_8b_h100")["tree"] is None and answer("chat_8b_h100", engine="sglang")["tree"]


def test_versions():
    vllm = ENGINES["vllm"]
    assert availability(vllm, "independent", "0.10.2")[0] is False
    assert availability(vllm, "independent", "0.25")[0] and "0.25" in availability(vllm, "independent", None)[1]
    there, said = availability(vllm, "eagle3", "0.14")
    assert there and "not verified for 0.14" in said
    assert availability(vllm, "eagle2", None) == (False, "not found in vLLM")
    assert "not verified" in availability(ENGINES["sglang"], "eagle3", "0.5.9")[1]


def test_what_an_engine_has_we_can_export_for_it():
    """Heads: a family of an engine that has a format here is one that the format has, and the other way round."""
    from models.export.formats import FORMATS

    formats = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "trtllm", "llamacpp": "gguf", "openvino": "openvino"}
    for engine, name in formats.items():
        exported = {family for family, there in FORMATS.items() if name in there}
        assert exported == {"eagle1", "eagle3", "medusa"} & set(ENGINES[engine].families), engine


def test_metric_names_are_those_that_are_read():
    from eval.serving.metrics import COUNTERS

    for engine, names in COUNTERS.items():
        known = {value for value in vars(names).values() if isinstance(value, str)}
        assert {name.removesuffix("_total") for name in ENGINES[engine].metrics} <= known


def test_flags_hold_the_numbers():
    flags = {name: answer(name)["recommendation"]["flags"] for name in ("chat_8b_h100", "code_completion_8b")}
    assert json.loads(flags["chat_8b_h100"].split("'")[1]) == {
        "method": "eagle3", "model": "DIR", "num_speculative_tokens": 6}  # fmt: skip
    assert flags["code_completion_8b"].endswith(
        "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 7"
    )
    assert all("$" not in answer(name)["recommendation"]["flags"] for name in EXPECTED if name != "no_rollback"
               and not isinstance(EXPECTED[name], list))  # fmt: skip


# --- whatever is asked --------------------------------------------------------------------------------------------

alphas = st.lists(st.floats(0, 1), min_size=1, max_size=10)
names = st.sampled_from([name for name in EXPECTED if name not in ("no_rollback", "other_revision", "medusa_legacy")])
engines = st.sampled_from([name for name in ENGINES if name != "other"])
FEW = settings(max_examples=25, deadline=None)


@FEW
@given(names, alphas, st.floats(0, 0.5))
def test_higher_acceptance_never_lowers_the_speedup(name, point, more):
    def best(values):
        return max(one["speedup"] for one in values["families"] if one["family"] == "eagle3")

    better = [min(1.0, a + more) for a in point]
    before, after = (answer(name, measured(*a), temperature=0) for a in (point, better))
    assert best(after) >= best(before) - 1e-9
    if before["recommendation"] and after["recommendation"]:
        assert after["recommendation"]["speedup"] >= before["recommendation"]["speedup"] - 1e-9


@FEW
@given(names, alphas)
def test_n_star_is_theorys(name, point):
    found = recommend(replace(EXAMPLES[name], temperature=0), measured(*point))
    times = found.option.costs.times
    assert found.n_star == measured_outlook(found.option.profile.point, times).n_star


@FEW
@given(names, engines, alphas, st.sampled_from(sorted(FAMILIES)), st.floats(0, 1.5), st.integers(1, 64))
def test_nothing_is_recommended_below_break_even(name, engine, point, family, temperature, batch):
    load = replace(EXAMPLES[name], engine=engine, engine_version=None, temperature=temperature, batch=batch)
    found = recommend(load, measured(*point, family=family))
    given = found.choice
    if given is None:
        assert found.refused
        return
    assert not found.refused and given.speedup > 1 and given.expected > given.even_tau
    assert found.option.at_hand and found.option.in_engine
    values = record(found)
    assert values["recommendation"]["speedup_low"] <= given.speedup <= values["recommendation"]["speedup_high"]


def keys(value):
    if isinstance(value, dict):
        return {name: keys(inner) for name, inner in value.items()}
    return None


@FEW
@given(st.sampled_from(sorted(EXPECTED)), engines, alphas)
def test_json_is_complete_and_strict(name, engine, point):
    values = answer(name, measured(*point), engine=engine, engine_version=None)
    text = json.dumps(values, allow_nan=False)
    assert json.loads(text) == values
    assert list(values) == list(answer("chat_8b_h100"))
    assert (values["recommendation"] is None) == values["refused"] == bool(values["refusals"])
    assert {one["origin"] for one in values["numbers"]} <= {"measured", "published", "assumption"}
    assert all(one["source"] for one in values["numbers"]) and len(values["families"]) == len(FAMILIES)
    given = values["recommendation"]
    assert given is None or keys(given) == keys(answer("chat_8b_h100")["recommendation"])


@pytest.mark.parametrize("name", EXPECTED)
def test_one_page(name):
    values = answer(name)
    text = page(values)
    first, lines = text.splitlines()[0], text.splitlines()
    assert first.startswith("# REFUSED (") == values["refused"]
    assert len(lines) <= 75 and len(text) <= 6000
    assert all(f"| {one['origin']} |" in text for one in values["numbers"])
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert min(tables) >= 3
    if not values["refused"]:
        assert f"{values['recommendation']['speedup']:.2f}x" in text and values["recommendation"]["flags"] in text


def test_the_work_is_shown_and_right():
    values = answer("chat_8b_h100", evidence=measured(0.73, 0.7137, 0.68138, 0.6))
    assert [one["depth"] for one in values["n"]["candidates"]] == [2, 3, 4]
    for one in values["n"]["candidates"]:
        tokens, speed = one["work"].split("; S = ")
        left, right = tokens.removeprefix("E = ").rsplit(" = ", 1)
        assert math.isclose(eval(left.replace("^", "**")), float(right), abs_tol=2e-3)
        left, right = speed.rsplit(" = ", 1)
        assert math.isclose(eval(left.replace(" x ", "*")), float(right), abs_tol=5e-3)
        assert one["low"] < one["speedup"] < one["high"] and math.isclose(float(right), one["speedup"], abs_tol=6e-4)


def test_alarms_and_telemetry():
    values = answer("chat_8b_h100")
    plan = values["telemetry"]
    chosen = next(one for one in values["n"]["candidates"] if one["depth"] == 6)
    assert plan["alarms"][0]["when"] == f"tau < {chosen['even_tau']:.2f}"
    assert chosen["expected"] / chosen["even_tau"] == pytest.approx(chosen["speedup"])
    assert "vllm:spec_decode_num_accepted_tokens_per_pos_total" in plan["metrics"] and "family=eagle3" in plan["again"]
    assert "--enable-metrics" in answer("code_completion_8b")["telemetry"]["enable"]


def test_the_temperature_gate_falls_with_acceptance():
    gates = [answer("chat_8b_h100", evidence=measured(*[a] * 4))["temperature"]["up_to"] for a in (0.41, 0.43, 0.9)]
    assert gates == sorted(gates) and gates[0] < gates[-1] == 1.0
    assert answer("creative_no_telemetry")["temperature"]["up_to"] is None  # nobody published T=1.1
    warm = answer("creative_no_telemetry", evidence=measured(0.7, 0.7, temperature=1.1))
    assert warm["temperature"]["up_to"] == 1.1


def test_what_was_measured_stands_before_what_was_published():
    values = answer("chat_8b_h100", measured(0.5, 0.5, family="medusa"), heads=["eagle3", "medusa"])
    assert values["recommendation"]["family"] == "medusa"
    published = next(one for one in values["families"] if one["family"] == "eagle3")
    assert published["speedup"] > values["recommendation"]["speedup"] and published["origin"] == "published"
    head = measured(0.6, 0.6, 0.6, family="eagle1")  # SGLang grows EAGLE-2's tree with it
    values = answer("code_completion_8b", head, p99_ms=None)
    assert values["recommendation"]["family"] in ("eagle1", "eagle2")
    assert {one["origin"] for one in values["families"] if one["family"] in ("eagle1", "eagle2")} == {"measured"}


# --- mistakes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, hint",
    [
        (["engine=ollama"], "no engine 'ollama'; there are: vllm"),
        (["tasks={poetry:1}"], "no task 'poetry'"),
        (["tasks={chat:0}"], "found {'chat': 0}"),
        (["tasks={chat:-1,code:2}"], "above zero"),
        (["heads=[eagle4]"], "no head 'eagle4'"),
        (["batch=0"], "found 0, 0 and 0"),
        (["temperature=-1"], "found 4, -1 and 0"),
        (["memory=0"], "expected workload.memory above zero, found 0.0"),
        (["p99_ms=-3"], "workload.p99_ms"),
        (["parameters=null"], "give workload.parameters, or run=DIR"),
        (["bandwidth=null", "tflops=null"], "give workload.bandwidth, workload.tflops"),
    ],
)
def test_mistakes_are_one_line(words, hint, command):
    from eval.tuner.command import run

    code, _, err = command("tuner", run, "workload=chat_8b_h100", *(f"workload.{word}" for word in words))
    assert code == 2 and hint in err and len(err.splitlines()) == 1, err
