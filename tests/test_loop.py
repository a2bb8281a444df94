"""The speculative loop: exact laws through the real loop, greedy identity, cache lengths, what is counted."""

from types import SimpleNamespace

import pytest
import torch
from scipy import stats

import eval.speculative.loop as loop
from eval.speculative.acceptance import Accepted, DraftLaw, accept_chain, draw
from eval.speculative.drafter import Draft, HeadDrafter, PromptLookup
from eval.speculative.loop import plain_decode, speculate, speculative_decode
from eval.speculative.processors import Sampling, to_law
from tiny import tiny_verifier
from toy_head import head_of

V, FIRST, LENGTH = 4, 0, 3
GREEDY = Sampling()


class StubCache:
    def __init__(self):
        self.ids, self.lengths = [], []

    def truncate(self, length_B):
        assert length_B[0] <= len(self.ids)
        self.ids = self.ids[: length_B[0]]
        self.lengths.append(length_B[0])


class StubVerifier:
    """Its law depends on the last two tokens; after the one-token prompt [FIRST] it always says FIRST."""

    device, eos_ids = torch.device("cpu"), ()

    def __init__(self, seed: int = 0):
        self.table_VVV = 1.5 * torch.randn(V, V, V, generator=torch.Generator().manual_seed(seed))

    def new_cache(self, batch, capacity):
        return StubCache()

    def decode(self, cache, tokens_BT, *, logits="all", capture=True):
        start = len(cache.ids)
        cache.ids = cache.ids + tokens_BT[0].tolist()
        rows = []
        for i in range(start, len(cache.ids)):
            one = torch.full((V,), -1e9).index_fill(0, torch.tensor(FIRST), 0.0)
            rows.append(self.table_VVV[cache.ids[i - 1], cache.ids[i]] if i else one)
        logits_TV = torch.stack(rows)
        nothing = torch.zeros(1, len(rows), 1, 1)
        return SimpleNamespace(
            logits=logits_TV[-1:] if logits == "last" else logits_TV[None], aux_BTAD=nothing, last_BTD=nothing[..., 0]
        )


class StubDrafter:
    """Draws from a law of its own that depends on the last two tokens; a pruned vocabulary with `ids_R`."""

    def __init__(self, sampling, ids_R=None, point=False, claim_sampled=False, seed=1):
        self.sampling, self.ids_R, self.point = sampling, ids_R, point
        self.has_law = claim_sampled or not point
        size = V if ids_R is None else len(ids_R)
        self.logits_VVR = torch.randn(V, V, size, generator=torch.Generator().manual_seed(seed))

    def start(self, prompt_ids, pending, features, capacity):
        self.ids = prompt_ids + [pending]

    def accepted(self, tokens, features):
        assert len(features.aux_TAD) == len(features.last_TD) == len(tokens)
        self.ids = self.ids + tokens

    def draft(self, depth, generator):
        ids, laws = list(self.ids), []
        for _ in range(depth):
            logits_R = self.logits_VVR[ids[-2], ids[-1]]
            laws.append(to_law(logits_R, self.sampling))
            uniform = torch.rand((), generator=generator, dtype=torch.float64)
            column = int(logits_R.argmax() if self.point else draw(laws[-1], uniform))
            ids.append(int(self.ids_R[column]) if self.ids_R is not None else column)
        tokens_N = torch.tensor(ids[len(self.ids) :])
        return Draft(tokens_N, DraftLaw(torch.stack(laws), self.ids_R) if self.has_law else None)


def joint_counts(verifier, drafter, sampling, depth: int, samples: int) -> torch.Tensor:
    """How often each text of LENGTH tokens came, across as many rounds as each took."""
    counts = torch.zeros(V**LENGTH)
    options = {"max_new_tokens": LENGTH + 1, "depth": depth, "sampling": sampling}
    for seed in range(samples):
        tokens = speculative_decode(verifier, drafter, [FIRST], seed=seed, **options).tokens
        counts[sum(token * V**i for i, token in enumerate(tokens[1:]))] += 1
    return counts


def joint_law(verifier, sampling) -> torch.Tensor:
    """The exact law of those texts, in the same order."""
    law_VVV = to_law(verifier.table_VVV.double(), sampling)
    law = torch.zeros(V**LENGTH, dtype=torch.float64)
    for a in range(V):
        for b in range(V):
            for c in range(V):
                law[a + b * V + c * V * V] = law_VVV[FIRST, FIRST, a] * law_VVV[FIRST, a, b] * law_VVV[a, b, c]
    return law


def chi_square(counts: torch.Tensor, law: torch.Tensor) -> float:
    """p-value of the counts under the exact law; rare texts are pooled, impossible ones must not occur."""
    if counts[law == 0].sum() > 0:
        return 0.0
    counts, law = counts[law > 0].double(), law[law > 0]
    expected, rare = law * counts.sum(), law * counts.sum() < 5
    if rare.any():
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    return float(stats.chisquare(counts.numpy(), expected.numpy() * (counts.sum() / expected.sum()).item()).pvalue)


PRUNED = torch.tensor([1, 3])
EXACT = {
    "chain of 1": (Sampling(1.0), 1, {}),
    "chain of 2": (Sampling(1.0), 2, {}),
    "chain of 3": (Sampling(1.0), 3, {}),
    "pruned vocabulary": (Sampling(1.0), 2, {"ids_R": PRUNED}),
    "point masses, pruned": (Sampling(1.0), 2, {"point": True, "ids_R": PRUNED}),
    "temperature and top-p": (Sampling(1.4, top_p=0.8), 2, {}),
    "top-k": (Sampling(0.8, top_k=2), 2, {}),
}


@pytest.mark.parametrize("name", EXACT)
def test_texts_follow_the_verifiers_law_exactly(name):
    sampling, depth, options = EXACT[name]
    verifier = StubVerifier()
    counts = joint_counts(verifier, StubDrafter(sampling, **options), sampling, depth, 1500)
    assert chi_square(counts, joint_law(verifier, sampling)) > 0.01


def always_accept(p_NV, tokens_N, q, uniform_N):
    return Accepted(len(tokens_N), int(draw(p_NV[-1], uniform_N[-1])))


def residual_is_p(p_NV, tokens_N, q, uniform_N):
    verdict = accept_chain(p_NV, tokens_N, q, uniform_N)
    return Accepted(verdict.count, int(draw(p_NV[verdict.count], uniform_N[-1])))


def bonus_from_q(p_NV, tokens_N, q, uniform_N):
    verdict = accept_chain(p_NV, tokens_N, q, uniform_N)
    every = verdict.count == len(tokens_N)
    return Accepted(verdict.count, int(draw(q.probs_NR[-1], uniform_N[-1]))) if every else verdict


def bonus_without_temperature(p_NV, tokens_N, q, uniform_N, temperature=2.5):
    verdict = accept_chain(p_NV, tokens_N, q, uniform_N)
    plain_V = p_NV[-1] ** temperature  # undoes the division of the logits
    every = verdict.count == len(tokens_N)
    return Accepted(verdict.count, int(draw(plain_V, uniform_N[-1]))) if every else verdict


INEXACT = {
    "always accept": (always_accept, 1.0, {}),
    "residual without (p - q)+": (residual_is_p, 1.0, {}),
    "bonus from q": (bonus_from_q, 1.0, {}),
    "bonus without temperature": (bonus_without_temperature, 2.5, {}),
    "argmax candidates tested with q": (accept_chain, 1.0, {"point": True, "claim_sampled": True}),
}


@pytest.mark.parametrize("name", INEXACT)
def test_inexact_schemes_fail_the_same_test(name, monkeypatch):
    scheme, temperature, options = INEXACT[name]
    monkeypatch.setattr(loop, "accept_chain", scheme)
    verifier, sampling = StubVerifier(), Sampling(temperature)
    counts = joint_counts(verifier, StubDrafter(sampling, **options), sampling, 1, 1000)
    assert chi_square(counts, joint_law(verifier, sampling)) < 1e-4


# --- with a real model ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier()


@pytest.fixture(scope="module")
def head(verifier):
    return head_of(verifier)


class Oracle:
    """Drafts what the verifier will say, apart from every `wrong`-th token of the text."""

    ids_R = None

    def __init__(self, text: list[int], wrong: int | None = None):
        self.text, self.wrong = text, wrong

    def start(self, prompt_ids, pending, features, capacity):
        self.at = 1

    def accepted(self, tokens, features):
        self.at += len(tokens)

    def draft(self, depth, generator):
        known = self.text[self.at : self.at + depth]
        known += [3] * (depth - len(known))
        wrong = [self.wrong and (self.at + i) % self.wrong == 0 for i in range(depth)]
        return Draft(torch.tensor([token ^ 1 if bad else token for token, bad in zip(known, wrong, strict=True)]))


PROMPT = [1, 40, 41, 42, 43, 50, 60, 40, 41]


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize("kind", ["head", "lookup", "oracle", "half right"])
def test_greedy_text_is_the_verifiers_own(verifier, head, kind, depth):
    plain = plain_decode(verifier, PROMPT, max_new_tokens=40, sampling=GREEDY)
    drafter = {
        "head": lambda: HeadDrafter(head, GREEDY),
        "lookup": PromptLookup,
        "oracle": lambda: Oracle(plain.tokens),
        "half right": lambda: Oracle(plain.tokens, wrong=3),
    }[kind]()
    ours = speculative_decode(verifier, drafter, PROMPT, max_new_tokens=40, depth=depth, sampling=GREEDY)
    assert ours.tokens == plain.tokens
    assert ours.finish == plain.finish
    if kind == "oracle":
        assert all(r.accepted == depth for r in ours.rounds[:-1])
    if kind == "half right" and depth == 6:
        assert {r.accepted for r in ours.rounds[:-1]} <= {0, 1, 2}


def test_cache_lengths_after_full_acceptance_and_after_a_rejection_at_draft_two():
    verifier, lengths = StubVerifier(), {}
    plain = plain_decode(verifier, [FIRST], max_new_tokens=9, sampling=GREEDY).tokens
    for name, wrong in (("all", None), ("second", 2)):
        caches = []
        verifier.new_cache = lambda batch, capacity, caches=caches: caches.append(StubCache()) or caches[-1]
        rounds = speculate(verifier, Oracle(plain, wrong), [FIRST], max_new_tokens=9, depth=4, sampling=GREEDY)
        next(rounds), next(rounds)
        lengths[name] = caches[0].lengths
    n = 1
    assert lengths == {"all": [n + 1 + 4], "second": [n + 2]}


def test_text_is_cut_at_end_of_turn_but_the_round_is_counted_whole():
    verifier = StubVerifier()
    text = [FIRST] + [1, 2, 3] * 8
    for i in range(len(text) - 1):  # make the verifier say `text`
        before = text[i - 1] if i else FIRST
        verifier.table_VVV[before, text[i]] = torch.nn.functional.one_hot(torch.tensor(text[i + 1]), V) * 9.0
    verifier.eos_ids = (2,)
    drafter = Oracle(text)
    out = speculative_decode(verifier, drafter, [FIRST], max_new_tokens=20, depth=5, sampling=GREEDY)
    assert out.tokens == [FIRST, 1, 2] and out.finish == "stop"
    assert [(r.accepted, len(r.emitted)) for r in out.rounds] == [(5, 6)]
    out = speculative_decode(verifier, drafter, [FIRST], max_new_tokens=2, depth=5, sampling=GREEDY)
    assert out.tokens == [FIRST, 1] and out.finish == "length"
    assert [r.accepted for r in out.rounds] == [5]


def test_end_of_turn_from_the_prefill_ends_it():
    verifier = StubVerifier()
    verifier.eos_ids = (FIRST,)
    out = speculative_decode(verifier, Oracle([FIRST]), [FIRST], max_new_tokens=9, depth=2, sampling=GREEDY)
    assert (out.tokens, out.finish, out.rounds) == ([FIRST], "stop", [])
    assert plain_decode(verifier, [FIRST], max_new_tokens=9, sampling=GREEDY).tokens == [FIRST]


def test_the_same_seed_gives_the_same_sampled_text(verifier, head):
    sampling = Sampling(1.0, top_p=0.9)
    options = {"max_new_tokens": 20, "depth": 3, "sampling": sampling}
    texts = [
        speculative_decode(verifier, HeadDrafter(head, sampling), PROMPT, seed=seed, **options).tokens
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1] != texts[2]
