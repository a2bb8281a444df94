"""Heads in the published layouts, made by hand, against their mathematics written out here once more.

The layouts are those of SafeAI's EAGLE checkpoints. Nothing of ours computes the expected logits: one row at a time, in
float64, with keys and values in lists.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from models.export.native import attach
from models.export.warm import read_any
from tiny import tiny_verifier

D, HEADS, KV, F, MLP, V, R, EPS, THETA = 32, 4, 2, 8, 48, 300, 90, 1e-5, 10000.0
IDS = torch.arange(R) * 3 + 1
TOKENS = torch.tensor([[5, 17, 200, 31, 8, 299, 44]])
DRAFTS = (7, 120)


def verifier_with(layers):
    sizes = {"intermediate_size": MLP, "num_key_value_heads": KV, "rms_norm_eps": EPS}
    return tiny_verifier("llama", layers=8, hidden=D, vocab=V, aux_layers=layers, **sizes)


def tensors_of(layer, inputs):
    """One decoder layer by the published names."""
    shapes = {
        f"{layer}.self_attn.q_proj.weight": (HEADS * F, inputs),
        f"{layer}.self_attn.k_proj.weight": (KV * F, inputs),
        f"{layer}.self_attn.v_proj.weight": (KV * F, inputs),
        f"{layer}.self_attn.o_proj.weight": (D, HEADS * F),
        f"{layer}.mlp.gate_proj.weight": (MLP, D),
        f"{layer}.mlp.up_proj.weight": (MLP, D),
        f"{layer}.mlp.down_proj.weight": (D, MLP),
    }
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    return tensors | {f"{layer}.post_attention_layernorm.weight": 1 + 0.3 * torch.randn(D)}


def write(folder, tensors, **values):
    config = {"model_type": "llama", "hidden_size": D, "intermediate_size": MLP, "num_attention_heads": HEADS}
    config |= {"num_key_value_heads": KV, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": EPS}
    config |= {"hidden_act": "silu", "max_position_embeddings": 512, "rope_theta": THETA, "tie_word_embeddings": False}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | values))
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- the mathematics, once more -------------------------------------------------------------------------------


def rms(x, weight):
    return x / (x.pow(2).mean() + EPS).sqrt() * weight


def rotated(x, position):
    """x [heads, F]: pairs are (i, i + F/2)."""
    angle = position / THETA ** (torch.arange(0, F, 2, dtype=torch.float64) / F)
    a, b = x[:, : F // 2], x[:, F // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], 1)


def layer_row(t, layer, x, residual, position, keys, values):
    """One row through attention over all rows so far and the MLP. x: what q, k and v read."""
    q = rotated((t[f"{layer}.self_attn.q_proj.weight"] @ x).view(HEADS, F), position)
    keys.append(rotated((t[f"{layer}.self_attn.k_proj.weight"] @ x).view(KV, F), position))
    values.append((t[f"{layer}.self_attn.v_proj.weight"] @ x).view(KV, F))
    heads = []
    for head in range(HEADS):
        group = head * KV // HEADS
        score = torch.stack([q[head] @ key[group] / F**0.5 for key in keys])
        heads.append(sum(p * value[group] for p, value in zip(score.softmax(0), values, strict=True)))
    hidden = residual + t[f"{layer}.self_attn.o_proj.weight"] @ torch.cat(heads)
    y = rms(hidden, t[f"{layer}.post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(t[f"{layer}.mlp.gate_proj.weight"] @ y)
    return hidden + t[f"{layer}.mlp.down_proj.weight"] @ (gate * (t[f"{layer}.mlp.up_proj.weight"] @ y))


def eagle3_row(t, embedding, token, hidden, position, keys, values):
    normed = rms(hidden, t["midlayer.hidden_norm.weight"])
    x = torch.cat([rms(embedding[token], t["midlayer.input_layernorm.weight"]), normed])
    return layer_row(t, "midlayer", x, hidden, position, keys, values)


def eagle1_row(t, embedding, token, hidden, position, keys, values):
    x = t["fc.weight"] @ torch.cat([embedding[token], hidden])
    return layer_row(t, "layers.0", x, x, position, keys, values)


def expected_logits(row, t, embedding, hiddens, final):
    """Draft logits after every true row, then after two drafts that read the head's own output."""
    t = {name: tensor.double() for name, tensor in t.items() if name not in ("d2t", "t2d")}
    embedding, keys, values, logits, out = embedding.double(), [], [], [], None
    for position, (token, hidden) in enumerate(zip(TOKENS[0].tolist(), hiddens(t), strict=True)):
        out = row(t, embedding, token, hidden, position, keys, values)
        logits.append(final(t, out))
    for step, token in enumerate(DRAFTS):
        out = row(t, embedding, token, out, len(TOKENS[0]) + step, keys, values)
        logits.append(final(t, out))
    return torch.stack(logits)


def found_logits(head, aux):
    """The same from our head as the loop runs it: one pass, then a row at a time."""
    cache = head.new_cache(1, 16)
    out = head.step(TOKENS, head.fuse(aux), cache)
    logits = [head.logits(out)[0]]
    for token in DRAFTS:
        out = head.step(torch.tensor([[token]]), head.feedback(out[:, -1:]), cache)
        logits.append(head.logits(out)[0])
    return torch.cat(logits)


@torch.no_grad()
@pytest.mark.parametrize("identity", [False, True])
def test_an_eagle3_head_by_hand(tmp_path, identity):
    verifier = verifier_with((2, 4, 5))
    rows = V if identity else R
    tensors = tensors_of("midlayer", 2 * D) | {"fc.weight": torch.randn(D, 3 * D) * 0.2}
    tensors |= {name: 1 + 0.3 * torch.randn(D) for name in ("norm.weight", "midlayer.hidden_norm.weight")}
    tensors |= {"midlayer.input_layernorm.weight": 1 + 0.3 * torch.randn(D), "lm_head.weight": torch.randn(rows, D)}
    if not identity:
        tensors |= {"d2t": IDS - torch.arange(R), "t2d": torch.isin(torch.arange(V), IDS)}
    values = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": rows}
    head = attach(read_any(write(tmp_path / "head", tensors, **values), verifier), verifier)
    assert torch.equal(head.vocab.ids_R, torch.arange(V) if identity else IDS)
    aux = torch.randn(1, len(TOKENS[0]), 3, D)
    expected = expected_logits(
        eagle3_row,
        tensors,
        verifier.embedding_VD,
        lambda t: [t["fc.weight"] @ state.flatten().double() for state in aux[0]],
        lambda t, out: t["lm_head.weight"] @ rms(out, t["norm.weight"]),
    )
    torch.testing.assert_close(found_logits(head, aux).double(), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_an_eagle1_head_by_hand(tmp_path):
    verifier = verifier_with((8,))
    tensors = tensors_of("layers.0", D) | {"fc.weight": torch.randn(D, 2 * D) * 0.2}
    folder = write(tmp_path / "head", tensors, architectures=["LlamaForCausalLM"])
    head = attach(read_any(folder, verifier), verifier)
    aux = torch.randn(1, len(TOKENS[0]), 1, D)
    expected = expected_logits(
        eagle1_row,
        tensors,
        verifier.embedding_VD,
        lambda t: [state[0].double() for state in aux[0]],
        lambda t, out: verifier.lm_head_rows().double() @ out,
    )
    torch.testing.assert_close(found_logits(head, aux).double(), expected, rtol=1e-4, atol=1e-4)
