"""The schedule is a pure function of steps and seconds, and reaches its ends where it should."""

import pytest

from train.schedule import Limits, lr_scale, training_minutes


def test_progress_is_the_larger_share():
    both = Limits(steps=100, seconds=60.0)
    assert both.progress(0, 0.0) == 0.0
    assert both.progress(50, 6.0) == 0.5
    assert both.progress(50, 45.0) == 0.75
    assert both.progress(300, 1.0) == 1.0
    assert Limits(seconds=10.0).progress(1_000_000, 5.0) == 0.5
    assert not both.reached(99, 59.0) and both.reached(100, 0.0) and both.reached(0, 60.0)
    with pytest.raises(AssertionError):
        Limits()


def test_training_takes_what_the_job_leaves():
    assert training_minutes(6, 11, 5.0, 2) == pytest.approx(4)
    assert training_minutes(6, 11, 1.0, 2) == 6  # the data was there already
    assert training_minutes(None, 11, 1.0, 2) == pytest.approx(8)
    assert training_minutes(6, 11, 20.0, 2) == pytest.approx(1.1)  # late, yet something is learnt
    assert training_minutes(0.5, 11, 20.0, 2) == 0.5
    assert training_minutes(6, None, 20.0, 2) == 6
    assert training_minutes(None, None, 20.0, 2) is None


def test_warm_up_then_cosine():
    assert lr_scale(0.0, 0.1, 0.0) == 0.0
    assert lr_scale(0.05, 0.1, 0.0) == pytest.approx(0.5)
    assert lr_scale(0.1, 0.1, 0.0) == pytest.approx(1.0)
    assert lr_scale(0.55, 0.1, 0.0) == pytest.approx(0.5)
    assert lr_scale(0.55, 0.1, 0.2) == pytest.approx(0.6)
    assert lr_scale(1.0, 0.1, 0.2) == pytest.approx(0.2)
    assert lr_scale(0.0, 0.0, 0.0) == 1.0
    assert lr_scale(1.0, 1.0, 0.0) == 0.0
