"""Temperature, top-k and top-p: the law that is sampled."""

import pytest
import torch

from conf.errors import UserError
from eval.speculative.processors import Sampling, to_law

LOGITS = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 0.0]])


def test_temperature_zero_is_a_point_mass_on_the_argmax():
    assert to_law(LOGITS, Sampling()).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]


def test_temperature_divides_the_logits():
    assert torch.allclose(to_law(LOGITS, Sampling(2.0)), torch.softmax(LOGITS / 2, -1))


def test_top_k_keeps_exactly_k_ties_by_id():
    law = to_law(torch.zeros(1, 5), Sampling(1.0, top_k=2))
    assert law.tolist() == [[0.5, 0.5, 0, 0, 0]]
    assert (to_law(LOGITS, Sampling(1.0, top_k=3)) > 0).sum(-1).tolist() == [3, 3]
    assert torch.allclose(to_law(LOGITS, Sampling(1.0, top_k=9)), torch.softmax(LOGITS, -1))


@pytest.mark.parametrize(
    "top_p, kept", [(0.05, [0, 1, 0, 0]), (0.5, [0, 1, 0, 0]), (0.51, [0, 1, 1, 0]), (0.8, [1, 1, 1, 0])]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    p = torch.tensor([[0.15, 0.5, 0.25, 0.1]])
    law = to_law(p.log(), Sampling(1.0, top_p=top_p))
    kept = torch.tensor([kept], dtype=torch.bool)
    assert torch.allclose(law, p * kept / (p * kept).sum())


def test_top_p_sees_what_top_k_left_renormalised():
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert (to_law(p.log(), Sampling(1.0, top_k=2, top_p=0.56)) > 0).tolist() == [[True, False, False, False]]


def test_rows_sum_to_one_and_keep_their_order():
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    law = to_law(logits, Sampling(0.7, top_k=20, top_p=0.9))
    assert torch.allclose(law.sum(-1), torch.ones(50))
    assert torch.equal(law.argmax(-1), logits.argmax(-1))


def test_half_precision_logits_become_float32_laws():
    assert to_law(LOGITS.bfloat16(), Sampling(1.0)).dtype == torch.float32


@pytest.mark.parametrize(
    "values",
    [*({"temperature": t} for t in (-1.0, float("nan"), float("inf"))), {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}],
)
def test_senseless_settings_are_the_users_error(values):
    with pytest.raises(UserError):
        Sampling(**values)
