"""The cost model against torch's own counter on the real step, and parameters against the real models."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models import heads, packed, parts
from models.introspect import find_parts
from models.losses import head_loss
from models.objectives import Labels, Objective
from models.states import VerifierStates, label_rows
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_verifier
from train.cost import HeadCost, VerifierCost

DOCUMENTS, ANSWER = 3, 2 / 3
SMOLLM2 = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 8192, "vocab_size": 49152,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "final_logit_softcapping": None,
}  # fmt: skip
TINY = SMOLLM2 | {
    "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 400,
}  # fmt: skip


def made_up(kind, shape, R, K, tokens, A=3, **more):
    """A head, a packed row of equal documents, their labels, and the same as the cost model has it."""
    V, D = shape["vocab_size"], shape["hidden_size"]
    vocab = DraftVocab.identity(V) if kind == "eagle1" else DraftVocab(torch.arange(R), V)
    layers = {"eagle3": tuple(range(1, A + 1)), "independent": ()}.get(kind, (9,))
    config = heads.kind_of(kind)[0].from_verifier(shape, layers, len(vocab), **more)
    plain = SimpleNamespace(final_logit_softcapping=None)
    lm_head = SimpleNamespace(weight=torch.randn(V, D), bias=None)
    verifier = SimpleNamespace(
        embedding_VD=torch.randn(V, D),
        lm_head_rows=lambda: lm_head.weight,
        config=plain,
        lm_head=lm_head,
        device=torch.device("cpu"),
    )
    head = heads.build(config, verifier, vocab)
    head.attention = "dense"
    row_T = torch.arange(tokens)
    document_T = row_T * DOCUMENTS // tokens
    position_T = row_T - torch.searchsorted(document_T, document_T)
    span_T = torch.where(position_T >= (1 - ANSWER) * tokens // DOCUMENTS, document_T, -1)
    last_P = label_rows(span_T[None])
    P = len(last_P)
    states = VerifierStates(
        torch.randint(V, (1, tokens)), document_T[None], position_T[None], span_T[None],
        torch.randn(1, tokens, len(layers), D), torch.randn(P, D), last_P, torch.randint(len(vocab), (P,)),
        torch.zeros(P),
    )  # fmt: skip
    own = {name: getattr(config, name) for name in ("layers", "blocks") if hasattr(config, name)}
    cost = HeadCost(
        kind, D, shape["intermediate_size"], shape["num_attention_heads"] * shape["head_dim"],
        2 * shape["num_key_value_heads"] * shape["head_dim"], len(vocab), len(layers), K, **own,
    )  # fmt: skip
    return head, states, cost


def counted(head, states, K):
    """Operations of forward, teacher and backward, by torch's counter."""
    teacher = torch.randn(len(head.vocab), states.last_PD.shape[1])
    with FlopCounterMode(display=False) as counter:
        labels = Labels.given(states, lambda rows: rows @ teacher.T, K)
        loss, weight, _ = head_loss(head, states, labels, Objective(steps=K))
        (loss / weight).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
def test_the_step_costs_what_the_formula_says(kind, K):
    more = {"heads": K, "blocks": 2} if kind == "medusa" else {}
    head, states, cost = made_up(kind, TINY, 200, K, 240, **more)
    expected = cost.step(240, len(states.last_index_P), 240 / DOCUMENTS)
    assert counted(head, states, K) == pytest.approx(expected, rel=0.015)


def test_at_smollm2s_sizes_too():
    """Half of the draft vocabulary, for the time; a frozen LM head costs a third of the logits less."""
    head, states, cost = made_up("eagle3", SMOLLM2, 4096, 3, 384)
    P = len(states.last_index_P)
    assert counted(head, states, 3) == pytest.approx(cost.step(384, P, 128), rel=0.015)
    assert sum(p.numel() for p in head.parameters() if p.dim() > 1) == cost.body + cost.lm_head == cost.trained
    head.lm_head.requires_grad_(False)
    frozen = HeadCost(**{**vars(cost), "train_lm_head": False})
    assert counted(head, states, 3) == pytest.approx(frozen.step(384, P, 128), rel=0.015)
    assert frozen.trained == cost.body


@pytest.mark.parametrize(("kind", "more"), [("eagle1", {}), ("medusa", {"heads": 3, "blocks": 2}),
                                            ("independent", {"layers": 2})])  # fmt: skip
def test_parameters_of_other_heads(kind, more):
    head, _, cost = made_up(kind, TINY, 200, 3, 60, **more)
    matrices = sum(p.numel() for p in head.parameters() if p.dim() > 1)
    assert matrices == cost.trained


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
def test_memory_of_a_step(kind):
    """What backward keeps, each storage once, against the formula without weights and blocks of logits."""
    more = {"heads": 3} if kind == "medusa" else {}
    head, states, cost = made_up(kind, TINY, 200, 3, 480, **more)
    own = {p.untyped_storage().data_ptr() for p in [*head.parameters(), head.inverse_V, states.aux_BTAD]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and tensor.is_floating_point():
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        labels = Labels.given(states, lambda rows: rows @ torch.randn(64, len(head.vocab)), 3)
        head_loss(head, states, labels, Objective(steps=3))
    P = len(states.last_index_P)
    expected = cost.memory(480, P) - cost.memory(0, 0)
    found = sum(size for size, _ in kept.values())
    assert 0.6 < expected / found < 1.5, (expected, found)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_verifiers_are_counted_without_their_weights(family, monkeypatch):
    model = tiny_model(family)
    bare = parts.outline(model.config)
    cost = VerifierCost.of(bare, find_parts(bare).layers, model.config)
    assert cost.total + cost.ends == sum(p.numel() for p in model.parameters())
    experts = 8 * 4 * 3 * 64 * 128 if family == "mixtral" else 0  # layers, experts, matrices
    assert cost.active == cost.total - experts // 2  # two of four are at work
    assert cost.weight_bytes(2) == 2 * (cost.total + cost.ends)


def test_a_pass_of_the_verifier_costs_what_the_formula_says(monkeypatch):
    monkeypatch.setattr(packed, "MAX_BYTES", 0)  # oneDNN's own products are not counted
    verifier = tiny_verifier("llama", layers=8, hidden=64, vocab=300)
    cost = VerifierCost.of(verifier.model, verifier.layers, verifier.config)
    ids, document = torch.randint(3, 300, (1, 96)), torch.arange(96)[None] // 48
    position = torch.arange(96)[None] % 48
    span = torch.where(position >= 16, document, -1)
    with FlopCounterMode(display=False) as counter:
        states = verifier.states(ids, document, position, span)
    found, expected = counter.get_total_flops(), cost.capture(96, len(states.last_index_P), 48)
    attention = 8 * 4 * cost.heads_dim * 49 / 2 * 96  # torch counts a causal square whole, or on some CPUs not at all
    assert min(abs(found - expected - x * attention) for x in (-1, 0, 1)) < 0.03 * expected
    assert math.isclose(cost.write(10, 48), cost.capture(10, 10, 48))
