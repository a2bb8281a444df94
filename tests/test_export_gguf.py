"""GGUF files of EAGLE-3 heads: round trips, what llama.cpp reads in them, and refusals."""

import json
import struct
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from conf.cli import main
from conf.errors import UserError
from eval.command import evaluate_run
from models.export import gguf as layout
from models.export.__main__ import export
from models.export.formats import format_of, write_export
from models.export.native import StoredHead, VerifierCard, attach, save_head
from models.export.warm import is_published, layers_wanted, named_verifier, peek, read_any
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.layers import Rotary, rotate
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer, tiny_verifier

MATRICES = {
    "fc.weight": (32, 96),
    "blk.0.attn_q.weight": (32, 64),
    "blk.0.attn_k.weight": (16, 64),
    "blk.0.attn_v.weight": (16, 64),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_gate.weight": (64, 32),
    "blk.0.ffn_up.weight": (64, 32),
    "blk.0.ffn_down.weight": (32, 64),
    "output.weight": (100, 32),
}
NORMS = ("blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm", "output_norm")


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier(hidden=32, vocab=300)


def make_head(verifier, ids=None, **switches):
    ids = torch.arange(1, 300, 3) if ids is None else ids
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, len(ids), **switches)
    torch.manual_seed(0)
    head = Eagle3Head(config, verifier.embedding_VD, DraftVocab(ids, 300)).eval()
    with torch.no_grad():
        for norm in (head.norm, head.midlayer.hidden_norm):
            norm.weight.normal_()
    return head


@pytest.fixture
def stored(verifier):
    return StoredHead.of(make_head(verifier), verifier, {"ttt_steps": 7})


def contents(folder):
    """(keys, tensors) of the file, as the `gguf` package reads them."""
    reader = gguf.GGUFReader(folder / "head.gguf")
    return {k: f.contents() for k, f in reader.fields.items()}, {t.name: t for t in reader.tensors}


def rewrite(folder, keys=(), tensors=()):
    """The file again with other keys and tensors (None: without); those of another kind as (array, kind)."""
    reader = gguf.GGUFReader(folder / "head.gguf")
    arch = dict(keys).get("general.architecture", "eagle3")
    writer = gguf.GGUFWriter(None, arch)
    values = {k: (f.contents(), f.types) for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    values |= {k: (v, values[k][1] if k in values else None) for k, v in dict(keys).items()}
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, (value, _) in values.items():
        if value is not None and key != "general.architecture":
            (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    data = {t.name: (np.array(t.data), t.tensor_type) for t in reader.tensors} | dict(tensors)
    for name, pair in data.items():
        if pair is not None:
            writer.add_tensor(name, pair[0], raw_dtype=pair[1])
    writer.write_header_to_file(folder / "head.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    layout.parsed.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("full", [False, True])
def test_a_round_trip_is_exact(verifier, tmp_path, dtype, full):
    head = make_head(verifier, torch.arange(300) if full else None)
    stored = StoredHead.of(head, verifier, {"ttt_steps": 7})
    assert write_export(stored, tmp_path, "gguf", dtype, verifier) == tmp_path
    back = layout.read(tmp_path)
    assert back.config == stored.config and back.vocab.hash == stored.vocab.hash
    assert back.verifier == stored.verifier and back.training == {"ttt_steps": 7}
    assert back.tensors.keys() == stored.tensors.keys()
    for name, tensor in stored.tensors.items():
        assert back.tensors[name].dtype == dtype and torch.equal(back.tensors[name], tensor.to(dtype))
    hidden = torch.randn(1, 4, 3, 32)
    tokens = torch.tensor([[3, 5, 7, 9]])
    for one, other in [(attach(back, verifier), attach(stored, verifier, dtype))]:
        found, expected = (h.step(tokens, h.fuse(hidden), h.new_cache(1, 4)) for h in (one, other))
        assert torch.equal(found, expected)


def test_names_shapes_and_keys_are_what_the_engine_reads(verifier, stored, tmp_path):
    layout.write(stored, tmp_path, torch.float16, verifier)
    keys, tensors = contents(tmp_path)
    norms = {f"{name}.weight": (32,) for name in NORMS}
    shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in tensors.items()}
    assert shapes == MATRICES | norms | {"d2t": (100,)}
    kinds = {name: t.tensor_type.name for name, t in tensors.items()}
    assert kinds == dict.fromkeys(MATRICES, "F16") | dict.fromkeys(norms, "F32") | {"d2t": "I64"}
    assert tensors["d2t"].data.tolist() == list(range(1, 300, 3))  # the id itself, not an offset
    own = {k.removeprefix("eagle3."): v for k, v in keys.items() if k.startswith("eagle3.")}
    assert own.pop("attention.layer_norm_rms_epsilon") == np.float32(verifier.head_geometry["rms_norm_eps"])
    assert own == {
        "target_layers": [2, 4, 5],
        "target_hidden_size": 32,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "block_count": 1,
        "context_length": 512,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 8,
        "vocab_size": 300,
    }
    assert keys["general.architecture"] == "eagle3" and keys["general.file_type"] == 1


def test_the_tokens_are_the_verifiers(tmp_path):
    verifier = tiny_verifier(hidden=32, vocab=600)  # more rows than tokens
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, 600)
    head = Eagle3Head(config, verifier.embedding_VD, DraftVocab.identity(600))
    layout.write(StoredHead.of(head, verifier), tmp_path, verifier=verifier)
    keys, _ = contents(tmp_path)
    named = verifier.tokenizer.get_vocab()
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 600 and len(named) < 600
    assert {text: i for i, text in enumerate(tokens) if types[i] != gguf.TokenType.UNUSED} == named
    control = [tokens[i] for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL]
    assert control == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert keys["tokenizer.ggml.add_bos_token"] is False and keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.chat_template"] == verifier.tokenizer.chat_template


def test_neighbours_rotated_give_the_scores_of_halves_rotated(verifier, stored, tmp_path):
    """llama.cpp rotates rows (2i, 2i+1) of each head of q and k together, we rows (i, i + F/2)."""
    layout.write(stored, tmp_path, verifier=verifier)
    _, tensors = contents(tmp_path)
    x, config = torch.randn(6, 64), stored.config
    cos, sin = Rotary(config.rope_parameters, 8, 512)(torch.arange(6), torch.float32)

    def neighbours(weight):
        heads = (x @ torch.from_numpy(np.array(weight)).T).unflatten(-1, (-1, 8))
        even, odd = heads[..., 0::2], heads[..., 1::2]
        turned = even * cos[:, None] - odd * sin[:, None], odd * cos[:, None] + even * sin[:, None]
        return torch.stack(turned, dim=-1).flatten(-2)

    def halves(name):
        return rotate((x @ stored.tensors[f"midlayer.self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 8)), cos, sin)

    q, k = (neighbours(tensors[f"blk.0.attn_{name}.weight"].data)[:, 0] for name in "qk")
    torch.testing.assert_close(q @ k.T, halves("q")[:, 0] @ halves("k")[:, 0].T, rtol=1e-5, atol=1e-5)


def test_llama3s_rope_is_written_as_factors(verifier, stored, tmp_path):
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 500000.0,
    }
    rope["original_max_position_embeddings"] = 128
    config = replace(stored.config, rope_parameters=rope)
    layout.write(replace(stored, config=config), tmp_path, verifier=verifier)
    _, tensors = contents(tmp_path)
    plain = Rotary({"rope_type": "default", "rope_theta": 500000.0}, 8, 512).inv_freq
    factors = torch.from_numpy(np.array(tensors["rope_freqs.weight"].data))
    torch.testing.assert_close(plain / factors, Rotary(rope, 8, 512).inv_freq)
    assert factors[0] == 1 and factors[-1] == 8
    assert layout.read(tmp_path).config == config
    rewrite(tmp_path, tensors={"rope_freqs.weight": (np.ones(4, np.float32), None)})
    with pytest.raises(UserError, match="expected the RoPE factors"):
        layout.read(tmp_path)
    rewrite(tmp_path, {"eyrie.notes": None})
    with pytest.raises(UserError, match="nothing that explains them"):
        layout.read(tmp_path, stored.verifier)


def test_a_linear_rope_is_written_as_keys(verifier, stored, tmp_path):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    config = replace(stored.config, rope_parameters=rope)
    layout.write(replace(stored, config=config), tmp_path, verifier=verifier)
    keys, _ = contents(tmp_path)
    assert (keys["eagle3.rope.scaling.type"], keys["eagle3.rope.scaling.factor"]) == ("linear", 2.0)
    rewrite(tmp_path, {"eyrie.notes": None})
    assert layout.read(tmp_path, stored.verifier).config.rope_parameters == rope


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc_norm": True}, "plain EAGLE-3 head, found one with fc_norm"),
        ({"norm_output": True}, "found one with norm_output"),
        ({"aux_layers": (2, 4)}, r"three captured layers below 8, found \[2, 4\]"),
        ({"aux_layers": (2, 4, 8)}, r"found \[2, 4, 8\]"),
        ({"hidden_act": "gelu"}, "expected hidden_act silu.*found gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "found yarn"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "found default over 0.5"),
    ],
)
def test_another_computation_is_not_written(verifier, stored, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        layout.write(replace(stored, config=replace(stored.config, **change)), tmp_path / "out", verifier=verifier)
    assert not (tmp_path / "out").exists()


def test_writing_refuses_what_it_cannot_name(verifier, stored, tmp_path):
    assert format_of(stored, "gguf").needs_verifier
    with pytest.raises(UserError, match="expected the verifier with its tokenizer"):
        layout.write(stored, tmp_path)
    other = tiny_verifier(hidden=32, vocab=300, seed=1)
    with pytest.raises(UserError, match=f"{verifier.weights_hash[:12]}.*{other.weights_hash[:12]}"):
        layout.write(stored, tmp_path, verifier=other)
    words = tiny_verifier(hidden=32, vocab=300)
    words.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(UserError, match="byte-level BPE tokens, found WordLevel"):
        layout.write(StoredHead.of(make_head(words), words), tmp_path, verifier=words)
    del stored.tensors["norm.weight"]
    with pytest.raises(UserError, match="export: missing tensors norm.weight"):
        layout.write(stored, tmp_path, verifier=verifier)


QUANTISED = gguf.quants.quantize(np.ones((32, 96), np.float32), gguf.GGMLQuantizationType.Q8_0)


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({}, {"output_norm.weight": None}, "missing tensors output_norm.weight"),
        ({}, {"d2t": None}, "missing tensors d2t"),
        ({}, {"blk.1.attn_q.weight": (np.ones((2, 2), np.float32), None)}, "unknown tensors blk.1.attn_q.weight"),
        ({}, {"output_norm.weight": (np.ones(33, np.float32), None)}, r"of shape \(32,\), found \(33,\)"),
        ({}, {"output_norm.weight": (np.ones(32, np.float16), None)}, "output_norm.weight in torch.float32"),
        ({}, {"fc.weight": (QUANTISED, gguf.GGMLQuantizationType.Q8_0)}, "found Q8_0: a quantised head"),
        ({}, {"d2t": (np.arange(100), None)}, "vocabulary map .*, found .*: files of different heads"),
        ({"eagle3.target_layers": [1, 4, 5]}, {}, r"target_layers \[2, 4, 5\], found \[1, 4, 5\]"),
        ({"eagle3.norm_before_residual": True}, {}, "norm_before_residual False, found True"),
        ({"eagle3.rope.freq_base": 1e6}, {}, "freq_base 10000.0, found 1000000.0"),
        ({"eagle3.block_size": 7}, {}, "block_size none, found 7"),
        ({"eagle3.vocab_size": None}, {}, "vocab_size 300, found none"),
        ({"eagle3.vocab_size": None, "eyrie.notes": None}, {}, "missing eagle3.vocab_size"),
        ({"eyrie.notes": "{"}, {}, "is damaged"),
        ({"general.architecture": "llama"}, {}, "expected the architecture eagle3 in .*, found llama"),
    ],
)
def test_reading_refuses(verifier, stored, tmp_path, keys, tensors, message):
    layout.write(stored, tmp_path, verifier=verifier)
    rewrite(tmp_path, keys, tensors)
    with pytest.raises(UserError, match=message) as caught:
        layout.read(tmp_path, stored.verifier)
    assert "\n" not in str(caught.value)


def test_damage_is_one_line(verifier, stored, tmp_path):
    layout.write(stored, tmp_path, verifier=verifier)
    whole = (tmp_path / "head.gguf").read_bytes()
    for part in (b"", b"nothing", whole[:40], whole[:2000], whole[:-20000]):
        (tmp_path / "head.gguf").write_bytes(part)
        layout.parsed.cache_clear()
        with pytest.raises(UserError, match="is damaged") as caught:
            layout.read(tmp_path)
        assert "\n" not in str(caught.value)
    (tmp_path / "head.gguf").unlink()
    with pytest.raises(UserError, match="one .gguf file, found none"):
        layout.read(tmp_path)


def test_a_file_from_elsewhere_is_read_and_checked(verifier, stored, tmp_path):
    """As llama.cpp's converter writes it: no notes, maybe the embedding, any name."""
    layout.write(stored, tmp_path, verifier=verifier)
    embedding = verifier.embedding_VD.detach().numpy()
    optional = ["eagle3.norm_before_fc", "eagle3.attention.value_length"]
    keys = dict.fromkeys(["eyrie.notes", *optional]) | {"eagle3.rope.scaling.type": "none"}
    rewrite(tmp_path, keys, {"token_embd.weight": (embedding, None)})
    (tmp_path / "head.gguf").rename(tmp_path / "published-f32.gguf")
    assert is_published(tmp_path) and peek(tmp_path) == "eagle3" and named_verifier(tmp_path) is None
    with pytest.raises(UserError, match="does not name its verifier"):
        layout.read(tmp_path)
    back = read_any(tmp_path, verifier)
    assert back.config == stored.config and all(torch.equal(back.tensors[k], t) for k, t in stored.tensors.items())
    (tmp_path / "published-f32.gguf").rename(tmp_path / "head.gguf")
    rewrite(tmp_path, {}, {"token_embd.weight": (embedding + 1, None)})
    with pytest.raises(UserError, match="ships an embedding of its own"):
        read_any(tmp_path, verifier)


def test_our_own_file_stays_bound_to_its_verifier(verifier, stored, tmp_path):
    other = tiny_verifier(hidden=32, vocab=300, seed=1)
    moved = tiny_verifier(hidden=32, vocab=300, aux_layers=(1, 3, 6))
    layout.write(stored, tmp_path, verifier=verifier)
    assert named_verifier(tmp_path) == verifier.name and layers_wanted(tmp_path) == [2, 4, 5]
    assert read_any(tmp_path, verifier).verifier == VerifierCard.of(verifier)
    with pytest.raises(UserError, match=f"{verifier.weights_hash[:12]}.*{other.weights_hash[:12]}"):
        read_any(tmp_path, other)
    with pytest.raises(UserError, match=r"reads layers \[2, 4, 5\].*captures \[1, 3, 6\]"):
        read_any(tmp_path, moved)


def test_a_gguf_folder_is_exported_and_evaluated_by_command(tmp_path, monkeypatch, capsys):
    tiny_model(hidden=32).save_pretrained(tmp_path / "verifier")
    tiny_tokenizer().save_pretrained(tmp_path / "verifier")
    verifier = Verifier.load(str(tmp_path / "verifier"), dtype="float32", device="cpu")
    size = verifier.vocab_size
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, size)
    head = Eagle3Head(config, verifier.embedding_VD, DraftVocab.identity(size))
    save_head(tmp_path / "run" / "head", StoredHead.of(head, verifier))
    monkeypatch.setattr("sys.argv", ["export", f"run={tmp_path / 'run'}", "format=gguf", f"out={tmp_path / 'head'}"])
    export()
    assert [file.name for file in (tmp_path / "head").iterdir()] == ["head.gguf"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Add two numbers."}\n')
    words = [f"run={tmp_path / 'head'}", f"prompts={tmp_path / 'prompts.jsonl'}", "decode.max_new_tokens=6"]
    monkeypatch.setattr("sys.argv", ["eval", *words, "report=false", "plots=false", "decode.depth=2", "json=true"])
    capsys.readouterr()
    main("eval")(evaluate_run)()
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["identical_to_baseline"] is True and values["dtype"] == "float32"


def test_a_length_beyond_the_file_ends_at_once(tmp_path):
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 0, 1 << 40)
    (tmp_path / "a.gguf").write_bytes(head + bytes(64))
    with pytest.raises(UserError, match=r"is damaged \(it ends at 1\d\d bytes\)"):
        layout.kind(tmp_path)
