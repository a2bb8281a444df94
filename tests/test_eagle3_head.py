"""The EAGLE-3 head against transformers' Llama, its names, its start from the verifier, and its errors."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.phi.modeling_phi import PhiConfig, PhiRotaryEmbedding

from conf.errors import UserError
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.layers import RMSNorm, Rotary, rotate
from models.vocab import DraftVocab
from toy_head import A, D, V, make_config, make_head, make_states

ROPES = [
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16},
]


def llama(rope, **changes):
    torch.manual_seed(0)
    values = dict(
        hidden_size=D,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        rope_parameters=rope,
        vocab_size=V,
        num_hidden_layers=3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(LlamaConfig(**{**values, **changes})).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 0.1) + (p.dim() == 1))
    return model


def start(head, model, **switches):
    layer = model.model.layers[-1].state_dict()
    rows = model.lm_head.weight.detach()[head.vocab.ids_R]
    head.start_from_verifier(layer, model.model.norm.weight.detach(), rows, **switches)


@pytest.mark.parametrize("rope", ROPES, ids=[r["rope_type"] for r in ROPES])
def test_head_started_from_the_last_layer_repeats_transformers_logits(rope):
    """fc passes on the state that enters the last layer, so the head is the verifier's own last layer and LM head."""
    model, head = llama(rope), make_head(rope_parameters=rope)
    start(head, model)
    ids = torch.randint(V, (2, 40))
    expected = model(ids, output_hidden_states=True)
    aux = torch.stack([torch.randn(2, 40, D, dtype=torch.float64)] * (A - 1) + [expected.hidden_states[-2]], dim=2)
    cache = head.new_cache(2, 40)
    out = head.step(ids, head.fuse(aux), cache)
    wanted = expected.logits[..., head.vocab.ids_R]
    close = {"rtol": 0, "atol": 3e-6}  # transformers' norm goes through float32 whatever the input
    torch.testing.assert_close(head.logits(out), wanted, **close)
    # and one row at a time, as when drafting
    cache.truncate(30)
    for t in range(30, 40):
        out = head.step(ids[:, t : t + 1], head.fuse(aux[:, t : t + 1]), cache)
        torch.testing.assert_close(head.logits(out)[:, 0], wanted[:, t], **close)


def test_embedding_and_hidden_take_the_right_halves():
    """Weights are [embedding | hidden], each through its own norm."""
    head = make_head()
    head.midlayer.self_attn.v_proj.weight.data[:, :D] = 0
    tokens, hidden = torch.tensor([[3]]), torch.randn(1, 1, D, dtype=torch.float64)
    other = torch.tensor([[4]])
    one = head.step(tokens, hidden, head.new_cache(1, 1))
    two = head.step(other, hidden, head.new_cache(1, 1))
    assert torch.equal(one, two)  # a single row only sees its own value: the embedding half was zeroed
    three = head.step(tokens, -hidden, head.new_cache(1, 1))
    assert not torch.allclose(three, one)
    head.midlayer.self_attn.o_proj.weight.data.zero_()
    head.midlayer.mlp.down_proj.weight.data.zero_()
    assert torch.equal(head.step(tokens, hidden, head.new_cache(1, 1)), hidden)  # the residual is un-normed


def test_names_and_shapes_are_the_published_layout():
    head = make_head(fc_norm=True)
    assert {n: tuple(t.shape) for n, t in head.state_dict().items()} == {
        "fc.weight": (D, A * D),
        "fc_norm.0.weight": (D,),
        "fc_norm.1.weight": (D,),
        "fc_norm.2.weight": (D,),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.input_layernorm.weight": (D,),
        "midlayer.post_attention_layernorm.weight": (D,),
        "midlayer.self_attn.q_proj.weight": (24, 2 * D),
        "midlayer.self_attn.k_proj.weight": (12, 2 * D),
        "midlayer.self_attn.v_proj.weight": (12, 2 * D),
        "midlayer.self_attn.o_proj.weight": (D, 24),
        "midlayer.mlp.gate_proj.weight": (24, D),
        "midlayer.mlp.up_proj.weight": (24, D),
        "midlayer.mlp.down_proj.weight": (D, 24),
        "norm.weight": (D,),
        "lm_head.weight": (13, D),
    }
    assert not [n for n in make_head().state_dict() if n.startswith("fc_norm")]


def test_start_switches_are_separate_and_random_start_is_normal():
    model = llama(ROPES[0])
    random = Eagle3Head(make_config(), torch.randn(V, D), make_head().vocab)
    assert 0.01 < random.fc.weight.std() < 0.03 and (random.norm.weight == 1).all()
    head = make_head()
    before = {n: t.clone() for n, t in head.state_dict().items()}
    start(head, model, layer=False)
    changed = {n for n, t in head.state_dict().items() if not torch.equal(t, before[n])}
    assert changed == {"lm_head.weight", "norm.weight"}
    head = make_head()
    start(head, model, lm_head=False)
    after = head.state_dict()
    assert {n for n in after if torch.equal(after[n], before[n])} == {"lm_head.weight"}
    assert (after["midlayer.input_layernorm.weight"] == 1).all()
    assert (after["midlayer.self_attn.q_proj.weight"][:, :D] == 0).all()
    head = make_head()
    start(head, model, layer=False, lm_head=False)
    assert all(torch.equal(t, before[n]) for n, t in head.state_dict().items())


def test_start_refuses_another_geometry_by_name():
    head = make_head()
    with pytest.raises(UserError, match=r"mlp.gate_proj.weight should be \(24, 16\).*head.start=random"):
        start(head, llama(ROPES[0], intermediate_size=32))
    model = llama(ROPES[0])
    layer = model.model.layers[0].state_dict()
    del layer["self_attn.q_proj.weight"]
    rows = torch.zeros(13, D)
    with pytest.raises(UserError, match="found none"):
        head.start_from_verifier(layer, model.model.norm.weight, rows)
    with pytest.raises(UserError, match="LM head rows"):
        head.start_from_verifier(layer, model.model.norm.weight, rows[1:], layer=False)


def test_partial_rotary_factor_is_the_one_of_transformers():
    config = PhiConfig(hidden_size=32, num_attention_heads=4)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    rotary = Rotary(config.rope_parameters, 8, 64)
    torch.testing.assert_close(rotary.inv_freq, PhiRotaryEmbedding(config).inv_freq)
    x = torch.randn(5, 2, 8)
    turned = rotate(x, *rotary(torch.arange(5), x.dtype))
    assert torch.equal(turned[..., 4:], x[..., 4:]) and not torch.equal(turned[1:, :, :4], x[1:, :, :4])


def test_norm_is_computed_in_float32_and_frequencies_survive_a_cast():
    x = torch.randn(3, D)
    norm = RMSNorm(D, 1e-5)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), expected)
    half = norm.half()(x.half())
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), expected, rtol=2e-3, atol=2e-3)
    head = make_head().half()
    cos, _ = head.rotary(torch.tensor([60]), torch.float32)
    assert head.rotary.inv_freq.dtype == torch.float32 and cos[0, 0] == torch.tensor(60.0).cos()


def test_fc_norm_and_norm_output():
    head = make_head(fc_norm=True, norm_output=True)
    aux, out = torch.randn(2, A, D, dtype=torch.float64), torch.randn(2, D, dtype=torch.float64)
    torch.testing.assert_close(
        head.fuse(aux * torch.tensor([2.0, 5.0, 9.0])[:, None]), head.fuse(aux), atol=1e-4, rtol=1e-4
    )
    assert torch.equal(head.feedback(out), head.norm(out))
    plain = make_head()
    assert plain.feedback(out) is out
    torch.testing.assert_close(plain.fuse(aux), torch.cat([aux[:, 0], aux[:, 1], aux[:, 2]], -1) @ plain.fc.weight.T)


def test_rows_of_a_batch_are_independent():
    head, states = make_head(), make_states([["pABCDEFG"], ["ppABCDEF"]])
    g = head.fuse(states.aux_BTAD)
    both = head.step(states.input_ids_BT, g, head.new_cache(2, 8))
    for b in range(2):
        alone = head.step(states.input_ids_BT[b : b + 1], g[b : b + 1], head.new_cache(1, 8))
        torch.testing.assert_close(both[b : b + 1], alone, rtol=1e-10, atol=1e-12)


def test_config_round_trip_and_from_the_verifier():
    config = make_config(fc_norm=True)
    assert Eagle3Config.from_dict(config.to_dict()) == config
    own = ("draft_vocab_size", "aux_layers", "verifier_hidden_size", "fc_norm", "norm_output")
    geometry = {k: v for k, v in config.to_dict().items() if k not in own}
    assert Eagle3Config.from_verifier(geometry, (1, 2, 3), 13, fc_norm=True) == config
    assert (config.max_position_embeddings, config.rope_parameters) == (64, ROPES[0])  # SpecForge #249, #405


def test_errors_say_expected_and_found():
    config, vocab = make_config(), DraftVocab(torch.arange(13), V)
    with pytest.raises(UserError, match=r"expected an embedding of shape \(23, 16\), found \(22, 16\)"):
        Eagle3Head(config, torch.zeros(V - 1, D), vocab)
    with pytest.raises(UserError, match="expected a draft vocabulary of 13 of 23 ids, found 12 of 23"):
        Eagle3Head(config, torch.zeros(V, D), DraftVocab(torch.arange(12), V))
    with pytest.raises(UserError, match="captured layer"):
        make_config(aux_layers=())
    with pytest.raises(UserError, match="multiple"):
        make_config(num_key_value_heads=3)
    with pytest.raises(UserError, match="must be the verifier's 8, found 16"):
        make_config(verifier_hidden_size=8)
    with pytest.raises(UserError, match="unknown keys.*layers"):
        Eagle3Config.from_dict({**config.to_dict(), "layers": 2})
    with pytest.raises(UserError, match="missing keys.*vocab_size"):
        Eagle3Config.from_dict({k: v for k, v in config.to_dict().items() if k != "vocab_size"})
    with pytest.raises(UserError, match="found 'longrope'"):
        make_head(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    with pytest.raises(UserError, match="needs rope_theta"):
        make_head(rope_parameters={"full_attention": {"rope_theta": 1e4}})
    with pytest.raises(UserError, match="found 'swoosh'"):
        make_head(hidden_act="swoosh")


def test_a_verifier_in_another_dtype_is_read_in_the_heads_own():
    head = make_head().float()
    head.embedding_VD = head.embedding_VD.half()
    states = make_states([["ppABCD"]])
    out = next(head.unroll(replace(states, aux_BTAD=states.aux_BTAD.half()), 1))
    assert out.dtype == torch.float32 and out.isfinite().all()
