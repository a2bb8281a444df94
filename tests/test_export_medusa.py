"""Medusa folders: exact names, round trips, the names of FasterDecoding, and refusals that say what is wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.cli import main
from conf.errors import UserError
from conf.schema import TrainConf, VerifierConf
from eval.command import evaluate_run
from models import heads
from models.export import medusa
from models.export.__main__ import export
from models.export.formats import exported, write_export
from models.export.native import StoredHead, VerifierCard, attach, save_head
from models.export.warm import is_published, layers_wanted, peek, read_any
from models.heads.medusa import MedusaConfig
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer, tiny_verifier
from train.build import build_head

D, V = 32, 300
SOME = torch.arange(1, V, 3)  # 100 ids


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier(hidden=D, vocab=V, aux_layers=[-1])


def make_head(verifier, ids=SOME, heads_=3, blocks=1, seed=0):
    """Random in all its weights: untrained blocks are zero, and a mistake in them would not show."""
    config = MedusaConfig.from_verifier(
        verifier.head_geometry, verifier.aux_layers, len(ids), heads=heads_, blocks=blocks
    )
    head = heads.build(config, verifier, DraftVocab(ids, verifier.vocab_size)).eval()
    torch.manual_seed(seed)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return head


def stored(verifier, **options):
    return StoredHead.of(make_head(verifier, **options), verifier, {"steps": 5})


@torch.no_grad()
def logits(head):
    """[heads, 7, R] over fixed random states."""
    hidden = torch.randn(7, D, generator=torch.Generator().manual_seed(3))
    return torch.stack([head.logits(out) for out in head.outputs(hidden, head.config.heads)])


def change(folder, edit=None, **values):
    """Edit the tensors of a folder in place, and set keys of its config (None takes one out)."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edited = edit(tensors) if edit else None
    tensors = edited if isinstance(edited, dict) else tensors
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: x for key, x in config.items() if x is not None}))


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("ids", [SOME, torch.arange(V)], ids=["R<V", "R=V"])
def test_a_round_trip_gives_the_same_logits(verifier, tmp_path, ids, blocks):
    head = make_head(verifier, ids, blocks=blocks)
    out = medusa.write(StoredHead.of(head, verifier, {"steps": 5}), tmp_path / "out", verifier=verifier)
    back = medusa.read(out, VerifierCard.of(verifier), verifier.embedding_VD)
    assert back.config == head.config and back.vocab.hash == head.vocab.hash and back.training == {"steps": 5}
    assert torch.equal(logits(attach(back, verifier)), logits(head))
    assert medusa.read(out).verifier == VerifierCard.of(verifier)  # named by our own notes


def test_names_shapes_and_dtypes(verifier, tmp_path):
    blocks = {f"blocks.{h}.layers.{b}.weight": (D, D) for h in range(3) for b in range(2)}
    blocks |= {f"blocks.{h}.layers.{b}.bias": (D,) for h in range(3) for b in range(2)}
    for ids, more in (
        (SOME, {"lm_head.weight": (V, D), "token_map": (100,)}),
        (torch.arange(V), {"lm_head.weight": (V, D)}),
    ):
        tensors = load_file(
            medusa.write(stored(verifier, ids=ids, blocks=2), tmp_path, torch.bfloat16) / "model.safetensors"
        )
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == blocks | more
        assert {tensor.dtype for name, tensor in tensors.items() if name != "token_map"} == {torch.bfloat16}
        if "token_map" in tensors:
            assert tensors["token_map"].dtype == torch.int64 and torch.equal(tensors["token_map"], SOME)  # no offsets


def test_config_json(verifier, tmp_path):
    head = stored(verifier, blocks=2)
    values = json.loads((medusa.write(head, tmp_path, torch.float16) / "config.json").read_text())
    assert values.pop("eyrie")["vocab_hash"] == head.vocab.hash
    assert values == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": D,
        "vocab_size": V,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "truncated_vocab_size": V,
        "torch_dtype": "float16",
    }
    # the reader in vLLM takes the last such key for the number of heads
    assert [key for key in values if "num" in key and "heads" in key] == ["num_heads"]
    assert [key for key in values if "num" in key and "layers" in key] == ["num_hidden_layers"]


def published(folder, blocks, seed=4, biases=True, prefix="", name="model.safetensors", **values):
    """A folder with FasterDecoding's names, three heads, each with an LM head of its own, all the same."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: 0.2 * torch.randn(shape, generator=random)  # noqa: E731
    lm_head, tensors = draw(V, D), {}
    for head in range(3):
        for block in range(blocks):
            tensors[f"{prefix}{head}.{block}.linear.weight"] = draw(D, D)
            if biases:
                tensors[f"{prefix}{head}.{block}.linear.bias"] = draw(D)
        tensors[f"{prefix}{head}.{blocks}.weight"] = lm_head.clone()
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    config = {"medusa_num_heads": 3, "medusa_num_layers": blocks, "base_model_name_or_path": "someone/verifier"}
    (folder / "config.json").write_text(json.dumps(config | values))
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}


def medusa_logits(tensors, hidden, blocks):
    """What the Medusa paper computes, from the published names alone. [3, 7, V]"""
    logits = []
    for head in range(3):
        x = hidden
        for block in range(blocks):
            y = x @ tensors[f"{head}.{block}.linear.weight"].T + tensors.get(f"{head}.{block}.linear.bias", 0.0)
            x = x + y * torch.sigmoid(y)
        logits.append(x @ tensors[f"{head}.{blocks}.weight"].T)
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        (1, {}),
        (2, {}),
        (2, {"biases": False}),
        (1, {"prefix": "medusa_heads.", "name": "medusa_lm_head.safetensors"}),
        (1, {"vocab_size": V, "hidden_size": D, "model_type": "medusa"}),
    ],
)
def test_the_names_of_fasterdecoding_are_read(verifier, tmp_path, blocks, options):
    tensors = published(tmp_path, blocks, **options)
    assert is_published(tmp_path) and peek(tmp_path) == "medusa" and layers_wanted(tmp_path) == [-1]
    head = attach(read_any(tmp_path, verifier), verifier)
    assert (head.config.heads, head.config.blocks, len(head.vocab)) == (3, blocks, V)
    hidden = torch.randn(7, D, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(logits(head), medusa_logits(tensors, hidden, blocks), rtol=1e-5, atol=1e-5)


def test_published_heads_that_ours_cannot_hold_are_refused(verifier, tmp_path):
    published(tmp_path, 1)
    with pytest.raises(UserError, match="does not name its verifier"):
        medusa.read(tmp_path)
    change(tmp_path, lambda t: t.update({"2.1.weight": t["2.1.weight"] + 1.0}))
    with pytest.raises(UserError, match="found head 2's unlike head 0's"):
        read_any(tmp_path, verifier)
    change(tmp_path, lambda t: {name: tensor for name, tensor in t.items() if name != "2.1.weight"})
    with pytest.raises(UserError, match=r"expected one LM head or 3, found those of heads \[0, 1\]"):
        read_any(tmp_path, verifier)
    published(tmp_path, 1, medusa_num_heads=2)  # as one published head has it
    with pytest.raises(UserError, match=r"config says 2 heads, the tensors are of heads \[0, 1, 2\]"):
        read_any(tmp_path, verifier)
    published(tmp_path, 1, medusa_num_layers=2)
    with pytest.raises(UserError, match="missing tensors lm_head.weight"):
        read_any(tmp_path, verifier)
    published(tmp_path, 1, logit_scale=0.5)
    with pytest.raises(UserError, match="expected no logit_scale, found 0.5"):
        read_any(tmp_path, verifier)
    published(tmp_path, 1, num_attention_heads=4)
    with pytest.raises(UserError, match="expected one number of heads, found .*num_attention_heads"):
        read_any(tmp_path, verifier)
    published(tmp_path, 1, medusa_num_heads=None)
    with pytest.raises(UserError, match="expected one number of heads"):
        read_any(tmp_path, verifier)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_outside_the_map_is_never_drafted(verifier, tmp_path, dtype):
    """The largest of all V logits, as an engine that reads past the map takes it, is the head's own draft."""
    head = make_head(verifier, torch.arange(40, 140))  # with ids on either side, which an equal logit could reach
    tensors = load_file(medusa.write(StoredHead.of(head, verifier), tmp_path, dtype) / "model.safetensors")
    rows, ids = tensors["lm_head.weight"].float(), tensors["token_map"]
    hidden = torch.randn(2000, D, generator=torch.Generator().manual_seed(6)) * torch.logspace(-3, 3, 2000)[:, None]
    all_V = hidden @ rows.T
    assert torch.equal(all_V.argmax(-1), ids[(hidden @ rows[ids].T).argmax(-1)])
    outside = torch.ones(V, dtype=torch.bool).index_fill(0, ids, False)
    margin = all_V[:, ids].max(-1).values - all_V[:, outside].max(-1).values
    spread = all_V[:, ids].std(-1)
    assert bool((margin > spread).all())  # far from a matter of rounding
    back = medusa.read(tmp_path)
    assert len(back.vocab) == 100 and torch.equal(back.tensors["lm_head.weight"].float(), rows[ids])


def test_other_rows_outside_the_map_are_refused(verifier, tmp_path):
    medusa.write(stored(verifier), tmp_path)
    change(tmp_path, lambda t: t["lm_head.weight"][0].add_(0.01))
    with pytest.raises(UserError, match="outside token_map to be the mean of those inside"):
        medusa.read(tmp_path)


def test_a_map_that_an_engine_goes_by(verifier, tmp_path):
    """`truncated_vocab_size` R: in any order, by R rows or by V of which the map's are kept."""
    head = make_head(verifier)
    medusa.write(StoredHead.of(head, verifier), tmp_path)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    own = head.lm_head.weight.detach()
    change(
        tmp_path, lambda t: t.update({"token_map": SOME[order], "lm_head.weight": own[order]}), truncated_vocab_size=100
    )
    assert torch.equal(logits(attach(medusa.read(tmp_path), verifier)), logits(head))
    rows = torch.randn(V, D)
    rows[SOME] = own
    change(tmp_path, lambda t: t.update({"lm_head.weight": rows}))
    assert torch.equal(logits(attach(medusa.read(tmp_path), verifier)), logits(head))
    change(tmp_path, lambda t: t.update({"lm_heads.0.weight": t.pop("lm_head.weight")}))  # vLLM reads this name too
    assert torch.equal(logits(attach(medusa.read(tmp_path), verifier)), logits(head))
    change(tmp_path, lambda t: t.update({"token_map": SOME.clamp(max=200)}))
    with pytest.raises(UserError, match="without repeats"):
        medusa.read(tmp_path)
    change(tmp_path, lambda t: t.update({"token_map": SOME[:99]}))
    with pytest.raises(UserError, match=r"token_map int64 of shape \(100,\), found torch.int64 \(99,\)"):
        medusa.read(tmp_path)
    change(tmp_path, lambda t: {name: tensor for name, tensor in t.items() if name != "token_map"})
    with pytest.raises(UserError, match="missing tensors token_map: the config says 100 of 300"):
        medusa.read(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("blocks.1.layers.0.bias"), "missing tensors blocks.1.layers.0.bias"),
        (lambda t: t.pop("lm_head.weight"), "missing tensors lm_head.weight"),
        (lambda t: t.pop("token_map"), "map {map}, found"),
        (lambda t: t.update({"norm.weight": torch.ones(D)}), "unknown tensors norm.weight"),
        (lambda t: t.update({"blocks.0.layers.1.weight": torch.ones(D, D)}), "unknown tensors blocks.0.layers.1"),
        (lambda t: t.update({"blocks.3.layers.0.weight": torch.ones(D, D)}), "the tensors are of heads [0, 1, 2, 3]"),
        (lambda t: t.update({"0.0.linear.bias": torch.ones(D)}), "two tensors for blocks.0.layers.0.bias"),
        (lambda t: t.update({"lm_heads.0.weight": torch.ones(V, D)}), "found both"),
        (lambda t: t.update({"blocks.0.layers.0.weight": torch.ones(D, D + 1)}), "of shape (32, 32), found (32, 33)"),
        (lambda t: t.update({"lm_head.weight": torch.ones(99, D)}), "lm_head.weight of shape (300, ...), found (99,"),
        (lambda t: t.update({"lm_head.weight": torch.ones(V)}), "with two axes, found (300,)"),
        (lambda t: t.update({"lm_head.weight": t["lm_head.weight"].half()}), "lm_head.weight in torch.float32"),
        (lambda t: t.update({"lm_head.weight": torch.ones(V, D).int()}), "lm_head.weight in torch.float32"),
        (lambda t: t.update({"token_map": SOME.int()}), "token_map int64 of shape (300,), found torch.int32"),
        (lambda t: t["lm_head.weight"].fill_(float("nan")), "lm_head.weight: expected finite values"),
    ],
)  # fmt: skip
def test_reading_refuses(verifier, tmp_path, edit, message):
    head = stored(verifier)
    medusa.write(head, tmp_path)
    change(tmp_path, edit)
    with pytest.raises(UserError) as caught:
        medusa.read(tmp_path)
    assert message.replace("{map}", head.vocab.hash[:12]) in str(caught.value) and "\n" not in str(caught.value)


def test_a_map_of_all_tokens_is_refused(verifier, tmp_path):
    """vLLM ignores it: with the rows in another order it would serve other tokens."""
    medusa.write(stored(verifier, ids=torch.arange(V)), tmp_path)
    change(tmp_path, lambda t: t.update({"token_map": torch.arange(V).flip(0)}))
    with pytest.raises(UserError, match="unknown tensors token_map"):
        medusa.read(tmp_path)


def test_an_export_is_bound_to_its_verifier_and_its_map(verifier, tmp_path):
    other = tiny_verifier(hidden=D, vocab=V, seed=1, aux_layers=[-1])
    head = stored(verifier)
    hashes = f"{verifier.weights_hash[:12]}.*{other.weights_hash[:12]}"
    with pytest.raises(UserError, match=hashes):
        medusa.write(head, tmp_path / "none", verifier=other)
    assert not (tmp_path / "none").exists()
    medusa.write(head, tmp_path)
    for read in (lambda: medusa.read(tmp_path, VerifierCard.of(other)), lambda: read_any(tmp_path, other)):
        with pytest.raises(UserError, match=hashes):
            read()
    change(tmp_path, lambda t: t.update({"token_map": torch.arange(100)}), truncated_vocab_size=100)
    swapped = DraftVocab(torch.arange(100), V)
    with pytest.raises(UserError, match=f"map {head.vocab.hash[:12]}, found {swapped.hash[:12]}"):
        medusa.read(tmp_path)
    for heads_ in (4, 2**62):  # a range of so many would not fit into memory
        change(tmp_path, num_heads=heads_)
        with pytest.raises(UserError, match=rf"config says {heads_} heads, the tensors are of heads \[0, 1, 2\]"):
            medusa.read(tmp_path)
    change(tmp_path, num_heads=3, num_hidden_layers=2**62)
    with pytest.raises(UserError, match=f"config says {2**62} layers a head"):
        medusa.read(tmp_path)


def test_writing_refuses_a_broken_head(verifier, tmp_path):
    head = stored(verifier)
    head.tensors["blocks.0.0.linear.bias"][3] = float("nan")
    with pytest.raises(UserError, match=r"blocks.0.layers.0.bias: expected finite values"):
        medusa.write(head, tmp_path / "out")
    del head.tensors["blocks.0.0.linear.bias"]
    with pytest.raises(UserError, match="missing tensors blocks.0.layers.0.bias"):
        medusa.write(head, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_gets_this_export_and_it_is_a_start(verifier, tmp_path):
    head = make_head(verifier)
    assert exported(StoredHead.of(head, verifier), tmp_path / "export") == tmp_path / "export"
    cfg = TrainConf(verifier=VerifierConf(source="toy"))
    cfg.data.path, cfg.head.name, cfg.head.start, cfg.head.heads = None, "medusa", str(tmp_path / "export"), 3
    warm = build_head(cfg, verifier, [])
    assert warm.training and warm.config == head.config and torch.equal(logits(warm), logits(head))


def test_it_is_written_and_evaluated_by_command(tmp_path, monkeypatch, capsys):
    tiny_model(hidden=D).save_pretrained(tmp_path / "verifier")
    tiny_tokenizer().save_pretrained(tmp_path / "verifier")
    source = str(tmp_path / "verifier")
    verifier = Verifier.load(source, dtype="float32", device="cpu", aux_layers=[-1])
    save_head(tmp_path / "run" / "head", stored(verifier))
    monkeypatch.setattr("sys.argv", ["export", f"run={tmp_path / 'run'}", "format=medusa"])
    export()
    out = tmp_path / "run" / "export-medusa"
    assert capsys.readouterr().out.splitlines()[-1] == str(out) and peek(out) == "medusa"
    same = write_export(stored(verifier), tmp_path / "vllm", "vllm")
    assert (same / "config.json").read_text() == (out / "config.json").read_text()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Add two numbers."}\n')
    words = [f"run={out}", f"prompts={tmp_path / 'prompts.jsonl'}", "decode.max_new_tokens=6", "report=false"]
    words += ["plots=false", "decode.depth=2", f"verifier_source={source}", "json=true"]
    monkeypatch.setattr("sys.argv", ["eval", *words])
    main("eval")(evaluate_run)()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical_to_baseline"] is True
