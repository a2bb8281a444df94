"""Every back end of the anchors' attention against one softmax over all keys, written down plainly."""

from dataclasses import replace

import pytest
import torch

from models.anchor_attention import BACKENDS, attention_of
from models.layout import document_runs
from models.losses import head_loss
from models.objectives import Labels, Objective
from models.supervision import supervised
from toy_head import D, make_head, make_other, make_states, teacher, ttt_loss

H, HEADS, F = 4, 2, 6
ROWS = {
    "several turns": [["ppABCuuDEFGu", "pABCDE", "ppu"]],
    "padded": [["pppABCDEFG", "--------"], ["ppABCuuDEFGu", "pABCDE"]],
    "opens with an answer": [["ABCDuuEF", "pABCDE"]],
    "no answer": [["ppp", "pp"]],
}


def parts(states, steps, dtype=torch.float64, seed=0):
    """Queries, step-0 keys and values, and own ones of steps 1..steps."""
    generator = torch.Generator().manual_seed(seed)
    P, N = len(states.last_index_P), states.input_ids_BT.numel()

    def some(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    own = [[some(P, HEADS, F) for _ in range(steps)] for _ in range(2)]
    return some(P, H, F), some(N, HEADS, F), some(N, HEADS, F), *own


def naive(states, q, k, v, own_k, own_v):
    """One anchor and one head at a time."""
    document, out = states.document_BT.flatten().tolist(), []
    for p, t in enumerate(states.layout.anchor_P.tolist()):
        rows = [row for row in range(t + 1) if document[row] == document[t]]
        heads = []
        for h in range(H):
            group = h // (H // HEADS)
            keys = torch.stack([*k[rows, group], *(x[p, group] for x in own_k)])
            values = torch.stack([*v[rows, group], *(x[p, group] for x in own_v)])
            heads.append(torch.softmax(keys @ q[p, h] * F**-0.5, 0) @ values)
        out.append(torch.stack(heads))
    return torch.stack(out) if out else q * 0


def results(attend, inputs):
    q, k, v, own_k, own_v = inputs
    out = attend(q, k, v, own_k, own_v)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [q, k, v, *own_k, *own_v]
    return out.detach(), torch.autograd.grad((out * weight).sum(), leaves, materialize_grads=True)


def counted_anchors(states):
    """An answer's token that opens its document has no anchor; what stands in its slot means nothing."""
    return supervised(states, 1)[0]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("backend", ["dense", "flash", "mixed"])
def test_value_and_gradient_equal_the_plain_softmax(backend, rows, steps, monkeypatch):
    """SpecForge PR #536: a gradient by hand through a merge of log-sum-exps."""
    monkeypatch.setitem(BACKENDS, "mixed", lambda states: BACKENDS["dense"].func(2 * 4 * 7, states))  # some runs each
    states = make_states(rows)
    inputs = parts(states, steps)
    value, grads = results(lambda *x: naive(states, *x), inputs)
    found, ours = results(attention_of(states, backend), inputs)
    torch.testing.assert_close(found, value, rtol=1e-10, atol=1e-12)
    for mine, expected in zip(ours, grads, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["dense", "flash"])
def test_gradcheck(backend):
    states = make_states([["ppABuCD", "pABC"]])
    q, k, v, own_k, own_v = parts(states, 2)
    attend = attention_of(states, backend)
    assert torch.autograd.gradcheck(
        lambda q, k, v, a, b, c, d: attend(q, k, v, [a, b], [c, d]), (q, k, v, *own_k, *own_v), fast_mode=True
    )


@pytest.mark.parametrize("rows", [ROWS["several turns"], ROWS["padded"]])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_gives_the_same_values(rows):
    """Its gradient needs CUDA: `make gpu-check`."""
    states = make_states(rows)
    with torch.no_grad():
        q, k, v, *own = parts(states, 2)
        inputs = q.detach(), k.detach(), v.detach(), *([x.detach() for x in some] for some in own)
        found, expected = (attention_of(states, name)(*inputs) for name in ("flex", "dense"))
    mask = counted_anchors(states)
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-10, atol=1e-12)


def test_long_runs_take_the_fused_kernel_and_agree_in_bfloat16():
    states = make_states([["pp" + "A" * 120 + "uu" + "B" * 60]])
    exact = results(attention_of(states, "dense"), parts(states, 2))
    for backend in ("dense", "flash"):
        rough = results(attention_of(states, backend), parts(states, 2, torch.bfloat16))
        for mine, expected in zip((rough[0], *rough[1]), (exact[0], *exact[1]), strict=True):
            assert mine.dtype == torch.bfloat16
            assert (mine.double() - expected).norm() < 0.02 * expected.norm()


def test_layout_of_packed_documents():
    states = make_states([["ppABCuuDEFu", "ABC", "pABCD"]])
    runs = states.layout.runs
    # (document's first row, rows of anchors, number of the first); the first label of "ABC" has no anchor of its own
    assert [tuple(run) for run in runs] == [
        (0, 1, 3, 0),
        (0, 6, 8, 2),
        (0, 10, 11, 4),
        (11, 11, 12, 5),
        (14, 14, 17, 6),
    ]
    assert states.layout.position_P.tolist() == [1, 2, 6, 7, 10, 0, 0, 1, 2]
    assert sum(run.count for run in runs) == len(states.last_index_P)
    assert states.layout.documents == ((0, 0, 11), (0, 11, 14), (0, 14, 19))
    moved = states.to("cpu").layout
    assert moved.runs == runs and moved.documents == states.layout.documents


def test_documents_of_padded_rows():
    """Neighbours by the flat row that are documents of two rows; pads at the ends, and a row of nothing else."""
    document_BT = torch.tensor([[0, 0, 1, 1], [2, -1, -1, -1], [-1, -1, -1, -1], [3, 3, 3, 3], [3, 4, 4, -1]])
    assert document_runs(document_BT) == ((0, 0, 2), (0, 2, 4), (1, 0, 1), (3, 0, 4), (4, 0, 1), (4, 1, 3))
    assert document_runs(document_BT[:, :0]) == ()


@pytest.mark.parametrize(("kind", "K"), [("eagle3", 3), ("eagle1", 3), ("medusa", 5), ("independent", 1)])
def test_a_step_asks_the_device_nothing(kind, K):
    """Under fake tensors everything that would read a value from the device raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    head, states = make_head() if kind == "eagle3" else make_other(kind), make_states(ROWS["padded"])
    states = states if kind == "eagle3" else replace(states, aux_BTAD=states.aux_BTAD[:, :, :1])
    weight = torch.randn(len(head.vocab), D, dtype=torch.float64)
    layout = states.layout
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def fake(x):
            return mode.from_tensor(x)

        head = head._apply(fake)
        if hasattr(head, "rotary"):
            head.rotary.inv_freq = fake(head.rotary.inv_freq)
        states = replace(states, **{name: fake(x) for name, x in vars(states).items() if isinstance(x, torch.Tensor)})
        states.__dict__["layout"] = replace(layout, anchor_P=fake(layout.anchor_P), position_P=fake(layout.position_P))
        weight = fake(weight)
        with pytest.raises(Exception, match="item|data-dependent|_local_scalar_dense"):
            states.last_index_P[0].item()
        for weights in ("decay", "vat"):
            labels = Labels.given(states, lambda hidden: hidden @ weight.T, K)
            objective = Objective(steps=K, weights=weights, noise=0.1, feature_weight=0.1)
            loss, _, _ = head_loss(head, states, labels, objective)
            loss.backward()
    assert not [name for name, p in head.named_parameters() if p.grad is None or p.grad.shape != p.shape]


def test_no_tensor_of_a_step_is_as_large_as_all_scores_or_all_logits(monkeypatch):
    """SpecForge #112: memory of a step has no [P, T] and no [P, R] term."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = {"any": 0, "logits": 0}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor):
                    kind = "logits" if x.shape[-1:] == (R,) else "any"
                    largest[kind] = max(largest[kind], x.numel())
            return out

    monkeypatch.setattr("models.token_loss.BLOCK_LOGITS", 2**12)
    R, K, head, states = 19, 4, make_head(R=19), make_states([["p" + "A" * 400]])
    head.attention = "flash"
    teacher_PR, P = teacher(states, R=R), len(states.last_index_P)
    with Watch():
        ttt_loss(head, states, teacher_PR, K)[0].backward()
    assert 0 < largest["logits"] <= 2**12 < K * P * R / 7
    assert largest["any"] <= K * (P + 1) * 24 < P * 401 / 4  # layer activations of all steps side by side, at most
