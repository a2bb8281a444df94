"""No pad is computed anywhere, a packed batch's loss is its documents' one by one, and what one byte a value costs."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from data.batches import OnlineStates, PackedLoader
from data.documents import Document
from data.store import StateStore
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.vocab import DraftVocab
from tiny import tiny_verifier
from toy_head import ttt_loss


def documents(count=11, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(12, 60, count).tolist()
    return [Document(f"d{i}", rng.integers(3, 500, n).tolist(), [(4, 8), (9, n)]) for i, n in enumerate(lengths)]


def loss_of(verifier, source, indices):
    """(loss sum, weight sum) of a random head; the teacher's logits in the states' own dtype."""
    torch.manual_seed(0)
    vocab = DraftVocab(torch.arange(0, verifier.vocab_size, 3), verifier.vocab_size)
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, len(vocab))
    head = Eagle3Head(config, verifier.embedding_VD, vocab).to(verifier.dtype)
    states = source.states(indices)
    states = replace(states, lse_P=states.lse_P.to(verifier.dtype))  # sums are in its dtype
    teacher_PR = states.last_PD @ verifier.lm_head_rows(vocab.ids_R).T
    loss, weight, _ = ttt_loss(head, states, teacher_PR, 3)
    return loss.item(), weight.item()


@pytest.fixture(scope="module")
def exact():
    return tiny_verifier(layers=7, hidden=32, dtype=torch.float64)


@pytest.mark.parametrize("stored", [True, False])
def test_a_packed_loss_is_the_sum_over_its_documents(exact, tmp_path, stored):
    online = OnlineStates(exact, documents())
    source = StateStore.capture(exact, documents(), tmp_path) if stored else online
    batch = [7, 0, 3, 10]
    alone = [loss_of(exact, source, [index]) for index in batch]
    assert all(loss > 0 for loss, _ in alone)
    tolerance = 1e-12 if stored else 1e-6  # online, the log-sum-exp is float32 and computed anew for each packing
    assert loss_of(exact, source, batch) == pytest.approx(np.sum(alone, 0).tolist(), rel=tolerance)


def test_the_same_dtype_gives_the_same_loss(exact, tmp_path):
    """One document a forward, so that store and verifier multiply the same matrices."""
    one = documents(1)
    store = StateStore.capture(exact, one, tmp_path)
    assert loss_of(exact, store, [0]) == loss_of(exact, OnlineStates(exact, one), [0])


@pytest.mark.parametrize("name", ["int8", "float8"])
def test_one_byte_a_value_moves_the_loss_a_little(tmp_path, name):
    """Of an untrained head, whose law is nearly flat: measured 2e-6 (int8) and 1e-6 (float8)."""
    verifier = tiny_verifier(layers=7, hidden=32)
    store = StateStore.capture(verifier, documents(), tmp_path, name)
    (found, weight), (wanted, same) = (
        loss_of(verifier, source, range(11)) for source in (store, OnlineStates(verifier, documents()))
    )
    assert weight == same and 0 < abs(found / wanted - 1) < 2e-5


def test_no_pad_is_computed(exact, tmp_path, monkeypatch):
    rows, states = [], type(exact).states
    monkeypatch.setattr(type(exact), "states", lambda self, *given: rows.append(given) or states(self, *given))
    store = StateStore.capture(exact, documents(), tmp_path, shard_tokens=150)
    tokens = sum(len(document.input_ids) for document in documents())
    assert sum(ids.numel() for ids, *_ in rows) == tokens
    assert all((document_BT >= 0).all() for _, document_BT, *_ in rows)
    assert sum(shard["tokens"] for shard in store.shards) == tokens
    assert sum(len(store._shard(number)["aux"]) for number in range(len(store.shards))) == tokens
    loader = PackedLoader(store, 128)
    batches = list(islice(loader, len(loader.plan(0))))
    assert sum(batch.input_ids_BT.numel() for batch in batches) == tokens
    assert all((batch.document_BT >= 0).all() for batch in batches)
