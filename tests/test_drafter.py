"""What drafters propose: the head as the serving engines feed it, prompt lookup by hand."""

import pytest
import torch
from scipy import stats

from eval.speculative.drafter import Features, HeadDrafter, PromptLookup
from eval.speculative.loop import plain_decode
from eval.speculative.processors import Sampling
from tiny import tiny_verifier
from toy_head import head_of

GREEDY = Sampling()
PROMPT = [1, 40, 41, 42, 43, 50, 60, 40, 41]


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier()


@pytest.fixture(scope="module")
def head(verifier):
    return head_of(verifier)


def features_of(verifier, ids: list[int]) -> Features:
    cache = verifier.new_cache(1, len(ids))
    out = verifier.decode(cache, torch.tensor([ids]), logits="none")
    return Features(out.aux_BTAD[0], out.last_BTD[0])


def test_accepted_tokens_are_run_again_with_the_verifiers_features(verifier, head):
    """After every round the head drafts what it would draft from a fresh start on the whole text."""
    plain = plain_decode(verifier, PROMPT, max_new_tokens=30, sampling=GREEDY).tokens
    drafter = HeadDrafter(head, GREEDY)
    drafter.start(PROMPT, plain[0], features_of(verifier, PROMPT), 100)
    at = 1
    for accepted in (0, 2, 4, 1):
        ours = drafter.draft(4, torch.Generator()).tokens_N
        fresh, ids = HeadDrafter(head, GREEDY), PROMPT + plain[: at - 1]
        fresh.start(ids, plain[at - 1], features_of(verifier, ids), 100)
        assert torch.equal(ours, fresh.draft(4, torch.Generator()).tokens_N)
        new, states = plain[at : at + accepted + 1], features_of(verifier, PROMPT + plain[: at + accepted])
        rows = slice(len(PROMPT) + at - 1, len(PROMPT) + at + accepted)
        drafter.accepted(new, Features(states.aux_TAD[rows], states.last_TD[rows]))
        at += len(new)


@torch.no_grad()
def test_rows_and_positions_of_the_head_are_the_engines(verifier, head):
    """The chain by hand, without a cache: every step runs all rows anew."""
    pending = 77
    states = features_of(verifier, PROMPT)
    tokens, hidden, drafted = PROMPT[1:] + [pending], head.fuse(states.aux_TAD), []
    for _ in range(4):
        out_1TD = head.step(torch.tensor([tokens]), hidden[None], 0, head.new_cache(1, 50))
        drafted.append(int(head.vocab.ids_R[head.logits(out_1TD[0, -1]).argmax()]))
        tokens, hidden = tokens + [drafted[-1]], torch.cat([hidden, head.feedback(out_1TD[0, -1:])])
    drafter = HeadDrafter(head, GREEDY)
    drafter.start(PROMPT, pending, states, 50)
    assert drafter.draft(4, torch.Generator()).tokens_N.tolist() == drafted


def test_sampled_drafts_come_with_the_law_they_were_drawn_from(verifier, head):
    sampling = Sampling(0.8, top_k=4)
    drafter, generator = HeadDrafter(head, sampling), torch.Generator().manual_seed(0)
    states = features_of(verifier, PROMPT)
    firsts, law = [], None
    for _ in range(600):
        drafter.start(PROMPT, 77, states, 50)
        draft = drafter.draft(1, generator)
        firsts.append(int(draft.tokens_N[0]))
        law = draft.q_draft
    assert law.probs_NR.shape == (1, len(head.vocab)) and int((law.probs_NR > 0).sum()) == 4
    support = law.ids_R[law.probs_NR[0] > 0]
    counts = torch.tensor([firsts.count(int(token)) for token in support]).double()
    expected = law.probs_NR[0][law.probs_NR[0] > 0].double() * len(firsts)
    assert counts.sum() == len(firsts)
    assert stats.chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue > 0.01


def test_prompt_lookup_copies_after_the_longest_latest_suffix():
    drafter = PromptLookup()
    drafter.start([5, 6, 7, 1, 6, 7, 2, 5, 6], 7)  # ... 5 6 7 occurred at the start, 6 7 later too
    assert drafter.draft(3).tokens_N.tolist() == [1, 6, 7]
    drafter.accepted([9])
    assert drafter.draft(3).tokens_N.tolist() == []
    drafter.accepted([6, 7])
    assert drafter.draft(2).tokens_N.tolist() == [9, 6]  # the latest "6 7" before this one
