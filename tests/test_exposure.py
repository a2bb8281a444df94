"""Exposure counts against a serial free run of every anchor with the head's cache, in float64, and their intervals."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from data.documents import Document
from eval.exposure import Exposure, draws, exposure, intervals, measure_exposure, shares
from eval.measure import EvalSettings, run_prompts
from eval.prompts import Prompt
from eval.speculative.loop import plain_decode
from eval.speculative.processors import Sampling
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree
from models.heads.eagle1 import Eagle1Config, Eagle1Head
from models.vocab import DraftVocab
from tiny import tiny_verifier
from toy_head import V, head_of, make_config, make_head, make_states

TEXTS = ["pppABCDEFGHIJuu", "pABCDEFGuuKLMNOPQ", "ABCDEFu", "ppA", "pppu"]
DEPTH = 5


def eagle1():
    """EAGLE-1 reads one state, and its drafts are all of the vocabulary."""
    config = make_config(R=V, aux_layers=(4,)).to_dict()
    for name in ("fc_norm", "norm_output", "verifier_hidden_size"):
        del config[name]
    head = Eagle1Head(Eagle1Config.from_dict(config), torch.randn(V, 16).double(), DraftVocab.identity(V),
                      torch.randn(V, 16).double()).double()  # fmt: skip
    for p in head.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return head


def states_of(texts, head):
    states = make_states([texts])
    return replace(states, aux_BTAD=states.aux_BTAD[:, :, : len(head.config.aux_layers)])


def draft(head, states, ids_BT):
    return head.unroll(replace(states, input_ids_BT=ids_BT), DEPTH)


@torch.no_grad()
def written(head, states, foreign=()):
    """`states` of a text that follows the head's drafts for a few tokens, from one anchor and then from another.

    top_P is what was drafted, and so is the next token, but at the label rows `foreign`: the text goes on with another.
    """
    generator = torch.Generator().manual_seed(1)
    ids, top, k = states.input_ids_BT.clone(), states.top_P.clone(), 0
    for p, s in enumerate(states.last_index_P.tolist()):
        drafts = [head.logits(out[max(p - i, 0)]).argmax() for i, out in enumerate(draft(head, states, ids))]
        k = k + 1 if k < DEPTH - 1 and torch.rand((), generator=generator) < 0.75 else 0
        top[p] = head.vocab.ids_R[drafts[k]]
        ids[0, s + 1] = (top[p] + 1) % V if p in foreign else top[p]
    return replace(states, input_ids_BT=ids, top_P=top)


@torch.no_grad()
def draft_serially(head, states, begin, t, tokens):
    """Drafts of the anchor in row t: true features up to it, then own ones with `tokens` or, without, own drafts."""
    ids, aux = states.input_ids_BT, states.aux_BTAD
    cache = head.new_cache(1, 64)
    out = head.step(ids[:, begin + 1 : t + 2], head.fuse(aux[:, begin : t + 1]), cache)[:, -1:]
    drafts = []
    for k in range(DEPTH):
        drafts.append(int(head.vocab.ids_R[head.logits(out[0, 0]).argmax()]))
        token = drafts[-1] if tokens is None else tokens[min(k, len(tokens) - 1)]
        out = head.step(torch.tensor([[token]]), head.feedback(out), cache)
    return drafts


def serial_counts(head, states, texts):
    """From the definitions, an anchor at a time; `texts` say what is an answer."""
    counts = {field.name: np.zeros((len(texts), DEPTH), dtype=np.int64) for field in fields(Exposure)}
    ids, top = states.input_ids_BT[0].tolist(), dict(zip(states.last_index_P.tolist(), states.top_P.tolist()))  # noqa: B905
    begin = 0
    for d, text in enumerate(texts):
        for t in range(begin, begin + len(text)):
            answer = 0  # tokens from row t + 1 on in one answer
            while t + 1 + answer < begin + len(text) and text[t + 1 + answer - begin].isupper():
                answer += 1
            if answer < 2:
                continue
            free = draft_serially(head, states, begin, t, None)
            given = draft_serially(head, states, begin, t, ids[t + 2 : t + 1 + answer])
            running = True
            for k in range(min(DEPTH, answer - 1)):
                label = top[t + 1 + k]
                forced = draft_serially(head, states, begin, t + k, None)[0]
                values = {
                    "counted": True, "forced": forced == label, "given": given[k] == label,
                    "tested": running, "own": running and free[k] == label, "true": running and forced == label,
                }  # fmt: skip
                for name, value in values.items():
                    counts[name][d, k] += value
                running = running and free[k] == label == ids[t + 2 + k]
        begin += len(text)
    return Exposure(**counts)


@pytest.mark.parametrize("foreign", [(), (3, 8, 12)], ids=["greedy", "not quite greedy"])
@pytest.mark.parametrize("make", [make_head, eagle1], ids=["eagle3", "eagle1"])
def test_counts_equal_a_serial_free_run(make, foreign):
    head = make()
    states = written(head, states_of(TEXTS, head), foreign)
    found, expected = exposure(head, states, DEPTH), serial_counts(head, states, TEXTS)
    for field in fields(Exposure):
        assert np.array_equal(getattr(found, field.name), getattr(expected, field.name)), field.name
    total = {field.name: getattr(expected, field.name).sum(0) for field in fields(Exposure)}
    assert (total["tested"][:4] > 0).all() and total["tested"][1] < total["counted"][1]
    assert (total["own"][1:] != total["true"][1:]).any() and total["own"][0] == total["true"][0] == total["given"][0]
    assert not found.counted[3:].any()  # an answer of one token, and none


def test_what_lies_outside_the_draft_vocabulary_is_a_miss_everywhere():
    head = make_head()
    states = written(head, states_of(TEXTS, head))
    outside = next(i for i in range(V) if i not in head.vocab.ids_R.tolist())
    found = exposure(head, replace(states, top_P=torch.full_like(states.top_P, outside)), DEPTH)
    assert found.counted.sum() > 0 and not (found.forced.any() or found.given.any() or found.own.any())
    assert np.array_equal(found.tested[:, 0], found.counted[:, 0]) and not found.tested[:, 1:].any()


def test_portions_and_neighbours_change_nothing(monkeypatch):
    verifier = tiny_verifier(dtype=torch.float64)
    heads = {"a": head_of(verifier).double(), "b": head_of(verifier, start=False).double()}
    documents = [answered(verifier, [1, 40 + i, 41, 42], 12) for i in range(4)]
    together = measure_exposure(verifier, heads, documents, 3)
    monkeypatch.setattr("eval.exposure.TOKENS", 20)
    monkeypatch.setattr("eval.exposure.LOGITS", 1)
    for name, counts in measure_exposure(verifier, heads, documents, 3).items():
        for field in fields(Exposure):
            assert np.array_equal(getattr(counts, field.name), getattr(together[name], field.name))
    assert together["a"].counted.sum(0).tolist() == [sum(max(0, d.labels - k) for d in documents) for k in range(3)]


def answered(verifier, prompt, length):
    """The verifier's own greedy answer as a document."""
    text = plain_decode(verifier, prompt, max_new_tokens=length, sampling=Sampling()).tokens
    return Document("d", prompt + text, [(len(prompt), len(prompt) + len(text))])


def test_the_loop_accepts_what_the_free_run_hits():
    """The loop starts at some of the anchors: there it accepts a draft exactly where the free run hits."""
    verifier = tiny_verifier(vocab=7, layers=7, hidden=32, dtype=torch.float64)  # so few tokens that chance hits
    head = head_of(verifier).double()
    prompt, depth = [1, 4, 5, 6], 3
    ids = answered(verifier, prompt, 90).input_ids
    settings = EvalSettings(shape=FixedTree.chain(depth), max_new_tokens=90, baseline=False)
    (run,) = run_prompts(
        verifier, drafter_for(head, settings.shape, Sampling()), [Prompt("p", "", tuple(prompt))], settings, False
    )
    at, lengths = len(prompt), set()
    for call in run.speculative.rounds:
        if at + depth >= len(ids):
            break
        for k in range(depth):  # an answer so short that its first anchor alone has a label at depth k
            one = Document("d", ids[: at + k + 2], [(at, at + k + 2)])
            counts = measure_exposure(verifier, {"": head}, [one], k + 1)[""]
            assert counts.counted[0, k] == 1 and counts.own[0, k] == (call.accepted > k)
        lengths.add(call.accepted)
        at += len(call.emitted)
    assert len(lengths) > 1


def test_adding_heads_adds_counts_of_each_document():
    head = make_head()
    one = exposure(head, written(head, states_of(TEXTS, head)), DEPTH)
    two = one + one
    assert np.array_equal(two.own, 2 * one.own) and two.counted.shape == (len(TEXTS), DEPTH)


# --- intervals ------------------------------------------------------------------------------------------------


def test_shares_are_pooled_and_intervals_are_over_documents():
    hits, trials = np.array([[9, 0], [0, 0]]), np.array([[9, 0], [1, 0]])
    assert shares(hits, trials)[0, 0] == 0.9 and np.isnan(shares(hits, trials)[0, 1])
    many = np.tile(hits, (50, 1)), np.tile(trials, (50, 1))
    draws_SN = draws(100)
    assert draws_SN.shape == (2000, 100) and (draws_SN.sum(1) == 100).all()
    (low, high), none = intervals(shares(*many, draws_SN))
    # Documents are all right or all wrong, long ones right: the spread is that of the number of short ones drawn.
    assert none is None and 0.85 < low < 0.9 < high < 0.94
    again = intervals(shares(*many, draws(100)))
    assert again[0] == [low, high]


def test_paired_intervals_see_a_difference_that_single_ones_do_not():
    rng = np.random.default_rng(0)
    trials = np.full((40, 1), 20)
    easy = rng.integers(2, 18, (40, 1))
    a, b = easy, easy + 1  # b is better by a twentieth on every document
    draws_SN = draws(40)
    ((low, high),) = intervals(shares(b, trials, draws_SN) - shares(a, trials, draws_SN))
    assert low == pytest.approx(0.05) and high == pytest.approx(0.05)
    (of_a,), (of_b,) = intervals(shares(a, trials, draws_SN)), intervals(shares(b, trials, draws_SN))
    assert of_a[1] > of_b[0]
