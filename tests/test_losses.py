"""The supervised set, the fused LM head + loss, normalisation, and the counts (MATH.md section 3)."""

from dataclasses import replace

import pytest
import torch

from models.packed import native_bfloat16
from models.supervision import supervised
from models.token_loss import token_loss
from toy_head import D, V, make_head, make_states, one_by_one, teacher, ttt_loss

R = 13


def reference(head, states, teacher_PR, steps, decay=0.8):
    """Plain, one (t, k) at a time: loss sum, weight sum, and rows of (k, hit, overlap, loss)."""
    counted, span = supervised(states, steps), states.span_BT.flatten()
    loss_sum, weight_sum, rows = torch.zeros((), dtype=torch.float64), 0.0, []
    ids = head.vocab.ids_R.tolist()
    for k, out in enumerate(head.unroll(states, steps)):
        for p, label in enumerate(states.last_index_P.tolist()):
            if not counted[k, p]:
                continue
            s = label + k
            assert span[label] == span[s] == span[s + 1]
            row = states.last_index_P.tolist().index(s)
            log_q = head.logits(out[p]).log_softmax(-1)
            hit = ids[int(log_q.argmax())] == int(states.top_P[row])
            p_full = (teacher_PR[row] - states.lse_P[row]).exp()
            ce = -(teacher_PR[row].softmax(-1) * log_q).sum()
            known = int(states.top_P[row]) in ids
            rows.append(
                (
                    k,
                    hit,
                    float(torch.minimum(p_full, log_q.exp()).sum().detach()),
                    float(ce.detach()) if known else None,
                )
            )
            if known:
                loss_sum, weight_sum = loss_sum + decay**k * ce, weight_sum + decay**k
    return loss_sum, weight_sum, rows


def gradients(head, loss):
    head.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in head.named_parameters()}


def assert_same(left, right):
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-9, atol=1e-12, msg=name)


def test_supervised_set_of_one_answer_is_exact():
    """SpecForge #885: [p p p A B C u u] trains (2,0) -> B, (2,1) -> C, (3,0) -> C and nothing else."""
    states = make_states([["pppABCuu"]])
    anchor = states.last_index_P - 1
    pairs = {(int(anchor[p]), k) for k, p in supervised(states, 7).nonzero().tolist()}
    assert pairs == {(2, 0), (2, 1), (3, 0)}
    ids = states.input_ids_BT[0]
    labels = [int(ids[int(states.last_index_P[p]) + k + 1]) for k, p in supervised(states, 7).nonzero().tolist()]
    assert sorted(labels) == sorted([int(ids[4]), int(ids[5]), int(ids[5])])


def test_supervised_set_stays_inside_spans_documents_and_rows():
    states = make_states([["pABuCDEu", "pAB"], ["ABC", "pAB---"]])
    anchor = states.last_index_P - 1
    pairs = {(int(anchor[p]), k) for k, p in supervised(states, 4).nonzero().tolist()}
    # rows are 11 long; an answer that opens its document has no anchor for B, only one for C
    assert pairs == {(0, 0), (3, 0), (3, 1), (4, 0), (8, 0), (11, 0), (14, 0)}


@pytest.mark.parametrize("decay", [0.8, 1.0])
def test_loss_gradient_and_counts_equal_the_plain_reference(decay):
    head, states = make_head(), make_states([["ppABCuuDEFGu", "pABCDE"], ["pppABCDEFG", "--------"]])
    teacher_PR = teacher(states)
    loss_sum, weight_sum, counts = ttt_loss(head, states, teacher_PR.clone(), 4, decay)
    ours = gradients(head, loss_sum)
    expected, weight, rows = reference(head, states, teacher_PR, 4, decay)
    torch.testing.assert_close(loss_sum, expected, rtol=1e-10, atol=1e-12)
    assert float(weight_sum) == pytest.approx(weight, rel=1e-12)
    assert_same(ours, gradients(head, expected))
    assert any(r[3] is None for r in rows) and any(r[1] for r in rows)
    for k in range(4):
        mine = [r for r in rows if r[0] == k]
        known = [r[3] for r in mine if r[3] is not None]
        assert counts.total_K[k] == len(mine) and counts.correct_K[k] == sum(r[1] for r in mine)
        assert float(counts.overlap_K[k]) == pytest.approx(sum(r[2] for r in mine), rel=1e-10)
        assert float(counts.loss_K[k]) == pytest.approx(decay**k * sum(known), rel=1e-10)
        assert float(counts.weight_K[k]) == pytest.approx(decay**k * len(known), rel=1e-12)
    twice = counts + counts
    assert torch.equal(twice.total_K, 2 * counts.total_K) and torch.equal(twice.loss_K, 2 * counts.loss_K)


def test_fused_lm_head_passes_gradcheck_across_blocks(monkeypatch):
    monkeypatch.setattr("models.token_loss.BLOCK_LOGITS", 200)  # one label row a block
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (150, 5))
    target = torch.rand(6, 5, generator=generator, dtype=torch.float64) / 6
    label = torch.arange(149) % 6  # the last row learns from nothing
    row_weight = torch.rand(150, generator=generator, dtype=torch.float64).round(decimals=1)
    row_MU = one_by_one(label, 6).clamp_min(0)
    row_MU[row_MU == 149] = 150

    def loss(h, w):
        return token_loss(h, w, lambda rows: target[rows], row_MU, row_weight).loss_sum * 3

    assert torch.autograd.gradcheck(loss, (hidden.requires_grad_(), weight.requires_grad_()))
    plain = -((target / target.sum(-1, keepdim=True))[label] * (hidden @ weight.T)[:149].log_softmax(-1)).sum(-1)
    found = token_loss(hidden, weight, lambda rows: target[rows], row_MU, row_weight)
    torch.testing.assert_close(found.loss_N[:149], plain.detach())
    assert found.loss_N[149] == found.overlap_N[149] == 0 and found.choice_N[149] == -1
    with torch.no_grad():
        again = token_loss(hidden, weight, lambda rows: target[rows], row_MU, row_weight)
        assert again.loss_sum == pytest.approx(float(plain @ row_weight[:149]))
    both = torch.autograd.grad(loss(hidden, weight), (hidden, weight))
    for index, (h, w) in enumerate([(hidden, weight.detach()), (hidden.detach(), weight)]):  # the other one frozen
        assert torch.equal(torch.autograd.grad(loss(h, w), (h, w)[index])[0], both[index])


def test_teacher_argmax_outside_the_draft_vocabulary_is_a_miss_without_loss():
    """SpecForge PR #492."""
    head, states = make_head(), make_states([["ppABCDEF"]])
    outside = int((~head.vocab.t2d).nonzero()[0])
    with torch.no_grad():
        best = [head.vocab.ids_R[head.logits(out).argmax(-1)] for out in head.unroll(states, 1)][0]
    all_known = replace(states, top_P=best)
    _, weight, counts = ttt_loss(head, all_known, teacher(states), 1)
    assert counts.correct_K[0] == counts.total_K[0] == weight == 5
    top = best.clone()
    top[2] = outside
    loss_sum, weight, counts = ttt_loss(head, replace(states, top_P=top), teacher(states), 1)
    assert (float(counts.correct_K[0]), float(counts.total_K[0]), float(weight)) == (4, 5, 4)
    garbage = teacher(states)
    garbage[2] = torch.randn(R)  # the teacher of that row plays no part
    again, _, _ = ttt_loss(head, replace(states, top_P=top), garbage, 1)
    assert torch.equal(again, loss_sum)


def test_mass_outside_the_draft_vocabulary_is_lost_to_the_overlap():
    head, states = make_head(), make_states([["ppABCD"]])
    teacher_PR = teacher(states)
    lse = teacher_PR.logsumexp(-1)
    inside = ttt_loss(head, replace(states, lse_P=lse), teacher_PR.clone(), 1)
    half = ttt_loss(head, replace(states, lse_P=lse + 2 * torch.log(torch.tensor(2.0))), teacher_PR, 1)
    assert torch.allclose(inside[0], half[0], rtol=1e-12)  # the loss normalises over the draft columns
    assert half[2].overlap_K[0] < 0.26 * half[2].total_K[0] < inside[2].overlap_K[0]


def test_garbage_past_the_end_and_in_the_gaps_changes_nothing():
    """EAGLE #317: no row is trained against what follows the end, whatever stands there."""
    head, states = make_head(), make_states([["ppABCD", "-----"], ["pABCDEFGHu", "-"]])
    teacher_PR = teacher(states)
    before = ttt_loss(head, states, teacher_PR.clone(), 5)
    grads = gradients(head, before[0])
    ids, aux = states.input_ids_BT.clone(), states.aux_BTAD.clone()
    unread = states.document_BT < 0
    unread[0, 5], unread[1, 8:10] = True, True  # the last answer token is a label's target, never read
    unread_ids = unread.clone()
    ids[unread_ids] = (ids[unread_ids] + 7) % V
    aux[unread] = 100 * torch.randn(int(unread.sum()), *aux.shape[2:], dtype=aux.dtype)
    after = ttt_loss(head, replace(states, input_ids_BT=ids, aux_BTAD=aux), teacher_PR, 5)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert_same(grads, gradients(head, after[0]))


def test_pads_packing_and_accumulation_leave_the_gradient_alone():
    """EAGLE #340, speculators #942: sums, divided once by the weights of everything."""
    head = make_head()
    a, b = "pppABCDEFu", "ppABCD"
    packed = make_states([[a, b]])
    packed = replace(packed, top_P=head.vocab.ids_R[packed.top_P % R])
    cut = {"input_ids_BT", "aux_BTAD"}

    def part(text, begin, pads):
        alone = make_states([[text, "-" * pads]])
        fill = {n: getattr(alone, n).clone() for n in cut}
        for n in cut:
            fill[n][:, : len(text)] = getattr(packed, n)[:, begin : begin + len(text)]
        count = len(alone.last_index_P)
        first = int((packed.last_index_P < begin).sum())
        rows = slice(first, first + count)
        return replace(alone, **fill, top_P=packed.top_P[rows], lse_P=packed.lse_P[rows]), teacher(packed)[rows]

    whole, weight, _ = ttt_loss(head, packed, teacher(packed), 4)
    expected = gradients(head, whole / weight)

    def both(pads):
        return [ttt_loss(head, *part(text, begin, pads), 4) for text, begin in ((a, 0), (b, len(a)))]

    for pads in (0, 100):
        sums = both(pads)
        total = sums[0][1] + sums[1][1]
        assert total == pytest.approx(float(weight))
        assert_same(expected, gradients(head, (sums[0][0] + sums[1][0]) / total))
    sums = both(0)
    mean_of_means = gradients(head, (sums[0][0] / sums[0][1] + sums[1][0] / sums[1][1]) / 2)
    assert not torch.allclose(mean_of_means["fc.weight"], expected["fc.weight"], rtol=1e-3)


def test_only_the_head_learns():
    head, states = make_head(), make_states([["ppABCD"]])
    gradients(head, ttt_loss(head, states, teacher(states), 3)[0])
    assert head.embedding_VD.grad is None and not head.embedding_VD.requires_grad
    assert not [n for n in head.state_dict() if "embed" in n or "inverse" in n]
    assert all(p.grad.abs().max() > 0 for p in head.parameters())


def test_peak_memory_does_not_hold_logits_per_step():
    """SpecForge #112: nothing that autograd keeps is as wide as the draft vocabulary, but the LM head's gradient."""
    head, states = make_head(R=19), make_states([["p" + "A" * 40]])
    kept = []

    def pack(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        ttt_loss(head, states, teacher(states, R=19), 4)
    assert [s for s in kept if s[-1:] == (19,)] == [] and (19, D) in kept


def test_half_precision_loss_stays_near_float32():
    """float16 autocast stands in where bfloat16 is not native: products are narrow, softmax and loss are not."""
    dtype = torch.bfloat16 if native_bfloat16() else torch.float16
    head, states = make_head().float(), make_states([["ppABCDEF", "pABC"]])
    states = replace(states, aux_BTAD=states.aux_BTAD.float(), lse_P=states.lse_P.float())
    exact, weight, _ = ttt_loss(head, states, teacher(states).float(), 3)
    plain = gradients(head, exact)
    with torch.autocast("cpu", dtype):
        loss, _, counts = ttt_loss(head, states, teacher(states).float(), 3)
    grads = gradients(head, loss)
    assert loss.dtype == counts.overlap_K.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(exact.detach()), rel=0.02) and weight > 0
    for name, grad in grads.items():
        assert grad.isfinite().all() and grad.dtype == torch.float32
        assert torch.cosine_similarity(grad.flatten(), plain[name].flatten(), dim=0) > 0.99, name
