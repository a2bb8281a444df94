"""States on disk are the record that the verifier gives online, appear whole or not at all, and survive a kill."""

import signal
import subprocess
import sys
import time
from collections import namedtuple
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from conf.errors import UserError
from data.batches import OnlineStates, packed_rows
from data.documents import Document
from data.quantize import STORE_DTYPES, dequantize, quantize
from data.store import StateStore, _shards, bytes_needed
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.vocab import DraftVocab
from tiny import tiny_verifier
from toy_head import ttt_loss


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier(layers=7, hidden=32)


def documents(count=23, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        length = int(rng.integers(12, 60))
        spans = [(4, 8), (9, length)] if index % 3 else [(5, length - 1)]
        made.append(Document(f"d{index}", rng.integers(3, 500, length).tolist(), spans))
    return made


def assert_same(found, wanted, atol=1e-5):
    for field in fields(wanted):
        a, b = getattr(found, field.name), getattr(wanted, field.name)
        assert a.shape == b.shape and a.dtype == b.dtype, field.name
        torch.testing.assert_close(a, b, atol=atol, rtol=atol, msg=lambda text, name=field.name: f"{name}: {text}")


@pytest.fixture(scope="module")
def store(verifier, tmp_path_factory):
    return StateStore.capture(verifier, documents(), tmp_path_factory.mktemp("store"), shard_tokens=200)


def test_stored_states_equal_online_ones(verifier, store):
    online = OnlineStates(verifier, documents())
    assert len(store.shards) > 2
    for indices in ([0], [22, 3, 7], list(range(23))):
        assert_same(store.states(indices), online.states(indices))


def test_a_packed_row_is_its_documents_one_by_one(verifier, store):
    """speculators #279: nothing leaks from one document of a row into the next, and none is shifted."""
    together, alone = store.states([3, 7]), [store.states([index]) for index in (3, 7)]
    for name in ("input_ids_BT", "position_BT", "aux_BTAD"):
        assert torch.equal(getattr(together, name), torch.cat([getattr(s, name) for s in alone], 1)), name
    for name in ("last_PD", "top_P", "lse_P"):
        assert torch.equal(getattr(together, name), torch.cat([getattr(s, name) for s in alone])), name
    length = alone[0].input_ids_BT.shape[1]
    rows = torch.cat([alone[0].last_index_P, alone[1].last_index_P + length])
    assert torch.equal(together.last_index_P, rows)
    assert together.document_BT.tolist() == [[0] * length + [1] * alone[1].input_ids_BT.shape[1]]
    for index, states in zip((3, 7), alone, strict=True):  # nor when they were captured
        assert_same(states, OnlineStates(verifier, documents()).states([index]))


def test_losses_from_the_store_equal_online_ones(verifier, store):
    vocab = DraftVocab(torch.arange(0, verifier.vocab_size, 3), verifier.vocab_size)
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, len(vocab))
    head = Eagle3Head(config, verifier.embedding_VD, vocab)
    losses = []
    for source in (store, OnlineStates(verifier, documents())):
        states = source.states([5, 1, 9])
        teacher_PR = verifier.logits(states.last_PD, vocab.ids_R)
        loss_sum, weight_sum, _ = ttt_loss(head, states, teacher_PR, 3)
        losses.append((loss_sum / weight_sum).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_only_what_training_needs_is_stored(verifier, store):
    overhead = store.bytes - bytes_needed(verifier, documents())
    assert 0 < overhead < 1000 * len(store.shards), "headers only"


def test_progress_is_logged(verifier, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("data.store.SECONDS_PER_LINE", 0)
    with caplog.at_level("INFO", logger="data.store"):
        store = StateStore.capture(verifier, documents(), tmp_path, shard_tokens=200)
    lines = [record.message for record in caplog.records]
    assert sum("tokens/s, about" in line for line in lines) == len(store.shards) - 1


def test_resume_computes_only_what_is_missing(verifier, store, tmp_path, monkeypatch):
    whole = StateStore.capture(verifier, documents(), tmp_path, shard_tokens=200)
    names = [shard["file"] for shard in whole.shards]
    (tmp_path / names[1]).unlink()
    (tmp_path / names[2]).write_bytes(b"half")
    calls, states = [], type(verifier).states
    monkeypatch.setattr(type(verifier), "states", lambda self, *rows: calls.append(1) or states(self, *rows))
    again = StateStore.capture(verifier, documents(), tmp_path, shard_tokens=200)
    assert len(calls) == 2
    again.verify()
    assert_same(again.states(range(23)), store.states(range(23)), atol=0)
    StateStore.capture(verifier, documents(), tmp_path, shard_tokens=200)
    assert len(calls) == 2, "a complete store computes nothing"


@pytest.mark.parametrize("shard_tokens", [1, 40, 200, 10_000])
def test_shards_end_where_they_are_full(shard_tokens):
    """As they were first cut, one document after another: stores of then are found."""
    lengths = [len(document.input_ids) for document in documents()]
    ranges, first, tokens = [], 0, 0
    for index, length in enumerate(lengths):
        tokens += length
        if tokens >= shard_tokens or index == len(lengths) - 1:
            ranges.append((first, index + 1))
            first, tokens = index + 1, 0
    assert _shards(lengths, shard_tokens) == ranges and _shards([], shard_tokens) == []


def test_a_shard_says_who_computed_it(verifier, tmp_path):
    own = StateStore.capture(verifier, documents(2), tmp_path / "own").shards[0]
    assert own["computed_by"] == {"verifier": "tiny-llama", "dtype": "torch.float32", "device": "cpu"}

    def pieces(some):
        for document in some:
            states = verifier.states(*packed_rows([document]))
            yield states.aux_BTAD[0], states.last_PD, states.top_P, states.lse_P

    asked = StateStore.capture(verifier, documents(2), tmp_path / "asked", pieces=pieces, server="http://there:1")
    assert asked.shards[0]["computed_by"] == {"server": "http://there:1"}


@pytest.mark.parametrize("damage", [b"{}", b"[1]", b'{"file": "x"}', b"\xff\xfe\x00", b'{"file'])
def test_a_shard_without_a_whole_checksum_is_computed_again(verifier, tmp_path, damage):
    StateStore.capture(verifier, documents(5), tmp_path, shard_tokens=100)
    (tmp_path / "states-00001.json").write_bytes(damage)
    StateStore.capture(verifier, documents(5), tmp_path, shard_tokens=100).verify()


def test_a_folder_that_cannot_be_made_is_one_line(verifier, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="expected a folder that can be made"):
        StateStore.capture(verifier, documents(2), tmp_path / "file")


def test_a_kill_between_shards(verifier, tmp_path, monkeypatch):
    states = type(verifier).states
    left = iter(range(3))

    def dies(self, *rows):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return states(self, *rows)

    monkeypatch.setattr(type(verifier), "states", dies)
    with pytest.raises(KeyboardInterrupt):
        StateStore.capture(verifier, documents(), tmp_path, shard_tokens=200)
    assert len(list(tmp_path.glob("states-*.json"))) == 3
    monkeypatch.setattr(type(verifier), "states", states)
    StateStore.capture(verifier, documents(), tmp_path, shard_tokens=200).verify()
    assert not list(tmp_path.glob("*.tmp"))


def test_no_old_checksum_stands_beside_a_new_shard(verifier, tmp_path, monkeypatch):
    """A shard's size is that of the one before it, so a kill between shard and checksum would pass for a whole one."""
    store = StateStore.capture(verifier, documents(5), tmp_path, shard_tokens=100)
    (tmp_path / store.shards[0]["file"]).unlink()

    def dies(path):
        raise KeyboardInterrupt

    monkeypatch.setattr("data.store.file_hash", dies)
    with pytest.raises(KeyboardInterrupt):
        StateStore.capture(verifier, documents(5), tmp_path, shard_tokens=100)
    names = {path.name for path in tmp_path.glob("states-00000*")}
    assert names == {"states-00000.safetensors"}


def test_damage_is_found(verifier, tmp_path):
    store = StateStore.capture(verifier, documents(5), tmp_path, shard_tokens=100)
    path = tmp_path / store.shards[0]["file"]
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="shard 0 .* is damaged"):
        store.verify()


@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_smaller_dtypes(verifier, tmp_path, dtype, tolerance):
    full = bytes_needed(verifier, documents(), "float32")
    store = StateStore.capture(verifier, documents(), tmp_path, dtype)
    assert store.bytes < 0.6 * full
    assert_same(store.states([4, 2]), OnlineStates(verifier, documents()).states([4, 2]), atol=tolerance)


def test_the_key_is_of_the_content(verifier, tmp_path, monkeypatch):
    monkeypatch.setenv("EYRIE_CACHE", str(tmp_path))
    first = StateStore.capture(verifier, documents(4))
    assert StateStore.capture(verifier, documents(4)).folder == first.folder
    renamed = [replace(document, id="x" + document.id) for document in documents(4)]
    assert StateStore.capture(verifier, renamed).folder == first.folder
    others = [documents(5), documents(4, seed=1), documents(4)[::-1]]
    folders = {StateStore.capture(verifier, other).folder for other in others}
    folders.add(StateStore.capture(verifier, documents(4), dtype="float16").folder)
    folders.add(StateStore.capture(tiny_verifier(layers=7, hidden=32, aux_layers=(1, 2, 3)), documents(4)).folder)
    assert len(folders | {first.folder}) == 6
    with pytest.raises(UserError, match="states of another documents"):
        StateStore.capture(verifier, documents(5), first.folder)


def test_a_full_disk_stops_before_anything_runs(verifier, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1000, 990, 10))
    with pytest.raises(UserError, match="of free disk for the verifier's states, found 10 B at"):
        StateStore.capture(verifier, documents(), tmp_path)
    assert not list(tmp_path.glob("states-*"))
    with pytest.raises(UserError, match="expected data.store_dtype in"):
        StateStore.capture(verifier, documents(), tmp_path, "int4")


def test_reading_is_fast(store):
    """A floor that only a mistake (a copy per token, a whole shard per document) would miss."""
    store.states(range(23))
    began = time.perf_counter()
    for _ in range(20):
        store.states(range(23))
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_quantised_rows_against_a_plain_reference(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, 64, generator=generator)
    x[0, 0, 5] = 9000.0  # a massive activation takes its own row's precision and no other's
    x[1, 1] = 0.0
    x[2] *= 1e-30
    values, scale = quantize(x, STORE_DTYPES[name])
    found = dequantize(values, scale, torch.float32)
    assert values.element_size() == 1 and scale.shape == (40, 3) and (found[1, 1] == 0).all()
    for row, back in zip(x.flatten(0, 1), found.flatten(0, 1), strict=True):
        largest = max(abs(value) for value in row.tolist())
        for value, other in zip(row.tolist(), back.tolist(), strict=True):
            step = largest / 127 / 2 if name == "int8" else max(abs(value) / 16, largest / 448 * 2**-10)
            assert abs(value - other) <= step * 1.001
    relative = (found - x).norm(dim=-1) / x.norm(dim=-1).clamp_min(1e-30)
    assert 1e-3 < relative[5:].mean() < (0.01 if name == "int8" else 0.03)


@pytest.mark.parametrize("name, bound", [("int8", 0.01), ("float8", 0.03)])
def test_a_store_of_one_byte_a_value(verifier, tmp_path, name, bound):
    store, online = StateStore.capture(verifier, documents(), tmp_path, name), OnlineStates(verifier, documents())
    tokens, labels = sum(len(d.input_ids) for d in documents()), sum(d.labels for d in documents())
    needed = bytes_needed(verifier, documents(), name)
    assert needed == tokens * 3 * (32 + 4) + labels * (32 + 4 + 12)
    assert 0 < store.bytes - needed < 1000
    found, wanted = store.states([4, 2, 9]), online.states([4, 2, 9])
    assert found.aux_BTAD.dtype == wanted.aux_BTAD.dtype and torch.equal(found.top_P, wanted.top_P)
    for name in ("aux_BTAD", "last_PD"):
        a, b = getattr(found, name), getattr(wanted, name)
        assert 0 < (a - b).norm() < bound * b.norm()


def test_auto_is_the_dtype_of_the_verifier(tmp_path):
    verifier = tiny_verifier(layers=7, hidden=32, dtype=torch.bfloat16)
    store, online = StateStore.capture(verifier, documents(4), tmp_path), OnlineStates(verifier, documents(4))
    assert store.index["dtype"] == "bfloat16"
    found, wanted = store.states([3]), online.states([3])
    assert found.aux_BTAD.dtype == torch.bfloat16 and torch.equal(found.last_index_P, wanted.last_index_P)
    assert (
        store.bytes < 1.1 * bytes_needed(verifier, documents(4)) < 0.6 * bytes_needed(verifier, documents(4), "float32")
    )


def test_states_that_are_not_finite_are_refused(verifier, tmp_path):
    def pieces(some):
        for document in some:
            n, p = len(document.input_ids), document.labels
            yield torch.full((n, 3, 32), float("nan")), torch.zeros(p, 32), torch.zeros(p).long(), torch.zeros(p)

    with pytest.raises(UserError, match="expected finite verifier states, found NaN or inf"):
        StateStore.capture(verifier, documents(2), tmp_path, pieces=pieces)
    assert not list(tmp_path.glob("states-*"))


PART = """
import sys, time, torch
from pathlib import Path
sys.path.insert(0, "tests")
from data.store import StateStore
from test_store import documents
from tiny import tiny_verifier
torch.set_num_threads(1)
verifier = tiny_verifier(layers=7, hidden=32)
states, seen = verifier.states, 0
def slow(*rows):
    global seen
    seen += 1
    print("shard", flush=True)
    time.sleep(float(sys.argv[2]))
    return states(*rows)
verifier.states = slow
print("ready", flush=True)
sys.stdin.readline()
StateStore.capture(verifier, documents(), Path(sys.argv[1]), shard_tokens=100)
print("computed", seen, flush=True)
"""


def part(folder, pause):
    command = [sys.executable, "-c", PART, str(folder), str(pause)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_share_the_work_and_one_may_be_killed(verifier, tmp_path):
    """Any number of them, asked for the same: each shard is computed once, and a dead one's is taken over."""
    whole = StateStore.capture(verifier, documents(), tmp_path / "one", shard_tokens=100)
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "states-00000.safetensors.1.tmp").write_bytes(b"half")  # of one that was killed as it wrote
    *processes, doomed = (part(tmp_path / "many", pause) for pause in (0.3, 0.3, 600))
    for process in (*processes, doomed):  # none begins before all are there
        assert process.stdout.readline() == "ready\n"
    for process in (doomed, *processes):
        process.stdin.write("go\n")
        process.stdin.flush()
    assert doomed.stdout.readline() == "shard\n"  # it holds one
    doomed.send_signal(signal.SIGKILL)
    doomed.communicate()
    counts = [int(process.communicate(timeout=60)[0].split()[-1]) for process in processes]
    assert sum(counts) == len(whole.shards) and min(counts) > 0
    store = StateStore.capture(verifier, documents(), tmp_path / "many", shard_tokens=100)
    store.verify()
    assert not list((tmp_path / "many").glob("*.tmp"))
    assert [shard["sha256"] for shard in store.shards] == [shard["sha256"] for shard in whole.shards]
