"""Verifiers larger than a device: layers elsewhere, or not loaded at all."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conf.cli import load
from conf.errors import UserError
from models import introspect, parts
from models.export.native import read_head
from models.verifier import Verifier
from tiny import tiny_model, tiny_tokenizer
from train.checks import check
from train.main import train

MAPS = {
    "one device": {"": "cpu"},
    "disk": {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers": "disk", "model.norm": "disk",
             "lm_head": "disk"},
    "half": {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu",
             **{f"model.layers.{i}": "cpu" if i < 4 else "disk" for i in range(8)}},
}  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["own head", "tied head"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    tiny_model(hidden=32, vocab=300, tie_word_embeddings=request.param).save_pretrained(folder)
    tiny_tokenizer(300).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def plain(saved):
    return Verifier.load(saved, dtype="float32", device="cpu")


def record(verifier):
    ids = torch.arange(3, 23)[None]
    document = (torch.arange(20) // 12)[None]
    position = torch.cat([torch.arange(12), torch.arange(8)])[None]
    return verifier.states(ids, document, position, torch.where(position > 3, document, -1))


def decoded(verifier):
    """Two sequences of unequal lengths, twice."""
    cache, rows = verifier.new_cache(2, 12), torch.arange(3, 13).view(2, 5)
    verifier.decode(cache, rows, count_B=[5, 3])
    cache.keep_rows([1, 0])
    return verifier.decode(cache, rows[:, :2]).logits


@pytest.mark.parametrize("name", MAPS)
def test_a_map_of_devices_changes_no_state(saved, plain, name):
    spread = Verifier.load(saved, dtype="float32", device_map=MAPS[name])
    assert parts.absent(spread.model) == (name != "one device"), "layers on the disk are not in memory"
    one, other = record(spread), record(plain)
    for field in ("aux_BTAD", "last_PD", "top_P", "lse_P"):
        torch.testing.assert_close(getattr(one, field), getattr(other, field))
    torch.testing.assert_close(decoded(spread), decoded(plain))
    ids_R = torch.tensor([2, 5, 7])
    assert torch.equal(spread.lm_head_rows(ids_R), plain.lm_head_rows(ids_R))
    assert torch.equal(spread.embedding_VD, plain.embedding_VD) and spread.weights_hash == plain.weights_hash
    assert torch.equal(spread.final_norm_weight, plain.final_norm_weight)
    same_layer(spread, plain)


def same_layer(one, other, layer=-1):
    mine, theirs = one.layer_state_dict(layer), other.layer_state_dict(layer)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_without_its_layers_a_verifier_has_all_that_a_head_starts_from(saved, plain):
    bare = Verifier.load(saved, dtype="float32", device="cpu", whole=False)
    held = sum({p.data_ptr(): p.numel() for p in bare.model.parameters() if not p.is_meta}.values())
    tied = bare.embedding_VD.data_ptr() == bare.lm_head.weight.data_ptr()
    assert held == (1 if tied else 2) * 300 * 32 + 32
    hidden = torch.randn(4, 32)
    assert torch.equal(bare.logits(hidden), plain.logits(hidden)) and bare.weights_hash == plain.weights_hash
    assert torch.equal(bare.embedding_VD, plain.embedding_VD) and bare.head_geometry == plain.head_geometry
    same_layer(bare, plain, 3)
    with pytest.raises(UserError, match="task=capture"):
        record(bare)


def test_a_weight_that_is_not_there_is_named(saved, tmp_path):
    model = parts.outline(tiny_model(hidden=32, vocab=300).config)
    with pytest.raises(UserError, match="safetensors"):
        parts.fill(model, [model.lm_head], [tmp_path / "pytorch_model.bin"], torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match="expected lm_head.weight .*whole=true"):
        parts.fill(model, [model.lm_head], [], torch.device("cpu"), torch.float32)


def test_a_head_learns_the_same_from_stored_states_without_the_layers(tmp_path, monkeypatch, capsys):
    """What ranks do for a verifier that none of them can hold: states are captured first, then trained from."""
    tiny_model("llama", layers=8, hidden=32, vocab=300).save_pretrained(tmp_path / "verifier")
    tiny_tokenizer(300).save_pretrained(tmp_path / "verifier")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"What is {i} and {i * i}?"}) + "\n" for i in range(14)))
    words = ["experiment=debug", f"verifier.source={tmp_path / 'verifier'}", "data=jsonl", f"data.path={prompts}"]
    words += [f"evaluation.prompts={prompts}", "trainer.accelerator=cpu", "trainer.validate_every=0"]
    words += ["data.exclude=[]", "json=true"]

    def command(*more):
        monkeypatch.setattr(sys, "argv", ["train", *words, *more])
        try:
            train()
            code = 0
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    code, _, err = command("verifier.whole=false", f"output_dir={tmp_path / 'early'}")
    assert code == 2 and "task=capture" in err
    heads = []
    for name, more in (("whole", []), ("bare", ["verifier.whole=false"])):
        code, out, err = command(*more, f"output_dir={tmp_path / name}")
        assert code == 0, err
        values = json.loads(out.splitlines()[-1])
        heads.append(read_head(Path(values["run"])).tensors)
    assert "not evaluated" in err and "tau" not in values and Path(values["export"]).is_dir()
    assert heads[0].keys() == heads[1].keys()
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


@pytest.mark.parametrize(("words", "message"), [
    (["verifier.whole=false", "data.store=false"], "trained from stored states"),
    (["verifier.whole=false", "trainer.validate_every=5"], "trainer.validate_every=0"),
    (["verifier.device_map=auto", "trainer.devices=2"], "serves one process, found 2 ranks"),
    (["verifier.device_map=auto", "verifier.device=cpu"], "leave verifier.device unset"),
    (["verifier.max_memory={cpu:1GB}"], "verifier.device_map=auto"),
])  # fmt: skip
def test_what_such_a_verifier_cannot_do_is_said_at_once(words, message):
    cfg = load(
        "train",
        ["experiment=debug", "verifier.source=x", "trainer.accelerator=cpu", "trainer.validate_every=0", *words],
    )
    with pytest.raises(UserError, match=message):
        check(cfg)


def test_the_hash_of_a_large_model_is_kept_until_its_files_change(tmp_path, monkeypatch):
    monkeypatch.setenv("EYRIE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(introspect, "REMEMBERED_FROM", 10)
    reads, read = [], introspect._hash_files
    monkeypatch.setattr(introspect, "_hash_files", lambda files: reads.append(1) or read(files))
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(4)}, file)
    first = introspect.hash_files([file])
    assert introspect.hash_files([file]) == first == read([file]) and len(reads) == 1
    save_file({"a": torch.arange(1, 5)}, file)  # as large as before
    assert introspect.hash_files([file]) != first and len(reads) == 2
