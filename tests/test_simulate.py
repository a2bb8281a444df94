"""The five simulations: exact values, agreement, and that each can disagree."""

import json

import numpy as np
import pytest

from conf.cli import load
from eval.simulate import chi_square, draft_quality, n_sweep, rollback, rules, tree
from eval.simulate.command import run
from eval.simulate.finding import Check
from models.cache import KVCache


def settings(*words):
    return load("simulate", list(words))


def found(simulate, *words):
    return simulate(settings(*words)).to_dict()


def test_chi_square_passes_for_the_rule_and_for_nothing_else():
    values = found(chi_square.simulate, "seeds=25", "rounds=4000")
    assert values["agrees"] and values["degrees"]["first token"] == 7
    by_scheme = {(row["scheme"], row["law"]): row for row in values["tests"]}
    for law in ("first token", "three tokens"):
        assert by_scheme["the rule", law]["passed"] >= 20  # 25 coins of 95 %: fewer has probability 2e-4
        for wrong in ("correction from p", "all accepted"):
            assert by_scheme[wrong, law]["passed"] == 0 and by_scheme[wrong, law]["seeds"] == 10
    assert round(values["false_alarms"], 2) == 0.43  # a sample taken for the law, at a nominal 5 %
    assert values["checks"][-1]["simulated"] == 1000  # decided alike by eval/speculative/acceptance.py


def test_texts_of_a_fixed_length_take_as_many_rounds_as_they_take():
    laws = chi_square.toy_laws(np.random.default_rng(0))
    text_RT = rules.texts(laws, 0, 2, 3, 500, np.random.default_rng(1))
    assert text_RT.shape == (500, 3) and text_RT.min() >= 0 and text_RT.max() < 8
    assert chi_square.joint_law(laws).sum() == pytest.approx(1)
    code = text_RT @ [64, 8, 1]
    assert chi_square.joint_law(laws)[code[0]] == pytest.approx(
        laws.p_VV[0, text_RT[0, 0]] * laws.p_VV[text_RT[0, 0], text_RT[0, 1]] * laws.p_VV[text_RT[0, 1], text_RT[0, 2]]
    )


def test_sweep_has_its_minimum_at_15_and_none_within_the_first_ten():
    values = found(n_sweep.simulate)
    assert values["agrees"] and (values["n_star"], values["n_star_simulated"]) == (15, 15)
    cost = [values["cost_by_n"][n]["simulated"] for n in range(1, 41)]
    assert all(later < earlier for earlier, later in zip(cost[:9], cost[1:10], strict=True))
    assert 1 / values["cost_by_n"][15]["exact"] == pytest.approx(5.092, abs=5e-4)
    assert 1 / values["cost_by_n"][10]["exact"] == pytest.approx(4.901, abs=5e-4)


def test_sweep_with_few_rounds_says_what_noise_can_say():
    """A neighbour of N* may come out cheapest; that is no contradiction, another alpha is."""
    assert all(found(n_sweep.simulate, "rounds=2000", f"seed={seed}")["agrees"] for seed in range(5))
    run_R = n_sweep.runs_of_accepts(0.8, 200_000, np.random.default_rng(0))
    assert (run_R >= 3).mean() == pytest.approx(0.512, abs=5e-3)


def test_tree_levels_leaves_and_chains():
    values = found(tree.simulate)
    assert values["agrees"] and (values["nodes"], values["rows"]) == (14, 15)
    assert len(values["leaves"]) == 8
    for row in values["by_draft"]:
        beta, alpha = row["hit"], row["alpha"]
        assert row["tree"] == pytest.approx(1 + beta + beta**2 + beta**3)
        assert row["chain_same_steps"] == pytest.approx((1 - alpha**4) / (1 - alpha))
        assert row["chain_same_rows"] == pytest.approx((1 - alpha**15) / (1 - alpha))
        assert beta > alpha
    middle = next(row for row in values["by_draft"] if row["noise"] == tree.SHOWN_MIX)
    assert sum(leaf["exact"] for leaf in values["leaves"]) == pytest.approx(middle["hit"] ** 3)
    # Of equal rows the chain emits more where drafts are good, the tree where they are poor.
    best, worst = values["by_draft"][0], values["by_draft"][-1]
    assert best["chain_same_rows"] > best["tree"] and worst["chain_same_rows"] < worst["tree"]


def test_rank_acceptance_by_hand():
    """q draws 0 with .75: it passes with 2/3; if not, what is left of p and of q is token 1 alone."""
    assert tree.rank_acceptance(np.array([0.5, 0.5]), np.array([0.75, 0.25]), 2) == pytest.approx([0.75, 0.25])
    assert tree.rank_acceptance(np.array([1.0, 0.0, 0.0]), np.array([0.2, 0.4, 0.4]), 3) == pytest.approx(
        [0.2, 0.8 * 1 / 3, 0.8 * 2 / 3]
    )


@pytest.mark.parametrize("shape", ["[3,1]", "[1,1,1]", "[2]"])
def test_other_shapes(shape):
    assert found(tree.simulate, f"shape={shape}", "rounds=5000")["agrees"]


def test_rollback_lengths():
    values = found(rollback.simulate)
    lengths = {name: [step["after"] for step in values["rounds"] if step["sequence"] == name] for name in "AB"}
    assert values["agrees"] and lengths == {"A": [8, 13, 18, 23], "B": [7, 9, 11, 13]}
    assert [scheme["rows_again"] for scheme in values["schemes"].values()] == [0, 0, 12]
    assert values["schemes"]["scratch and commit"]["rows_copied"] == 4 * 5 + 4 * 2
    lines = [line.plain for line in rollback.drawing(rollback.play(4, 0)[0])]
    assert lines[1:3] == ["round 1  A  ===xdddd                 3 + 1 + 4 = 8",
                          "round 1  B  =====xd---               5 + 1 + 1 = 7"]  # fmt: skip


def test_a_rollback_that_keeps_a_row_too_many_is_seen(monkeypatch):
    right = KVCache.accept_paths

    def wrong(self, nodes_B):
        right(self, [[*nodes, nodes[-1] + 1] if len(nodes) < 3 else nodes for nodes in nodes_B])

    monkeypatch.setattr(KVCache, "accept_paths", wrong)
    assert not found(rollback.simulate)["agrees"]


def test_measured_alpha_is_the_overlap():
    values = found(draft_quality.simulate)
    assert values["agrees"] and values["by_noise"][0]["measured_alpha"] == 1
    alphas = [row["alpha"] for row in values["by_noise"]]
    assert alphas == sorted(alphas, reverse=True) and alphas[-1] < 0.5
    row = values["by_noise"][3]
    assert row["tokens_by_n"][5]["exact"] == pytest.approx((1 - row["alpha"] ** 6) / (1 - row["alpha"]))


def test_a_rule_that_is_not_ours_is_seen():
    laws = chi_square.toy_laws(np.random.default_rng(0))
    rng = np.random.default_rng(1)
    last_R, uniform_RU = np.zeros(200, int), rng.random((200, 5))
    assert rules.hold_chains(laws, last_R, uniform_RU, rules.chain_rounds(laws, last_R, uniform_RU)) == 200
    wrong = rules.chain_rounds(laws, last_R, uniform_RU, from_p=True)
    assert rules.hold_chains(laws, last_R, uniform_RU, wrong) < 200
    p_V, q_V = laws.p_VV[0], laws.q_VV[0]
    uniform_RU = rng.random((100, 13))
    trees = rules.tree_rounds(p_V, q_V, [2, 2], uniform_RU)
    assert rules.hold_trees(p_V, q_V, [2, 2], uniform_RU, trees) == 100
    assert rules.hold_trees(p_V, p_V, [2, 2], uniform_RU, trees) < 100


def test_a_check_disagrees_past_four_standard_errors():
    assert Check("", 1.039, 1.0, 0.01).agrees and not Check("", 1.041, 1.0, 0.01).agrees
    assert Check("", 3, 3).agrees and not Check("", 3, 4).agrees


def test_the_seed_decides():
    words = ("seeds=2", "rounds=2000")
    first, again, other = (found(chi_square.simulate, *words, f"seed={seed}") for seed in (3, 3, 4))
    assert first == again != other


def test_all_of_them_write_json_and_plots(tmp_path, command):
    words = ["name=all", "seeds=3", "rounds=2000", f"out={tmp_path}"]
    code, out, err = command("simulate", run, *words, "json=true")
    assert code == 0, err
    values = json.loads(out.splitlines()[-1])
    assert values["agrees"] and values["path"] == str(tmp_path / "simulate.json")
    names = {"chi_square", "n_sweep", "tree", "rollback", "draft_quality"}
    assert {path.stem for path in tmp_path.glob("*.png")} == names and names <= set(values)
    assert json.loads((tmp_path / "simulate.json").read_text())["tree"] == values["tree"]
    assert "round 1  A" in err


@pytest.mark.parametrize(
    "words, hint",
    [
        ([], "expected name to be one of chi_square"),
        (["name=chi"], "found chi"),
        (["name=chi_square", "seeds=0"], "found 0"),
        (["name=tree", "rounds=0"], "rounds"),
        (["name=tree", "shape=[9,9]"], "found [9, 9]"),
        (["name=rollback", "depth=1"], "found 1"),
        (["name=n_sweep", "alpha=1"], "found 1.0"),
        (["name=n_sweep", "max_n=100000000"], "max_n from 2 to 1000"),
    ],
)
def test_mistakes_are_one_line(words, hint, command):
    code, _, err = command("simulate", run, *words)
    assert code == 2 and hint in err and len(err.splitlines()) == 1
