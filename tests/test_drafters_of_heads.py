"""Medusa's and the independent draft's candidates: whose law they follow, and what is run again after a rejection."""

import pytest
import torch
from scipy import stats

from conf.errors import UserError
from eval.speculative.drafter import Features
from eval.speculative.loop import plain_decode, speculative_decode
from eval.speculative.processors import Sampling
from eval.speculative.scorers import ModelScorer, TreeDrafter, drafter_for
from eval.speculative.shapes import FixedTree
from models import heads
from models.draft_model import DraftModel
from models.vocab import DraftVocab
from tiny import tiny_tokenizer, tiny_verifier

GREEDY, SAMPLED = Sampling(), Sampling(0.8, top_k=4)
PROMPT = [1, 40, 41, 42, 43, 50, 60, 40, 41]
KINDS = ("medusa", "independent")


@pytest.fixture(scope="module")
def verifiers():
    return {kind: tiny_verifier(dtype=torch.float64, aux_layers=heads.captured_layers(kind, None)) for kind in KINDS}


def head_of(kind, verifier):
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, verifier.aux_layers, 256)
    torch.manual_seed(0)
    head = heads.build(config, verifier, DraftVocab(torch.arange(0, 512, 2), 512)).double().eval()
    with torch.no_grad():
        for p in head.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return head


def features_of(verifier, ids):
    out = verifier.decode(verifier.new_cache(1, len(ids)), torch.tensor([ids]), logits="none")
    return Features(out.aux_BTAD, out.last_BTD)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_follow_the_laws_that_they_come_with(verifiers, kind, depth):
    """The last candidate's frequencies, given the ones before it, against its law."""
    verifier = verifiers[kind]
    drafter = drafter_for(head_of(kind, verifier), FixedTree.chain(depth), SAMPLED)
    generator = torch.Generator().manual_seed(0)
    states, seen = features_of(verifier, PROMPT), {}
    for _ in range(500 * depth):
        drafter.start([PROMPT], [77], states, 50)
        draft = drafter.draft(torch.rand(1, depth, generator=generator, dtype=torch.float64))
        assert draft.laws.probs_BMR.shape == (1, depth, 256)
        tokens = tuple(draft.tokens_BN[0].tolist())
        seen.setdefault(tokens[:-1], []).append((tokens[-1], draft.laws.probs_BMR[0, -1]))
    draws = max(seen.values(), key=len)
    law = draws[0][1]
    assert all(torch.equal(law, other) for _, other in draws) and len(draws) > 150
    support = (law > 0).nonzero().flatten()
    counts = torch.tensor([sum(token == int(drafter.ids_R[c]) for token, _ in draws) for c in support]).double()
    assert counts.sum() == len(draws)
    expected = law[support].double() / law[support].double().sum() * len(draws)
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_text_is_the_verifiers_own_and_rounds_are_those_of_a_fresh_drafter(verifiers, kind, depth):
    verifier = verifiers[kind]
    head = head_of(kind, verifier)
    plain = plain_decode(verifier, PROMPT, max_new_tokens=24, sampling=GREEDY).tokens
    chain = FixedTree.chain(depth)
    decoded = speculative_decode(verifier, drafter_for(head, chain, GREEDY), PROMPT, max_new_tokens=24, sampling=GREEDY)
    assert decoded.tokens == plain
    at = 1
    for call in decoded.rounds:
        ids, fresh = PROMPT + plain[: at - 1], drafter_for(head, chain, GREEDY)
        fresh.start([ids], plain[at - 1 : at], features_of(verifier, ids), 80)
        assert tuple(fresh.draft(None).tokens_BN[0].tolist()) == call.drafted
        at += len(call.emitted)
        if at > len(plain):
            break


@torch.no_grad()
def test_medusa_drafts_each_position_from_the_last_processed_row(verifiers):
    verifier = verifiers["medusa"]
    head, states = head_of("medusa", verifier), features_of(verifier, PROMPT)
    drafter = drafter_for(head, FixedTree.chain(9), GREEDY)
    drafter.start([PROMPT], [77], states, 50)
    draft = drafter.draft(None)
    expected = [int(head.vocab.ids_R[head.lm_head(blocks(states.last_BTD[0, -1])).argmax()]) for blocks in head.blocks]
    assert draft.tokens_BN.tolist() == [expected] and drafter.depth == 5  # no more than there are heads
    drafter.accepted([[3, 4]], Features(states.aux_BTAD[:, 2:4], states.last_BTD[:, 2:4]), None)
    assert torch.equal(drafter.scorer.hidden_BD, states.last_BTD[:, 3])


@torch.no_grad()
def test_an_independent_draft_unrolls_as_it_serves(verifiers):
    """Training rows equal a cached decode, document by document in a packed row."""
    verifier = verifiers["independent"]
    head = head_of("independent", verifier)
    ids = torch.tensor([[*PROMPT, 11, *PROMPT[::-1]]])
    document = torch.tensor([[0] * 10 + [1] * 9])
    position = torch.tensor([[*range(10), *range(9)]])
    span = torch.where(position > 3, document, -1)
    states = verifier.states(ids, document, position, span)
    (out_PD,) = head.unroll(states, 1)
    for p, row in enumerate(states.last_index_P.tolist()):
        begin = row - int(position[0, row])
        cache = head.new_cache(1, 32)
        head.extend(cache, ids[:, begin : begin + 2])
        head.extend(cache, torch.tensor([[9, 9]]))  # drafts, thrown away
        cache.truncate([2])
        torch.testing.assert_close(head.logits(out_PD[p]), head.extend(cache, ids[:, begin + 2 : row + 1])[0, 0])


def test_any_model_of_the_same_tokenizer_drafts_without_training():
    verifier = tiny_verifier(dtype=torch.float64, aux_layers=[])
    models = (tiny_verifier(dtype=torch.float64, aux_layers=[]), tiny_verifier("qwen3", layers=2, aux_layers=[]))
    scorers = [ModelScorer(DraftModel(model, verifier), "cpu") for model in models]
    same, other = (TreeDrafter(scorer, FixedTree.chain(4), GREEDY) for scorer in scorers)
    plain = plain_decode(verifier, PROMPT, max_new_tokens=24, sampling=GREEDY).tokens
    options = {"max_new_tokens": 24, "sampling": GREEDY}
    decoded = speculative_decode(verifier, same, PROMPT, **options)
    assert decoded.tokens == plain and all(r.accepted == 4 for r in decoded.rounds)  # it is the verifier itself
    assert speculative_decode(verifier, other, PROMPT, **options).tokens == plain


def test_another_tokenizer_is_refused():
    verifier, model = tiny_verifier(aux_layers=[]), tiny_verifier(layers=2, aux_layers=[])
    model.tokenizer = tiny_tokenizer(300)
    with pytest.raises(UserError, match="expected a draft with the tokenizer of tiny-llama, found [0-9]+ tokens"):
        DraftModel(model, verifier)
