"""The OpenVINO export without OpenVINO: what the converter is handed, what is written into its IR, and refusals.

The converter is a stand-in on the PATH that writes an IR as optimum-cli's begins and ends.
"""

import json
import sys
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

from conf.errors import UserError
from models.export import openvino, safeai
from models.export.__main__ import export
from models.export.formats import format_of
from models.export.native import StoredHead, VerifierCard, save_head
from models.export.warm import is_published, peek, read_any
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.vocab import DraftVocab
from tiny import tiny_verifier

MODEL = """<?xml version="1.0"?>
<net name="Model0" version="11">
\t<layers>
\t\t<layer id="0" name="input_ids" type="Parameter" version="opset1"><data shape="?,?" element_type="i64" /></layer>
\t</layers>
\t<rt_info>
\t\t<eagle3_mode value="True" />
\t\t<runtime_options><KV_CACHE_PRECISION value="f16" /></runtime_options>
\t</rt_info>
</net>
"""
# Keeps config.json as the converter does, other keys added and our notes in.
CONVERTER = f"""#!{sys.executable}
import json, pathlib, sys
words = sys.argv[1:]
source, out = pathlib.Path(words[words.index("--model") + 1]), pathlib.Path(words[-1])
assert (source / "model.safetensors").is_file()
out.mkdir(exist_ok=True)
config = json.loads((source / "config.json").read_text())
(out / "config.json").write_text(json.dumps(config | {{"use_cache": True}}))
(out / "openvino_model.xml").write_text({MODEL!r})
(out / "words.json").write_text(json.dumps(words))
"""
BROKEN = f"#!{sys.executable}\nimport sys\nprint('loading')\nsys.exit('no such architecture')\n"


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier("llama", layers=8, hidden=32, vocab=300)


@pytest.fixture(autouse=True)
def no_converter(monkeypatch, tmp_path):
    """Nothing but what a test puts there is on the PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def make_head(verifier, ids=None, **switches):
    ids = torch.arange(1, 300, 3) if ids is None else ids
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, len(ids), **switches)
    return StoredHead.of(Eagle3Head(config, verifier.embedding_VD, DraftVocab(ids, 300)), verifier, {"ttt_steps": 7})


def install(tmp_path, text=CONVERTER):
    script = tmp_path / "bin" / "optimum-cli"
    script.write_text(text)
    script.chmod(0o755)


def runtime_info(out):
    info = ElementTree.parse(out / "ir" / "openvino_model.xml").getroot().find("rt_info")
    return {entry.tag: entry.get("value") for entry in info}


def test_the_folder_without_a_converter_says_what_to_run(verifier, tmp_path, caplog):
    stored = make_head(verifier)
    with caplog.at_level("INFO", logger="models.export.openvino"):
        out = openvino.write(stored, tmp_path / "out", verifier=verifier)
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    assert f"--weight-format fp32 {out}/ir` where optimum-intel is" in caplog.text
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], verifier.embedding_VD)
    assert torch.equal(torch.arange(100) + tensors["d2t"], stored.vocab.ids_R)
    assert is_published(out) and peek(out) == "eagle3"
    back = read_any(out, verifier)
    assert back.training == {"ttt_steps": 7} and back.vocab.hash == stored.vocab.hash
    for name, tensor in stored.tensors.items():
        assert torch.equal(back.tensors[name], tensor)
    other = tiny_verifier("llama", layers=8, hidden=32, vocab=300, seed=1)
    with pytest.raises(UserError, match=f"{verifier.weights_hash[:12]}.*{other.weights_hash[:12]}"):
        safeai.read(out, VerifierCard.of(other))


@pytest.mark.parametrize(("dtype", "weights"), [("float32", "fp32"), ("bfloat16", "fp32"), ("float16", "fp16")])
def test_the_ir_gets_layers_as_outputs_and_the_notes(verifier, tmp_path, dtype, weights):
    install(tmp_path)
    stored = make_head(verifier)
    out = openvino.write(stored, tmp_path / "out", getattr(torch, dtype), verifier)
    words = json.loads((out / "ir" / "words.json").read_text())
    assert words[:4] == ["export", "openvino", "--model", str(out)] and words[-3:-1] == ["--weight-format", weights]
    info = runtime_info(out)
    assert verifier.aux_layers == (2, 4, 5) and info["hidden_layers_list"] == "1 3 4"
    notes = json.loads(info["eyrie"])
    assert notes["verifier"]["weights_hash"] == verifier.weights_hash and notes["vocab_hash"] == stored.vocab.hash
    assert info["eagle3_mode"] == "True"
    tree = ElementTree.parse(out / "ir" / "openvino_model.xml").getroot()
    assert tree.find("rt_info/runtime_options/KV_CACHE_PRECISION").get("value") == "f16"
    assert tree.find("layers/layer/data").get("element_type") == "i64" and tree.get("version") == "11"


def test_custom_layers(tmp_path):
    verifier = tiny_verifier("llama", layers=8, hidden=32, vocab=300, aux_layers=(1, 3, 6))
    install(tmp_path)
    out = openvino.write(make_head(verifier), tmp_path / "out", verifier=verifier)
    assert runtime_info(out)["hidden_layers_list"] == "0 2 5"


def test_the_same_command_finishes_an_ir_that_was_converted_elsewhere(verifier, tmp_path):
    stored, out = make_head(verifier), tmp_path / "out"
    openvino.write(stored, out, verifier=verifier)
    install(tmp_path)
    openvino.run(openvino.convert_command(out, torch.float32))
    (tmp_path / "bin" / "optimum-cli").unlink()
    assert "hidden_layers_list" not in runtime_info(out)
    for _ in range(2):  # a second time changes nothing
        openvino.write(stored, out, verifier=verifier)
        assert runtime_info(out)["hidden_layers_list"] == "1 3 4"
    root = ElementTree.parse(out / "ir" / "openvino_model.xml").getroot()
    assert len(root.findall("rt_info/hidden_layers_list")) == len(root.findall("rt_info/eyrie")) == 1


def test_an_ir_of_another_head_is_refused_or_converted_again(verifier, tmp_path):
    install(tmp_path)
    out = openvino.write(make_head(verifier), tmp_path / "out", verifier=verifier)
    old = json.loads(runtime_info(out)["eyrie"])["head_hash"]
    torch.manual_seed(5)
    other = make_head(verifier)
    (tmp_path / "bin" / "optimum-cli").unlink()
    with pytest.raises(UserError) as caught:
        openvino.write(other, out, verifier=verifier)
    new = json.loads((out / "config.json").read_text())["eyrie"]["head_hash"]
    assert old != new and old[:12] in str(caught.value) and new[:12] in str(caught.value)
    install(tmp_path)
    openvino.write(other, out, verifier=verifier)
    assert json.loads(runtime_info(out)["eyrie"])["head_hash"] == new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("eagle3_mode", "other_mode"), "expected eagle3_mode in the runtime info"),
        (lambda text: text.replace('"True"', '"False"'), "expected eagle3_mode"),
        (lambda text: text.replace("rt_info", "rt"), "expected eagle3_mode"),
        (lambda text: text[:200], "is damaged"),
    ],
)
def test_an_ir_that_is_no_eagle3_heads_is_refused(verifier, tmp_path, change, message):
    install(tmp_path)
    stored = make_head(verifier)
    out = openvino.write(stored, tmp_path / "out", verifier=verifier)
    (out / "ir" / "openvino_model.xml").write_text(change(MODEL))
    with pytest.raises(UserError, match=message) as caught:
        openvino.write(stored, out, verifier=verifier)
    assert "\n" not in str(caught.value)


def test_a_failed_conversion_says_why(verifier, tmp_path):
    install(tmp_path, BROKEN)
    with pytest.raises(UserError, match="ended with 1 .*no such architecture; to see all of it: optimum-cli export"):
        openvino.write(make_head(verifier), tmp_path / "out", verifier=verifier)
    install(tmp_path, f"#!{sys.executable}\n")  # content with itself, and nothing written
    with pytest.raises(UserError, match="ended with 0 and no openvino_model.xml: no output"):
        openvino.write(make_head(verifier), tmp_path / "out", verifier=verifier)


@pytest.mark.parametrize("switch", ["fc_norm", "norm_output"])
def test_heads_that_the_converter_would_change_are_refused(verifier, tmp_path, switch):
    with pytest.raises(UserError, match=f"expected {switch} false"):
        openvino.write(make_head(verifier, **{switch: True}), tmp_path / "out", verifier=verifier)
    assert not (tmp_path / "out").exists()


def test_other_refusals(verifier, tmp_path):
    with pytest.raises(UserError, match="smaller than the verifier's 300 tokens, found all"):
        openvino.write(make_head(verifier, torch.arange(300)), tmp_path / "out", verifier=verifier)
    with pytest.raises(UserError, match="expected the verifier"):
        openvino.write(make_head(verifier), tmp_path / "out")
    for layers in ((0, 3, 6), (1, 3, 5, 6)):
        moved = tiny_verifier("llama", layers=8, hidden=32, vocab=300, aux_layers=layers)
        with pytest.raises(UserError, match="expected 3 captured layers from 1 up, found"):
            openvino.write(make_head(moved), tmp_path / "out", verifier=moved)
    other = tiny_verifier("llama", layers=8, hidden=32, vocab=300, seed=1)
    with pytest.raises(UserError, match=f"{verifier.weights_hash[:12]}.*{other.weights_hash[:12]}"):
        openvino.write(make_head(verifier), tmp_path / "out", verifier=other)
    assert not (tmp_path / "out").exists()


def test_command(verifier, tmp_path, monkeypatch, capsys):
    stored = make_head(verifier)
    assert format_of(stored, "openvino").needs_verifier
    save_head(tmp_path / "run" / "head", stored)
    monkeypatch.setattr("models.export.__main__.Verifier.load", lambda name, **options: verifier)
    monkeypatch.setattr("sys.argv", ["export", f"run={tmp_path / 'run'}", "format=openvino"])
    install(tmp_path)
    export()
    out = tmp_path / "run" / "export-openvino"
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert runtime_info(out)["hidden_layers_list"] == "1 3 4"
