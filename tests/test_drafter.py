"""What drafters propose: the head as the serving engines feed it, prompt lookup by hand, Lookahead's window."""

import pytest
import torch
from scipy import stats

from conf.errors import UserError
from eval.speculative.copying import Lookahead, PromptLookup, Suffixes
from eval.speculative.drafter import Features
from eval.speculative.loop import plain_decode, speculative_decode
from eval.speculative.processors import Sampling
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree
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


def features_of(verifier, ids):
    cache = verifier.new_cache(1, len(ids))
    out = verifier.decode(cache, torch.tensor([ids]), logits="none")
    return Features(out.aux_BTAD, out.last_BTD)


def test_accepted_tokens_are_run_again_with_the_verifiers_features(verifier, head):
    """After every round the head drafts what it would draft from a fresh start on the whole text."""
    plain = plain_decode(verifier, PROMPT, max_new_tokens=30, sampling=GREEDY).tokens
    drafter = drafter_for(head, FixedTree.chain(4), GREEDY)
    drafter.start([PROMPT], plain[:1], features_of(verifier, PROMPT), 100)
    at = 1
    for accepted in (0, 2, 4, 1):
        ours = drafter.draft(None).tokens_BN
        fresh, ids = drafter_for(head, FixedTree.chain(4), GREEDY), PROMPT + plain[: at - 1]
        fresh.start([ids], plain[at - 1 : at], features_of(verifier, ids), 100)
        assert torch.equal(ours, fresh.draft(None).tokens_BN)
        new, states = plain[at : at + accepted + 1], features_of(verifier, PROMPT + plain[: at + accepted])
        rows = slice(len(PROMPT) + at - 1, len(PROMPT) + at + accepted)
        drafter.accepted([new], Features(states.aux_BTAD[:, rows], states.last_BTD[:, rows]), None)
        at += len(new)


@torch.no_grad()
def test_rows_and_positions_of_the_head_are_the_engines(verifier, head):
    """The chain by hand, without a cache: every step runs all rows anew."""
    pending = 77
    states = features_of(verifier, PROMPT)
    tokens, hidden, drafted = PROMPT[1:] + [pending], head.fuse(states.aux_BTAD), []
    for _ in range(4):
        out_1TD = head.step(torch.tensor([tokens]), hidden, head.new_cache(1, 50))
        drafted.append(int(head.vocab.ids_R[head.logits(out_1TD[0, -1]).argmax()]))
        tokens, hidden = tokens + [drafted[-1]], torch.cat([hidden, head.feedback(out_1TD[:, -1:])], 1)
    drafter = drafter_for(head, FixedTree.chain(4), GREEDY)
    drafter.start([PROMPT], [pending], states, 50)
    assert drafter.draft(None).tokens_BN.tolist() == [drafted]


def test_sampled_drafts_come_with_the_law_they_were_drawn_from(verifier, head):
    sampling = Sampling(0.8, top_k=4)
    drafter, generator = drafter_for(head, FixedTree.chain(1), sampling), torch.Generator().manual_seed(0)
    states = features_of(verifier, PROMPT)
    firsts, law_R = [], None
    for _ in range(600):
        drafter.start([PROMPT], [77], states, 50)
        draft = drafter.draft(torch.rand(1, 1, generator=generator, dtype=torch.float64))
        firsts.append(int(draft.tokens_BN))
        law_R = draft.laws.probs_BMR[0, 0]
    assert law_R.shape == (len(head.vocab),) and int((law_R > 0).sum()) == 4
    support = drafter.ids_R[law_R > 0]
    counts = torch.tensor([firsts.count(int(token)) for token in support]).double()
    expected = law_R[law_R > 0].double() * len(firsts)
    assert counts.sum() == len(firsts)
    assert stats.chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy()).pvalue > 0.01


def test_siblings_are_drawn_without_replacement(verifier, head):
    """Pairs of siblings against the law of drawing two, one after the other."""
    sampling = Sampling(0.8, top_k=3)
    drafter, generator = drafter_for(head, FixedTree.of([2]), sampling), torch.Generator().manual_seed(0)
    drafter.start([PROMPT], [77], features_of(verifier, PROMPT), 50)
    root_R = drafter.scorer.root()[0]
    drafter.scorer.root = lambda: root_R[None]
    pairs, law_R = [], None
    for _ in range(1500):
        draft = drafter.draft(torch.rand(1, 2, generator=generator, dtype=torch.float64))
        pairs.append(tuple(draft.tokens_BN[0].tolist()))
        law_R = draft.laws.probs_BMR[0, 0].double()
    q = {int(drafter.ids_R[c]): float(law_R[c]) for c in law_R.nonzero().flatten()}
    expected = {(a, b): q[a] * q[b] / (1 - q[a]) for a in q for b in q if a != b}
    assert set(pairs) <= expected.keys() and len(expected) == 6
    counts, law = zip(*[(pairs.count(pair), p * len(pairs)) for pair, p in expected.items()], strict=True)
    assert stats.chisquare(counts, [x * len(pairs) / sum(law) for x in law]).pvalue > 0.01


def test_prompt_lookup_copies_after_the_longest_latest_suffix():
    drafter = PromptLookup(3)
    drafter.start([[5, 6, 7, 1, 6, 7, 2, 5, 6], [9, 9]], [7, 4])  # ... 5 6 7 occurred at the start, 6 7 later too
    draft = drafter.draft()
    assert [[node[1] for node in nodes if node] for nodes in draft.nodes_B] == [[1, 6, 7], []]
    drafter.keep_rows([0])
    drafter.accepted([[9]])
    assert drafter.draft().tokens_BN.tolist() == [[]]
    drafter.accepted([[6, 7]])
    assert drafter.draft().tokens_BN.tolist() == [[9, 6, 7]]  # the latest "6 7" before this one
    text = Suffixes([1, 2, 1], 3)
    assert text.following(5) == [2, 1]


def test_lookaheads_window_is_a_jacobi_iteration_and_its_columns_are_the_pool(verifier):
    """Each newest token is the argmax after its column's older ones, on the text; it comes back where it was seen."""
    W, N = 3, 4
    drafter = Lookahead(W, N, guesses=1000)
    options = {"max_new_tokens": 6, "sampling": GREEDY}
    trails, told = [], drafter.accepted

    def watch(tokens, features, logits_BMV):
        before = [list(row) for row in drafter.windows[0].trail_LW]
        told(tokens, features, logits_BMV)
        trails.append((before, [list(row) for row in drafter.windows[0].trail_LW], len(tokens[0])))

    drafter.accepted = watch
    text = PROMPT + speculative_decode(verifier, drafter, PROMPT, **options).tokens
    at = len(PROMPT) + 1  # tokens that the window of a round stands behind
    for before, after, emitted in trails:
        moved = emitted - 1
        for j in range(W - moved):
            column = j + moved
            ids = text[:at] + before[0][: column + 1] + [row[column] for row in before[1:]]
            out = verifier.decode(verifier.new_cache(1, len(ids)), torch.tensor([ids]), logits="last")
            assert after[-1][j] == int(out.logits[0].argmax())
            assert [row[j] for row in after[:-1]] == [row[column] for row in before[1:]]
            assert tuple([row[column] for row in before[1:]] + [after[-1][j]]) in drafter_pool(
                drafter, before[0][column]
            )
        at += emitted


def drafter_pool(drafter, token):
    """What was seen after a token."""
    return drafter.windows[0].pool[token]


def test_lookahead_refuses_sizes_that_make_no_window():
    with pytest.raises(UserError, match="found 0, 4 and 5"):
        Lookahead(window=0)


def test_more_best_tokens_than_the_draft_has_are_the_users_error(head):
    wide = FixedTree.of([2, len(head.vocab) + 1])
    with pytest.raises(UserError, match="at most 256 children, .* found 257"):
        drafter_for(head, wide, GREEDY)
    assert drafter_for(head, wide, Sampling(1.0)).nodes == 2 + 2 * 257  # draws run out of tokens instead
