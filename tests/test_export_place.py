"""Where an export may be written, what becomes of an earlier one, and values of wrong types in files."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from models import heads
from models.export import eagle1, folder, gguf, medusa, native, safeai
from models.export.__main__ import export
from models.export.formats import write_export
from models.export.native import StoredHead, VerifierCard, read_head, save_head
from models.export.warm import is_gguf
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer, tiny_verifier


def stored_head(kind="eagle3", seed=0):
    layers = {"eagle3": (2, 4, 5)}.get(kind, (8,))
    verifier = tiny_verifier("llama", layers=8, hidden=32, vocab=300, aux_layers=layers)
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, layers, 300)
    torch.manual_seed(seed)
    return StoredHead.of(heads.build(config, verifier, DraftVocab(torch.arange(300), 300)), verifier), verifier


def content(place):
    return {path.name: path.read_bytes() for path in place.iterdir()}


@pytest.mark.parametrize("name", ["safeai", "gguf"])
def test_another_models_files_and_the_verifiers_folder_are_left_alone(tmp_path, name):
    stored, verifier = stored_head()
    model = tmp_path / "model"
    tiny_model(layers=8, hidden=32).save_pretrained(model)
    before = content(model)
    with pytest.raises(UserError, match="earlier export of ours, found .*config.json"):
        write_export(stored, model, name, verifier=verifier)
    at_home = replace(stored, verifier=replace(stored.verifier, name=str(model)))
    for out in (model, model / "export"):
        with pytest.raises(UserError, match="outside the verifier's folder"):
            write_export(at_home, out, "safeai")
    assert content(model) == before
    (tmp_path / "new").mkdir()
    for _ in range(2):
        write_export(stored, tmp_path / "new", name, verifier=verifier)


def test_an_export_replaces_that_of_another_layout(tmp_path):
    (old, verifier), (new, _) = stored_head(), stored_head(seed=1)
    write_export(old, tmp_path, "gguf", verifier=verifier)
    safeai.write(new, tmp_path)
    assert set(content(tmp_path)) == {"config.json", "model.safetensors"}
    write_export(old, tmp_path, "gguf", verifier=verifier)
    assert set(content(tmp_path)) == {"head.gguf"} and is_gguf(tmp_path)
    assert torch.equal(gguf.read(tmp_path).tensors["fc.weight"], old.tensors["fc.weight"])
    safeai.write(new, tmp_path)
    (tmp_path / "ir").mkdir()
    with pytest.raises(UserError, match="expected no ir/"):
        write_export(old, tmp_path, "gguf", verifier=verifier)


def test_an_interrupted_export_or_head_leaves_the_old_one(tmp_path, monkeypatch):
    (old, _), (new, _) = stored_head(), stored_head(seed=1)
    safeai.write(old, tmp_path / "export")
    save_head(tmp_path / "head", old)
    before = [content(tmp_path / name) for name in ("export", "head")]

    def interrupted(tensors, file, **more):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    for module, call in ((folder, safeai.write), (native, lambda head, out: save_head(out, head))):
        monkeypatch.setattr(module, "save_file", interrupted)
        for place in ("export" if module is folder else "head", f"new-{module.__name__}"):
            with pytest.raises(KeyboardInterrupt):
                call(new, tmp_path / place)
        assert content(tmp_path / place) == {}
    assert [content(tmp_path / name) for name in ("export", "head")] == before
    assert torch.equal(read_head(tmp_path).tensors["fc.weight"], old.tensors["fc.weight"])


WRONG = {
    "hidden_size": "32", "num_attention_heads": 0, "head_dim": 8.5, "rms_norm_eps": "small", "hidden_act": 3,
    "rope_parameters": [1], "draft_vocab_size": "300", "target_hidden_size": [32],
    "norm_before_residual": 1.5, "fc_norm": "yes", "eagle_aux_hidden_state_layer_ids": 3, "eyrie": [1],
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG)
def test_values_of_another_type_are_one_line(tmp_path, key):
    stored, _ = stored_head()
    safeai.write(stored, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: WRONG[key]}))
    with pytest.raises(UserError, match="expected") as caught:
        safeai.read(tmp_path, stored.verifier)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("values", [{"num_layers": "8"}, {"eos_token_ids": ["a"]}, {"name": None}])
def test_a_card_of_wrong_types(values):
    card = stored_head()[0].verifier
    with pytest.raises(UserError, match=next(iter(values))):
        VerifierCard.from_dict(card.__dict__ | values)


def test_a_zero_bias_of_another_shape_and_small_floats_are_refused(tmp_path):
    stored, _ = stored_head("eagle1")
    eagle1.write_sglang(stored, tmp_path / "eagle1")
    file = tmp_path / "eagle1" / "model.safetensors"
    save_file(load_file(file) | {"fc.bias": torch.zeros(7)}, file)
    with pytest.raises(UserError, match=r"fc.bias of shape \(32,\), found \(7,\)"):
        eagle1.read(tmp_path / "eagle1")
    stored, _ = stored_head("medusa")
    medusa.write(stored, tmp_path / "medusa")
    file = tmp_path / "medusa" / "model.safetensors"
    save_file({name: x.to(torch.float8_e4m3fn) for name, x in load_file(file).items()}, file)
    with pytest.raises(UserError, match="16 bits or more, found torch.float8"):
        medusa.read(tmp_path / "medusa")


def test_a_gguf_in_float64_is_refused(tmp_path):
    stored, verifier = stored_head()
    with pytest.raises(UserError, match="float32, float16 or bfloat16 for a GGUF"):
        gguf.write(stored, tmp_path / "out", torch.float64, verifier)


def test_the_command_takes_the_verifiers_place(tmp_path, command):
    from models.verifier import Verifier

    tiny_model(layers=8, hidden=32).save_pretrained(tmp_path / "moved")
    tiny_tokenizer().save_pretrained(tmp_path / "moved")
    verifier = Verifier.load(str(tmp_path / "moved"), dtype="float32", device="cpu")
    V = verifier.vocab_size
    config = heads.kind_of("eagle3")[0].from_verifier(verifier.head_geometry, verifier.aux_layers, V)
    stored = StoredHead.of(heads.build(config, verifier, DraftVocab(torch.arange(V), V)), verifier)
    save_head(tmp_path / "run" / "head", replace(stored, verifier=replace(stored.verifier, name="/nowhere")))
    words = [f"run={tmp_path / 'run'}", "format=gguf", f"verifier_source={tmp_path / 'moved'}"]
    run = export.__wrapped__
    code, _, err = command("export", run, *words, f"out={tmp_path / 'out'}")
    assert code == 0 and (tmp_path / "out" / "head.gguf").is_file(), err
    for word, said in (("out=", "expected out=DIR"), ("run=", "give the run")):
        code, _, err = command("export", run, *words, word)
        assert code == 2 and said in err and len(err.splitlines()) == 1
