"""Labels of the head's own drafts, against a plain forward of the verifier over every drafted prefix."""

import torch

from data.batches import packed_rows
from data.documents import Document
from models.losses import head_loss
from models.objectives import Labels, Objective
from models.on_policy import own_labels
from models.supervision import supervised
from tiny import tiny_verifier
from toy_head import head_of

K = 3
DOCUMENTS = [
    Document("a", list(range(10, 24)), [(3, 8), (10, 14)]),
    Document("b", list(range(40, 49)), [(0, 4), (5, 9)]),  # opens with an answer: its second token has no anchor
]


def both(eos=()):
    verifier = tiny_verifier(dtype=torch.float64)
    verifier.eos_ids = tuple(eos)
    head = head_of(verifier).double()
    with torch.no_grad():  # far enough from the verifier's own layer that drafts miss
        head.fc.weight.add_(torch.randn(head.fc.weight.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3)
    states = verifier.states(*packed_rows(DOCUMENTS))
    return verifier, head, states


def labels_of(verifier, head, states):
    return own_labels(head, verifier, states, verifier.draft_logits(head.vocab.ids_R), K)


def test_drafts_and_their_labels_are_those_of_a_serial_run():
    verifier, head, states = both()
    labels, checked, misses = labels_of(verifier, head, states), 0, 0
    ids, counted = states.input_ids_BT[0], supervised(states, 1)[0]
    for p, label in enumerate(states.last_index_P.tolist()):
        assert bool(labels.counted_KP[0, p]) == bool(counted[p])
        if not counted[p]:
            assert not labels.counted_KP[:, p].any()
            continue
        t, begin = label - 1, label - 1 - int(states.position_BT[0, label - 1])
        cache = head.new_cache(1, 64)
        aux = states.aux_BTAD[:, begin : t + 1]
        out = head.step(ids[None, begin + 1 : t + 2], head.fuse(aux), cache)[:, -1:]
        prefix = ids[begin : t + 2].tolist()
        for k in range(K):
            one = torch.tensor([prefix])
            law = verifier.capture(one, torch.zeros_like(one), torch.arange(len(prefix))[None]).last_BTD[0, -1]
            row = int(labels.row_KP[k, p])
            torch.testing.assert_close(labels.last_MD[row], law, rtol=1e-8, atol=1e-9)
            logits = verifier.logits(law)
            assert labels.top_M[row] == logits.argmax() and labels.counted_KP[k, p]
            p_target = logits.softmax(-1)[head.vocab.ids_R]
            torch.testing.assert_close(labels.law(slice(row, row + 1))[0], p_target, rtol=1e-5, atol=1e-7)
            if k == K - 1:
                break
            draft = int(head.vocab.ids_R[head.logits(out)[0, 0].argmax()])
            assert labels.tokens_KP[k + 1, p] == draft
            misses += draft != int(logits.argmax())
            prefix.append(draft)
            out = head.step(torch.tensor([[draft]]), head.feedback(out), cache)
            checked += 1
    assert checked == 2 * int(counted.sum()) > 10 and misses > 3


def test_nothing_counts_after_an_own_end_of_turn():
    verifier, head, states = both()
    free = labels_of(verifier, head, states)
    for k in (1, 2):  # the turn ends with draft k of some anchor, and with no draft before
        others = torch.isin(free.tokens_KP[k], free.tokens_KP[1:k])
        stop = int(free.tokens_KP[k][free.counted_KP[k] & ~others][0])
        verifier.eos_ids = (stop,)
        ended = labels_of(verifier, head, states)
        stopped = free.counted_KP[k] & (free.tokens_KP[k] == stop)
        assert stopped.any() and not ended.counted_KP[k:, stopped].any()
        assert torch.equal(ended.counted_KP[:k, stopped], free.counted_KP[:k, stopped])
        going = ~(free.tokens_KP[1:] == stop).any(0)
        assert torch.equal(ended.counted_KP[:, going], free.counted_KP[:, going]) and free.counted_KP[:, going].any()


def test_where_the_head_is_right_own_drafts_are_the_text():
    """The text is made to be what the head drafts at its first anchor: then it learns from the text's own labels."""
    verifier, head, states = both()
    drafts = labels_of(verifier, head, states).tokens_KP[1:, 0].tolist()
    ids = list(DOCUMENTS[0].input_ids)
    ids[4:6] = drafts  # the first anchor is row 2, which reads x_3
    states = verifier.states(*packed_rows([Document("a", ids, DOCUMENTS[0].spans), DOCUMENTS[1]]))
    labels, given = labels_of(verifier, head, states), Labels.given(states, verifier.draft_logits(None), K)
    assert labels.tokens_KP[1:, 0].tolist() == drafts and given.counted_KP[:, 0].all()
    for k in range(K):
        own, text = labels.last_MD[labels.row_KP[k, 0]], given.last_MD[given.row_KP[k, 0]]
        torch.testing.assert_close(own, text, rtol=1e-8, atol=1e-9)


def test_the_verifier_is_not_under_autocast(monkeypatch):
    """Lightning's training step is; labels are the verifier's in its own dtype."""
    verifier = tiny_verifier()
    head, states = head_of(verifier), verifier.states(*packed_rows(DOCUMENTS))
    tokens_KP = torch.randint(3, verifier.vocab_size, (K, len(states.last_PD)))
    monkeypatch.setattr("models.on_policy.own_drafts", lambda *_: tokens_KP)
    plain = labels_of(verifier, head, states)
    with torch.autocast("cpu", torch.bfloat16):
        found = labels_of(verifier, head, states)
    assert torch.equal(found.last_MD, plain.last_MD) and torch.equal(found.top_M, plain.top_M)
    assert torch.equal(found.law(slice(0, 9)), plain.law(slice(0, 9)))


def test_it_trains():
    verifier, head, states = both()
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(15):
        loss, weight, counts = head_loss(head, states, labels_of(verifier, head, states), Objective(steps=K))
        optimizer.zero_grad()
        (loss / weight).backward()
        optimizer.step()
        losses.append(float((loss / weight).detach()))
    assert losses[-1] < losses[0] and counts.total_K[2] > 0
