"""The verifier adapter against transformers' own forward, and against arithmetic done by hand."""

import pytest
import torch

from conf.errors import UserError
from models import packed
from models.states import label_rows
from models.tree import TreeRows
from models.verifier import Verifier
from tiny import FAMILIES, tiny_model, tiny_tokenizer, tiny_verifier

LENGTHS = (13, 5, 20)
CLOSE = {"atol": 3e-5, "rtol": 1e-4}


def packed_row(lengths=LENGTHS, pads=2, vocab=512):
    """One row of documents with pads at the end: ids, documents, positions, each [1, T]."""
    total = sum(lengths) + pads
    ids = torch.randint(3, vocab, (1, total))
    document = torch.tensor([[d for d, n in enumerate(lengths) for _ in range(n)] + [-1] * pads])
    position = torch.tensor([[t for n in lengths for t in range(n)] + [0] * pads])
    return ids, document, position


def adding_toy(layers=9):
    """A verifier whose block i adds i to the residual stream: attention writes nothing, the MLP is its bias."""
    model = tiny_model("llama", layers=layers, mlp_bias=True)
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
        layer.mlp.down_proj.bias.data.fill_(float(i))
    model.model.embed_tokens.weight.data.round_()  # so that the sums are exact
    return Verifier(model, tiny_tokenizer(), "adding")


def test_captured_values_are_the_stream_entering_each_layer():
    verifier = adding_toy()
    assert verifier.aux_layers == (2, 4, 6)
    ids, document, position = packed_row()
    captured = verifier.capture(ids, document, position)
    start = verifier.embedding_VD[ids]
    for a, layer in enumerate(verifier.aux_layers):
        right = start + sum(range(layer))
        assert torch.equal(captured.aux_BTAD[:, :, a], right)
        assert not torch.equal(captured.aux_BTAD[:, :, a], right + layer)  # the output of the layer is another
        assert not torch.equal(captured.aux_BTAD[:, :, a], right - (layer - 1))
    end = start + sum(range(verifier.num_layers))
    torch.testing.assert_close(captured.last_BTD, verifier.final_norm(end))


@pytest.mark.parametrize("family", [*FAMILIES, "granite", "cohere", "gpt_oss"])
def test_packed_capture_and_logits_equal_each_document_alone(family):
    reference, verifier = tiny_model(family), tiny_verifier(family)
    ids, document, position = packed_row()
    captured = verifier.capture(ids, document, position)
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        with torch.no_grad():
            alone = reference(ids[:, part], output_hidden_states=True)
        for a, layer in enumerate(verifier.aux_layers):
            torch.testing.assert_close(captured.aux_BTAD[:, part, a], alone.hidden_states[layer], **CLOSE)
            assert (captured.aux_BTAD[:, part, a] - alone.hidden_states[layer + 1]).abs().max() > 0.05
        torch.testing.assert_close(captured.last_BTD[:, part], alone.hidden_states[-1], **CLOSE)
        torch.testing.assert_close(verifier.logits(captured.last_BTD[:, part]), alone.logits, **CLOSE)
        start += length


def test_other_documents_and_pads_do_not_leak():
    verifier = tiny_verifier("mistral")
    ids, document, position = packed_row()
    before = verifier.capture(ids, document, position)
    ids[:, :13], ids[:, 38:] = 7, 9
    after = verifier.capture(ids, document, position)
    assert torch.equal(before.aux_BTAD[:, 13:38], after.aux_BTAD[:, 13:38])
    assert torch.equal(before.last_BTD[:, 13:38], after.last_BTD[:, 13:38])
    assert not torch.allclose(before.last_BTD[:, :13], after.last_BTD[:, :13])


def test_batch_of_packed_rows_equals_one_by_one():
    verifier = tiny_verifier()
    rows = [packed_row((4, 6), pads=2), packed_row((12,), pads=0), packed_row((1, 1, 9), pads=1)]
    ids, document, position = (torch.cat(x) for x in zip(*rows, strict=True))
    together = verifier.capture(ids, document, position)
    for b, row in enumerate(rows):
        real = row[1][0] >= 0
        alone = verifier.capture(*row)
        torch.testing.assert_close(together.last_BTD[b, real], alone.last_BTD[0, real], **CLOSE)
        torch.testing.assert_close(together.aux_BTAD[b, real], alone.aux_BTAD[0, real], **CLOSE)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_ragged_decode_equals_each_sequence_alone(family):
    reference, verifier = tiny_model(family), tiny_verifier(family)
    prompts = [torch.randint(3, 512, (n,)) for n in LENGTHS]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    cache = verifier.new_cache(3, 24)
    first = verifier.decode(cache, padded, count_B=LENGTHS, logits="last")
    more, counts = torch.randint(3, 512, (3, 4)), (4, 2, 3)
    second = verifier.decode(cache, more, count_B=counts)
    assert cache.length_B == [n + c for n, c in zip(LENGTHS, counts, strict=True)]
    for b, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        with torch.no_grad():
            alone = reference(torch.cat([prompt, more[b, :count]])[None], output_hidden_states=True)
        n = len(prompt)
        torch.testing.assert_close(first.logits[b], alone.logits[0, n - 1], **CLOSE)
        torch.testing.assert_close(second.logits[b, :count], alone.logits[0, n:], **CLOSE)
        torch.testing.assert_close(second.last_BTD[b, :count], alone.hidden_states[-1][0, n:], **CLOSE)
        for a, layer in enumerate(verifier.aux_layers):
            torch.testing.assert_close(second.aux_BTAD[b, :count, a], alone.hidden_states[layer][0, n:], **CLOSE)


def test_junk_rows_are_invisible_and_rollback_forgets():
    verifier = tiny_verifier()

    def run(junk: int, detour: bool):
        cache = verifier.new_cache(2, 12)
        tokens = torch.tensor([[5, 6, 7, 8], [9, junk, junk, junk]])
        verifier.decode(cache, tokens, count_B=[4, 1])
        if detour:
            verifier.decode(cache, torch.full((2, 3), junk), logits="none", capture=False)
            cache.truncate([4, 1])
        return verifier.decode(cache, torch.tensor([[10, 11], [12, 13]])).logits

    right = run(3, False)
    assert torch.equal(right, run(400, False))
    assert torch.equal(right, run(401, True))


def test_full_cache_with_junk_past_the_end_stays_finite():
    verifier = tiny_verifier("gemma2", sliding_window=2)  # no fused kernel that forgives an empty softmax
    cache, alone = verifier.new_cache(2, 6), verifier.new_cache(1, 6)
    prompts, more = torch.randint(3, 512, (2, 5)), torch.randint(3, 512, (2, 4))
    verifier.decode(cache, prompts, count_B=[5, 2])
    verifier.decode(alone, prompts[:1])
    out = verifier.decode(cache, more, count_B=[1, 4])
    assert cache.length_B == [6, 6] and out.logits.isfinite().all()
    torch.testing.assert_close(out.logits[0, 0], verifier.decode(alone, more[:1, :1]).logits[0, 0], **CLOSE)
    with pytest.raises(UserError, match="at most 6 tokens"):
        verifier.decode(cache, torch.randint(3, 512, (2, 1)))
    idle = verifier.new_cache(2, 6)
    out = verifier.decode(idle, torch.randint(3, 512, (2, 3)), count_B=[3, 0])
    out = verifier.decode(idle, torch.randint(3, 512, (2, 3)), count_B=[0, 3])
    assert idle.length_B == [3, 3] and out.logits.isfinite().all()


@pytest.mark.parametrize(("family", "window"), [("llama", None), ("mistral", 8), ("mistral", 2), ("gemma2", 2)])
def test_tree_decode_equals_a_chain_along_every_path(family, window):
    verifier = tiny_verifier(family, **({"sliding_window": window} if window else {}))
    prompts, prefix = torch.randint(3, 512, (2, 11)), [11, 6]
    parents = [-1, 0, 0, 1, 2, 4]  # paths 0-1-3 and 0-2-4-5
    nodes = torch.randint(3, 512, (2, 6))
    cache = verifier.new_cache(2, 24)
    verifier.decode(cache, prompts, count_B=prefix, logits="none")
    tree = verifier.decode(cache, nodes, tree=TreeRows.of(torch.tensor([parents])))
    for path in ([0, 1, 3], [0, 2, 4, 5]):
        chain = verifier.new_cache(2, 24)
        verifier.decode(chain, prompts, count_B=prefix, logits="none")
        alone = verifier.decode(chain, nodes[:, path])
        torch.testing.assert_close(tree.logits[:, path], alone.logits, **CLOSE)
        torch.testing.assert_close(tree.aux_BTAD[:, path], alone.aux_BTAD, **CLOSE)
    cache.accept_paths([[0, 2, 4, 5], [0, 2]])
    assert cache.length_B == [15, 8]
    chain.truncate([15, 8])
    following = torch.randint(3, 512, (2, 2))
    after_tree, after_chain = verifier.decode(cache, following), verifier.decode(chain, following)
    torch.testing.assert_close(after_tree.logits, after_chain.logits, **CLOSE)


def test_tree_of_one_branch_is_the_chain():
    verifier = tiny_verifier()
    prompt, nodes = torch.randint(3, 512, (1, 5)), torch.randint(3, 512, (1, 4))
    logits = []
    for tree in (None, TreeRows.of(torch.tensor([[-1, 0, 1, 2]]))):
        cache = verifier.new_cache(1, 16)
        verifier.decode(cache, prompt)
        logits.append(verifier.decode(cache, nodes, tree=tree).logits)
    torch.testing.assert_close(*logits, **CLOSE)


def test_states_hold_the_law_at_the_label_rows():
    verifier = tiny_verifier()
    ids, document, position = packed_row()
    span = torch.full_like(ids, -1)
    span[0, 4:10], span[0, 15:18], span[0, 20:38] = 0, 1, 2
    states = verifier.states(ids, document, position, span)
    assert torch.equal(states.last_index_P, label_rows(span)) and len(states.last_index_P) == 5 + 2 + 17
    full = verifier.logits(verifier.capture(ids, document, position).last_BTD)[0, states.last_index_P]
    assert torch.equal(states.top_P, full.argmax(-1))
    torch.testing.assert_close(states.lse_P, full.logsumexp(-1), **CLOSE)
    assert states.lse_P.dtype == torch.float32 and not states.last_PD.requires_grad
    none = verifier.states(ids, document, position, torch.full_like(ids, -1))
    assert none.top_P.shape == (0,) and none.top_P.dtype == torch.int64


def test_logits_of_some_ids_and_of_the_last_row():
    verifier = tiny_verifier("gemma2")
    ids_R = torch.tensor([3, 7, 400])
    hidden = torch.randn(5, verifier.hidden_size)
    torch.testing.assert_close(verifier.logits(hidden, ids_R), verifier.logits(hidden)[:, ids_R], **CLOSE)
    assert torch.equal(verifier.lm_head_rows(ids_R), verifier.lm_head.weight[ids_R])
    tokens = torch.randint(3, 512, (2, 4))
    full = verifier.decode(verifier.new_cache(2, 8), tokens)
    last = verifier.decode(verifier.new_cache(2, 8), tokens, count_B=[4, 2], logits="last", capture=False)
    torch.testing.assert_close(last.logits, torch.stack([full.logits[0, 3], full.logits[1, 1]]), **CLOSE)
    assert last.aux_BTAD is None
    with pytest.raises(UserError, match="found 'some'"):
        verifier.decode(verifier.new_cache(2, 8), tokens, logits="some")


@pytest.mark.parametrize(("rows", "shape"), [(1, (40, 64)), (3, (64, 24)), (17, (300, 64))])
def test_packed_linear_equals_the_plain_one(rows, shape):
    plain = torch.nn.Linear(shape[1], shape[0], bias=rows == 3).requires_grad_(False)
    if not packed.can_pack(plain.weight):
        pytest.skip("no oneDNN on this machine")
    layer = packed.PackedLinear(plain)
    x = torch.randn(rows, shape[1])
    torch.testing.assert_close(layer(x), plain(x), **CLOSE)
    torch.testing.assert_close(layer(x[None].transpose(0, 1)), plain(x[None].transpose(0, 1)), **CLOSE)
    assert layer.state_dict().keys() == plain.state_dict().keys() and layer.weight is plain.weight


@pytest.mark.skipif(not packed.native_bfloat16(), reason="packs bfloat16 where the CPU multiplies it")
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_packed_bfloat16_is_as_near_as_bfloat16_comes(rows):
    plain = torch.nn.Linear(64, 96).bfloat16().requires_grad_(False)
    x = torch.randn(rows, 64).bfloat16()
    exact = plain.weight.double() @ x.double().T
    exact = exact.T + plain.bias.double()
    torch.testing.assert_close(packed.PackedLinear(plain)(x).double(), exact, rtol=2**-7, atol=2**-7)


def test_models_too_large_to_hold_twice_are_not_packed(monkeypatch):
    monkeypatch.setattr(packed, "MAX_BYTES", 1000)
    assert packed.pack_linears(tiny_model()) == 0


def test_layer_weights_come_under_plain_names():
    fused = tiny_verifier("phi3")
    layer = fused.layer_state_dict(3)
    assert torch.equal(layer["self_attn.k_proj.weight"], fused.layers[3].self_attn.qkv_proj.weight[64:96])
    assert torch.equal(layer["mlp.up_proj.weight"], fused.layers[3].mlp.gate_up_proj.weight[128:])
    llama = tiny_verifier("llama").layer_state_dict()
    assert {n: tuple(t.shape) for n, t in layer.items()} == {n: tuple(t.shape) for n, t in llama.items()}
    gemma = tiny_verifier("gemma2")
    gemma.final_norm.weight.data.uniform_(-0.5, 0.5)
    assert torch.equal(gemma.final_norm_weight, gemma.final_norm.weight + 1)
    geometry = gemma.head_geometry
    assert geometry["hidden_act"] == "gelu_pytorch_tanh" and geometry["rope_parameters"]["rope_theta"] == 10000.0
    assert (geometry["head_dim"], geometry["num_key_value_heads"], geometry["vocab_size"]) == (16, 2, 512)


def test_the_same_model_with_other_captured_layers():
    """Both go on working side by side, on one set of weights."""
    verifier = tiny_verifier("llama", layers=8, hidden=32, vocab=300, aux_layers=(2, 5))
    other = verifier.capturing((1, 2, 8))
    assert other.embedding_VD is verifier.embedding_VD and other.weights_hash == verifier.weights_hash
    ids = torch.arange(6)[None]
    one, two = (v.capture(ids, ids * 0, ids) for v in (verifier, other))
    assert one.aux_BTAD.shape[2] == 2 and two.aux_BTAD.shape[2] == 3
    assert torch.equal(one.aux_BTAD[:, :, 0], two.aux_BTAD[:, :, 1]) and torch.equal(
        two.aux_BTAD[:, :, 2], two.last_BTD
    )
