"""The acceptance rules on hand-made laws, and their edge rules."""

import itertools
import math

import pytest
import torch

from eval.speculative.acceptance import Accepted, DraftLaw, accept_points, accept_sampled, draw

V = 5


def laws(rows: int, seed: int) -> torch.Tensor:
    return torch.softmax(2 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)), -1)


def coins(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def chain_nodes(tokens):
    return [(n - 1, int(token)) for n, token in enumerate(tokens)]


def accept_chain(p_NV, tokens, q_NR, uniform_N, ids_R=None):
    """A chain through our rule for trees. p_NV: a row more than tokens."""
    law = DraftLaw(q_NR[None], range(len(tokens)), ids_R)
    verdict = accept_sampled(chain_nodes(tokens), law, 0, lambda n: p_NV[n + 1], uniform_N)
    assert verdict.nodes == tuple(range(len(verdict.nodes)))
    return len(verdict.nodes), verdict.token


def accept_point_chain(p_NV, tokens, uniform_N):
    """A chain of point masses; a coin a level."""
    [verdict] = accept_points([chain_nodes(tokens)], lambda at, level: [int(draw(p_NV[at[0] + 1], uniform_N[level]))])
    return len(verdict.nodes), verdict.token


def leviathan(p_NV, tokens, q_NV, uniform_N):
    """Leviathan's rule for a chain, all positions at once, over the whole vocabulary."""
    index = torch.arange(len(tokens))
    p_N, q_N = p_NV[index, tokens].double(), q_NV[index, tokens].double()
    count = int((uniform_N[:-1] * q_N < p_N).long().cumprod(0).sum())
    law_V = p_NV[count].double()
    if count < len(tokens):
        law_V = (law_V - q_NV[count].double()).clamp(min=0)
    return count, int(draw(law_V, uniform_N[-1]))


def test_a_chain_is_leviathans_rule():
    generator = torch.Generator().manual_seed(1)
    counts = set()
    for seed in range(300):
        n = seed % 4 + 1
        p, q = laws(n + 1, seed), laws(n, seed + 1000)
        tokens = draw(q, torch.rand(n, generator=generator))
        u = torch.rand(n + 1, generator=generator, dtype=torch.float64)
        ours = accept_chain(p, tokens, q, u)
        assert ours == leviathan(p, tokens, q, u)
        counts.add(ours[0])
    assert counts == {0, 1, 2, 3, 4}


def test_equal_laws_always_accept_and_the_bonus_follows_the_last_row():
    p = laws(4, 0)
    for u in (0.0, 0.3, 0.999999):
        count, token = accept_chain(p, p[:-1].argmax(-1), p[:-1], coins(0.999999, 0.999999, 0.999999, u))
        assert count == 3 and token == int(draw(p[3], torch.tensor(u)))


def test_a_draft_of_no_target_mass_is_never_accepted():
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    assert accept_chain(p, [0], torch.tensor([[1.0, 0, 0, 0, 0]]), coins(0, 0)) == (0, 1)
    assert accept_point_chain(p, [0], coins(0, 0)) == (0, 1)


@pytest.mark.parametrize("coin, count", [(0.24, 1), (0.26, 0)])
def test_sometimes_accepts_at_p_over_q(coin, count):
    p = torch.tensor([[0.2, 0.8, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]])
    q = torch.tensor([[0.8, 0.2, 0.0, 0.0, 0.0]])
    assert accept_chain(p, [0], q, coins(coin, 0)) == (count, 4 if count else 1)


def test_the_first_rejection_ends_the_chain_even_if_later_drafts_would_pass():
    p = torch.zeros(4, V)
    p[:, 2] = 1
    assert accept_point_chain(p, [2, 0, 2], coins(0.5, 0.5, 0.5, 0.5)) == (1, 2)
    q = torch.full((3, V), 1 / V)
    assert accept_chain(p, [2, 0, 2], q, coins(0.5, 0.5, 0.5, 0.5)) == (1, 2)


def test_no_drafts_is_a_plain_step():
    p = laws(1, 3)
    expected = int(draw(p[0], torch.tensor(0.7)))
    assert accept_point_chain(p, [], coins(0.7)) == (0, expected)
    assert accept_sampled([], DraftLaw(torch.ones(1, 1, V), ()), 0, lambda n: p[0], coins(0.7)) == Accepted(
        (), expected
    )


def test_mass_outside_the_draft_vocabulary_stays_in_the_residual():
    p = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.6]] * 2)
    q, ids_R = torch.tensor([[0.5, 0.5]]), torch.tensor([1, 3])
    tokens = {accept_chain(p, [3], q, coins(0.9, u), ids_R)[1] for u in torch.linspace(0, 0.999, 50)}
    assert tokens == {0, 2, 4}


def test_a_draft_that_its_law_cannot_give_is_an_error():
    p = laws(2, 1)
    with pytest.raises(AssertionError, match=r"q\(d\) = 0"):
        accept_chain(p, [0], torch.tensor([[0.0, 1, 0, 0, 0]]), coins(0.5, 0.5))
    for token in (0, 2, 4):
        with pytest.raises(AssertionError, match="outside the vocabulary"):
            accept_chain(p, [token], torch.ones(1, 2) / 2, coins(0.5, 0.5), torch.tensor([1, 3]))


def test_residual_of_no_mass_falls_back_to_the_target():
    """Only rounding gets here: p and q are equal but for a hair, and the coin lands in the hair."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]] * 2, dtype=torch.float64)
    assert accept_chain(p, [0], p[:1], coins(1.0, 0.75)) == (0, 1)


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
        weight = float(q[0, token]) / 400
        for i, coin in enumerate(grid):
            count, last = accept_chain(p, [token], q, torch.stack([coin, grid[(i * 157) % 400]]))
            accepted += weight * count
            out[token if count else last] += weight
    assert accepted == pytest.approx(float(torch.minimum(p[0], q[0]).sum()), abs=3e-3)
    assert torch.allclose(out, p[0].double(), atol=8e-3)


def test_point_mass_rejection_leaves_the_draft_out():
    p = torch.tensor([[0.4, 0.3, 0.3, 0.0, 0.0]] * 2)
    for u in torch.linspace(0.41, 0.999, 50):
        count, token = accept_point_chain(p, [0], coins(float(u), 0.0))
        assert count == 0 and token in (1, 2)


@pytest.mark.parametrize("sampled", [False, True])
def test_greedy_is_the_same_rule_with_point_masses(sampled):
    """p is a point mass: both rules follow it, whatever the draft's law and the coins."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(300):
        count = int(torch.randint(0, 4, (), generator=generator))
        top = torch.randint(0, 3, (count + 1,), generator=generator)
        tokens = torch.randint(0, 3, (count,), generator=generator)
        p = torch.nn.functional.one_hot(top, V).float()
        q = laws(count, int(top.sum())) if sampled else torch.nn.functional.one_hot(tokens, V).float()
        uniform = torch.rand(count + 1, generator=generator, dtype=torch.float64)
        [greedy] = accept_points([chain_nodes(tokens)], lambda at, level, top=top: [int(top[at[0] + 1])])
        assert accept_chain(p, tokens, q.view(count, V), uniform) == (len(greedy.nodes), greedy.token)
        assert accept_point_chain(p, tokens, uniform) == (len(greedy.nodes), greedy.token)


def test_half_precision_is_refused():
    with pytest.raises(AssertionError, match="bfloat16"):
        accept_chain(laws(2, 0).bfloat16(), [0], laws(1, 0), coins(0.5, 0.5))


# --- siblings -------------------------------------------------------------------------------------------------


def siblings(p, q, tokens, uniform):
    nodes = [(-1, token) for token in tokens]
    verdict = accept_sampled(nodes, DraftLaw(q[None, None], [0] * len(tokens)), 0, lambda n: p, uniform)
    return (tokens[verdict.nodes[0]] if verdict.nodes else None), verdict.token


def test_a_failed_sibling_leaves_q_and_reduces_p():
    """By hand: p = (.3 .5 .2), q = (.6 .3 .1); 0 fails at u >= .5. Then p = (0 .2 .1)/.3, q = (0 .75 .25): 1 passes up
    to (2/3) / (3/4) = 8/9, and after that all of p is on 2.
    """
    p, q = torch.tensor([0.3, 0.5, 0.2, 0, 0]), torch.tensor([0.6, 0.3, 0.1, 0, 0])
    assert siblings(p, q, [0, 1], coins(0.49, 0.0, 0.0))[0] == 0
    assert siblings(p, q, [0, 1], coins(0.51, 0.88, 0.0))[0] == 1
    assert siblings(p, q, [0, 1], coins(0.51, 0.89, 0.5)) == (None, 2)


def share_accepted(p, q, children):
    """By hand, over all draws and coins: some child of `children` drawn without replacement passes."""
    total = 0.0
    for x in range(V if children else 0):
        passes = min(1.0, float(p[x] / q[x]))
        rest, left = (p - q).clamp(min=0), q.index_fill(0, torch.tensor(x), 0.0)
        later = share_accepted(rest / rest.sum(), left / left.sum(), children - 1) if passes < 1 else 0.0
        total += float(q[x]) * (passes + (1 - passes) * later) if q[x] > 0 else 0.0
    return total


def test_acceptance_and_output_law_of_siblings_without_replacement():
    """All draws weighed by their probability, and coins integrated: the output law is p; more children pass more."""
    p, q = laws(2, 7)[0].double(), laws(1, 8)[0].double()
    grid, failing, shares = ((torch.arange(100) + 0.5) / 100).tolist(), 1 - 1e-12, []
    for children in (1, 2, 3):
        out, accepted = torch.zeros(V, dtype=torch.float64), 0.0
        for tokens in map(list, itertools.permutations(range(V), children)):
            reached = math.prod(float(q[x] / (1 - q[tokens[:i]].sum())) for i, x in enumerate(tokens))
            for i, token in enumerate(tokens):  # those before it have failed
                low, high = 0.0, 1.0  # it passes with coins below some number
                for _ in range(12):
                    uniform = [failing] * i + [(low + high) / 2] + [failing] * (children - i)
                    passes = siblings(p, q, tokens, coins(*uniform))[0] == token
                    low, high = ((low + high) / 2, high) if passes else (low, (low + high) / 2)
                passed = reached * (low + high) / 2
                out[token] += passed
                accepted, reached = accepted + passed, reached - passed
            for u in grid if siblings(p, q, tokens, coins(*[failing] * children, 0.0))[0] is None else []:
                none, last = siblings(p, q, tokens, coins(*[failing] * children, u))
                assert none is None
                out[last] += reached / len(grid)
        assert torch.allclose(out, p, atol=5e-3)
        assert accepted == pytest.approx(share_accepted(p, q, children), abs=3e-3)
        shares.append(accepted)
    assert shares[0] == pytest.approx(float(torch.minimum(p, q).sum()), abs=3e-3)
    assert shares[2] > shares[1] + 0.02 and shares[1] > shares[0] + 0.05


def test_point_masses_follow_what_the_verifier_says():
    """Down a tree while its own token is a child; of two equal siblings the first. Dead nodes don't count."""
    nodes = [(-1, 4), (-1, 4), (0, 1), (1, 2), None, (0, 3)]
    says = {-1: 4, 0: 3, 5: 9}
    [verdict] = accept_points([nodes], lambda at, level: [says[at[0]]])
    assert verdict == Accepted((0, 5), 9)
    both = accept_points([nodes, [None]], lambda at, level: [says.get(at[0], 7), 5])
    assert both == [Accepted((0, 5), 9), Accepted((), 5)]


def test_a_point_mass_passes_with_its_probability_and_the_rest_is_p_without_it():
    p = laws(2, 4)
    grid = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000
    passed, out = 0, torch.zeros(V)
    for u in grid:
        count, token = accept_point_chain(p, [2], coins(float(u), 0.0))
        passed += count
        out[2 if count else token] += 1 / 2000
    assert passed / 2000 == pytest.approx(float(p[0, 2]), abs=1e-3)
    assert torch.allclose(out, p[0], atol=1e-3)
