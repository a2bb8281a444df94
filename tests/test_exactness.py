"""Every acceptance rule through the real loop: texts follow the verifier's law, and inexact schemes fail the same test.

The law of three tokens is known exactly, its factors depend on what came before, and texts are made across as many
rounds as they take (MATH.md, section 5). `make exactness` asks whether the test is calibrated.
"""

import pytest
import torch
from scipy import stats
from stub_model import FIRST, LENGTH, StubVerifier, V, stub_drafter

import eval.speculative.grow as grow
import eval.speculative.loop as loop
from eval.speculative.acceptance import Accepted, DraftLaw, accept_sampled, draw
from eval.speculative.copying import Lookahead, NoDraft, PromptLookup
from eval.speculative.loop import decode_batch
from eval.speculative.processors import Sampling, to_law
from eval.speculative.shapes import FixedTree, GrowingShape

chain, tree = FixedTree.chain, FixedTree.of
PRUNED = torch.tensor([1, 3])
WARM = Sampling(1.0)
EXACT = {
    "chain of 1": (chain(1), WARM, {}),
    "chain of 2": (chain(2), WARM, {}),
    "chain of 3": (chain(3), WARM, {}),
    "chain that stops early": (chain(3, min_confidence=0.2), WARM, {}),
    "chain, pruned vocabulary": (chain(2), WARM, {"ids_R": PRUNED}),
    "chain of best tokens, pruned": (chain(2), WARM, {"points": True, "ids_R": PRUNED}),
    "chain, temperature and top-p": (chain(2), Sampling(1.4, top_p=0.8), {}),
    "chain, top-k": (chain(2), Sampling(0.8, top_k=2), {}),
    "siblings": (tree([3]), WARM, {}),
    "tree [2,2]": (tree([2, 2]), WARM, {}),
    "tree [2,2,2]": (tree([2, 2, 2]), WARM, {}),
    "tree of paths": (tree([[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 1, 0]]), WARM, {}),
    "tree, more children than tokens": (tree([3, 3]), WARM, {"ids_R": PRUNED}),
    "tree, temperature and top-p": (tree([2, 2]), Sampling(1.4, top_p=0.8), {}),
    "tree, top-k": (tree([3, 2]), Sampling(0.8, top_k=2), {}),
    "tree that stops early": (tree([2, 2], min_confidence=0.25), WARM, {}),
    "tree of best tokens": (tree([2, 2]), WARM, {"points": True}),
    "tree of best tokens, top-p": (tree([2, 2]), Sampling(1.4, top_p=0.8), {"points": True, "ids_R": PRUNED}),
    "EAGLE-2's tree": (GrowingShape(3, 2, 6), WARM, {}),
    "EAGLE-2's tree, pruned, top-k": (GrowingShape(2, 2, 4), Sampling(1.2, top_k=3), {"ids_R": PRUNED}),
    "EAGLE-2's tree, only likely paths": (GrowingShape(3, 2, 8, min_confidence=0.2), WARM, {}),
}


def joint_counts(verifier, drafter, sampling, samples, seed=0):
    """How often each text of LENGTH tokens came, across as many rounds as each took; in batches, each its own seed."""
    counts = torch.zeros(V**LENGTH)
    for first in range(0, samples, 500):
        batch = [[FIRST]] * min(500, samples - first)
        options = {"max_new_tokens": LENGTH + 1, "sampling": sampling, "seed": seed + first}
        for text in decode_batch(verifier, drafter, batch, **options):
            counts[sum(token * V**i for i, token in enumerate(text.tokens[1:]))] += 1
    return counts


def joint_law(verifier, sampling):
    """The exact law of those texts, in the same order."""
    law_VVV = to_law(verifier.table_VVV.double(), sampling)
    law = torch.zeros(V**LENGTH, dtype=torch.float64)
    for a in range(V):
        for b in range(V):
            for c in range(V):
                law[a + b * V + c * V * V] = law_VVV[FIRST, FIRST, a] * law_VVV[FIRST, a, b] * law_VVV[a, b, c]
    return law


def chi_square(counts, law):
    """p-value of the counts under the exact law; rare texts are pooled, impossible ones must not occur."""
    if counts[law == 0].sum() > 0:
        return 0.0
    counts, law = counts[law > 0].double(), law[law > 0]
    expected, rare = law * counts.sum(), law * counts.sum() < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    return float(stats.chisquare(counts.numpy(), expected.numpy() * (counts.sum() / expected.sum()).item()).pvalue)


def p_value(name, samples, seed=0):
    shape, sampling, options = EXACT[name]
    verifier = StubVerifier()
    counts = joint_counts(verifier, stub_drafter(shape, sampling, **options), sampling, samples, seed)
    return chi_square(counts, joint_law(verifier, sampling))


@pytest.mark.parametrize("name", EXACT)
def test_texts_follow_the_verifiers_law_exactly(name):
    assert p_value(name, 1500) > 0.01


@pytest.mark.parametrize("sampling", [WARM, Sampling(1.4, top_p=0.8)], ids=["warm", "top-p"])
@pytest.mark.parametrize("drafter", [NoDraft(), PromptLookup(2), Lookahead(3, 3, 3)], ids=lambda drafter: drafter.name)
def test_drafts_without_a_model_follow_it_too(drafter, sampling):
    verifier = StubVerifier()
    assert chi_square(joint_counts(verifier, drafter, sampling, 1500), joint_law(verifier, sampling)) > 0.01


@pytest.mark.parametrize("name", ["chain of 3", "tree [2,2,2]"])
def test_every_depth_is_rejected_and_the_bonus_drawn(name):
    shape, sampling, options = EXACT[name]
    batch = {"max_new_tokens": 5, "sampling": sampling}
    texts = decode_batch(StubVerifier(), stub_drafter(shape, sampling, **options), [[FIRST]] * 300, **batch)
    ends = {(call.accepted, call.tested) for text in texts for call in text.rounds}
    assert ends == {(0, 1), (1, 2), (2, 3), (3, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_the_test_is_calibrated(name):
    """Over 500 seeds p < 0.05 comes as often as a coin of 5 % falls: 99.7 % of such counts lie in 12 to 41."""
    alarms = sum(p_value(name, 400, seed=10_000 * (1 + i)) < 0.05 for i in range(500))
    print(f"{name}: {alarms} of 500 below 0.05")
    assert 12 <= alarms <= 41


# --- the test has power ---------------------------------------------------------------------------------------


def always_accept(nodes, laws, sequence, p_target, uniform_U):
    path = []
    while children := [n for n, node in enumerate(nodes) if node[0] == (path[-1] if path else -1)]:
        path.append(children[0])
    return Accepted(tuple(path), int(draw(p_target(path[-1]), uniform_U[-1])))


def residual_is_p(nodes, laws, sequence, p_target, uniform_U):
    verdict = accept_sampled(nodes, laws, sequence, p_target, uniform_U)
    at = verdict.nodes[-1] if verdict.nodes else -1
    return Accepted(verdict.nodes, int(draw(p_target(at), uniform_U[-1])))


def bonus_from_q(nodes, laws, sequence, p_target, uniform_U):
    verdict = accept_sampled(nodes, laws, sequence, p_target, uniform_U)
    every = len(verdict.nodes) == len(nodes)
    return Accepted(verdict.nodes, int(draw(laws.probs_BMR[sequence, -1], uniform_U[-1]))) if every else verdict


def bonus_without_temperature(nodes, laws, sequence, p_target, uniform_U, temperature=2.5):
    verdict = accept_sampled(nodes, laws, sequence, p_target, uniform_U)
    if len(verdict.nodes) < len(nodes):
        return verdict
    plain_V = p_target(verdict.nodes[-1]) ** temperature  # undoes the division of the logits
    return Accepted(verdict.nodes, int(draw(plain_V, uniform_U[-1])))


def siblings(test):
    """A rule for one level of siblings: test(p, q, token, coin) -> passed, p, q."""

    def rule(nodes, laws, sequence, p_target, uniform_U):
        p, q = p_target(-1).double(), laws.probs_BMR[sequence, 0].double()
        for n, (_, token) in enumerate(nodes):
            passed, p, q = test(p, q, token, float(uniform_U[n]))
            if passed:
                return Accepted((n,), int(draw(p_target(n), uniform_U[-1])))
        return Accepted((), int(draw(p, uniform_U[-1])))

    return rule


def norm(weights):
    return weights / weights.sum() if weights.sum() > 0 else weights


def without(q, token):
    return q.index_fill(0, torch.tensor(token), 0.0)


@siblings
def independent_coins(p, q, token, coin):
    """Each sibling against the same p and q; only the last residual is subtracted."""
    return coin * q[token] < p[token], p, q


@siblings
def q_not_renormalised(p, q, token, coin):
    return coin * q[token] < p[token], norm((p - q).clamp(min=0)), without(q, token)


@siblings
def p_not_reduced(p, q, token, coin):
    return coin * norm(q)[token] < p[token], p, without(q, token)


INEXACT = {
    "always accept": (always_accept, chain(1), 1.0),
    "residual without (p - q)+": (residual_is_p, chain(1), 1.0),
    "bonus from q": (bonus_from_q, chain(1), 1.0),
    "bonus without temperature": (bonus_without_temperature, chain(1), 2.5),
    "independent coins for siblings": (independent_coins, tree([2]), 1.0),
    "q not renormalised after a sibling": (q_not_renormalised, tree([3]), 1.0),
    "p not reduced after a sibling": (p_not_reduced, tree([2]), 1.0),
}


@pytest.mark.parametrize("name", INEXACT)
def test_inexact_rules_fail_the_same_test(name, monkeypatch):
    rule, shape, temperature = INEXACT[name]
    monkeypatch.setattr(loop, "accept_sampled", rule)
    verifier, sampling = StubVerifier(), Sampling(temperature)
    counts = joint_counts(verifier, stub_drafter(shape, sampling), sampling, 3000)
    assert chi_square(counts, joint_law(verifier, sampling)) < 1e-4


@siblings
def our_rule(p, q, token, coin):
    q = norm(q)
    return coin * q[token] < p[token], norm((p - q).clamp(min=0)), without(q, token)


def test_the_toy_rules_are_ours_but_for_the_fault(monkeypatch):
    """The harness of the sibling schemes passes when nothing is wrong with them."""
    monkeypatch.setattr(loop, "accept_sampled", our_rule)
    verifier = StubVerifier()
    counts = joint_counts(verifier, stub_drafter(tree([3]), WARM), WARM, 3000)
    assert chi_square(counts, joint_law(verifier, WARM)) > 0.01


@pytest.mark.parametrize("shape", [chain(1), tree([2])])
def test_best_tokens_tested_with_the_drafts_law_fail(shape, monkeypatch):
    def best(law_BKR, level, uniform_BL):
        columns = law_BKR.topk(max(level.rank) + 1, -1).indices[:, list(level.parent), list(level.rank)]
        return columns, torch.ones_like(columns, dtype=torch.bool)

    monkeypatch.setattr(grow, "_draw_children", best)
    verifier = StubVerifier()
    counts = joint_counts(verifier, stub_drafter(shape, WARM), WARM, 2000)
    assert chi_square(counts, joint_law(verifier, WARM)) < 1e-4


def test_pruning_what_was_drawn_fails(monkeypatch):
    """Two siblings are drawn and the likelier one is kept, as a rerank would: its law is no longer q."""
    drawn = grow.grow_fixed

    def pruned(*args):
        draft = drawn(*args)
        likelier_B = draft.laws.probs_BMR[:, 0].gather(1, draft.tokens_BN).argmax(1, keepdim=True)
        laws = DraftLaw(draft.laws.probs_BMR, (0,), draft.laws.ids_R)
        parents_11 = torch.tensor([[-1]])
        return type(draft)(draft.tokens_BN.gather(1, likelier_B), parents_11, None, laws)

    monkeypatch.setattr(grow, "grow_fixed", pruned)
    verifier = StubVerifier()
    counts = joint_counts(verifier, stub_drafter(tree([2]), WARM), WARM, 2000)
    assert chi_square(counts, joint_law(verifier, WARM)) < 1e-4
