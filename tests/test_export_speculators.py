"""The `speculators` layout: exact names and keys, round trips, refusals, a folder by hand, and the library itself."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from models import heads
from models.export import speculators
from models.export.__main__ import export
from models.export.formats import format_of, write_export
from models.export.native import StoredHead, VerifierCard, attach, save_head
from models.export.warm import is_published, layers_wanted, named_verifier, peek, read_any
from models.heads.eagle3 import Eagle3Config
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer, tiny_verifier

PYTHON = os.environ.get("EYRIE_SPECULATORS_PYTHON")  # one that has the library: its own environment
LOADER = Path(__file__).parents[1] / "eval" / "serving" / "engines" / "speculators_load.py"
IDS = torch.arange(1, 300, 3)
D, V, R, WIDE, NARROW, MLP = 32, 300, 100, 32, 16, 64
SHAPES = {
    "fc.weight": (D, 3 * D),
    "layers.0.hidden_norm.weight": (D,),
    "layers.0.input_layernorm.weight": (D,),
    "layers.0.post_attention_layernorm.weight": (D,),
    "layers.0.self_attn.q_proj.weight": (WIDE, 2 * D),
    "layers.0.self_attn.k_proj.weight": (NARROW, 2 * D),
    "layers.0.self_attn.v_proj.weight": (NARROW, 2 * D),
    "layers.0.self_attn.o_proj.weight": (D, WIDE),
    "layers.0.mlp.gate_proj.weight": (MLP, D),
    "layers.0.mlp.up_proj.weight": (MLP, D),
    "layers.0.mlp.down_proj.weight": (D, MLP),
    "norm.weight": (D,),
    "embed_tokens.weight": (V, D),
}


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier("llama", layers=8, hidden=D, vocab=V)


def make_head(verifier, ids=IDS, **switches):
    """Norms too are random: one that is left out would show."""
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, len(ids), **switches)
    torch.manual_seed(0)
    head = heads.build(config, verifier, DraftVocab(ids, verifier.vocab_size)).eval()
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "lm_head" not in name:
                parameter.normal_(std=0.15)
    return head


@torch.no_grad()
def draft_logits(head, states_TS, tokens, steps):
    """Served row by row: the draft logits [steps, T, R] after each row t, its drafts being the tokens given."""
    fused = head.fuse(states_TS.unflatten(-1, (len(head.config.aux_layers), -1))[None])
    rows = []
    for t in range(len(states_TS)):
        cache = head.new_cache(1, t + 1 + steps)
        out = head.step(tokens[None, 1 : t + 2], fused[:, : t + 1], cache)[:, -1:]
        rows.append([head.logits(out)[0, 0]])
        for k in range(1, steps):
            out = head.step(tokens[None, t + 1 + k : t + 2 + k], head.feedback(out), cache)
            rows[t].append(head.logits(out)[0, 0])
    return torch.stack([torch.stack(row) for row in rows], dim=1)


def some_logits(head):
    numbers = torch.Generator().manual_seed(3)
    states = torch.randn(5, len(head.config.aux_layers) * D, generator=numbers)
    return draft_logits(head, states, torch.randint(0, V, (8,), generator=numbers), 3)


def exported(verifier, out, head=None, **options):
    stored = StoredHead.of(head or make_head(verifier), verifier, {"ttt_steps": 7})
    return speculators.write(stored, out, verifier=verifier, **options)


def edit(folder, **changes):
    """Other values in config.json; None takes a key away."""
    values = json.loads((folder / "config.json").read_text())
    values = {key: value for key, value in (values | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_names_shapes_and_dtypes(verifier, tmp_path, dtype):
    tensors = load_file(exported(verifier, tmp_path, dtype=dtype) / "model.safetensors")
    expected = SHAPES | {"lm_head.weight": (R, D), "d2t": (R,), "t2d": (V,)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert tensors.pop("d2t").dtype == torch.int64 and tensors.pop("t2d").dtype == torch.bool
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert torch.equal(tensors["embed_tokens.weight"], verifier.embedding_VD.to(dtype))


def test_a_whole_vocabulary_ships_no_map(verifier, tmp_path):
    head = make_head(verifier, torch.arange(V))
    tensors = load_file(exported(verifier, tmp_path, head) / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES | {"lm_head.weight": (V, D)}
    assert torch.equal(some_logits(attach(read_any(tmp_path, verifier), verifier)), some_logits(head))


def test_config_json(verifier, tmp_path):
    values = json.loads((exported(verifier, tmp_path) / "config.json").read_text())
    layer, notes = values.pop("transformer_layer_config"), values.pop("eyrie")
    geometry = verifier.head_geometry
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    same += ("rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters", "vocab_size")
    assert {key: layer[key] for key in same} == {key: geometry[key] for key in same}
    assert layer["model_type"] == "llama" and layer["num_hidden_layers"] == 1
    assert layer["attention_bias"] is layer["mlp_bias"] is layer["tie_word_embeddings"] is False
    assert "num_aux_hidden_states" not in layer and "eyrie" not in layer
    assert notes["verifier"]["weights_hash"] == verifier.weights_hash and notes["aux_layers"] == [2, 4, 5]
    assert values.pop("speculators_config") == {
        "algorithm": "eagle3",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "tiny-llama", "architectures": ["LlamaForCausalLM"]},
    }
    assert values.pop("speculators_version").count(".") == 2
    assert values == {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": R,
        "target_hidden_size": D,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "torch_dtype": "float32",
    }


def test_a_card_from_before_architectures_were_kept_takes_the_verifiers(verifier, tmp_path):
    stored = StoredHead.of(make_head(verifier), verifier)
    card = VerifierCard.from_dict(stored.verifier.__dict__ | {"architecture": None})
    speculators.write(StoredHead(stored.config, stored.vocab, stored.tensors, card), tmp_path, verifier=verifier)
    served = json.loads((tmp_path / "config.json").read_text())["speculators_config"]
    assert served["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert served["proposal_methods"][0]["speculative_tokens"] == speculators.DEPTH  # nothing says what it trained for


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}, {"norm_output": True}])
@pytest.mark.parametrize("layers", [None, (1, 3, 4, 6)])
def test_round_trips_give_the_same_logits(tmp_path, switches, layers):
    verifier = tiny_verifier("llama", layers=8, hidden=D, vocab=V, aux_layers=layers)
    head = make_head(verifier, **switches)
    exported(verifier, tmp_path, head)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["transformer_layer_config"].get("num_aux_hidden_states") == (layers and 4)
    assert {name for name in load_file(tmp_path / "model.safetensors") if name.startswith("fc_norm")} == {
        f"fc_norm.{n}.weight" for n in range(len(verifier.aux_layers)) if "fc_norm" in switches
    }
    assert is_published(tmp_path) and peek(tmp_path) == "eagle3" and named_verifier(tmp_path) == "tiny-llama"
    assert layers_wanted(tmp_path) == list(verifier.aux_layers)
    stored = read_any(tmp_path, verifier)
    assert stored.config == head.config and stored.vocab.hash == head.vocab.hash
    assert stored.training == {"ttt_steps": 7} and stored.verifier == VerifierCard.of(verifier)
    assert torch.equal(some_logits(attach(stored, verifier)), some_logits(head))


def by_hand(folder, **values):
    """What FORMATS says of this layout, written without our writer; returns (folder, tensors)."""
    random = torch.Generator().manual_seed(5)
    tensors = {name: 0.1 * torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
    tensors |= {"lm_head.weight": torch.randn(R, D, generator=random), "d2t": IDS - torch.arange(R)}
    tensors |= {"t2d": torch.isin(torch.arange(V), IDS)}
    layer = {"model_type": "llama", "hidden_size": D, "intermediate_size": MLP, "num_attention_heads": 4}
    layer |= {"num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1, "vocab_size": V, "rms_norm_eps": 1e-6}
    layer |= {"hidden_act": "silu", "max_position_embeddings": 512, "attention_bias": False}
    layer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    given = {"name_or_path": "someone/model", "architectures": ["LlamaForCausalLM"]}
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": R,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "tie_word_embeddings": False,
        "transformer_layer_config": layer | values.pop("layer", {}),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": given,
        },
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder, tensors


def test_a_folder_by_hand_is_read(verifier, tmp_path):
    """The first row, where attention is its own value, is worked out here."""
    moved = tiny_verifier("llama", layers=8, hidden=D, vocab=V, aux_layers=(1, 3, 6))
    folder, tensors = by_hand(tmp_path / "a")
    tensors["embed_tokens.weight"] = moved.embedding_VD.clone()
    save_file(tensors, folder / "model.safetensors")
    assert layers_wanted(folder) == [1, 3, 6] and named_verifier(folder) is None
    stored = read_any(folder, moved)
    assert torch.equal(stored.vocab.ids_R, IDS)
    head = attach(stored, moved)
    states, tokens = torch.randn(1, 3 * D), torch.tensor([0, 7])
    t = {name.removeprefix("layers.0.").removesuffix(".weight"): tensor for name, tensor in tensors.items()}

    def norm(x, name):
        return t[name] * x * (x.square().mean() + 1e-6).rsqrt()

    g = t["fc"] @ states[0]
    x = torch.cat([norm(t["embed_tokens"][7], "input_layernorm"), norm(g, "hidden_norm")])
    value = (t["self_attn.v_proj"] @ x).view(2, 8).repeat_interleave(2, 0).flatten()
    x = g + t["self_attn.o_proj"] @ value
    y = norm(x, "post_attention_layernorm")
    x = x + t["mlp.down_proj"] @ (torch.nn.functional.silu(t["mlp.gate_proj"] @ y) * (t["mlp.up_proj"] @ y))
    expected = t["lm_head"] @ norm(x, "norm")
    torch.testing.assert_close(draft_logits(head, states, tokens, 1)[0, 0], expected, rtol=1e-4, atol=1e-4)

    with pytest.raises(UserError, match="does not name its verifier"):
        speculators.read(folder)
    with pytest.raises(UserError, match=r"reads layers \[1, 3, 6\].*captures \[2, 4, 5\]"):
        read_any(folder, verifier)
    edit(folder, eagle_aux_hidden_state_layer_ids=None)  # the usual three
    assert layers_wanted(folder) is None and read_any(folder, verifier).config.aux_layers == (2, 4, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.0.hidden_norm.weight"), "missing tensors layers.0.hidden_norm.weight"),
        (lambda t: t.pop("lm_head.weight"), "missing tensors lm_head.weight"),
        (lambda t: t.pop("d2t"), "missing tensors d2t"),
        (lambda t: t.update({"midlayer.hidden_norm.weight": torch.ones(D)}), "unknown tensors midlayer.hidden_norm"),
        (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.ones(MLP, D)}), "unknown tensors layers.1.mlp"),
        (lambda t: t.update({"fc.weight": torch.ones(D, 2 * D)}), "fc.weight of shape (32, 96), found (32, 64)"),
        (lambda t: t.update({"norm.weight": torch.ones(D).half()}), "norm.weight in torch.float32"),
        (lambda t: t.update({"t2d": ~t["t2d"]}), "t2d marks other tokens"),
        (lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"] + 1}), "an embedding of its own"),
    ],
)
def test_reading_refuses_other_tensors(verifier, tmp_path, change, message):
    exported(verifier, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        read_any(tmp_path, verifier)
    assert message in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"norm_before_residual": True}, "expected norm_before_residual false, found True"),
        ({"norm_before_fc": True}, "expected norm_before_fc false, found True"),
        ({"norm_before_residual": None}, "missing norm_before_residual: .* vLLM true"),
        ({"draft_vocab_size": None}, "missing draft_vocab_size"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type eagle3, found eagle"),
        ({"transformer_layer_config": []}, "transformer_layer_config to describe"),
        ({"layer": {"num_hidden_layers": 2}}, "expected one layer, found 2"),
        ({"layer": {"model_type": "qwen3"}}, "model_type llama, found qwen3"),
        ({"layer": {"attention_bias": True}}, "a layer without biases"),
        ({"layer": {"layer_types": ["sliding_attention"]}}, "full attention, found sliding_attention"),
        ({"layer": {"hidden_size": 64}}, r"embed_tokens.weight of shape \(300, 64\), found \(300, 32\)"),
    ],
)
def test_reading_refuses_other_computations(verifier, tmp_path, values, message):
    folder, tensors = by_hand(tmp_path / "a")
    save_file(tensors, folder / "model.safetensors")
    layer = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    values = dict(values)
    if "layer" in values:
        values["transformer_layer_config"] = layer | values.pop("layer")
    edit(folder, **values)
    with pytest.raises(UserError, match=message) as caught:
        read_any(folder, verifier)
    assert "\n" not in str(caught.value)


def test_an_export_is_bound_to_its_verifier_its_map_and_its_layers(verifier, tmp_path):
    other = tiny_verifier("llama", layers=8, hidden=D, vocab=V, seed=1)
    stored = StoredHead.of(make_head(verifier), verifier)
    both = f"{verifier.weights_hash[:12]}.*{other.weights_hash[:12]}"
    with pytest.raises(UserError, match=both):
        speculators.write(stored, tmp_path, verifier=other)
    exported(verifier, tmp_path)
    with pytest.raises(UserError, match=both):
        speculators.read(tmp_path, VerifierCard.of(other))
    with pytest.raises(UserError, match=both):
        read_any(tmp_path, other)
    edit(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 4, 5])
    with pytest.raises(UserError, match=r"captured layers \[2, 4, 5\], found \[1, 4, 5\]"):
        speculators.read(tmp_path)
    edit(tmp_path, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    swapped = DraftVocab(torch.arange(R), V)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"d2t": swapped.d2t, "t2d": swapped.t2d}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"map {stored.vocab.hash[:12]}, found {swapped.hash[:12]}"):
        speculators.read(tmp_path)


def test_writing_refuses(verifier, tmp_path):
    stored = StoredHead.of(make_head(verifier), verifier)
    with pytest.raises(UserError, match="expected the verifier, whose embedding"):
        speculators.write(stored, tmp_path / "none")
    missing = {name: tensor for name, tensor in stored.tensors.items() if name != "midlayer.hidden_norm.weight"}
    with pytest.raises(UserError, match="missing tensors layers.0.hidden_norm.weight"):
        broken = StoredHead(stored.config, stored.vocab, missing, stored.verifier)
        speculators.write(broken, tmp_path / "none", verifier=verifier)
    last = tiny_verifier("llama", layers=8, hidden=D, vocab=V, aux_layers=(2, 4, 8))
    with pytest.raises(UserError, match="captured layers below 8"):
        exported(last, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert format_of(stored, "speculators").needs_verifier
    whole = tiny_verifier("llama", layers=8, hidden=D, vocab=V, aux_layers=[-1])
    config = heads.kind_of("eagle1")[0].from_verifier(whole.head_geometry, whole.aux_layers, V)
    eagle1 = StoredHead.of(heads.build(config, whole, DraftVocab.identity(V)), whole)
    with pytest.raises(UserError, match="no format 'speculators' for eagle1 heads"):
        write_export(eagle1, tmp_path / "none", "speculators", verifier=whole)


@pytest.fixture
def saved(tmp_path):
    """A verifier's folder, and the verifier from it."""
    folder = tmp_path / "verifier"
    tiny_model(hidden=D).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_command(saved, tmp_path, monkeypatch, capsys):
    verifier = Verifier.load(str(saved), dtype="float32", device="cpu")
    head = make_head(verifier)
    save_head(tmp_path / "run" / "head", StoredHead.of(head, verifier))
    monkeypatch.setattr("sys.argv", ["export", f"run={tmp_path / 'run'}", "format=speculators"])
    export()
    out = tmp_path / "run" / "export-speculators"
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert torch.equal(load_file(out / "model.safetensors")["embed_tokens.weight"], verifier.embedding_VD)
    assert read_any(out, verifier).config == head.config


@pytest.mark.skipif(not PYTHON, reason="EYRIE_SPECULATORS_PYTHON names no Python that has the library")
@pytest.mark.parametrize("plain", [True, False])
def test_the_library_holds_and_computes_the_same(saved, tmp_path, plain):
    """Loaded bit for bit; its own unrolled pass gives our served logits; and what it saves is read again.

    Not plain: all tokens, four layers, both switches of EAGLE-3.1.
    """
    layers = None if plain else [1, 3, 4, 6]
    verifier = Verifier.load(str(saved), dtype="float32", device="cpu", aux_layers=layers)
    switches = {} if plain else {"fc_norm": True, "norm_output": True}
    head = make_head(verifier, IDS if plain else torch.arange(verifier.vocab_size), **switches)
    folder = exported(verifier, tmp_path / "head", head)
    words = [PYTHON, str(LOADER), str(folder), str(saved), str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and report["ok"] and report["notes_kept"], report
    assert report["equal"] == len(load_file(folder / "model.safetensors"))
    assert report["new"] == ["verifier_lm_head.weight", "verifier_norm.weight"]
    given = load_file(tmp_path / "out" / "logits.safetensors")
    ours = draft_logits(head, given["states"], given["tokens"], len(given["logits"]))
    torch.testing.assert_close(ours, given["logits"], rtol=1e-4, atol=1e-4)
    back = attach(read_any(tmp_path / "out" / "saved", verifier), verifier)
    assert torch.equal(draft_logits(back, given["states"], given["tokens"], len(given["logits"])), ours)
