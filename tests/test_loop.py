"""The loop: greedy identity, cache lengths, what ends a text and what is counted. (Laws: test_exactness.)"""

from types import SimpleNamespace

import pytest
import torch
from stub_model import FIRST, Oracle, StubScorer, StubVerifier, V, stub_drafter

from eval.speculative.copying import NoDraft, PromptLookup
from eval.speculative.grow import grow_by_confidence
from eval.speculative.loop import _features, decode_batch, plain_decode, speculate, speculative_decode
from eval.speculative.processors import Sampling
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree, GrowingShape
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


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("kind", ["head", "lookup", "oracle", "half right"])
def test_greedy_text_is_the_verifiers_own(verifier, head, kind, depth):
    plain = plain_decode(verifier, PROMPT, max_new_tokens=40, sampling=GREEDY)
    drafter = {
        "head": lambda: drafter_for(head, FixedTree.chain(depth), GREEDY),
        "lookup": lambda: PromptLookup(depth),
        "oracle": lambda: Oracle(plain.tokens, depth),
        "half right": lambda: Oracle(plain.tokens, depth, wrong=3),
    }[kind]()
    ours = speculative_decode(verifier, drafter, PROMPT, max_new_tokens=40, sampling=GREEDY)
    assert ours.tokens == plain.tokens
    assert ours.finish == plain.finish
    assert {r.source for r in ours.rounds} == {drafter.name}
    if kind == "oracle":
        assert all(r.accepted == depth == r.tested for r in ours.rounds[:-1])
    if kind == "half right" and depth == 6:
        assert {r.accepted for r in ours.rounds[:-1]} <= {0, 1, 2}


def test_cache_lengths_after_full_acceptance_and_after_a_rejection_at_draft_two():
    verifier, lengths = StubVerifier(), {}
    plain = plain_decode(verifier, [FIRST], max_new_tokens=9, sampling=GREEDY).tokens
    for name, wrong in (("all", None), ("second", 2)):
        rounds = speculate(verifier, Oracle(plain, 4, wrong), [[FIRST]], max_new_tokens=9, sampling=GREEDY)
        next(rounds), next(rounds)
        lengths[name] = verifier.caches[-1].lengths
    n = 1
    assert lengths == {"all": [[n + 1 + 4]], "second": [[n + 2]]}


def test_a_batch_rolls_back_each_sequence_by_its_own_length_and_lets_it_leave():
    """Lengths grow by 1 + accepted each, and a sequence that has its tokens is in no later call."""
    verifier, sampling = StubVerifier(), Sampling(1.0)
    rounds = list(
        speculate(
            verifier, stub_drafter(FixedTree.of([2, 2]), sampling), [[FIRST]] * 20, max_new_tokens=7, sampling=sampling
        )
    )
    lengths, calls = [1] * 20, verifier.caches[-1].lengths
    taken = 20
    for call in calls:
        now = []
        while taken < len(rounds) and len(now) < len(call):
            one = rounds[taken]
            lengths[one.sequence] += 1 + one.accepted
            now.append(lengths[one.sequence])
            taken += 1
        assert now == call
    assert taken == len(rounds) and len(calls[-1]) < len(calls[0]) == 20
    assert all(7 <= length <= 7 + 2 for length in lengths)
    assert len({one.accepted for one in rounds}) == 3


def test_every_token_is_processed_once_but_for_rejected_drafts():
    """The verifier is given the prompt, then each round's pending token and nodes; nothing verified runs again."""
    verifier = StubVerifier()
    rows, decode = [], verifier.decode
    verifier.decode = lambda cache, tokens, **options: rows.append(tokens.shape) or decode(cache, tokens, **options)
    drafter = stub_drafter(GrowingShape(3, 2, 6), GREEDY)
    text = speculative_decode(verifier, drafter, [FIRST] * 3, max_new_tokens=12, sampling=GREEDY)
    assert rows == [(1, 3)] + [(1, 6)] * len(text.rounds)
    assert all(len(r.drafted) == 5 and r.depth in (2, 3) for r in text.rounds)


def test_unlikely_paths_cost_no_draft_step_and_no_row():
    """The candidates that are likely enough are those of the whole tree, and nothing else is grown or verified."""
    scorer, B = StubScorer(), 3
    scorer.last_B2 = torch.tensor([[0, 1], [2, 3], [3, 1]])
    steps, step = [], scorer.grow
    scorer.grow = lambda *nodes: steps.append(1) or step(*nodes)
    sizes = set()
    for floor in (0.001, 0.05, 0.2, 0.5, 0.999):
        whole = grow_by_confidence(scorer, GrowingShape(4, 3, 99))
        steps.clear()
        draft = grow_by_confidence(scorer, GrowingShape(4, 3, 99, min_confidence=floor))
        paths = [[paths_of(nodes) for nodes in one.nodes_B] for one in (whole, draft)]
        chance = [{path: probability(scorer, b, path) for path in paths[0][b]} for b in range(B)]
        assert [set(found) for found in paths[1]] == [{p for p, c in one.items() if c >= floor} for one in chance]
        grown = [max((len(p) for p, c in one.items() if c >= floor and len(p) < 4), default=0) for one in chance]
        assert len(steps) == max(grown) and draft.tokens_BN.shape[1] <= sum(len(found) for found in paths[1])
        sizes.add((len(steps), draft.tokens_BN.shape[1]))
    assert len(sizes) == 5 and (0, 0) in sizes


def paths_of(nodes):
    """The tokens from the root to each live node."""
    paths = []
    for node in nodes:
        parent, token = node or (None, None)
        paths.append(None if node is None else (*(paths[parent] if parent >= 0 else ()), token))
    return [path for path in paths if path is not None]


def probability(scorer, b, path):
    chance, last = 1.0, scorer.last_B2[b].tolist()
    for token in path:
        chance *= scorer.table_VVR[last[0], last[1]].softmax(-1)[token].item()
        last = [last[1], token]
    return chance


def test_text_is_cut_at_end_of_turn_but_the_round_is_counted_whole():
    verifier = StubVerifier()
    text = [FIRST] + [1, 2, 3] * 8
    for i in range(len(text) - 1):  # make the verifier say `text`
        before = text[i - 1] if i else FIRST
        verifier.table_VVV[before, text[i]] = torch.nn.functional.one_hot(torch.tensor(text[i + 1]), V) * 9.0
    verifier.eos_ids = (2,)
    drafter = Oracle(text, 5)
    out = speculative_decode(verifier, drafter, [FIRST], max_new_tokens=20, sampling=GREEDY)
    assert out.tokens == [FIRST, 1, 2] and out.finish == "stop"
    assert [(r.accepted, len(r.emitted)) for r in out.rounds] == [(5, 6)]
    out = speculative_decode(verifier, drafter, [FIRST], max_new_tokens=2, sampling=GREEDY)
    assert out.tokens == [FIRST, 1] and out.finish == "length"
    assert [r.accepted for r in out.rounds] == [5]


def test_end_of_turn_from_the_prefill_ends_it():
    verifier = StubVerifier()
    verifier.eos_ids = (FIRST,)
    out = speculative_decode(verifier, Oracle([FIRST], 2), [FIRST], max_new_tokens=9, sampling=GREEDY)
    assert (out.tokens, out.finish, out.rounds) == ([FIRST], "stop", [])
    assert plain_decode(verifier, [FIRST], max_new_tokens=9, sampling=GREEDY).tokens == [FIRST]


def test_the_same_seed_gives_the_same_sampled_text(verifier, head):
    sampling = Sampling(1.0, top_p=0.9)
    drafter = drafter_for(head, FixedTree.chain(3), sampling)
    texts = [
        speculative_decode(verifier, drafter, PROMPT, seed=seed, max_new_tokens=20, sampling=sampling).tokens
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_plain_decoding_is_the_loop_without_drafts(verifier):
    for sampling in (GREEDY, Sampling(0.7)):
        options = {"max_new_tokens": 15, "sampling": sampling, "seed": 5}
        [none] = decode_batch(verifier, NoDraft(), [PROMPT], **options)
        assert none.tokens == plain_decode(verifier, PROMPT, **options).tokens
        assert len(none.rounds) == 14


def test_a_leaf_on_the_accepted_path_is_no_miss():
    """Depth 2 is tested only where the node that was accepted at depth 1 has children."""
    verifier = StubVerifier()
    drafter, warm = stub_drafter(FixedTree.of([[0], [1], [2], [0, 0]]), Sampling(1.0)), Sampling(1.0)
    text = speculative_decode(verifier, drafter, [FIRST], max_new_tokens=60, sampling=warm)
    kinds = {(r.accepted, r.tested) for r in text.rounds}
    assert kinds <= {(0, 1), (1, 1), (1, 2), (2, 2)} and (1, 1) in kinds


def test_states_of_the_accepted_rows_also_where_one_sequence_accepted_them_all():
    states = torch.arange(6.0).view(2, 3, 1)
    decoded = SimpleNamespace(last_BTD=states, aux_BTAD=states[..., None])
    assert _features(decoded, [[0, 1, 2], [0, 2]]).last_BTD[1, :2, 0].tolist() == [3, 5]
    assert _features(decoded, [[0, 1, 2], [0, 1]]).last_BTD[1, :2, 0].tolist() == [3, 4]
    assert _features(decoded, [[0], [0, 2]]).aux_BTAD[1, :, 0, 0].tolist() == [3, 5]
