"""The TTT unroll against a naive reference and against a serial decode with the real cache, in float64."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from conf.errors import UserError
from models.states import label_rows
from models.supervision import supervised
from toy_head import D, V, make_head, make_states, teacher, ttt_loss

PACKED = [["ppABCuuDEFGu", "pABCDE", "ppppAB", "ppu"]]
RAGGED = [["ppABCuuDEFGu", "pABCDE", "----"], ["pppABCDEFG", "------------"]]


def naive_unroll(head, states, steps):
    """Every (anchor, step) on its own, from the definition: out[k][p], with lists of keys and plain softmax."""
    layer, attention, size = head.midlayer, head.midlayer.self_attn, head.config.head_dim

    def rope(x, position):
        half = size // 2
        angle = position / 100.0 ** (torch.arange(half, dtype=torch.float32) * 2 / size)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angle.cos().double(), angle.sin().double()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def project(token, hidden, position):
        both = torch.cat([layer.input_layernorm(head.embedding_VD[token]), layer.hidden_norm(hidden)])
        q, k, v = (getattr(attention, f"{n}_proj")(both).view(-1, size) for n in "qkv")
        return rope(q, position), rope(k, position), v

    ids, document = states.input_ids_BT, states.document_BT
    T = ids.shape[1]
    out = [[None] * len(states.last_index_P) for _ in range(steps)]
    for p, label in enumerate(states.last_index_P.tolist()):
        b, t = divmod(label - 1, T)
        begin = t - int(states.position_BT[b, t])
        assert (document[b, begin : t + 1] == document[b, t]).all()
        rows = [project(ids[b, i + 1], head.fuse(states.aux_BTAD[b, i]), i - begin) for i in range(begin, t + 1)]
        keys, values = [r[1] for r in rows], [r[2] for r in rows]
        hidden = head.fuse(states.aux_BTAD[b, t])
        for k in range(steps):
            q, own_k, own_v = project(ids[b, min(t + 1 + k, T - 1)], hidden, t - begin + k)
            if k:
                keys, values = keys + [own_k], values + [own_v]
            heads = []
            for h in range(4):
                stack_k, stack_v = torch.stack([x[h // 2] for x in keys]), torch.stack([x[h // 2] for x in values])
                heads.append(torch.softmax(stack_k @ q[h] / math.sqrt(size), 0) @ stack_v)
            mid = hidden + attention.o_proj(torch.cat(heads))
            x = layer.post_attention_layernorm(mid)
            mlp = layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
            out[k][p] = mid + mlp
            hidden = head.feedback(out[k][p])
    return [torch.stack(x) for x in out]


@pytest.mark.parametrize("rows", [PACKED, RAGGED], ids=["packed", "padded"])
@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "norms"])
def test_unroll_equals_the_naive_reference_in_value_and_gradient(rows, switches):
    head, states = make_head(**switches), make_states(rows)
    weights = [torch.randn(len(states.last_index_P), D, dtype=torch.float64) for _ in range(4)]
    results = []
    for unroll in (naive_unroll, lambda h, s, k: list(h.unroll(s, k))):
        out, counted = unroll(head, states, 4), supervised(states, 4)
        out = [torch.where(c[:, None], o, 0.0) for c, o in zip(counted, out, strict=True)]
        head.zero_grad()
        sum((o * w).sum() for o, w in zip(out, weights, strict=True)).backward()
        grads = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
        results.append((torch.stack(out), grads))
    (value, grads), (ours, our_grads) = results
    torch.testing.assert_close(ours, value, rtol=1e-10, atol=1e-12)
    assert grads.keys() == our_grads.keys() and "midlayer.self_attn.k_proj.weight" in grads
    for name in grads:
        torch.testing.assert_close(our_grads[name], grads[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("rows", [PACKED, RAGGED], ids=["packed", "padded"])
@pytest.mark.parametrize("norm_output", [False, True])
def test_step_k_equals_a_serial_decode_with_the_cache(rows, norm_output):
    """SpecForge #414 and the eager mask of speculators: rows 0..t with true states, then the head's own."""
    head, states = make_head(norm_output=norm_output), make_states(rows)
    steps, T = 5, states.input_ids_BT.shape[1]
    trained, counted = list(head.unroll(states, steps)), supervised(states, steps)
    checked = 0
    for p, label in enumerate(states.last_index_P.tolist()):
        b, t = divmod(label - 1, T)
        begin = t - int(states.position_BT[b, t])
        ids, aux = states.input_ids_BT[b : b + 1], states.aux_BTAD[b : b + 1]
        cache = head.new_cache(1, T + steps)
        out = head.step(ids[:, begin + 1 : t + 2], head.fuse(aux[:, begin : t + 1]), cache)[:, -1:]
        for k in range(steps):
            if not counted[k, p]:
                break
            if k:
                out = head.step(ids[:, t + 1 + k : t + 2 + k], head.feedback(out), cache)
            torch.testing.assert_close(trained[k][p], out[0, 0], rtol=1e-10, atol=1e-12)
            checked += 1
    assert checked == counted.sum() and counted[3].any()


def test_cache_truncation_and_reruns_leave_no_trace():
    head, states = make_head(), make_states(PACKED)
    ids, g = states.input_ids_BT[:, 1:9], head.fuse(states.aux_BTAD)[:, :8]
    fresh, used = head.new_cache(1, 12), head.new_cache(1, 12)
    whole = head.step(ids, g, fresh)
    head.step(ids[:, :5], g[:, :5], used)
    head.step(ids[:, :4], g[:, :4] * 3, used)  # drafts, then thrown away
    used.truncate(5)
    again = head.step(ids[:, 5:], g[:, 5:], used)
    torch.testing.assert_close(again, whole[:, 5:], rtol=1e-10, atol=1e-12)
    with pytest.raises(UserError, match="at most 12 tokens"):
        head.step(ids, g, used)


def test_documents_do_not_see_each_other_nor_their_place_in_the_batch():
    head = make_head()
    states = make_states(PACKED)
    parts = [(0, 12), (12, 18), (18, 24)]
    alone, names = [], ("input_ids_BT", "document_BT", "position_BT", "span_BT", "aux_BTAD")
    for a, b in parts:
        cut = {n: getattr(states, n)[:, a:b] for n in names}
        index = label_rows(cut["span_BT"])
        alone.append(list(head.unroll(replace(states, **cut, last_index_P=index), 3)))
    counted = supervised(states, 3)
    for k, out in enumerate(head.unroll(states, 3)):
        expected = torch.cat([x[k] for x in alone])
        torch.testing.assert_close(out[counted[k]], expected[counted[k]], rtol=1e-10, atol=1e-12)


def test_causality_prefix_in_prefix_out():
    """Changing token or state at row 8 touches no (t, k) that reads only earlier rows, and does touch later ones."""
    head, states = make_head(), make_states([["ppABCDEFGHIJ"]])
    ids, aux = states.input_ids_BT.clone(), states.aux_BTAD.clone()
    ids[0, 8] = (ids[0, 8] + 1) % V
    aux[0, 8] += 1
    before, after = list(head.unroll(states, 3)), list(head.unroll(replace(states, input_ids_BT=ids, aux_BTAD=aux), 3))
    anchor = states.last_index_P - 1
    for k in range(3):
        reads = anchor + 1 + k  # the last token that (t, k) reads
        assert torch.equal(before[k][reads < 8], after[k][reads < 8])
        assert (before[k][reads >= 8] != after[k][reads >= 8]).any(-1).all()


def test_later_keys_of_other_anchors_are_invisible():
    """Only its own feedback reaches an anchor at k >= 1: no gradient flows to another anchor's step-1 output."""
    head, states = make_head(), make_states(PACKED)
    outs = list(head.unroll(states, 3))
    p = 4
    grad_0, grad_1 = torch.autograd.grad(outs[2][p].sum(), [outs[0], outs[1]])
    for grad in (grad_0, grad_1):
        assert grad[p].abs().max() > 0
        grad[p] = 0
        assert grad.abs().max() == 0


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_gradcheck_through_ragged_documents(steps):
    """SpecForge PR #536: float64 gradcheck of the whole unroll, k = 0..3."""
    head, states = make_head(), make_states([["pABCu", "ppAB", "-"], ["ppABCDE", "---"]])
    names = ["fc.weight", "midlayer.self_attn.k_proj.weight", "midlayer.hidden_norm.weight"]
    counted = supervised(states, steps)

    def loss(*weights):
        swapped = {f"head.{n}": w for n, w in zip(names, weights, strict=True)}
        outs = torch.func.functional_call(_Unroll(head, states, steps), swapped)
        return sum((o[c] ** 2).sum() for o, c in zip(outs, counted, strict=True))

    parameters = dict(head.named_parameters())
    assert torch.autograd.gradcheck(loss, [parameters[n] for n in names], fast_mode=True)


class _Unroll(torch.nn.Module):
    def __init__(self, head, states, steps):
        super().__init__()
        self.head, self.states, self.steps = head, states, steps

    def forward(self):
        return list(self.head.unroll(self.states, self.steps))


def test_a_batch_without_labels_gives_zero_sums_and_zero_gradients_for_every_parameter():
    """A rank with nothing to learn must still take part in the exchange of gradients."""
    head, states = make_head(), make_states([["pppu", "pp"]])
    loss_sum, weight_sum, counts = ttt_loss(head, states, teacher(states), 3)
    loss_sum.backward()
    assert loss_sum == 0 and weight_sum == 0 and counts.total_K.sum() == 0
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in head.parameters())
