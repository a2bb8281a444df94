"""Every exporter refuses a broken head, in one line that names what is wrong, and leaves nothing behind."""

from dataclasses import replace

import pytest
import torch

from conf.errors import UserError
from models import heads
from models.export.formats import FORMATS, write_export
from models.export.native import StoredHead
from models.vocab import DraftVocab
from tiny import tiny_verifier

LAYERS = {"eagle3": (2, 4, 5), "eagle1": (8,), "medusa": (8,)}


@pytest.fixture(scope="module")
def verifiers():
    return {
        kind: tiny_verifier("llama", layers=8, hidden=32, vocab=300, aux_layers=aux) for kind, aux in LAYERS.items()
    }


@pytest.fixture(scope="module")
def other():
    return tiny_verifier("llama", layers=8, hidden=32, vocab=300, seed=1)


def stored_head(kind, verifier):
    ids = torch.arange(300) if kind == "eagle1" else torch.arange(1, 300, 3)
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, verifier.aux_layers, len(ids))
    return StoredHead.of(heads.build(config, verifier, DraftVocab(ids, 300)), verifier)


def with_tensor(name, change):
    """A fault in one tensor; change(tensor) -> tensor, None takes it away."""

    def broken(stored):
        tensors = dict(stored.tensors)
        value = change(tensors.get(name))
        tensors.pop(name, None)
        return replace(stored, tensors=tensors if value is None else tensors | {name: value})

    return broken


def poisoned(value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[3] = value
        return tensor

    return change


def with_config(**values):
    return lambda stored: replace(stored, config=type(stored.config).from_dict(stored.config.to_dict() | values))


# kind of head -> name of the fault -> (what breaks the stored head, what the message says)
FAULTS = {
    "eagle3": {
        "missing norm": (with_tensor("norm.weight", lambda t: None), "missing tensors norm.weight"),
        "missing hidden norm": (with_tensor("midlayer.hidden_norm.weight", lambda t: None), "missing .*hidden_norm"),
        "missing LM head": (with_tensor("lm_head.weight", lambda t: None), "missing tensors lm_head.weight"),
        "missing fc": (with_tensor("fc.weight", lambda t: None), "missing tensors fc.weight"),
        "extra bias": (with_tensor("fc.bias", lambda t: torch.zeros(32)), "unknown tensors fc.bias"),
        "bias of q": (
            with_tensor("midlayer.self_attn.q_proj.bias", lambda t: torch.zeros(32)),
            "q_proj.bias",
        ),
        "two layers": (with_tensor("layers.1.mlp.up_proj.weight", lambda t: torch.zeros(64, 32)), "unknown .*layers.1"),
        "names of a wrapper": (with_tensor("model.norm.weight", lambda t: torch.ones(32)), "unknown .*model.norm"),
        "norm of another size": (with_tensor("norm.weight", lambda t: torch.ones(33)), r"shape \(32,\), found \(33,\)"),
        "LM head over V": (with_tensor("lm_head.weight", lambda t: torch.ones(300, 32)), r"\(100, 32\), found \(300"),
        "fc over one layer": (with_tensor("fc.weight", lambda t: t[:, :32].clone()), r"\(32, 96\), found \(32, 32\)"),
        "NaN": (with_tensor("fc.weight", poisoned(float("nan"))), "fc.weight: expected finite values.*found 1"),
        "infinity": (with_tensor("norm.weight", poisoned(float("inf"))), "norm.weight: expected finite values"),
        "integer weights": (with_tensor("fc.weight", lambda t: t.long()), "fc.weight.*found torch.int64"),
        "map of another size": (
            lambda stored: replace(stored, vocab=DraftVocab(torch.arange(50), 300)),
            "100 of 300 ids, found 50 of 300",
        ),
        "map of another verifier": (
            lambda stored: replace(stored, vocab=DraftVocab(torch.arange(100), 400)),
            "100 of 300 ids, found 100 of 400",
        ),
        "last state captured": (with_config(aux_layers=(2, 4, 8)), "layers below 8"),
        "embedding captured": (with_config(aux_layers=(0, 4, 5)), r"captured layers .*\[0, 4, 5\]"),
    },
    "eagle1": {
        "missing fc": (with_tensor("fc.weight", lambda t: None), "missing tensors fc.weight"),
        "missing down_proj": (with_tensor("layers.0.mlp.down_proj.weight", lambda t: None), "missing .*down_proj"),
        "an input norm": (
            with_tensor("layers.0.input_layernorm.weight", lambda t: torch.ones(32)),
            "unknown .*input_",
        ),
        "a final norm": (with_tensor("norm.weight", lambda t: torch.ones(32)), "unknown tensors norm.weight"),
        "an LM head": (with_tensor("lm_head.weight", lambda t: torch.ones(300, 32)), "unknown tensors lm_head.weight"),
        "fc of EAGLE-3": (with_tensor("fc.weight", lambda t: torch.ones(32, 96)), r"\(32, 64\), found \(32, 96\)"),
        "NaN": (with_tensor("fc.weight", poisoned(float("nan"))), "fc.weight: expected finite values.*found 1"),
        "infinity": (with_tensor("fc.weight", poisoned(float("inf"))), "fc.weight: expected finite values.*found 1"),
        "integer weights": (with_tensor("fc.weight", lambda t: t.long()), "fc.weight.*found torch.int64"),
        "names of a wrapper": (with_tensor("model.fc.weight", lambda t: torch.ones(32, 64)), "unknown .*model.fc"),
        "map of another verifier": (
            lambda stored: replace(stored, vocab=DraftVocab(torch.arange(300), 400)),
            "300 of 300 ids, found 300 of 400",
        ),
        "attention biases": (with_config(attention_bias=True), "attention biases"),
    },
    "medusa": {
        "missing LM head": (with_tensor("lm_head.weight", lambda t: None), "missing .*lm_head"),
        "missing block": (with_tensor("blocks.4.0.linear.weight", lambda t: None), "missing .*4"),
        "a sixth head": (with_tensor("blocks.5.0.linear.weight", lambda t: torch.ones(32, 32)), "unknown .*5"),
        "integer weights": (with_tensor("lm_head.weight", lambda t: t.long()), "lm_head.weight.*found torch.int64"),
        "names of a wrapper": (with_tensor("model.x.weight", lambda t: torch.ones(32)), "unknown .*model.x"),
        "map of another size": (
            lambda stored: replace(stored, vocab=DraftVocab(torch.arange(50), 300)),
            "300 of 300 ids, found 50 of 300|100 of 300 ids, found 50 of 300",
        ),
        "block of another size": (with_tensor("blocks.0.0.linear.weight", lambda t: torch.ones(32, 33)), "found .*33"),
        "NaN": (with_tensor("lm_head.weight", poisoned(float("nan"))), "expected finite values.*found 1"),
    },
}
CASES = [
    pytest.param(kind, name, fault, id=f"{kind}-{name}-{fault}")
    for kind, formats in FORMATS.items()
    for name in formats
    for fault in FAULTS[kind]
]


@pytest.mark.parametrize(("kind", "name", "fault"), CASES)
def test_a_broken_head_is_refused(verifiers, tmp_path, kind, name, fault):
    damage, message = FAULTS[kind][fault]
    broken = damage(stored_head(kind, verifiers[kind]))
    with pytest.raises(UserError, match=message) as caught:
        write_export(broken, tmp_path / "out", name, verifier=verifiers[kind])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, formats in FORMATS.items() for name in formats])
def test_another_verifier_and_a_narrow_dtype_are_refused(verifiers, other, tmp_path, kind, name):
    stored = stored_head(kind, verifiers[kind])
    with pytest.raises(UserError, match=f"{stored.verifier.weights_hash[:12]}.*{other.weights_hash[:12]}"):
        write_export(stored, tmp_path / "out", name, verifier=other)
    first = next(iter(stored.tensors))
    large = with_tensor(first, poisoned(1e6))(stored)
    with pytest.raises(UserError, match="finite values in torch.float16"):
        write_export(large, tmp_path / "out", name, torch.float16, verifiers[kind])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("switches", [{"fc_norm": True}, {"norm_output": True}])
@pytest.mark.parametrize("name", ["sglang", "gguf", "openvino"])
def test_switches_that_an_engine_computes_without_are_refused(verifiers, tmp_path, name, switches):
    verifier = verifiers["eagle3"]
    config = heads.kind_of("eagle3")[0].from_verifier(verifier.head_geometry, verifier.aux_layers, 300, **switches)
    stored = StoredHead.of(heads.build(config, verifier, DraftVocab(torch.arange(300), 300)), verifier)
    with pytest.raises(UserError, match=next(iter(switches))):
        write_export(stored, tmp_path / "out", name, verifier=verifier)
    assert not (tmp_path / "out").exists()
