"""Each objective against its definition in plain autograd, in float64, and at the edges in float32."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from conf.errors import UserError
from models.losses import feature_loss, head_loss, with_noise
from models.objectives import Labels, Objective
from models.supervision import supervised
from models.token_loss import TokenTerms, acceptance, choices, token_loss
from toy_head import V, labels_of, make_head, make_states, one_by_one, teacher, ttt_loss

R, ROWS = 7, 90
TERMS = {
    "ce": TokenTerms(),
    "lk": TokenTerms("lk"),
    "lk_alpha": TokenTerms("lk_alpha"),
    "hass": TokenTerms(top_k_weight=0.7, top_k=3),
    "weighted": TokenTerms(weight=0.1, top_k_weight=0.5, top_k=50),
    "softcap": TokenTerms(softcap=2.0),
    "lk softcap": TokenTerms("lk", weight=0.5, top_k_weight=0.2, top_k=2, softcap=1.5),
}


def plain_loss(hidden, weight, target, label, terms):
    """One row at a time, as the papers write it."""
    losses = []
    for h, p in zip(hidden, target[label], strict=True):
        z = weight @ h
        if terms.softcap is not None:
            z = terms.softcap * torch.tanh(z / terms.softcap)
        log_q, p_hat = z.log_softmax(-1), p / p.sum()
        ce = -(p_hat * log_q).sum()
        alpha = torch.minimum(p, log_q.exp()).sum()
        if terms.kind == "ce":
            loss = ce
        elif terms.kind == "lk_alpha":
            loss = -alpha.log()
        else:
            kl = ce + (p_hat * p_hat.log()).sum()
            share = torch.exp(-3 * alpha.detach())
            loss = share * kl + (1 - share) * (1 - alpha)
        best = p.topk(min(terms.top_k, len(p)))
        top = -(best.values * log_q[best.indices]).sum()
        losses.append(terms.weight * loss + terms.top_k_weight * top)
    return torch.stack(losses)


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (ROWS, R))
    logits = torch.randn(11, R, generator=generator, dtype=torch.float64) * 2
    target = logits.softmax(-1) * torch.rand(11, 1, generator=generator, dtype=torch.float64)  # mass is missing
    row_weight = torch.rand(ROWS, generator=generator, dtype=torch.float64).round(decimals=1)
    return hidden, weight, target, torch.arange(ROWS) % 11, row_weight


@pytest.mark.parametrize("name", TERMS)
def test_value_and_gradient_equal_the_plain_loss(name, monkeypatch):
    monkeypatch.setattr("models.token_loss.BLOCK_LOGITS", 3 * 9 * R)  # three label rows of nine a block
    monkeypatch.setattr("models.token_loss.CACHE_LOGITS", 2 * 9 * R)
    hidden, weight, target, label, row_weight = rows()
    hidden.requires_grad_(), weight.requires_grad_()
    found = token_loss(hidden, weight, lambda part: target[part], one_by_one(label, 11), row_weight, TERMS[name])
    expected = plain_loss(hidden, weight, target, label, TERMS[name])
    torch.testing.assert_close(found.loss_N, expected.detach(), rtol=1e-10, atol=1e-12)
    ours = torch.autograd.grad(found.loss_sum * 3, (hidden, weight))
    theirs = torch.autograd.grad((expected * row_weight).sum() * 3, (hidden, weight))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TERMS)
def test_disjoint_supports_give_finite_losses_and_gradients(name, dtype):
    """Teacher and draft each certain of another token: acceptance is exactly 0 in float32."""
    weight = (torch.eye(R, 5, dtype=dtype) * 1e4).requires_grad_()
    hidden = torch.eye(5, dtype=dtype)[:2].clone().requires_grad_()
    target = torch.zeros(1, R, dtype=dtype)
    target[0, 4] = 1
    found = token_loss(
        hidden, weight, lambda rows: target[rows], torch.tensor([[0, 1]]), torch.ones(2, dtype=dtype), TERMS[name]
    )
    assert name.endswith("softcap") or (found.overlap_N == 0).all()
    for value in (found.loss_N, *torch.autograd.grad(found.loss_sum, (hidden, weight))):
        assert value.isfinite().all()


def test_an_empty_teacher_row_gives_finite_gradients():
    hidden, weight = torch.randn(1, 5, requires_grad=True), torch.randn(R, 5, requires_grad=True)
    for terms in TERMS.values():
        found = token_loss(hidden, weight, lambda _: torch.zeros(1, R), torch.tensor([[0]]), torch.ones(1), terms)
        for value in (found.loss_sum, *torch.autograd.grad(found.loss_sum, (hidden, weight))):
            assert value.isfinite().all()


def test_acceptance_of_disjoint_laws_has_finite_gradients():
    logits = torch.tensor([[1e4, 0.0, 0.0]], requires_grad=True)
    alpha = acceptance(torch.tensor([[0.0, 1.0, 0.0]]), logits.softmax(-1))
    alpha.sum().backward()
    assert alpha == 0 and logits.grad.isfinite().all()
    same = torch.tensor([[0.2, 0.3, 0.5]])
    assert acceptance(same, same) == pytest.approx(1.0)
    assert acceptance(same * 0.5, same) == pytest.approx(0.5)  # half of the verifier's mass is elsewhere


def test_choices_are_the_heads_argmax(monkeypatch):
    monkeypatch.setattr("models.token_loss.BLOCK_LOGITS", 0)
    hidden, weight, *_ = rows()
    assert torch.equal(choices(hidden, weight), (hidden @ weight.T).argmax(-1))
    assert choices(hidden[:0], weight).shape == (0,)


def test_vat_weighs_one_up_to_the_first_rejection_and_decays_from_there():
    hit_KP = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1], [1, 0, 1, 1]], dtype=torch.bool)
    weights = Objective(steps=4, weights="vat", step_decay=0.5).step_weights(hit_KP)
    expected = torch.tensor([[1, 1, 1, 1], [1, 0.5, 1, 1], [1, 0.25, 0.5, 1], [0.5, 0.125, 0.25, 1]])
    assert torch.equal(weights, expected.double())
    plain = Objective(steps=4, step_decay=0.5).step_weights(hit_KP)
    assert torch.equal(plain[:, 0], torch.tensor([1, 0.5, 0.25, 0.125]).double()) and (plain == plain[:, :1]).all()


def test_vat_reaches_the_loss_through_the_heads_own_hits():
    head, states = make_head(), make_states([["ppABCDEFGH"]])
    counted, ids = supervised(states, 3), head.vocab.ids_R
    with torch.no_grad():
        choice = torch.stack([head.logits(out).argmax(-1) for out in head.unroll(states, 3)])
    top = states.top_P.clone()
    top[:] = ids[choice[0].roll(1)]  # some hits, some misses
    top[2], top[4] = ids[choice[0][2]], ids[choice[0][4]]
    states = replace(states, top_P=top)
    row = torch.stack([torch.arange(k, len(top) + k) for k in range(3)]).clamp_max(len(top) - 1)
    hit = (ids[choice] == top[row]) & counted
    _, weight, counts = ttt_loss(head, states, teacher(states), 3, 0.5, weights="vat")
    expected = Objective(steps=3, weights="vat", step_decay=0.5).step_weights(hit) * counted
    assert hit.any() and float(weight) == pytest.approx(float(expected.sum()))
    assert counts.weight_K.tolist() == pytest.approx(expected.sum(1).tolist())


def test_feature_regression_is_smooth_l1_against_the_next_feature():
    head, states = make_head(), make_states([["ppABCDEF"]])
    loss, weight, _ = ttt_loss(head, states, teacher(states), 2, 1.0, token_weight=0.0, feature_weight=2.0)
    outs, counted = list(head.unroll(states, 2)), supervised(states, 2)
    known = head.inverse_V[states.top_P] >= 0
    expected = 0.0
    for k, p in counted.nonzero().tolist():
        if known[p + k]:
            gap = (outs[k][p] - states.last_PD[p + k]).abs()
            expected += 2 * torch.where(gap < 1, gap.square() / 2, gap - 0.5).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    zero = feature_loss(states.last_PD, states.last_PD, torch.float64)
    assert (zero == 0).all() and weight > 0


def test_survival_is_learnt_from_what_was_accepted():
    head, states = make_head(survival=True), make_states([["ppABCDEF"]])
    outs, counted = list(head.unroll(states, 2)), supervised(states, 2)
    choice = torch.stack([head.logits(out).argmax(-1) for out in outs])
    top = head.vocab.ids_R[choice[0]].clone()
    states = replace(states, top_P=top)  # every first draft hits
    loss, _, _ = ttt_loss(head, states, teacher(states), 2, 1.0, survival_weight=0.3)
    plain, _, _ = ttt_loss(head, states, teacher(states), 2, 1.0)
    expected = 0.0
    for k, p in counted.nonzero().tolist():
        survived = all(head.vocab.ids_R[choice[j][p]] == top[p + j] for j in range(k + 1))
        logit = head.survival(head.final(outs[k][p]))[0]
        expected += 0.3 * F.binary_cross_entropy_with_logits(logit, torch.tensor(float(survived)).double())
    torch.testing.assert_close(loss - plain, expected, rtol=1e-8, atol=1e-12)
    loss.backward()
    assert head.survival.weight.grad.abs().max() > 0 and head.fc.weight.grad.abs().max() > 0


def test_survival_learns_that_a_token_outside_the_draft_vocabulary_is_rejected():
    head, states = make_head(survival=True), make_states([["ppABCDEF"]])
    outside = int((head.inverse_V < 0).nonzero()[0])
    states = replace(states, top_P=torch.full_like(states.top_P, outside))
    loss, weight, counts = ttt_loss(head, states, teacher(states), 2, 0.5, survival_weight=0.3)
    expected = 0.0
    for k, out in enumerate(head.unroll(states, 2)):
        rejected = F.softplus(head.survival(head.final(out)))[:, 0]  # -log(1 - sigmoid)
        expected += 0.3 * 0.5**k * rejected[supervised(states, 2)[k]].sum()
    torch.testing.assert_close(loss, expected, rtol=1e-8, atol=1e-12)
    assert weight == 0 and counts.loss_K.sum() == pytest.approx(float(loss.detach()))


def test_noise_is_on_the_states_alone_and_follows_its_seed_alone():
    states, before = make_states([["ppABCD"]]), torch.get_rng_state()
    first, second, other = (with_noise(states, 0.1, seed) for seed in (5, 5, 6))
    gap = first.aux_BTAD - states.aux_BTAD
    assert torch.equal(first.aux_BTAD, second.aux_BTAD) and not torch.equal(first.aux_BTAD, other.aux_BTAD)
    assert 0.05 < gap.abs().max() <= 0.1 and gap.min() < -0.05
    assert torch.equal(first.last_PD, states.last_PD) and with_noise(states, 0.0, 5) is states
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_reaches_the_loss():
    head, states = make_head(), make_states([["ppABCD"]])
    objective = Objective(steps=2, noise=0.1)

    def loss(seed):
        return float(head_loss(head, states, labels_of(states, teacher(states), 2), objective, seed)[0].detach())

    assert loss(5) == loss(5) != loss(6)


def test_labels_of_the_text_point_both_ways():
    states, weight = make_states([["ppABCD"]]), torch.randn(5, 16, dtype=torch.float64)
    labels = Labels.given(states, lambda hidden: hidden @ weight.T, 2)
    expected = (states.last_PD @ weight.T - states.lse_P[:, None]).exp()
    torch.testing.assert_close(labels.law(slice(1, 3)), expected[1:])
    assert labels.row_KP.tolist() == [[0, 1, 2], [1, 2, 2]] and labels.counted_KP.tolist() == [
        [True] * 3,
        [True, True, False],
    ]
    assert labels.pair_MU.tolist() == [[0, 6], [1, 3], [2, 4]]  # pair k * 3 + p; 6: none


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": "mse"}, "objective.token must be ce or lk or lk_alpha, found mse"),
        ({"weights": "flat"}, "objective.weights must be decay or vat"),
        ({"tokens": "mine"}, "objective.tokens must be given or own"),
        ({"noise": -1.0}, "objective.noise must be 0 or more"),
        ({"feature_weight": float("nan")}, "objective.feature_weight"),
        ({"step_decay": -1.0}, "objective.step_decay must lie in 0..1, found -1.0"),
        ({"top_k": 0}, "objective.top_k must be 1 or more"),
        ({"token_weight": 0.0}, "has no loss"),
    ],
)
def test_a_wrong_objective_is_said(changes, message):
    with pytest.raises(UserError, match=message):
        Objective(steps=1, **changes)


def test_every_objective_reaches_every_parameter():
    for changes in ({"token": "lk"}, {"token": "lk_alpha"}, {"top_k_weight": 1.0}, {"weights": "vat"}):
        head, states = make_head(), make_states([["ppABCDEF"]])
        states = replace(states, top_P=head.vocab.ids_R[torch.arange(len(states.top_P)) % 13])
        loss, weight, _ = ttt_loss(head, states, teacher(states), 3, **changes)
        (loss / weight).backward()
        assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in head.parameters()), changes
    assert V > R
