"""TensorRT-LLM's folders against what its loaders read, written down from its sources (see models/export/trtllm.py).

The tables are of names and keys as the loaders ask for them, not of what we write. Nothing of this runs TensorRT-LLM.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from conf.errors import UserError
from models import heads
from models.export import medusa, trtllm
from models.export.__main__ import export
from models.export.formats import write_export
from models.export.native import StoredHead, VerifierCard, attach, save_head
from models.export.warm import peek
from models.vocab import DraftVocab
from tiny import tiny_verifier

D, V, MLP, QUERIES, KEYS = 32, 300, 64, 32, 16  # QUERIES, KEYS: heads times their width
SOME = torch.arange(1, V, 3)

# module of Eagle3ForCausalLM -> parameters that its load takes, "model." left off: load_weights adds it to every name
# without lm_head. q/k/v and gate/up are modules of the checkpoint, which the weight mapper fuses.
EAGLE3_MODULES = {
    "": {"d2t": ("R",)},
    "fc": {"weight": (D, 3 * D)},
    "midlayer.self_attn.q_proj": {"weight": (QUERIES, 2 * D)},
    "midlayer.self_attn.k_proj": {"weight": (KEYS, 2 * D)},
    "midlayer.self_attn.v_proj": {"weight": (KEYS, 2 * D)},
    "midlayer.self_attn.o_proj": {"weight": (D, QUERIES)},
    "midlayer.mlp.gate_proj": {"weight": (MLP, D)},
    "midlayer.mlp.up_proj": {"weight": (MLP, D)},
    "midlayer.mlp.down_proj": {"weight": (D, MLP)},
    "midlayer.input_layernorm": {"weight": (D,)},
    "midlayer.hidden_norm": {"weight": (D,)},
    "midlayer.post_attention_layernorm": {"weight": (D,)},
    "norm": {"weight": (D,)},
    "lm_head": {"weight": ("R", D)},
}
# keys of the config that the draft model asks for without a default, or whose default is another computation
EAGLE3_KEYS = {
    "architectures": ["LlamaForCausalLMEagle3"],  # becomes EAGLE3LlamaForCausalLM where draft_vocab_size is there
    "model_type": "llama",
    "hidden_size": D,
    "target_hidden_size": D,
    "intermediate_size": MLP,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": V,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "fc_norm": False,
    "norm_output": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def verifiers():
    """By kind of head: the same weights, with the states that this kind reads."""
    kinds = ("eagle3", "medusa")
    return {kind: tiny_verifier(hidden=D, vocab=V, aux_layers=heads.captured_layers(kind, None)) for kind in kinds}


def stored(kind, verifier, ids=SOME, **switches):
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, verifier.aux_layers, len(ids), **switches)
    head = heads.build(config, verifier, DraftVocab(ids, V))
    torch.manual_seed(0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return StoredHead.of(head, verifier)


def content(folder, weights="model.safetensors"):
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", weights]
    return load_file(folder / weights), json.loads((folder / "config.json").read_text())


def eagle3_names(size, norms=0):
    """{name in the checkpoint: shape} that the loader reads for a draft vocabulary of `size` tokens."""
    modules = dict(EAGLE3_MODULES) | {f"fc_norm.{layer}": {"weight": (D,)} for layer in range(norms)}
    if size == V:  # then the draft model has no such parameter
        del modules[""]
    named = {f"{module}.{name}".lstrip("."): shape for module, own in modules.items() for name, shape in own.items()}
    return {name: tuple(size if axis == "R" else axis for axis in shape) for name, shape in named.items()}


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}])
@pytest.mark.parametrize("ids", [SOME, torch.arange(V)], ids=["R<V", "R=V"])
def test_eagle3_names_are_those_that_the_loader_reads(verifiers, tmp_path, ids, switches, caplog):
    head = stored("eagle3", verifiers["eagle3"], ids, **switches)
    with caplog.at_level("WARNING"):
        out = trtllm.write_eagle3(head, tmp_path, torch.bfloat16, verifiers["eagle3"])
    tensors, values = content(out)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == eagle3_names(len(ids), norms=3 if switches else 0)
    assert {tensor.dtype for name, tensor in tensors.items() if name != "d2t"} == {torch.bfloat16}
    if len(ids) < V:  # copied into int32 there, which holds every offset
        assert tensors["d2t"].dtype == torch.int64 and torch.equal(torch.arange(100) + tensors["d2t"], SOME)
    expected = EAGLE3_KEYS | {"draft_vocab_size": len(ids)} | switches
    assert {key: values.get(key) for key in expected} == expected
    for name, tensor in head.tensors.items():
        assert torch.equal(tensors[name], tensor.bfloat16())
    assert ("fc_norm and norm_output" in caplog.text) == bool(switches)


def capture_layers(num_layers, option):
    """The outputs of layers that TensorRT-LLM captures, in the order that fc reads them."""
    return sorted(option) if option is not None else [1, num_layers // 2 - 1, num_layers - 4]


def test_eagle3_captured_layers_are_the_engines_default_or_named_for_its_option(verifiers, tmp_path, caplog):
    """An output of layer i is the stream that enters layer i + 1, which is how our layers are counted."""
    with caplog.at_level("WARNING"):
        values = content(trtllm.write_eagle3(stored("eagle3", verifiers["eagle3"]), tmp_path / "a"))[1]
    assert [layer + 1 for layer in capture_layers(8, None)] == list(verifiers["eagle3"].aux_layers)
    assert "eagle3_layers_to_capture" not in caplog.text
    custom = tiny_verifier(hidden=D, vocab=V, aux_layers=[1, 3, 6])
    with caplog.at_level("WARNING"):
        values = content(trtllm.write_eagle3(stored("eagle3", custom), tmp_path / "b"))[1]
    assert "needs eagle3_layers_to_capture: [0, 2, 5]" in caplog.text
    option = values["eyrie"]["eagle3_layers_to_capture"]
    assert [layer + 1 for layer in capture_layers(8, option)] == [1, 3, 6]
    assert not [key for key in values if key.startswith("eagle")]  # it would not read them


def test_eagle3_heads_that_it_computes_otherwise_are_refused(tmp_path):
    gelu = tiny_verifier(hidden=D, vocab=V, hidden_act="gelu")
    one = tiny_verifier(hidden=D, vocab=V, aux_layers=[3])
    embeddings = tiny_verifier(hidden=D, vocab=V, aux_layers=[0, 3, 6])
    last = tiny_verifier(hidden=D, vocab=V, aux_layers=[2, 4, 8])
    for head, message in (
        (stored("eagle3", gelu), "expected an MLP with silu, found gelu"),
        (stored("eagle3", one), "2 or more captured layers, found 1"),
        (stored("eagle3", embeddings), r"ascend from 1, found \[0, 3, 6\]"),
        (stored("eagle3", last), "captured layers below 8"),
    ):
        with pytest.raises(UserError, match=message):
            trtllm.write_eagle3(head, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def load_medusa(state, num_heads, num_layers, vocab):
    """What load_medusa_hf takes from a checkpoint, by name: (blocks [heads][layers] of weight and bias, LM heads)."""
    blocks, lm_heads = [], []
    for head in range(num_heads):
        blocks.append(
            [(state[f"{head}.{b}.linear.weight"], state[f"{head}.{b}.linear.bias"]) for b in range(num_layers)]
        )
        lm_heads.append(state[f"{head}.{num_layers}.weight"])
        assert all(weight.shape == (D, D) and bias.shape == (D,) for weight, bias in blocks[-1])
        assert lm_heads[-1].shape == (vocab, D)
    return blocks, lm_heads


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("ids", [SOME, torch.arange(V)], ids=["R<V", "R=V"])
def test_medusa_folder_is_what_the_loader_reads(verifiers, tmp_path, ids, blocks):
    verifier = verifiers["medusa"]
    head = stored("medusa", verifier, ids, heads=3, blocks=blocks)
    tensors, values = content(trtllm.write_medusa(head, tmp_path, verifier=verifier), "medusa_lm_head.safetensors")
    # medusa/model.py and medusa/config.py spell the number of heads differently
    assert values["medusa_num_heads"] == values["num_medusa_heads"] == 3 and values["medusa_num_layers"] == blocks
    read, lm_heads = load_medusa(tensors, values["medusa_num_heads"], values["medusa_num_layers"], V)
    names = {f"{h}.{b}.linear.{part}" for h in range(3) for b in range(blocks) for part in ("weight", "bias")}
    names |= {f"{h}.{blocks}.weight" for h in range(3)} | ({"token_map"} if len(ids) < V else set())
    assert tensors.keys() == names
    running = attach(head, verifier)
    hidden = torch.randn(50, D, generator=torch.Generator().manual_seed(2))
    for out, own, lm_head in zip(running.outputs(hidden, 3), read, lm_heads, strict=True):
        x = hidden
        for weight, bias in own:
            y = x @ weight.T + bias
            x = x + y * torch.sigmoid(y)
        logits_V, logits_R = x @ lm_head.T, running.logits(out).detach()
        torch.testing.assert_close(logits_V[:, ids], logits_R, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits_V.argmax(-1), ids[logits_R.argmax(-1)])  # no other token wins

    assert peek(tmp_path) == "medusa"
    back = medusa.read(tmp_path, VerifierCard.of(verifier))
    assert back.config == head.config and back.vocab.hash == head.vocab.hash
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in head.tensors.items())


def test_medusa_for_another_family_is_said(verifiers, tmp_path, caplog):
    gemma = tiny_verifier("gemma2", hidden=D, vocab=V, aux_layers=[-1])
    with caplog.at_level("WARNING"):
        trtllm.write_medusa(stored("medusa", verifiers["medusa"], heads=2), tmp_path / "a")
        assert "Medusa is for" not in caplog.text
        trtllm.write_medusa(stored("medusa", gemma, heads=2), tmp_path / "b")
    assert "this head's verifier is a Gemma2ForCausalLM" in caplog.text


@pytest.mark.parametrize(("kind", "weights"), [("eagle3", "model"), ("medusa", "medusa_lm_head")])
def test_command(verifiers, tmp_path, monkeypatch, capsys, kind, weights):
    head = stored(kind, verifiers[kind])
    save_head(tmp_path / "run" / "head", head)
    monkeypatch.setattr("sys.argv", ["export", f"run={tmp_path / 'run'}", "format=trtllm", "dtype=float16"])
    export()
    out = tmp_path / "run" / "export-trtllm"
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    again = write_export(head, tmp_path / "again", "trtllm", torch.float16)
    assert (again / f"{weights}.safetensors").read_bytes() == (out / f"{weights}.safetensors").read_bytes()
