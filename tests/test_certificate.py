"""The replay certificate: a faithful engine passes it, and each known fault is found and named."""

from dataclasses import replace

import pytest
import torch

from eval.command import Candidate
from eval.counts import pool
from eval.measure import EvalSettings
from eval.prompts import Prompt
from eval.serving.certificate import certify
from eval.serving.engine import EngineRun
from eval.serving.faults import READINGS, possible
from eval.serving.metrics import Tally
from eval.serving.online import known_faults, our_runs
from eval.serving.suspects import suspects
from eval.speculative.loop import decode_batch
from eval.speculative.processors import Sampling
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree
from models import heads
from models.vocab import DraftVocab
from tiny import tiny_verifier

LAYERS, AROUND = (2, 4, 5), (1, 2, 3, 4, 5, 6)
IDS = torch.arange(1, 300, 2)
NUMBERS = torch.Generator().manual_seed(1)
PROMPTS = [torch.randint(3, 300, (n,), generator=NUMBERS).tolist() for n in (9, 14, 11)]
DEPTH = 3


def tiny(aux_layers):
    return tiny_verifier("llama", layers=8, hidden=32, vocab=300, aux_layers=aux_layers)


def make(kind, verifier, **switches):
    """A random head with large weights, so that every difference shows in its drafts."""
    ids = torch.arange(300) if kind == "eagle1" else IDS
    config = heads.kind_of(kind)[0].from_verifier(verifier.head_geometry, verifier.aux_layers, len(ids), **switches)
    head = heads.build(config, verifier, DraftVocab(ids, 300)).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(mean=1.0 if parameter.dim() == 1 else 0.0, std=0.3)
    return head


def loop_run(verifier, head):
    """Our loop as an engine."""
    drafter = drafter_for(head, FixedTree.chain(DEPTH), Sampling())
    texts, rounds = [], []
    for ids in PROMPTS:
        [decoded] = decode_batch(verifier, drafter, [ids], max_new_tokens=24, sampling=Sampling())
        emitted, calls = 1, []
        for call in decoded.rounds:
            calls.append((emitted, list(call.drafted)))
            emitted += len(call.emitted)
        texts.append(decoded.tokens)
        rounds.append(calls)
    return EngineRun("loop", texts, sum(map(len, rounds)), 0, 0, None, rounds, 1.0)


@torch.no_grad()
def naive_run(verifier, head, run, *, layers=LAYERS, tokens=IDS, pairing=1, still=False):
    """The drafts that an engine with a fault makes behind the prefixes of `run`, each from nothing."""
    place = [verifier.aux_layers.index(layer) for layer in layers]
    rotary, rounds = head.rotary, []
    for prompt, text, calls in zip(PROMPTS, run.texts, run.rounds, strict=True):
        ids = torch.tensor([prompt + text])
        aux = verifier.capture(ids, ids * 0, torch.arange(ids.shape[1])[None]).aux_BTAD[:, :, place]
        faulty = []
        for emitted, _ in calls:
            n, drafts = len(prompt) + emitted, []
            cache = head.new_cache(1, n + DEPTH)
            out = head.step(ids[:, pairing : n - 1 + pairing], head.fuse(aux[:, : n - 1]), cache)[:, -1:]
            for back in range(1, DEPTH + 1):
                drafts.append(int(tokens[head.logits(out)[0, 0].argmax()]))
                head.rotary = lambda at, dtype, back=back: rotary(at - back if still else at, dtype)
                out = head.step(torch.tensor([drafts[-1:]]), head.feedback(out), cache)
            head.rotary = rotary
            faulty.append((emitted, drafts))
        rounds.append(faulty)
    return replace(run, rounds=rounds)


@pytest.mark.parametrize(
    ("kind", "layers", "switches"),
    [
        ("eagle3", LAYERS, {}),
        ("eagle3", LAYERS, {"fc_norm": True, "norm_output": True}),
        ("eagle1", (8,), {}),
        ("medusa", (8,), {}),
    ],
)
def test_a_faithful_engine_holds(kind, layers, switches):
    verifier = tiny(layers)
    head = make(kind, verifier, **switches)
    run = loop_run(verifier, head)
    found = certify(verifier, head, PROMPTS, run)
    assert found.holds and found.cause is None and found.first is None
    assert found.compared == DEPTH * run.verify_calls > 100
    assert sum(equal for equal, _ in found.equal_by_depth) == found.equal
    if kind == "eagle3":
        assert naive_run(verifier, head, run).rounds == run.rounds  # so what follows differs by its fault alone


COLUMN = torch.arange(len(IDS))
FAULTS = {
    "one too late": {"layers": (3, 5, 6)},
    "one too early": {"layers": (1, 3, 4)},
    "reverse order": {"layers": (5, 4, 2)},
    "not applied": {"tokens": COLUMN},
    "taken for token ids": {"tokens": IDS - COLUMN},
    "adds offsets": {"tokens": (IDS + COLUMN).clamp_max(299)},
    "its own token": {"pairing": 0},
    "stand at one position": {"still": True},
    "norm_output": {"feedback": lambda head, out: head.norm(out)},
    "norm_before_residual": {"residual": True},
}


def test_every_known_fault_has_a_test():
    assert len(FAULTS) == len(READINGS) and all(any(key in name for name in READINGS) for key in FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name):
    verifier = tiny(AROUND)
    head = make("eagle3", tiny(LAYERS))
    healthy, names = loop_run(tiny(LAYERS), head), head.state_dict().keys()
    settings = dict(FAULTS[name])
    broken = make("eagle3", tiny(LAYERS))
    if feedback := settings.pop("feedback", None):
        broken.feedback = lambda out: feedback(broken, out)
    if settings.pop("residual", None):
        plain = broken.project
        broken.project = lambda part, hidden: replace(plain(part, hidden), residual=broken.midlayer.hidden_norm(hidden))
    run = naive_run(verifier, broken, healthy, **settings)
    found = certify(verifier, head, PROMPTS, run)
    assert not found.holds and name in found.cause and "none of" not in found.cause, found.cause
    assert "100.0% of the engine's drafts" in found.cause
    assert head.state_dict().keys() == names
    first = found.first
    assert run.rounds[first.prompt][first.round][1][first.depth - 1] == first.theirs != first.ours


def test_rounding_and_the_unknown_are_told_apart():
    verifier = tiny(AROUND)
    head = make("eagle3", tiny(LAYERS))
    healthy = loop_run(tiny(LAYERS), head)
    strange = make("eagle3", tiny(LAYERS))
    with torch.no_grad():
        strange.midlayer.mlp.down_proj.weight.zero_()  # a tensor that was not loaded
    found = certify(verifier, head, PROMPTS, naive_run(verifier, strange, healthy))
    assert "none of 10 known faults" in found.cause
    coarse = make("eagle3", tiny(LAYERS))
    with torch.no_grad():
        for parameter in coarse.parameters():
            parameter.mul_(1 + 3e-3 * torch.randn(parameter.shape))
    found = certify(verifier, head, PROMPTS, naive_run(verifier, coarse, healthy))
    assert not found.holds and found.cause.startswith("rounding")


def test_a_map_with_some_wrong_entries_is_no_rounding():
    verifier, head = tiny(AROUND), make("eagle3", tiny(LAYERS))
    healthy = loop_run(tiny(LAYERS), head)
    often = torch.tensor([token for calls in healthy.rounds for _, drafts in calls for token in drafts]).mode().values
    found = certify(
        verifier, head, PROMPTS, naive_run(verifier, head, healthy, tokens=torch.where(often == IDS, 0, IDS))
    )
    assert not found.holds and found.cause.startswith("none of 10 known faults")
    assert found.first.theirs == 0 and found.first.gap is None  # a token that can't be drafted


def test_a_head_without_opinions_proves_nothing():
    """Its logits are all but equal, so that any draft would be a tie."""
    verifier, head = tiny(AROUND), make("eagle3", tiny(LAYERS))
    with torch.no_grad():
        head.lm_head.weight.mul_(1e-6)
    healthy = loop_run(tiny(LAYERS), head)
    found = certify(verifier, head, PROMPTS, naive_run(verifier, head, healthy, layers=(1, 3, 4)))
    assert found.ties > found.compared / 10 and not found.holds


def test_faults_that_cannot_be():
    """An identity map can't be misread, EAGLE-1 has no final norm, and Medusa no drafts that read each other."""
    eagle1, medusa = (make(kind, tiny((8,))) for kind in ("eagle1", "medusa"))
    assert sorted(reading.pairing for reading in possible(eagle1, 8).values()) == [0, 1, 1]
    assert {reading.shift for reading in possible(medusa, 8).values()} == {-1, 0}
    assert len(possible(medusa, 8)) == 4


@torch.no_grad()
def followed_by(verifier, head):
    """Texts whose every token is the head's first draft: that depth is always accepted, the later ones are not."""
    texts = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(40):
            states = torch.tensor([ids])
            aux = verifier.capture(states, states * 0, torch.arange(len(ids))[None]).aux_BTAD[:, :-1]
            out = head.step(states[:, 1:], head.fuse(aux), head.new_cache(1, len(ids)))
            ids.append(int(head.vocab.ids_R[head.logits(out)[0, -1].argmax()]))
        texts.append(ids[len(prompt) :])
    return texts


def rates_of(run):
    """Acceptance by position of these drafts on these texts, call by call, and how many calls."""
    hits, calls = [0] * DEPTH, 0
    for text, rounds in zip(run.texts, run.rounds, strict=True):
        at, drafts = 1, dict(rounds)
        while at in drafts:
            accepted = 0
            while accepted < DEPTH and drafts[at][accepted] == text[at + accepted]:
                hits[accepted] += 1
                accepted += 1
            at, calls = at + accepted + 1, calls + 1
    return [hit / calls for hit in hits]


@pytest.mark.parametrize("name", [None, "one too late", "reverse order", "its own token"])
def test_a_servers_rates_point_to_the_fault(name):
    """All that a server tells is how often each draft is accepted."""
    verifier, plain, head = tiny(AROUND), tiny(LAYERS), make("eagle3", tiny(LAYERS))
    texts = followed_by(plain, head)
    rounds = [[(at, []) for at in range(1, len(text) - DEPTH)] for text in texts]
    along = EngineRun("toy", texts, 0, 0, 0, None, rounds, 1.0)
    rates = rates_of(naive_run(verifier, head, along, **FAULTS.get(name, {})))
    found = suspects(verifier, head, PROMPTS, texts, rates)
    assert found == [] if name is None else any(name in fault for fault in found), (rates, found)
    assert len(found) < len(READINGS)
    assert (rates[0] == 1) == (name is None)


def test_a_server_that_differs_is_held_against_the_faults():
    """The seam of `python -m eval serve=URL`: its verifier captures the head's layers alone."""
    verifier, head = tiny(LAYERS), make("eagle3", tiny(LAYERS))
    prompts = [Prompt(str(i), "toy", tuple(ids)) for i, ids in enumerate(PROMPTS)]
    candidate = Candidate(head, lambda s: drafter_for(head, s.shape, s.sampling), "toy", None)
    runs = our_runs(verifier, candidate, prompts, EvalSettings(FixedTree.chain(DEPTH), max_new_tokens=24))
    counts = pool(run.counts for run in runs)
    as_measured = Tally(counts.verify_calls, counts.drafted, counts.accepted, tuple(counts.accepted_by_depth))
    assert known_faults(verifier, candidate, runs, as_measured) == []
    always = Tally(counts.verify_calls, counts.drafted, counts.drafted, (counts.verify_calls,) * DEPTH)
    assert known_faults(verifier, candidate, runs, always) == []  # no fault is that good
    assert known_faults(verifier, Candidate(None, candidate.drafter, "toy", None), runs, always) == []
    # Texts that follow the head: with the right layers its first draft is always accepted, one late it never is.
    texts = followed_by(verifier, head)
    runs = [replace(run, speculative=replace(run.speculative, tokens=t)) for run, t in zip(runs, texts, strict=True)]
    rounds = [[(at, []) for at in range(1, len(text) - DEPTH)] for text in texts]
    along = EngineRun("toy", texts, 0, 0, 0, None, rounds, 1.0)
    rates = rates_of(naive_run(tiny(AROUND), head, along, layers=(3, 5, 6)))
    late = Tally(1000, 3000, 0, tuple(round(1000 * rate) for rate in rates))
    found = known_faults(verifier, candidate, runs, late)
    assert any("one too late" in name for name in found) and len(found) < len(READINGS)
