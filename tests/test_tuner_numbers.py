"""The tuner's arithmetic against published figures, and what it reads: runs, trees, and pages of counters."""

import json
from dataclasses import replace

import pytest
from counter_page import serving, vllm_page
from test_theory_page import TIMES, measured, rewritten  # noqa: F401 - a fixture

from conf.cli import load
from conf.errors import UserError
from eval.theory.command import run as theory
from eval.theory.model import Times, equal_alpha, expected_tokens
from eval.tuner.choices import around, best, chain, chains, trees
from eval.tuner.command import run
from eval.tuner.costs import READ, Costs, measured_costs, roofline
from eval.tuner.evidence import evidence_of
from eval.tuner.published import BATCHED, CHAINS, TRAINED, Profile, cooled, published, training_factor

EIGHT = load("tuner", ["workload=chat_8b_h100"]).workload  # Llama-3.1-8B on an H100
POSITIONS = (7300, 5210, 3550)  # of 10,000 calls: .730 .521 .355, an independent measurement of Llama-3.1-8B at K=3


# --- reckoned times -----------------------------------------------------------------------------------------------


def test_a_plain_step_is_the_published_one():
    one = roofline(replace(EIGHT, prompt_tokens=1, answer_tokens=1), "eagle3", 1)
    assert 1 / one.times.decode == pytest.approx(158.34, rel=0.01) and READ < 1  # tokens/s, SGLang's docs


@pytest.mark.parametrize("batch", BATCHED)
def test_a_chain_of_three_gains_what_was_published(batch):
    costs = roofline(EIGHT, "eagle3", batch)
    assert costs.speedup(2.79, 3, 4) == pytest.approx(BATCHED[batch], rel=0.13)  # tau 2.79 at K=3
    assert costs.round(3, 4, -1) < costs.round(3, 4) < costs.round(3, 4, 1)


def test_one_text_gains_what_sglang_says():
    values = chain(published("eagle3", {"chat": 1}), roofline(EIGHT, "eagle3", 1), 6)
    tree = best(trees(published("eagle3", {"chat": 1}), roofline(EIGHT, "eagle3", 1)))
    assert values.low < 373.25 / 158.34 < values.high and tree.speedup == pytest.approx(373.25 / 158.34, rel=0.1)


def test_measured_times_count_no_noise_as_gain():
    times = {"t_decode": 1.0, "t_verify": {"1": 1.1, "2": 0.7, "4": 1.3}, "t_draft_first": 0.1, "t_draft": 0.05,
             "t_other": 0.0}  # fmt: skip
    record = {"times": times, "batch": 1, "speedup": 1.2, "predicted_speedup": 1.5, "dtype": "float32", "threads": 1,
              "device": "cpu"}  # fmt: skip
    costs = measured_costs(record, 1)
    assert [costs.times.verify(rows) for rows in (1, 2, 4)] == [1.0, 1.0, 1.3]
    assert costs.error == pytest.approx(0.25) and costs.origin == "measured"
    assert measured_costs(record | {"speedup": None}, 1).error == 0.05
    whole = measured_costs(record | {"batch": 8}, 8)  # a run has a sequence's share
    assert whole.times.decode == 8.0 and whole.speedup(1.5, 2, 3) == pytest.approx(costs.speedup(1.5, 2, 3))


# --- published acceptance -----------------------------------------------------------------------------------------


def test_published_acceptance():
    assert expected_tokens([CHAINS["eagle3"][0]] * 5) == pytest.approx(3.32)
    for point, low, high, _ in CHAINS.values():
        assert low < point < high
    chat, code = (published("eagle3", {task: 1}).point[0] for task in ("chat", "code"))
    accepted = [expected_tokens([a] * 5) - 1 for a in (chat, code)]
    assert accepted[1] / accepted[0] == pytest.approx(5.74 / 5.13)  # tau 6.74 and 6.13
    assert (
        published("prompt_lookup", {"summary": 1}).point[0] > published("prompt_lookup", {"instructions": 1}).point[0]
    )
    assert len(published("medusa", {"chat": 1}).point) == 5  # heads
    assert published("eagle3", {"creative": 1}) == published("eagle3", {"chat": 1})


def test_less_data_is_less_acceptance():
    alphas = [
        published("eagle3", {"chat": 1}, amount).point[0] for amount in (100, 5_000, 20_000, 50_000, 530_000, 10**7)
    ]
    assert alphas == sorted(alphas) and alphas[0] == alphas[1] and alphas[-1] == alphas[-2] == CHAINS["eagle3"][0]
    assert alphas[3] == pytest.approx(TRAINED[50_000][0]) == pytest.approx(equal_alpha(1.94, 5))
    assert "50k" in training_factor(1)[1]


def test_temperature_only_ever_cools():
    warm = Profile("eagle3", (0.8,), (0.7,), (0.9,), "measured", "x", 0.5)
    assert cooled(warm, 0.2) is warm  # colder than measured: a lower bound
    hot = cooled(warm, 1.0)
    assert hot.point[0] == pytest.approx(0.8 * (1 - 0.105 / 2)) and hot.origin == "assumption"
    assert hot.low[0] / 0.7 < hot.point[0] / 0.8 < hot.high[0] / 0.9
    assert cooled(published("eagle1", {"chat": 1}), 1.0).origin == "published"


def test_a_tree_of_better_levels_is_never_below_its_chain():
    profile, costs = published("eagle3", {"chat": 1}), Costs(Times.simple(0.05), "assumption", "x")
    for one in trees(profile, costs):
        line = chain(profile, costs, one.depth)
        assert one.expected > line.expected and one.low == pytest.approx(line.low) and one.rows > line.rows
    assert around(chains(profile, costs), 1)[0].depth == 1 and around(chains(profile, costs), 10)[-1].depth == 10


# --- runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def head(measured, tmp_path):  # noqa: F811
    """A run with a good head, its head folder beside it."""
    intervals = json.loads((measured / "alpha.json").read_text())["intervals"]
    known = {"alpha_by_depth": [0.8, 0.7, None], "accepted_by_position": [0.8, 0.56, None], "times": TIMES,
             "cost_ratio": 0.09, "tested_by_depth": [10, 8, 0], "accepted_by_depth": [8, 5, 0], "speedup": 1.4,
             "predicted_speedup": 1.47, "prompt_lookup_tau": 1.1,
             "intervals": intervals | {"alpha_by_depth": [[0.7, 0.9], [0.6, 0.8], None]}}  # fmt: skip
    folder = rewritten(tmp_path / "run", measured, **known)
    (folder / "head").symlink_to(measured / "head")
    return folder


def values_of(command, *words):
    code, out, err = command("tuner", run, *words, "json=true")
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def test_a_run_gives_theorys_n_and_writes_beside_it(head, command):
    values = values_of(command, f"run={head}", "workload.engine=vllm")
    given = values["recommendation"]
    code, out, _ = command("theory", theory, f"run={head}", "json=true")
    expected = json.loads(out.splitlines()[-1])
    assert code == 0 and values["n"]["n_star"] == given["n"] == expected["n_star"] == 2
    assert given["speedup"] == pytest.approx(expected["speedup"]) and given["family"] == "eagle3"
    assert given["speedup_low"] == pytest.approx((1 + 0.7 + 0.42) / 1.55 / 1.05)  # of n-alpha, and 5 % of the times
    assert given["speedup_high"] == pytest.approx((1 + 0.9 + 0.72) / 1.55 * 1.05)
    assert {one["origin"] for one in values["numbers"]} == {"measured", "published"}  # the engine's facts
    assert (head / "tuner.md").read_text().startswith("# EAGLE-3, N = 2") and values["path"] == str(head / "tuner.md")
    written = json.loads((head / "tuner.json").read_text())
    assert written == {name: value for name, value in values.items() if name != "path"}
    assert values["memory"] is None and any(
        one["family"] == "medusa" and one["n"] is None for one in values["families"]
    )


def test_a_run_of_another_machine_lends_its_acceptance_alone(head, command):
    values = values_of(command, f"run={head}", "workload=chat_8b_h100")
    sources = {one["name"].split(",")[0]: one["origin"] for one in values["numbers"]}
    assert sources["n-alpha"] == "measured" and sources["t_decode"] == "assumption"
    assert any("times are of cpu" in note for note in values["notes"])


def test_a_run_below_break_even_is_refused_by_its_own_numbers(head, command):
    slow = rewritten(head.parent / "slow", head, times=TIMES | {"t_draft_first": 5.0}, prompt_lookup_tau=1.0)
    values = values_of(command, f"run={slow}", "family=eagle3", "workload.engine=eyrie")
    [refusal] = values["refusals"]
    assert refusal["rule"] == "break_even" and refusal["reason"].startswith("measured: ") and "plain" in refusal["do"]
    assert (slow / "tuner.md").read_text().startswith("# REFUSED (break_even)")
    lookup = rewritten(head.parent / "lookup", slow, prompt_lookup_tau=1.9)  # measured on the same texts
    values = values_of(command, f"run={lookup}", "family=eagle3", "workload.engine=eyrie")
    assert values["recommendation"]["family"] == "prompt_lookup"


def test_a_measured_tree_stands_beside_the_run(head, command):
    tree = rewritten(head.parent / "tree", head, decode="tree", nodes=9, alpha_by_depth=[0.95, 0.9, None])
    values = values_of(command, f"run={head}", f"tree={tree}", "workload.engine=eyrie")
    assert (values["tree"]["origin"], values["tree"]["nodes"], values["tree"]["depth"]) == ("measured", 9, 2)
    assert values["tree"]["expected"] == pytest.approx(1 + 0.95 + 0.95 * 0.9)


def test_a_head_of_other_weights_is_refused(head, command):
    served = json.loads((head / "alpha.json").read_text())["verifier_hash"]
    words = [f"run={head}", "workload.engine=eyrie"]
    assert not values_of(command, *words, f"workload.verifier_revision={served[:12]}")["refused"]
    for setting in ("verifier_revision", "tokenizer"):
        values = values_of(command, *words, f"workload.{setting}=ffffffffffff")
        assert [one["rule"] for one in values["refusals"]] == ["head"]


# --- pages of counters --------------------------------------------------------------------------------------------


def evidence(*words):
    return evidence_of(load("tuner", list(words)))


def test_counters_of_vllm(tmp_path, command):
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(vllm_page(1000, (100, 50, 20)))
    after.write_text(vllm_page(11_000, [n + m for n, m in zip((100, 50, 20), POSITIONS, strict=True)]))
    values = values_of(command, f"metrics=[{before},{after}]", "workload=chat_8b_h100", f"out={tmp_path}")
    alpha = values["numbers"][0]
    assert alpha["value"] == pytest.approx([0.73, 5210 / 7300, 3550 / 5210]) and alpha["origin"] == "measured"
    assert all(
        low < a < high for low, a, high in zip(alpha["interval"][0], alpha["value"], alpha["interval"][1], strict=True)
    )
    assert values["recommendation"]["n"] == 3 and any("measure deeper" in note for note in values["notes"])
    whole = evidence(f"metrics={after}", "family=eagle1").profile
    assert whole.family == "eagle1" and whole.point[0] == pytest.approx(7400 / 11_000)


def test_counters_of_sglang_have_tau_alone(tmp_path):
    page = tmp_path / "sglang.txt"
    page.write_text("sglang:spec_accept_length 2.5\nsglang:spec_num_steps 3\nsglang:spec_num_draft_tokens 4\n")
    profile = evidence(f"metrics={page}", "family=eagle3").profile
    assert profile.point == (pytest.approx(equal_alpha(2.5, 3)),) * 3 and profile.low < profile.point < profile.high
    page.write_text("sglang:spec_accept_length 2.5\nsglang:spec_num_steps 3\nsglang:spec_num_draft_tokens 16\n")
    with pytest.raises(UserError, match="found trees of 16 rows and 3 levels"):
        evidence(f"metrics={page}", "family=eagle3")


def test_a_running_servers_counters():
    with serving(vllm_page(10_000, POSITIONS)) as address:
        for end in ("", "/metrics"):
            found = evidence(f"metrics={address}{end}", "family=eagle3")
            assert found.profile.point[0] == 0.73 and found.metrics_of == "vLLM"


def test_mistakes_are_one_line(head, tmp_path, command):
    page, other, none = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "none.txt"
    page.write_text(vllm_page(1000, (700, 500, 300)))
    other.write_text("sglang:spec_accept_length 2.5\nsglang:spec_num_steps 3\n")
    none.write_text(vllm_page(0, (0, 0, 0)))
    tree = rewritten(tmp_path / "tree", head, decode="tree", nodes=9)
    stranger = rewritten(tmp_path / "stranger", head, nodes=9, head_hash="f" * 64)
    (tmp_path / "far").mkdir()
    bare = rewritten(tmp_path / "far" / "bare", head)
    cases = [
        (["run=a", "metrics=b"], "found both"),
        (["run=/absent"], "/absent"),
        ([f"run={head}", "family=eagle4"], "no family 'eagle4'"),
        ([f"run={bare}"], "give family="),
        ([f"run={tree}"], "as tree=DIR"),
        ([f"run={head}", f"tree={head}"], "found a chain"),
        ([f"run={head}", f"tree={stranger}"], "found others"),
        (["tree=x"], "give run=DIR too"),
        ([f"metrics={page}"], "give family="),
        (["metrics=/absent.txt", "family=eagle3"], "no such file"),
        ([f"metrics=[{page},{page},{page}]", "family=eagle3"], "metrics=[before,after]"),
        ([f"metrics=[{other},{page}]", "family=eagle3"], "two pages of one engine"),
        ([f"metrics=[{page},{none}]", "family=eagle3"], "counters fell"),
        ([f"metrics={none}", "family=eagle3"], "is speculation on"),
        ([], "give workload.parameters"),
    ]
    for words, hint in cases:
        code, _, err = command("tuner", run, *words, f"out={tmp_path}/out")
        assert code == 2 and hint in err and len(err.splitlines()) == 1, (words, err)
