"""The acceptance rule on hand-made laws, and its edge rules."""

import pytest
import torch

from eval.speculative.acceptance import DraftLaw, accept_chain, accept_greedy, draw

V = 5


def laws(rows: int, seed: int) -> torch.Tensor:
    return torch.softmax(2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)), -1)


def uniforms(count: int, value: float = 0.5) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.float64)


def always(count: int) -> tuple[torch.Tensor, torch.Tensor, DraftLaw]:
    p = laws(count + 1, 0)
    return p, p[:-1].argmax(-1), DraftLaw(p[:-1])


def test_equal_laws_always_accept_and_the_bonus_follows_the_last_row():
    p, tokens, q = always(3)
    for u in (0.0, 0.3, 0.999999):
        verdict = accept_chain(p, tokens, q, torch.tensor([0.999999] * 3 + [u], dtype=torch.float64))
        assert verdict.count == 3
        assert verdict.token == int(draw(p[3], torch.tensor(u)))


def test_a_draft_of_no_target_mass_is_never_accepted():
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    q = DraftLaw(torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]]))
    for law in (q, None):
        verdict = accept_chain(p, torch.tensor([0]), law, uniforms(2, 0.0))
        assert (verdict.count, verdict.token) == (0, 1)


@pytest.mark.parametrize("coin, count", [(0.24, 1), (0.26, 0)])
def test_sometimes_accepts_at_p_over_q(coin, count):
    p = torch.tensor([[0.2, 0.8, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    q = DraftLaw(torch.tensor([[0.8, 0.2, 0.0, 0.0, 0.0]]))
    verdict = accept_chain(p, torch.tensor([0]), q, torch.tensor([coin, 0.0], dtype=torch.float64))
    assert (verdict.count, verdict.token) == (count, 4 if count else 1)


def test_the_first_rejection_ends_the_chain_even_if_later_drafts_would_pass():
    p = torch.zeros(4, V)
    p[:, 2] = 1
    verdict = accept_chain(p, torch.tensor([2, 0, 2]), None, uniforms(4))
    assert (verdict.count, verdict.token) == (1, 2)


def test_no_drafts_is_a_plain_step():
    p = laws(1, 3)
    verdict = accept_chain(p, torch.empty(0, dtype=torch.int64), None, uniforms(1, 0.7))
    assert (verdict.count, verdict.token) == (0, int(draw(p[0], torch.tensor(0.7))))


def test_mass_outside_the_draft_vocabulary_stays_in_the_residual():
    p = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.6]] * 2)
    q = DraftLaw(torch.tensor([[0.5, 0.5]]), ids_R=torch.tensor([1, 3]))
    tokens = {
        accept_chain(p, torch.tensor([3]), q, torch.tensor([0.9, u], dtype=torch.float64)).token
        for u in torch.linspace(0, 0.999, 50)
    }
    assert tokens == {0, 2, 4}


def test_point_mass_rejection_leaves_the_draft_out():
    p = torch.tensor([[0.4, 0.3, 0.3, 0.0, 0.0]] * 2)
    for u in torch.linspace(0, 0.999, 50):
        verdict = accept_chain(p, torch.tensor([0]), None, torch.tensor([0.41, u], dtype=torch.float64))
        assert verdict.count == 0 and verdict.token in (1, 2)


def test_a_draft_that_its_law_cannot_give_is_an_error():
    p = laws(2, 1)
    with pytest.raises(AssertionError, match=r"q\(d\) = 0"):
        accept_chain(p, torch.tensor([0]), DraftLaw(torch.tensor([[0.0, 1, 0, 0, 0]])), uniforms(2))
    for token in (0, 2, 4):
        with pytest.raises(AssertionError, match="outside the vocabulary"):
            accept_chain(p, torch.tensor([token]), DraftLaw(torch.ones(1, 2) / 2, torch.tensor([1, 3])), uniforms(2))


def test_residual_of_no_mass_falls_back_to_the_target():
    """Only rounding gets here: q exceeds p everywhere by a hair, and the coin lands in the hair."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]] * 2, dtype=torch.float64)
    q = DraftLaw(p[:1] * (1 + 1e-9))
    verdict = accept_chain(p, torch.tensor([0]), q, torch.tensor([1 - 1e-12, 0.75], dtype=torch.float64))
    assert (verdict.count, verdict.token) == (0, 1)


def test_half_precision_is_refused():
    with pytest.raises(AssertionError, match="bfloat16"):
        accept_chain(laws(2, 0).bfloat16(), torch.tensor([0]), None, uniforms(2))


@pytest.mark.parametrize("sampled", [False, True])
def test_greedy_is_the_same_rule_with_point_masses(sampled):
    generator = torch.Generator().manual_seed(5)
    for _ in range(300):
        count = int(torch.randint(0, 4, (), generator=generator))
        top = torch.randint(0, 3, (count + 1,), generator=generator)
        tokens = torch.randint(0, 3, (count,), generator=generator)
        p = torch.nn.functional.one_hot(top, V).float()
        q = DraftLaw(laws(count, int(top.sum()))) if sampled and count else None
        coins = torch.rand(count + 1, generator=generator, dtype=torch.float64)
        assert accept_chain(p, tokens, q, coins) == accept_greedy(top, tokens)


def test_draw_never_gives_a_token_of_no_weight():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    edges = torch.tensor([0.0, 0.25 - 1e-12, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert [int(draw(weights, u)) for u in edges] == [1, 1, 3, 3]
    assert draw(weights.expand(4, V), edges).tolist() == [1, 1, 3, 3]


def test_acceptance_rate_and_output_law_of_one_position():
    """A grid of coins integrates the rule: acceptance = sum of min(p, q), output law = p."""
    p, q = laws(2, 7), laws(1, 8)
    grid = (torch.arange(400, dtype=torch.float64) + 0.5) / 400
    out, accepted = torch.zeros(V, dtype=torch.float64), 0.0
    for token in range(V):
        verdicts = [
            accept_chain(p, torch.tensor([token]), DraftLaw(q), torch.stack([coin, grid[(i * 157) % 400]]))
            for i, coin in enumerate(grid)
        ]
        for verdict in verdicts:
            weight = float(q[0, token]) / 400
            accepted += weight * verdict.count
            out[token if verdict.count else verdict.token] += weight
    assert accepted == pytest.approx(float(torch.minimum(p[0], q[0]).sum()), abs=3e-3)
    assert torch.allclose(out, p[0].double(), atol=8e-3)
