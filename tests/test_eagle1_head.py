"""The EAGLE-1 head: its layer against transformers' Llama layer, training against a serial decode, what is frozen."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from conf.errors import UserError
from models.supervision import supervised
from toy_head import D, V, make_other, make_states

PACKED = [["ppABCuuDEFGu", "pABCDE", "ppppAB", "ppu"]]
RAGGED = [["ppABCuuDEFGu", "pABCDE", "----"], ["pppABCDEFG", "------------"]]


def one_state(rows):
    states = make_states(rows)
    return replace(states, aux_BTAD=states.aux_BTAD[:, :, :1])


def test_a_step_is_fc_and_transformers_layer_without_its_input_norm():
    head = make_other("eagle1")
    config = LlamaConfig(
        hidden_size=D, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        rms_norm_eps=1e-5, max_position_embeddings=64, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )  # fmt: skip
    layer = LlamaDecoderLayer(config, 0).double().eval()
    layer.input_layernorm = nn.Identity()
    missing = layer.load_state_dict(head.layers[0].state_dict(), strict=True)
    assert not missing.missing_keys
    tokens, feature = torch.randint(V, (2, 9)), torch.randn(2, 9, D, dtype=torch.float64)
    x = torch.cat([head.embedding_VD[tokens], feature], -1) @ head.fc.weight.T
    position = torch.arange(9)[None].expand(2, -1)
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    angles = LlamaRotaryEmbedding(config)(x, position)
    with torch.no_grad():
        expected = layer(x, attention_mask=mask, position_ids=position, position_embeddings=angles)
        out = head.step(tokens, head.fuse(feature[:, :, None]), head.new_cache(2, 9))
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)  # transformers' norm goes through float32
    torch.testing.assert_close(head.logits(out), out @ head.lm_head_VD.T)  # no norm in between
    assert head.feedback(out) is out


@pytest.mark.parametrize("rows", [PACKED, RAGGED], ids=["packed", "padded"])
def test_step_k_equals_a_serial_decode_with_the_cache(rows):
    head, states = make_other("eagle1"), one_state(rows)
    steps, T = 4, states.input_ids_BT.shape[1]
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


def test_what_is_trained_and_what_is_the_verifiers():
    head = make_other("eagle1")
    names = set(head.state_dict())
    assert names == {n for n, _ in head.named_parameters()} and "fc.weight" in names
    assert not [n for n in names if "norm" in n and "post_attention" not in n] and "lm_head.weight" not in names
    assert not head.lm_weight.requires_grad and not head.embedding_VD.requires_grad
    with pytest.raises(UserError, match="head.start=random"):
        head.start(None, -1)


def test_settings_that_cannot_be_are_said():
    config = make_other("eagle1").config
    for changes, message in (
        ({"aux_layers": (1, 2)}, r"reads the last hidden state alone, found layers \[1, 2\]"),
        ({"draft_vocab_size": 7}, "over all 23 ids, found 7"),
    ):
        with pytest.raises(UserError, match=message):
            replace(config, **changes)


def test_a_float32_head_drafts_over_a_narrow_verifier():
    """The LM head is the verifier's own tensor, in its dtype."""
    head = make_other("eagle1").float()
    head.lm_head_VD = head.lm_head_VD.bfloat16()
    assert head.logits(torch.randn(2, D)).dtype == torch.bfloat16
