"""The right values of the speed model; several figures in popular lessons are wrong."""

import pytest

from eval.theory.model import Times, expected_tokens, measured_outlook, outlook


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
