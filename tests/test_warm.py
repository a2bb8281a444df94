"""Published EAGLE-1 and EAGLE-3 folders as a start: read, checked against the verifier, evaluated, trained on."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.cli import main
from conf.errors import UserError
from conf.schema import DataConf, TrainConf, VerifierConf
from eval.command import evaluate_run
from models import heads
from models.export import eagle1, safeai
from models.export.__main__ import export
from models.export.formats import exported, write_export
from models.export.native import StoredHead, VerifierCard, attach, load_head, save_head
from models.export.warm import chance_warning, is_published, layers_wanted, peek, read_any
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer, tiny_verifier
from train.build import build_head

KINDS = ("eagle1", "eagle3", "medusa", "independent")


@pytest.fixture(scope="module")
def verifiers():
    """By kind of head: the same weights, with the states that this kind reads."""
    return {kind: tiny_verifier(hidden=32, vocab=300, aux_layers=heads.captured_layers(kind, None)) for kind in KINDS}


def make_head(kind, verifier, seed=0, **switches):
    ids = torch.arange(300) if kind == "eagle1" else torch.arange(1, 300, 3)
    layers = () if kind == "independent" else verifier.aux_layers
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, layers, len(ids), **switches)
    torch.manual_seed(seed)
    return heads.build(config, verifier, DraftVocab(ids, 300)).eval()


@torch.no_grad()
def logits(head, verifier):
    """Over one document: at each anchor, all steps."""
    ids = torch.arange(5, 25)[None]
    states = verifier.states(ids, torch.zeros_like(ids), torch.arange(20)[None], torch.where(ids > 9, 0, -1))
    steps = {"medusa": 5, "independent": 1}.get(head.config.kind, 3)
    return torch.stack([head.logits(out) for out in head.unroll(states, steps)])


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back_from_its_native_folder(verifiers, kind, tmp_path):
    verifier = verifiers[kind]
    head = make_head(kind, verifier)
    save_head(tmp_path, StoredHead.of(head, verifier))
    back = load_head(tmp_path, verifier)
    assert type(back) is type(head) and back.config == head.config
    assert torch.equal(logits(back, verifier), logits(head, verifier)) and not is_published(tmp_path)
    assert not [name for name in head.state_dict() if "embed" in name or "lm_head_VD" in name]


@pytest.mark.parametrize("switches", [{}, {"fc_bias": True}, {"attention_bias": True}])
def test_eagle1_folders_round_trip(verifiers, switches, tmp_path):
    """As another trainer writes them: no notes of ours, maybe biases, maybe the embedding."""
    verifier = verifiers["eagle1"]
    head = make_head("eagle1", verifier, **switches)
    with torch.no_grad():
        for name, p in head.named_parameters():
            if name.endswith("bias"):
                p.normal_()
    values = json.loads((eagle1.write_vllm(StoredHead.of(make_head("eagle1", verifier), verifier), tmp_path) /
                         "config.json").read_text())  # fmt: skip
    del values["eyrie"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = {name: p.detach().clone() for name, p in head.named_parameters()}
    save_file(tensors | {"embed_tokens.weight": verifier.embedding_VD.clone()}, tmp_path / "model.safetensors")
    assert is_published(tmp_path) and peek(tmp_path) == "eagle1" and layers_wanted(tmp_path) == [-1]
    back = attach(read_any(tmp_path, verifier), verifier)
    assert torch.equal(logits(back, verifier), logits(head, verifier))
    tensors["embed_tokens.weight"] = torch.randn_like(verifier.embedding_VD)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="an embedding of its own"):
        read_any(tmp_path, verifier)


def test_eagle1_is_written_for_each_engine(verifiers, tmp_path):
    """vLLM refuses fc.bias, SGLang demands it; neither knows a norm or an LM head."""
    verifier = verifiers["eagle1"]
    stored = StoredHead.of(make_head("eagle1", verifier, survival=True), verifier)
    vllm, sglang = (write_export(stored, tmp_path / name, name) for name in ("vllm", "sglang"))
    names = {path: set(load_file(path / "model.safetensors")) for path in (vllm, sglang)}
    parts = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    layer = {f"layers.0.{part}.weight" for part in [*parts, "post_attention_layernorm"]}
    assert names[vllm] == {"fc.weight", *layer} and names[sglang] == {"fc.weight", "fc.bias", *layer}
    assert not load_file(sglang / "model.safetensors")["fc.bias"].any()
    kinds = [json.loads((path / "config.json").read_text())["architectures"] for path in (vllm, sglang)]
    assert kinds == [["LlamaForCausalLM"], ["LlamaForCausalLMEagle"]]
    for path in (vllm, sglang):
        assert not attach(read_any(path, verifier), verifier).config.fc_bias
    biased = make_head("eagle1", verifier, fc_bias=True)
    zero = write_export(StoredHead.of(biased, verifier), tmp_path / "zero", "vllm")
    assert set(load_file(zero / "model.safetensors")) == names[vllm]
    with torch.no_grad():
        biased.fc.bias[3] = 0.5
    with pytest.raises(UserError, match="without a bias in fc.*format=sglang"):
        write_export(StoredHead.of(biased, verifier), tmp_path / "no", "vllm")
    kept = write_export(StoredHead.of(biased, verifier), tmp_path / "kept", "sglang")
    assert torch.equal(load_file(kept / "model.safetensors")["fc.bias"], biased.fc.bias)
    curious = StoredHead.of(make_head("eagle1", verifier, attention_bias=True), verifier)
    with pytest.raises(UserError, match="without attention biases"):
        write_export(curious, tmp_path / "no", "sglang")


def foreign_folder(folder, tensors, **values):
    """A checkpoint by hand, with as few keys in its config as authors have published."""
    plain = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "rms_norm_eps": 1e-5}
    plain |= {"hidden_act": "silu", "max_position_embeddings": 256, "vocab_size": 300, "num_hidden_layers": 1}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **plain, **values}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def foreign_layer(name, inputs, seed=5):
    """One layer's tensors, its own key head to every query head."""
    random = torch.Generator().manual_seed(seed)
    shapes = {f"self_attn.{x}_proj.weight": (32, inputs) for x in "qkv"}
    shapes |= {"self_attn.o_proj.weight": (32, 32), "mlp.down_proj.weight": (32, 64)}
    shapes |= {f"mlp.{x}_proj.weight": (64, 32) for x in ("gate", "up")}
    tensors = {f"{name}.{part}": 0.1 * torch.randn(shape, generator=random) for part, shape in shapes.items()}
    return tensors | {f"{name}.post_attention_layernorm.weight": torch.ones(32)}


def test_an_eagle1_folder_by_hand(verifiers, tmp_path, caplog):
    """`bias` and no key heads in the config; the first row, where attention is its own value, is worked out here."""
    verifier = verifiers["eagle1"]
    tensors = {"fc.weight": torch.randn(32, 64), "fc.bias": torch.randn(32), **foreign_layer("layers.0", 32)}
    folder = foreign_folder(tmp_path / "a", tensors, bias=True, rope_scaling={"type": "linear", "factor": 2.0})
    with caplog.at_level(logging.WARNING):
        head = attach(read_any(folder, verifier), verifier)
    assert head.config.num_key_value_heads == 4 and head.config.rope_parameters["rope_type"] == "linear"
    assert "the head has rope_parameters" in caplog.text
    hidden = torch.randn(1, 1, 1, 32)
    found = head.step(torch.tensor([[7]]), head.fuse(hidden), head.new_cache(1, 1)).flatten()
    t = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
    x = t["fc.weight"] @ torch.cat([verifier.embedding_VD[7], hidden.flatten()]) + t["fc.bias"]
    x = x + t["self_attn.o_proj.weight"] @ (t["self_attn.v_proj.weight"] @ x)
    y = x * (x.square().mean() + 1e-5).rsqrt()
    gate = torch.nn.functional.silu(t["mlp.gate_proj.weight"] @ y)
    x = x + t["mlp.down_proj.weight"] @ (gate * (t["mlp.up_proj.weight"] @ y))
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-4)


def test_an_eagle3_folder_by_hand(verifiers, tmp_path, caplog):
    verifier = verifiers["eagle3"]
    ids = torch.arange(100) * 3
    tensors = {"fc.weight": torch.randn(32, 96), **foreign_layer("midlayer", 64), "norm.weight": torch.ones(32)}
    tensors |= {f"midlayer.{name}.weight": torch.ones(32) for name in ("hidden_norm", "input_layernorm")}
    tensors |= {"lm_head.weight": torch.randn(100, 32), "d2t": ids - torch.arange(100)}
    tensors |= {"t2d": torch.isin(torch.arange(300), ids)}
    folder = foreign_folder(tmp_path / "a", tensors, draft_vocab_size=100)
    with caplog.at_level(logging.INFO):
        stored = read_any(folder, verifier)
    assert torch.equal(stored.vocab.d2t + torch.arange(100), ids) and stored.vocab.hash[:12] in caplog.text
    assert logits(attach(stored, verifier), verifier).isfinite().all()

    own = "eagle_aux_hidden_state_layer_ids"
    foreign_folder(folder, tensors, draft_vocab_size=100, **{own: [2, 4, 5]}, eagle_config={own: [2, 4, 5]})
    caplog.clear()
    assert read_any(folder, verifier).config.aux_layers == (2, 4, 5)
    assert "which means [3, 5, 6]: [2, 4, 5] are taken" in caplog.text
    foreign_folder(folder, tensors, draft_vocab_size=100, eagle_config={own: [2, 4, 5]})
    with pytest.raises(UserError, match=r"reads layers \[3, 5, 6\], the verifier captures \[2, 4, 5\]"):
        read_any(folder, verifier)
    for values in ({"input_norm": True}, {"eagle_config": {"norm_before_residual": True}}):
        foreign_folder(folder, tensors, draft_vocab_size=100, **values)
        with pytest.raises(UserError, match="norm.* false, found True"):
            read_any(folder, verifier)


def test_our_own_export_stays_bound_to_its_verifier(verifiers, tmp_path):
    """Another verifier of the same shape would be taken otherwise, and nothing accepted."""
    other = tiny_verifier(hidden=32, vocab=300, seed=1)
    write_export(StoredHead.of(make_head("eagle3", verifiers["eagle3"]), verifiers["eagle3"]), tmp_path)
    assert read_any(tmp_path, verifiers["eagle3"]).verifier == VerifierCard.of(verifiers["eagle3"])
    with pytest.raises(UserError, match=other.weights_hash[:12]):
        read_any(tmp_path, other)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_published_folder_is_exported_and_evaluated_by_command(kind, tmp_path, monkeypatch, capsys):
    tiny_model(hidden=32).save_pretrained(tmp_path / "verifier")
    tiny_tokenizer().save_pretrained(tmp_path / "verifier")
    verifier = Verifier.load(str(tmp_path / "verifier"), dtype="float32", device="cpu",
                             aux_layers=heads.captured_layers(kind, None))  # fmt: skip
    size = verifier.vocab_size
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, verifier.aux_layers, size)
    head = heads.build(config, verifier, DraftVocab.identity(size))
    save_head(tmp_path / "run" / "head", StoredHead.of(head, verifier))
    monkeypatch.setattr("sys.argv", ["export", f"run={tmp_path / 'run'}", "format=vllm", f"out={tmp_path / 'head'}"])
    export()
    assert peek(tmp_path / "head") == kind
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Add two numbers."}\n')
    words = [f"run={tmp_path / 'head'}", f"prompts={tmp_path / 'prompts.jsonl'}", "decode.max_new_tokens=6"]
    words += ["report=false", "plots=false", "decode.depth=2"]
    monkeypatch.setattr("sys.argv", ["eval", *words, f"verifier_source={tmp_path / 'verifier'}", "json=true"])
    main("eval")(evaluate_run)()
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert values["identical_to_baseline"] is True and values["dtype"] == "float32"
    assert len(list((tmp_path / "head").glob("eval-*/alpha.json"))) == 1
    card = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(card | {"eyrie": {}}))
    monkeypatch.setattr("sys.argv", ["eval", *words])
    with pytest.raises(SystemExit) as end:
        main("eval")(evaluate_run)()
    assert end.value.code == 2 and "verifier_source=MODEL" in capsys.readouterr().err


def test_a_published_eagle3_head_is_a_start(verifiers, tmp_path):
    """Custom layers, switches, and the map: what the folder says is what the head is."""
    verifier = tiny_verifier(hidden=32, vocab=300, aux_layers=[1, 3, 6])
    head = make_head("eagle3", verifier, fc_norm=True, norm_output=True)
    safeai.write(StoredHead.of(head, verifier), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["eyrie"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert peek(tmp_path) == "eagle3" and layers_wanted(tmp_path) == [1, 3, 6]
    cfg = TrainConf(verifier=VerifierConf(source="toy"), data=DataConf(path=None))
    cfg.head.start = str(tmp_path)
    warm = build_head(cfg, verifier, [])
    assert warm.training and warm.config == head.config and warm.vocab.hash == head.vocab.hash
    assert torch.equal(logits(warm, verifier), logits(head, verifier))
    del values["eagle_aux_hidden_state_layer_ids"]  # the nested ids are those of the layers' outputs
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_any(tmp_path, verifier).config.aux_layers == (1, 3, 6)
    cfg.head.name = "eagle1"
    with pytest.raises(UserError, match="expected an eagle1 head"):
        build_head(cfg, verifier, [])


def test_a_resumed_start_is_what_its_checkpoint_says(verifiers, tmp_path):
    verifier = verifiers["eagle3"]
    head = make_head("eagle3", verifier, fc_norm=True, survival=True)
    kept = {"config": head.config.to_dict(), "d2t": head.vocab.d2t}
    torch.save({"eyrie": {"head": kept}}, tmp_path / "last.ckpt")
    cfg = TrainConf(verifier=VerifierConf(source="toy"), data=DataConf(path=None))
    cfg.head.start = str(tmp_path / "gone")
    resumed = build_head(cfg, verifier, [], tmp_path / "last.ckpt")
    assert resumed.training and resumed.config == head.config and resumed.vocab.hash == head.vocab.hash
    assert not resumed.survival.weight.requires_grad


def test_mismatches_are_named(verifiers, tmp_path):
    verifier = verifiers["eagle3"]
    safeai.write(StoredHead.of(make_head("eagle3", verifier), verifier), tmp_path)
    moved, wider = (tiny_verifier(hidden=32, vocab=300, aux_layers=[3, 5, 6]), tiny_verifier(hidden=64, vocab=300))
    with pytest.raises(UserError, match=r"reads layers \[2, 4, 5\].*captures \[3, 5, 6\]"):
        read_any(tmp_path, moved)
    with pytest.raises(UserError, match=f"{verifier.weights_hash[:12]}.*{wider.weights_hash[:12]}"):
        read_any(tmp_path, wider)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["eyrie"]  # a head from elsewhere: sizes are all that tells
    (tmp_path / "config.json").write_text(json.dumps(values))
    for other, message in (
        (wider, "hidden_size 32.*64"),
        (tiny_verifier(hidden=32, vocab=400), "vocab_size 300.*400"),
    ):
        with pytest.raises(UserError, match=message):
            read_any(tmp_path, other)
    (tmp_path / "config.json").write_text(json.dumps(values | {"norm_before_residual": True}))
    with pytest.raises(UserError, match="norm_before_residual false"):
        read_any(tmp_path, verifier)
    save_file({"blocks.0.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"expected an EAGLE-3 .* head in .*blocks.0.weight"):
        read_any(tmp_path, verifier)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="convert it to safetensors"):
        read_any(tmp_path, verifier)


def test_no_layout_is_said(verifiers, tmp_path, caplog):
    stored = StoredHead.of(make_head("independent", verifiers["independent"]), verifiers["independent"])
    with pytest.raises(UserError, match="no format 'vllm' for independent heads"):
        write_export(stored, tmp_path, "vllm")
    with caplog.at_level("INFO"):
        assert exported(stored, tmp_path) is None
    assert "no serving layout for independent heads yet" in caplog.text


def test_chance_is_reported_with_its_likely_causes(verifiers):
    verifier = verifiers["eagle3"]
    head = make_head("eagle3", verifier)
    text = chance_warning(0.01, 500, head, verifier)
    assert "layers [2, 4, 5]" in text and head.vocab.hash[:12] in text and "no better than chance" in text
    assert chance_warning(0.3, 500, head, verifier) is chance_warning(0.0, 20, head, verifier) is None
    assert "layers" not in chance_warning(0.0, 500, make_head("independent", verifier), verifier)
    assert VerifierCard.of(verifier).num_layers == 8


def test_a_start_must_fit_the_objective(verifiers, tmp_path):
    verifier = verifiers["eagle3"]
    save_head(tmp_path / "plain", StoredHead.of(make_head("eagle3", verifier), verifier))
    save_head(tmp_path / "survival", StoredHead.of(make_head("eagle3", verifier, survival=True), verifier))
    save_head(
        tmp_path / "medusa", StoredHead.of(make_head("medusa", verifiers["medusa"], heads=3), verifiers["medusa"])
    )
    cfg = TrainConf(verifier=VerifierConf(source="toy"), data=DataConf(path=None))
    cfg.head.start = str(tmp_path / "survival")
    assert not any(p.requires_grad for p in build_head(cfg, verifier, []).survival.parameters())
    cfg.objective.survival = 0.1
    assert all(p.requires_grad for p in build_head(cfg, verifier, []).survival.parameters())
    cfg.head.start = str(tmp_path / "plain")
    with pytest.raises(UserError, match="has no survival output"):
        build_head(cfg, verifier, [])
    cfg.objective.survival, cfg.head.name, cfg.head.start = 0.0, "medusa", str(tmp_path / "medusa")
    with pytest.raises(UserError, match="set head.heads=3"):
        build_head(cfg, verifiers["medusa"], [])
