"""Every family of verifiers: its states, and heads of every kind that are built, learn a little, and decode exactly."""

from dataclasses import fields
from functools import lru_cache

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlamaConfig, LlavaConfig
from transformers.models.siglip import SiglipVisionConfig

from conf.errors import UserError
from data.batches import OnlineStates, packed_rows
from data.documents import Document
from data.generate import Request, generate
from data.store import StateStore, bytes_needed
from eval.speculative.loop import plain_decode, speculative_decode
from eval.speculative.processors import Sampling
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree
from models import heads
from models.layers import Rotary
from models.losses import head_loss
from models.objectives import Labels, Objective
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import FAMILIES, tiny_model, tiny_tokenizer, tiny_verifier

MORE = ("gemma", "gemma3_text", "qwen3_moe", "phi", "nested")
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3")
LLAMAS = {
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "nested",
}  # layers that a head's can start from
CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # some families go through float32 whatever the input
GREEDY = Sampling()
EXTRA = {
    "phi": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "deepseek_v3": {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24,
        "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
    },
}  # fmt: skip


def model_of(family):
    """A tiny float64 model; "nested": a vision model, whose text half is a Llama."""
    if family != "nested":
        dtype = torch.float32 if family in EXPERTS else torch.float64  # grouped products know no float64
        return tiny_model(family, layers=7, dtype=dtype, **EXTRA.get(family, {}))
    text = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()


@lru_cache
def driven(family):
    """One model for all tests that change none of it; each Verifier has its own hooks."""
    return model_of(family)


def verifier_of(family, aux_layers=None):
    return Verifier(driven(family), tiny_tokenizer(), f"tiny-{family}", aux_layers)


@lru_cache
def plain_text(family):
    """(prompt, what the verifier alone goes on with)."""
    prompt = torch.randint(6, 300, (7,), generator=torch.Generator().manual_seed(1)).tolist()
    return prompt, plain_decode(verifier_of(family, []), prompt, max_new_tokens=8, sampling=GREEDY).tokens


@pytest.mark.parametrize("family", [*FAMILIES, *MORE, "deepseek_v3"])
def test_states_and_logits_are_transformers_own(family):
    reference, ids = model_of(family), torch.randint(6, 300, (1, 20))
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True)
    for layers in ([0, 3, -1], []):
        verifier = verifier_of(family, layers)
        captured = verifier.capture(ids, torch.zeros_like(ids), torch.arange(20)[None])
        assert captured.aux_BTAD.shape == (1, 20, len(layers), 64)
        for a, layer in enumerate(layers):
            torch.testing.assert_close(captured.aux_BTAD[:, :, a], expected.hidden_states[layer], **CLOSE)
        torch.testing.assert_close(captured.last_BTD, expected.hidden_states[-1], **CLOSE)
        close = {"rtol": 1e-5, "atol": 1e-5}  # logits are float32
        torch.testing.assert_close(verifier.logits(captured.last_BTD), expected.logits.float(), **close)
        cache = verifier.new_cache(1, 24)
        verifier.decode(cache, ids[:, :9])
        verifier.decode(cache, torch.full((1, 4), 7))  # drafts, thrown away
        cache.truncate([9])
        again = verifier.decode(cache, ids[:, 9:])
        torch.testing.assert_close(again.last_BTD, expected.hidden_states[-1][:, 9:], **CLOSE)
        torch.testing.assert_close(again.logits, expected.logits[:, 9:].float(), **close)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
@pytest.mark.parametrize("kind", heads.KINDS)
def test_a_head_of_every_kind_learns_and_decodes_exactly(family, kind):
    verifier = verifier_of(family, heads.captured_layers(kind, None))
    if family == "phi" and kind == "eagle1":
        with pytest.raises(UserError, match="LM head without bias or scale"):
            build(verifier, kind)
        return
    prompt, text = plain_text(family)
    starts = family in LLAMAS and kind != "eagle1" or kind == "medusa"
    head = build(verifier, kind, layer=-1 if starts else None).to(verifier.dtype)
    if not starts:
        with pytest.raises(UserError, match="head.start=random"):
            head.start(verifier, -1, True)
    before, after = train(head, verifier, Document("0", prompt + text, [(7, 7 + len(text))]), 4)
    assert after < before
    drafted = speculative_decode(
        verifier, drafter_for(head.eval(), FixedTree.chain(3), GREEDY), prompt, max_new_tokens=8, sampling=GREEDY
    )
    assert drafted.tokens == text


def build(verifier, kind, layer=None):
    """A head from the verifier's geometry, from one of its layers (None: at random)."""
    every = DraftVocab.identity(verifier.vocab_size)
    vocab = every if kind == "eagle1" else DraftVocab(torch.arange(0, verifier.vocab_size, 2), verifier.vocab_size)
    layers = () if kind == "independent" else verifier.aux_layers
    torch.manual_seed(0)
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, layers, len(vocab))
    head = heads.build(config, verifier, vocab)
    head.start(verifier, layer, True)
    return head


def train(head, verifier, document, steps):
    """(first loss, last loss) of some steps on one document."""
    states = verifier.states(*packed_rows([document]))
    K = {"medusa": 5, "independent": 1}.get(head.config.kind, 2)
    objective = Objective(steps=K, feature_weight=float(head.config.kind == "eagle1"))
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(steps):
        ids = None if head.vocab.is_identity else head.vocab.ids_R
        labels = Labels.given(states, verifier.draft_logits(ids), K)
        loss, weight, _ = head_loss(head, states, labels, objective)
        optimizer.zero_grad()
        (loss / weight).backward()
        optimizer.step()
        losses.append(float((loss / weight).detach()))
    return losses[0], losses[-1]


def test_embedding_scale_and_soft_cap_of_gemma():
    """The table is scaled inside the model, never in what a head reads; EAGLE-1 drafts through the same soft-cap."""
    verifier = tiny_verifier("gemma2", aux_layers=[0, -1])
    ids = torch.tensor([[5, 9, 11]])
    captured = verifier.capture(ids, torch.zeros_like(ids), torch.arange(3)[None])
    torch.testing.assert_close(captured.aux_BTAD[0, :, 0], verifier.embedding_VD[ids[0]] * 8.0)  # sqrt(64)
    eagle1 = build(verifier_of("gemma2", [-1]), "eagle1")
    out = torch.randn(2, 64, dtype=torch.float64)
    assert eagle1.softcap == 3.0
    assert eagle1.double().logits(100 * out).abs().max() <= 3.0


GEOMETRY = {  # head_dim, key/value heads, rms_norm_eps, hidden_act, rope_theta, partial_rotary_factor
    "llama": (16, 2, 1e-6, "silu", 1e4, 1.0),
    "gemma3_text": (16, 2, 1e-6, "gelu_pytorch_tanh", 1e6, 1.0),
    "mixtral": (16, 2, 1e-5, "silu", 1e6, 1.0),
    "phi": (16, 2, 1e-5, "gelu_new", 1e4, 0.5),
    "nested": (16, 2, 1e-6, "silu", 1e4, 1.0),
    "gpt2": (16, 2, 1e-5, "gelu_new", 1e4, 1.0),  # names of its own, no rotary positions, no MLP width
}


@pytest.mark.parametrize("family", GEOMETRY)
def test_a_heads_shape_is_the_verifiers(family):
    verifier = tiny_verifier("gpt2", intermediate_size=None) if family == "gpt2" else verifier_of(family)
    config = heads.kind_of("eagle3")[0].from_verifier(verifier.head_geometry, (2, 3, 4), 512)
    rope = config.rope_parameters
    found = (config.head_dim, config.num_key_value_heads, config.rms_norm_eps, config.hidden_act)
    assert (*found, rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)) == GEOMETRY[family]
    assert (config.hidden_size, config.vocab_size) == (64, 512)
    assert config.intermediate_size == (256 if family == "gpt2" else 128)


ROPES = {
    "phi": ("phi", EXTRA["phi"]),
    "gemma3": ("gemma3_text", EXTRA["gemma3_text"]),
    "llama3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }}),
    "yarn": ("qwen3", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128,
    }}),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_a_heads_rotary_angles_are_the_verifiers(name):
    """Partial ones, those that layers of one type have, and those stretched for long contexts."""
    family, config = ROPES[name]
    verifier = tiny_verifier(family, layers=7, **config)
    shape, position = verifier.head_geometry, torch.tensor([[0, 1, 7, 200, 500]])
    kind = {"layer_type": "full_attention"} if family == "gemma3_text" else {}
    expected = verifier.base.rotary_emb(torch.zeros(1), position, **kind)  # each half twice
    rotary = Rotary(shape["rope_parameters"], shape["head_dim"], shape["max_position_embeddings"])
    for own, theirs in zip(rotary(position, torch.float32), expected, strict=True):
        torch.testing.assert_close(torch.cat([own, own], -1), theirs, rtol=0, atol=2e-4)


def test_norms_come_as_a_plain_layer_holds_them():
    """Gemma's less one, its norm before the MLP under the usual name; Phi's without their bias; some have none."""
    gemma = tiny_verifier("gemma2")
    for number, norm in enumerate(m for n, m in gemma.layers[3].named_modules() if n.endswith("layernorm")):
        norm.weight.data.fill_(float(number))  # input, post-attention, before the MLP, after it: 0, 1, 2, 3
    layer = gemma.layer_state_dict(3)
    assert torch.equal(layer["input_layernorm.weight"], torch.full((64,), 1.0))
    before_mlp = gemma.layers[3].pre_feedforward_layernorm.weight + 1
    assert torch.equal(layer["post_attention_layernorm.weight"], before_mlp)
    phi = tiny_verifier("phi", layers=7, **EXTRA["phi"])
    phi.final_norm.weight.data.uniform_(0.5, 1.5)
    phi.final_norm.bias.data.fill_(3.0)
    assert torch.equal(phi.final_norm_weight, phi.final_norm.weight)
    assert torch.equal(tiny_verifier("nanochat").final_norm_weight, torch.ones(64))


@pytest.mark.parametrize("layers", [[], [-1], [0, -1]])
def test_any_captured_layers_are_stored_and_generated(layers, tmp_path):
    """None at all (an independent draft), the last hidden state alone (EAGLE-1, Medusa), and both with others."""
    verifier = tiny_verifier(layers=5, hidden=32, aux_layers=layers)
    made = next(generate(verifier, [Request("0", [5, 6, 7])], max_new_tokens=6, stop_ids=(), capture=True))
    grown = Document("0", [5, 6, 7, *made.output_ids], [(3, 9)])
    read = Document("1", torch.randint(3, 500, (11,)).tolist(), [(4, 9)])
    assert made.states.aux_TAD.shape == (9, len(layers), 32)
    store = StateStore.capture(verifier, [grown, read], tmp_path, kept={grown.ids_hash: made.states})
    store.verify()
    assert bytes_needed(verifier, [grown, read]) == 20 * len(layers) * 128 + (5 + 4) * (128 + 12)
    found, online = store.states([1, 0]), OnlineStates(verifier, [grown, read]).states([1, 0])
    for field in fields(found):
        a, b = getattr(found, field.name), getattr(online, field.name)
        if field.name == "aux_BTAD":
            a, b = a[:, :-1], b[:, :-1]  # generation never reads its last token
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    if layers:
        assert torch.equal(found.aux_BTAD[0, found.last_index_P, -1], found.last_PD)


REFUSED = {
    "doge": ({}, "a mask or bias of its own in DogeAttention"),
    "nemotron": ({}, "did not arrive here.* in NemotronForCausalLM"),
    "phimoe": ({"sliding_window": 6}, "a window of 6 tokens that its layers do not name"),
    "hyperclovax": ({"logits_scaling": 0.5}, "expected logits that are the LM head's"),
    "stablelm": ({}, "an attention of its own"),
    "minimax": ({}, "layers of type linear_attention"),
    "mamba": ({}, "a decoder with 7 layers and a final norm, found MambaForCausalLM"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_driven_is_said_when_it_is_loaded(family):
    config, said = REFUSED[family]
    with pytest.raises(UserError, match=rf"{said}.*not supported as a verifier"):
        tiny_verifier(family, layers=7, **config)
