"""The right values of the speed model; several figures in popular lessons are wrong."""

import json

import pytest
from scipy.stats import chi2

from conf.errors import UserError
from eval.theory.command import run
from eval.theory.model import (
    Times,
    batch_times,
    break_even,
    conditional,
    equal_alpha,
    expected_tokens,
    measured_outlook,
    outlook,
    tree_outlook,
)


def answer(alpha, c, depth=64):
    return outlook([alpha] * depth, c)


@pytest.mark.parametrize(
    "alpha, c, n_star, speedup, digits",
    [(0.8, 0.05, 8, 3.0921, 4), (0.95, 0.02, 31, 9.954, 3), (0.9, 0.04, 15, 5.092, 3), (0.6, 0.05, 4, 1.9213, 4),
     (0.5, 0.3, 1, 1.1538, 4)],
)  # fmt: skip
def test_best_depth_and_its_speedup(alpha, c, n_star, speedup, digits):
    result = answer(alpha, c)
    assert result.n_star == n_star
    assert round(result.speedup, digits) == speedup


@pytest.mark.parametrize(
    "alpha, c, n, speedup",
    [(0.8, 0.05, 5, 2.951), (0.8, 0.05, 6, 3.040), (0.8, 0.05, 7, 3.082), (0.8, 0.05, 9, 3.078),
     (0.95, 0.02, 10, 7.187), (0.9, 0.04, 10, 4.901)],
)  # fmt: skip
def test_speedup_at_other_depths(alpha, c, n, speedup):
    assert round(answer(alpha, c).speedup_by_n[n - 1], 3) == speedup


def test_no_interior_minimum_of_cost_in_the_first_ten_depths():
    speedups = answer(0.9, 0.04).speedup_by_n[:10]
    assert speedups == sorted(speedups)


@pytest.mark.parametrize("alpha, n, expected", [(0.6, 5, 2.3834), (0.9, 5, 4.6856)])
def test_expected_tokens_count_the_verifiers_own(alpha, n, expected):
    assert round(expected_tokens([alpha] * n), 4) == expected
    assert expected_tokens([alpha] * n) == pytest.approx((1 - alpha ** (n + 1)) / (1 - alpha))


def test_cumulative_is_another_number_than_conditional():
    cumulative = [0.701, 0.370, 0.206, 0.125, 0.081]
    assert [round(a, 2) for a in conditional(cumulative)] == [0.70, 0.53, 0.56, 0.61, 0.65]
    assert expected_tokens(conditional(cumulative)) == pytest.approx(1 + sum(cumulative))
    assert round(expected_tokens(conditional([0.730, 0.521, 0.355])), 2) == 2.61  # vLLM logs it as 2.60
    assert conditional([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]


def test_a_sample_taken_for_the_law_alarms_43_times_of_100():
    assert round(float(chi2.sf(chi2.ppf(0.95, 7) / 2, 7)), 2) == 0.43


def test_profile_is_conditional_and_not_identically_distributed():
    assert expected_tokens([0.7, 0.5, 0.5]) == pytest.approx(1 + 0.7 + 0.35 + 0.175)
    assert expected_tokens([1.0, 0.0, 1.0]) == 2.0


def test_measured_form_equals_the_simple_one_under_its_assumptions():
    profile = [0.8] * 10
    flat = Times(decode=2.0, verify_by_width={1: 2.0, 16: 2.0}, draft_first=0.1, draft=0.1, other=0.0)
    assert measured_outlook(profile, flat).speedup_by_n == pytest.approx(outlook(profile, 0.05).speedup_by_n)


def test_measured_form_charges_width_and_first_pass():
    times = Times(decode=1.0, verify_by_width={1: 1.0, 3: 1.2}, draft_first=0.3, draft=0.1, other=0.05)
    result = measured_outlook([0.5, 0.5], times)
    assert result.speedup_by_n == pytest.approx([1.5 / (1.1 + 0.3 + 0.05), 1.75 / (1.2 + 0.3 + 0.1 + 0.05)])


def test_drafting_that_never_pays_recommends_depth_zero():
    result = answer(0.1, 0.5)
    assert (result.n_star, result.speedup) == (0, 1.0)


@pytest.mark.parametrize("c, depth", [(0.05, 1), (0.3, 1), (0.05, 5), (0.2, 4)])
def test_from_break_even_on_a_depth_pays(c, depth):
    alpha = break_even(depth, Times.simple(c))
    assert alpha == pytest.approx(c) if depth == 1 else alpha > c
    assert expected_tokens([alpha] * depth) == pytest.approx(1 + depth * c)
    below, above = (outlook([alpha + step] * depth, c).speedup_by_n[-1] for step in (-1e-3, 1e-3))
    assert below < 1 < above


def test_a_draft_as_dear_as_a_verify_never_pays():
    assert break_even(1, Times.simple(1.2)) is None and break_even(3, Times.simple(1.2)) is None
    assert break_even(2, Times.simple(1.0)) == 1.0 and break_even(2, Times.simple(0.0)) == 0.0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.95, 1.0])
def test_equal_alpha_is_the_inverse_of_expected_tokens(alpha):
    assert equal_alpha(expected_tokens([alpha] * 5), 5) == pytest.approx(alpha)


def test_verify_cost_between_and_past_the_measured_widths():
    times = Times.simple(0.05, {1: 2.0, 5: 3.0, 9: 4.0})
    assert [times.verify(rows) for rows in (1, 3, 9, 13)] == pytest.approx([1.0, 1.25, 2.0, 2.5])
    assert Times.simple(0.05, {1: 1.0, 4: 0.9}).verify(400) == 0.9  # never downwards


def test_tree_by_hit_rates_of_its_levels():
    tree = tree_outlook([2, 2, 2], [0.8] * 3, Times.simple(0.05))
    assert (tree.nodes, tree.levels) == (14, 3)
    assert tree.expected == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)
    assert tree.speedup == pytest.approx(tree.expected / 1.15)
    wide = tree_outlook([2, 2, 2], [0.8] * 3, Times.simple(0.05, {1: 1.0, 15: 1.3}))
    assert wide.speedup == pytest.approx(tree.expected / (1.3 + 0.15)) and wide.break_even > tree.break_even


def test_a_batch_pays_for_its_rows():
    times = Times.simple(0.1, {1: 1.0, 5: 1.4, 21: 3.0})
    four = batch_times(times, 4, 4)
    assert four.decode == pytest.approx(1.3) and four.draft == pytest.approx(0.13)
    assert four.verify(5) == pytest.approx(times.verify(20))
    assert batch_times(times, 1, 4) is times
    profile = [0.8] * 4
    by_batch = [measured_outlook(profile, batch_times(times, size, 4)).n_star for size in (1, 4, 16)]
    assert by_batch == sorted(by_batch, reverse=True) and by_batch[0] > by_batch[-1]
    flat = measured_outlook(profile, batch_times(Times.simple(0.1), 8, 4))
    assert flat.speedup_by_n == pytest.approx(outlook(profile, 0.1).speedup_by_n)


def test_of_a_batch_no_wider_call_is_taken_to_be_cheaper():
    noisy = Times.simple(0.1, {1: 1.0, 2: 1.6, 4: 1.2, 8: 1.5})
    assert batch_times(noisy, 2, 3).verify(1) == batch_times(noisy, 2, 3).verify(2) == pytest.approx(1.4)


# --- the command ----------------------------------------------------------------------------------------------


def values_of(command, *words):
    code, out, err = command("theory", run, *words, "json=true")
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def test_every_way_to_say_what_is_accepted(command):
    alpha = values_of(command, "alpha=0.8", "max_n=3")
    assert values_of(command, "profile=[0.8,0.8,0.8]") == alpha
    assert values_of(command, "by_position=[0.8,0.64,0.512]")["n_star"] == alpha["n_star"] == 3
    assert (alpha["c"], alpha["break_even"], len(alpha["break_even_by_n"])) == (0.05, pytest.approx(0.05), 3)


def test_wide_calls_batches_and_a_tree(command, tmp_path):
    words = ["alpha=0.8", "widths={1:1,16:1.3,64:3.2}", "shape=[2,2,2]", "hits=[.9,.85,.8]", f"out={tmp_path}"]
    values = values_of(command, *words)
    assert [one["batch"] for one in values["batches"]] == [1, 2, 4, 8, 16, 32, 64]
    assert values["batches"][0]["n_star"] == values["n_star"] and not values["batches"][-1]["known"]
    assert values["tree"]["expected"] == pytest.approx(1 + 0.9 + 0.765 + 0.612)
    assert values["path"] == str(tmp_path / "theory.png") and (tmp_path / "theory.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "theory.json").read_text())["n_star"] == values["n_star"]
    code, out, _ = command("theory", run, *words)
    assert code == 0 and all(part in out for part in ("tree of 14", "chain of 14", "128 ?", "N*"))


@pytest.mark.parametrize(
    "words, hint",
    [
        ([], "found none"),
        (["alpha=0.5", "profile=[0.5]"], "found alpha and profile"),
        (["alpha=1.2"], "found [1.2]"),
        (["profile=[]"], "at least one"),
        (["alpha=0.5", "c=-1"], "found -1.0"),
        (["alpha=0.5", "max_n=0"], "found 0"),
        (["by_position=[0.5,0.6]"], "never rises"),
        (["alpha=0.5", "widths={2:1}"], "found {2: 1}"),
        (["alpha=0.5", "batches=[4]"], "widths"),
        (["alpha=0.5", "widths={1:1,8:2}", "batches=[0]"], "found batches [0]"),
        (["alpha=0.5", "shape=[2,2]"], "hits"),
        (["alpha=0.5", "shape=[2,2]", "hits=[0.5]"], "each of 2 levels, found 1"),
        (["alpha=0.5", "shape=[0]", "hits=[0.5]"], "found [0]"),
        (["run=/absent"], "/absent"),
    ],
)
def test_mistakes_are_one_line(words, hint, command):
    code, _, err = command("theory", run, *words)
    assert code == 2 and hint in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("profile", [[], [0.5, 1.5]])
def test_a_profile_is_of_probabilities(profile):
    with pytest.raises(UserError):
        outlook(profile, 0.1)
