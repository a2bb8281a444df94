"""Every family of verifiers: its states, and heads of every kind that are built, learn a little, and decode exactly."""

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlamaConfig, LlavaConfig
from transformers.models.siglip import SiglipVisionConfig

from conf.errors import UserError
from data.batches import packed_rows
from data.documents import Document
from eval.speculative.drafter import drafter_for
from eval.speculative.loop import plain_decode, speculative_decode
from eval.speculative.processors import Sampling
from models import heads
from models.losses import head_loss
from models.objectives import Labels, Objective
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import FAMILIES, tiny_model, tiny_tokenizer, tiny_verifier

MORE = ("gemma", "gemma3_text", "qwen3_moe", "phi", "nested")
EXPERTS = ("mixtral", "qwen3_moe")
CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # some families go through float32 whatever the input
GREEDY = Sampling()
EXTRA = {
    "phi": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
}


def model_of(family):
    """A tiny float64 model; "nested": a vision model, whose text half is a Llama."""
    if family != "nested":
        dtype = torch.float32 if family in EXPERTS else torch.float64  # grouped products know no float64
        return tiny_model(family, dtype=dtype, **EXTRA.get(family, {}))
    text = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15,
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=5)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float64).eval()


def verifier_of(family, aux_layers=None):
    return Verifier(model_of(family), tiny_tokenizer(), f"tiny-{family}", aux_layers)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
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
    prompt = torch.randint(6, 300, (7,)).tolist()
    text = plain_decode(verifier, prompt, max_new_tokens=16, sampling=GREEDY).tokens
    head = build(verifier, kind).to(verifier.dtype)
    before, after = train(head, verifier, Document("0", prompt + text, [(7, 7 + len(text))]), 12)
    assert after < before
    drafted = speculative_decode(
        verifier, drafter_for(head.eval(), GREEDY), prompt, max_new_tokens=16, depth=3, sampling=GREEDY
    )
    assert drafted.tokens == text


def build(verifier, kind):
    """A head from the verifier's geometry; from its layer where the shapes are a Llama's, else at random."""
    every = DraftVocab.identity(verifier.vocab_size)
    vocab = every if kind == "eagle1" else DraftVocab(torch.arange(0, verifier.vocab_size, 2), verifier.vocab_size)
    layers = () if kind == "independent" else verifier.aux_layers
    torch.manual_seed(0)
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, layers, len(vocab))
    for name in ("rope_parameters", "rms_norm_eps", "hidden_act", "head_dim"):
        if hasattr(config, name):
            assert getattr(config, name) == verifier.head_geometry[name]
    head = heads.build(config, verifier, vocab)
    try:
        head.start(verifier, -1, True)
    except UserError as error:
        assert "head.start=random" in str(error)
        head.start(verifier, None, True)
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
        labels = Labels.given(states, verifier.logits(states.last_PD, ids), K)
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
