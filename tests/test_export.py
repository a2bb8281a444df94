"""Native and SafeAI folders: round trips, exact names, and refusals that say what is wrong."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from models.export import safeai
from models.export.__main__ import export
from models.export.formats import write_export
from models.export.native import StoredHead, VerifierCard, load_head, read_head, save_head, whole
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.vocab import DraftVocab
from tiny import tiny_verifier

NAMES = {
    "fc.weight",
    "lm_head.weight",
    "norm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight",
    *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
    *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
}


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier("llama", layers=8, hidden=32, vocab=300)


def make_head(verifier, ids=None, **switches):
    ids = torch.arange(1, 300, 3) if ids is None else ids
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, len(ids), **switches)
    return Eagle3Head(config, verifier.embedding_VD, DraftVocab(ids, 300))


def draft_logits(head):
    """Logits of a causal pass over fixed random states."""
    numbers = torch.Generator().manual_seed(3)
    aux = torch.randn(1, 6, 3, 32, generator=numbers)
    tokens = torch.randint(0, 300, (1, 6), generator=numbers)
    with torch.no_grad():
        return head.logits(head.step(tokens, head.fuse(aux), head.new_cache(1, 8)))


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}])
@pytest.mark.parametrize("full", [False, True])
def test_round_trips_give_the_same_logits(verifier, tmp_path, switches, full):
    head = make_head(verifier, torch.arange(300) if full else None, **switches)
    stored = StoredHead.of(head, verifier, {"ttt_steps": 7})
    save_head(tmp_path / "run" / "head", stored)
    native = load_head(tmp_path / "run", verifier)
    assert not native.training and torch.equal(draft_logits(native), draft_logits(head))
    assert native.embedding_VD.data_ptr() == verifier.embedding_VD.data_ptr()

    safeai.write(read_head(tmp_path / "run"), tmp_path / "out")
    back = safeai.read(tmp_path / "out")
    assert back.config == head.config and back.vocab.hash == head.vocab.hash and back.training == {"ttt_steps": 7}
    save_head(tmp_path / "again", back)
    assert torch.equal(draft_logits(load_head(tmp_path / "again", verifier)), draft_logits(head))


def test_names_and_maps_are_what_engines_read(verifier, tmp_path):
    stored = StoredHead.of(make_head(verifier), verifier)
    safeai.write(stored, tmp_path, verifier=verifier)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == NAMES | {"d2t", "t2d", "embed_tokens.weight"}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    ids = torch.arange(1, 300, 3)
    assert torch.equal(torch.arange(100) + tensors["d2t"], ids)  # an offset, not the id itself
    assert torch.equal(tensors["t2d"].nonzero().squeeze(1), ids)
    assert torch.equal(tensors["embed_tokens.weight"], verifier.embedding_VD)

    whole = StoredHead.of(make_head(verifier, torch.arange(300)), verifier)
    safeai.write(whole, tmp_path / "whole")
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == NAMES


def test_config_json(verifier, tmp_path):
    stored = StoredHead.of(make_head(verifier), verifier)
    values = json.loads((safeai.write(stored, tmp_path, torch.bfloat16) / "config.json").read_text())
    geometry = verifier.head_geometry
    same = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    same += ("rms_norm_eps", "hidden_act", "max_position_embeddings", "rope_parameters", "vocab_size")
    assert {key: values[key] for key in same} == {key: geometry[key] for key in same}
    assert values["architectures"] == ["LlamaForCausalLMEagle3"] and values["model_type"] == "llama"
    assert values["num_hidden_layers"] == 1 and values["draft_vocab_size"] == 100
    assert values["rope_theta"] == geometry["rope_parameters"]["rope_theta"] and values["rope_scaling"] is None
    assert values["torch_dtype"] == "bfloat16" and values["tie_word_embeddings"] is False
    for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias"):
        assert values[switch] is False
    assert "bias" not in values
    assert not [key for key in values if key.startswith("eagle")]  # default layers: none are named


def test_other_layers_are_written_in_both_conventions(tmp_path):
    verifier = tiny_verifier("llama", layers=8, hidden=32, vocab=300, aux_layers=(1, 3, 6))
    safeai.write(StoredHead.of(make_head(verifier), verifier), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6]
    assert values["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    assert safeai.read(tmp_path).config.aux_layers == (1, 3, 6)
    del values["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert safeai.read(tmp_path).config.aux_layers == (1, 3, 6)


def test_a_scaled_rope_survives_for_old_and_new_readers(verifier, tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    stored = StoredHead.of(make_head(verifier), verifier)
    config = Eagle3Config.from_dict(stored.config.to_dict() | {"rope_parameters": rope})
    safeai.write(StoredHead(config, stored.vocab, stored.tensors, stored.verifier), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["rope_scaling"] == {"rope_type": "linear", "factor": 2.0} and values["rope_theta"] == 5e5
    del values["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert safeai.read(tmp_path).config.rope_parameters == rope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("fc.weight"), "missing tensors fc.weight"),
        (lambda t: t.pop("d2t"), "missing tensors d2t"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), "unknown tensors model.norm.weight"),
        (lambda t: t.update({"norm.weight": torch.ones(33)}), "norm.weight of shape (32,), found (33,)"),
        (lambda t: t.update({"norm.weight": torch.ones(32).half()}), "norm.weight in torch.float32"),
        (lambda t: t.update({"d2t": t["d2t"].int()}), "d2t in torch.int64"),
        (lambda t: t.update({"d2t": t["d2t"] + torch.arange(100)}), "ids must lie in"),
        (lambda t: t.update({"t2d": ~t["t2d"]}), "t2d marks other tokens"),
        (
            lambda t: t["fc.weight"][0].fill_(float("nan")),
            "fc.weight: expected finite values in torch.float32, found 96",
        ),
    ],
)
def test_reading_refuses(verifier, tmp_path, change, message):
    safeai.write(StoredHead.of(make_head(verifier), verifier), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        safeai.read(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_before_fc"])
def test_another_computation_is_refused(verifier, tmp_path, switch):
    safeai.write(StoredHead.of(make_head(verifier), verifier), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {switch: True}))
    with pytest.raises(UserError, match=f"expected {switch} false, found True"):
        safeai.read(tmp_path)


def test_a_shipped_embedding_must_be_the_verifiers(verifier, tmp_path, caplog):
    own = verifier.embedding_VD
    stored = StoredHead.of(make_head(verifier), verifier)
    for dtype in (torch.bfloat16, torch.float32):
        safeai.write(stored, tmp_path, dtype, verifier)
        safeai.read(tmp_path, embedding_VD=own)
    with caplog.at_level("INFO", logger="models.export.folder"):
        safeai.read(tmp_path)
    assert "was not compared" in caplog.text
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] += 1e-3 * (torch.arange(300) == 299)[:, None]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="ships an embedding of its own"):
        safeai.read(tmp_path, embedding_VD=own)
    with pytest.raises(UserError, match="embedding of shape"):
        safeai.read(tmp_path, embedding_VD=own[:-1])


def test_damage_is_one_line(verifier, tmp_path):
    stored = StoredHead.of(make_head(verifier), verifier)
    native, foreign = save_head(tmp_path / "n", stored), safeai.write(stored, tmp_path / "f")
    for folder, read in ((native, read_head), (foreign, safeai.read)):
        whole = (folder / "config.json").read_text()
        damages = ((whole[:50], "is damaged"), ("[]", "expected a JSON object"), ("{}", "found None|not name"))
        for text, message in damages:
            (folder / "config.json").write_text(text)
            with pytest.raises(UserError, match=message) as caught:
                read(folder)
            assert "\n" not in str(caught.value)
        (folder / "config.json").write_text(whole)
    (foreign / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="is damaged"):
        safeai.read(foreign)
    values = json.loads((native / "config.json").read_text())
    for key in ("vocab_hash", "verifier", "config"):
        (native / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != key}))
        with pytest.raises(UserError, match=f"missing {key}"):
            read_head(native)
    (native / "config.json").write_text(json.dumps(values | {"verifier": {"name": "x"}}))
    with pytest.raises(UserError, match="does not describe its verifier"):
        read_head(native)
    (native / "config.json").write_text(json.dumps(values))
    save_file(stored.tensors, native / "head.safetensors")
    with pytest.raises(UserError, match="missing d2t"):
        read_head(native)


def test_writing_refuses_an_incomplete_head(verifier, tmp_path):
    stored = StoredHead.of(make_head(verifier), verifier)
    stored.tensors.pop("norm.weight")
    with pytest.raises(UserError, match="missing tensors norm.weight"):
        safeai.write(stored, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_where_an_export_cannot_go(verifier, tmp_path):
    """One line, and nothing is damaged; an interrupted export is not taken for a whole one."""
    stored = StoredHead.of(make_head(verifier), verifier)
    native = save_head(tmp_path / "run" / "head", stored)
    with pytest.raises(UserError, match="found the head itself"):
        safeai.write(stored, native)
    assert read_head(native).vocab.hash == stored.vocab.hash
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="expected a folder to write into"):
        safeai.write(stored, tmp_path / "file")
    safeai.write(stored, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(KeyboardInterrupt), whole(tmp_path / "out" / "model.safetensors") as (part,):
        part.write_bytes(b"half of it")
        raise KeyboardInterrupt
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    (tmp_path / "out" / "config.json").unlink()
    with pytest.raises(UserError, match="found no config.json"):
        safeai.read(tmp_path / "out")


def test_a_head_of_another_verifier_is_refused(verifier, tmp_path):
    save_head(tmp_path, StoredHead.of(make_head(verifier), verifier))
    other = tiny_verifier("llama", layers=8, hidden=32, vocab=300, seed=1)
    with pytest.raises(UserError) as caught:
        load_head(tmp_path, other)
    assert verifier.weights_hash[:12] in str(caught.value) and other.weights_hash[:12] in str(caught.value)
    moved = tiny_verifier("llama", layers=8, hidden=32, vocab=300, aux_layers=(1, 3, 6))
    with pytest.raises(UserError, match="reads layers"):
        load_head(tmp_path, moved)


def test_an_export_is_bound_to_its_verifier_its_map_and_its_layers(verifier, tmp_path):
    """Both sides are named; engines read past these notes, we don't."""
    other = tiny_verifier("llama", layers=8, hidden=32, vocab=300, seed=1)
    stored = StoredHead.of(make_head(verifier), verifier)
    with pytest.raises(UserError, match=f"{verifier.weights_hash[:12]}.*{other.weights_hash[:12]}"):
        safeai.write(stored, tmp_path / "other", verifier=other)  # would ship another embedding
    safeai.write(stored, tmp_path)
    with pytest.raises(UserError, match=f"{verifier.weights_hash[:12]}.*{other.weights_hash[:12]}"):
        safeai.read(tmp_path, VerifierCard.of(other))
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["eyrie"]["aux_layers"] == [2, 4, 5] and values["eyrie"]["vocab_hash"] == stored.vocab.hash
    moved = values | {"eagle_aux_hidden_state_layer_ids": [1, 4, 5]}
    (tmp_path / "config.json").write_text(json.dumps(moved))
    with pytest.raises(UserError, match=r"captured layers \[2, 4, 5\], found \[1, 4, 5\]"):
        safeai.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    for name, value in (("rms_norm_eps", 0.1), ("max_position_embeddings", 2048), ("hidden_act", "gelu")):
        (tmp_path / "config.json").write_text(json.dumps(values | {name: value}))
        with pytest.raises(UserError, match=f"{name} {verifier.head_geometry[name]}, found {value}"):
            safeai.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    swapped = StoredHead.of(make_head(verifier, torch.arange(100)), verifier)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"d2t": swapped.vocab.d2t, "t2d": swapped.vocab.t2d}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"map {stored.vocab.hash[:12]}, found {swapped.vocab.hash[:12]}"):
        safeai.read(tmp_path)


def test_a_swapped_vocabulary_and_a_damaged_file_are_refused(verifier, tmp_path):
    folder = save_head(tmp_path, StoredHead.of(make_head(verifier), verifier))
    tensors = load_file(folder / "head.safetensors")
    save_file(tensors | {"d2t": DraftVocab(torch.arange(100), 300).d2t.clone()}, folder / "head.safetensors")
    with pytest.raises(UserError, match="different heads"):
        read_head(folder)
    (folder / "head.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="damaged"):
        read_head(folder)
    with pytest.raises(UserError, match="is absent"):
        read_head(tmp_path / "nowhere")


def test_one_flipped_bit_in_the_weights_is_seen(verifier, tmp_path):
    """safetensors has no checksum; folders of before there was one in config.json are read as they are."""
    weights = save_head(tmp_path, StoredHead.of(make_head(verifier), verifier)) / "head.safetensors"
    whole = bytearray(weights.read_bytes())
    whole[-100] ^= 1
    weights.write_bytes(whole)
    with pytest.raises(UserError, match="is not the file that config.json was written with .*resume=RUN.*copy"):
        read_head(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values.pop("file").keys() == {"bytes", "sha256"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_head(tmp_path).config.kind == "eagle3"


def test_the_card_says_what_an_export_needs(verifier):
    card = VerifierCard.of(verifier)
    assert card.num_layers == 8 and card.eos_token_ids == tuple(verifier.eos_ids)
    assert VerifierCard.from_dict(json.loads(json.dumps(card.__dict__))) == card


@pytest.mark.parametrize(("kept", "expected"), [("bfloat16", torch.bfloat16), (None, torch.float32)])
def test_an_export_has_the_verifiers_dtype(verifier, tmp_path, kept, expected):
    stored = StoredHead.of(make_head(verifier), verifier)
    assert stored.verifier.dtype == "float32"
    stored = replace(stored, verifier=replace(stored.verifier, dtype=kept))
    folder = write_export(stored, tmp_path, "vllm")
    assert load_file(folder / "model.safetensors")["fc.weight"].dtype == expected
    assert f"torch.{json.loads((folder / 'config.json').read_text())['torch_dtype']}" == str(expected)


@pytest.mark.parametrize("name", ["vllm", "sglang", "safeai"])
def test_command(verifier, tmp_path, monkeypatch, capsys, name):
    save_head(tmp_path / "run" / "head", StoredHead.of(make_head(verifier), verifier))
    monkeypatch.setattr("sys.argv", ["export", f"run={tmp_path / 'run'}", f"format={name}", "dtype=float16"])
    export()
    out = tmp_path / "run" / f"export-{name}"
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert safeai.read(out).tensors["fc.weight"].dtype == torch.float16


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "give the run"), (["run=/nowhere"], "is absent"), (["run=x", "format=onnx"], "there are: safeai, vllm")],
)
def test_command_mistakes(monkeypatch, capsys, words, message):
    monkeypatch.setattr("sys.argv", ["export", *words])
    with pytest.raises(SystemExit) as end:
        export()
    assert end.value.code == 2 and message in capsys.readouterr().err
