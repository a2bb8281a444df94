"""Replaying a drafter on recorded text gives the loop's own rounds."""

import pytest
import torch

from conf.errors import UserError
from eval.alpha import evaluate
from eval.measure import EvalSettings
from eval.prompts import Prompt
from eval.replay import greedy_texts, record, replay, states_of
from eval.speculative.drafter import HeadDrafter, PromptLookup
from eval.speculative.loop import plain_decode, speculative_decode
from eval.speculative.processors import Sampling
from tiny import tiny_verifier
from toy_head import head_of

GREEDY = Sampling()
LENGTH, DEPTH = 24, 3


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier(dtype=torch.float64)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [Prompt(str(n), "toy", tuple(torch.randint(3, 300, (n,), generator=generator).tolist())) for n in (4, 9, 6)]


def drafters(verifier):
    return {"head": HeadDrafter(head_of(verifier).double(), GREEDY), "lookup": PromptLookup()}


@pytest.mark.parametrize("name", ["head", "lookup"])
@pytest.mark.parametrize("ends", [False, True], ids=["by length", "by end-of-turn"])
def test_rounds_are_the_loops(verifier, prompts, name, ends, monkeypatch):
    """Token for token and draft for draft, where the text is cut by its length and where it ends of itself."""
    if ends:  # whatever the text says at its tenth token ends it
        text = plain_decode(verifier, list(prompts[0].input_ids), max_new_tokens=LENGTH, sampling=GREEDY).tokens
        monkeypatch.setattr(verifier, "eos_ids", (text[10],))
    accepted = 0
    for recording in record(verifier, prompts, LENGTH, DEPTH):
        drafter, ids = drafters(verifier)[name], list(recording.prompt.input_ids)
        looped = speculative_decode(verifier, drafter, ids, max_new_tokens=LENGTH, depth=DEPTH, sampling=GREEDY)
        replayed = replay(drafter, recording, states_of(verifier, recording), DEPTH)
        assert (replayed.tokens, replayed.finish) == (looped.tokens, looped.finish)
        for ours, theirs in zip(replayed.rounds, looped.rounds, strict=True):
            assert (ours.drafted, ours.accepted, ours.emitted) == (theirs.drafted, theirs.accepted, theirs.emitted)
        accepted += sum(r.accepted for r in replayed.rounds)
    assert accepted or name == "head"  # a random model repeats itself, so prompt lookup hits


def test_texts_of_a_batch_are_those_of_single_prompts(verifier, prompts):
    texts = greedy_texts(verifier, [list(p.input_ids) for p in prompts], LENGTH)
    for prompt, text in zip(prompts, texts, strict=True):
        plain = plain_decode(verifier, list(prompt.input_ids), max_new_tokens=LENGTH, sampling=GREEDY).tokens
        assert text[: len(plain)] == plain and len(text) == LENGTH


def test_a_recording_is_read_back(verifier, prompts, monkeypatch):
    first = record(verifier, prompts, LENGTH, DEPTH)
    monkeypatch.setattr("eval.replay.greedy_texts", None)
    assert record(verifier, prompts, LENGTH, DEPTH) == first


def test_the_report_says_how_it_was_measured(verifier, prompts):
    settings = EvalSettings(depth=DEPTH, max_new_tokens=LENGTH, replay=True)
    report = evaluate(verifier, lambda: drafters(verifier)["head"], prompts, settings, progress=False)
    looped = EvalSettings(depth=DEPTH, max_new_tokens=LENGTH)
    loop = evaluate(verifier, lambda: drafters(verifier)["head"], prompts, looped, progress=False)
    assert (report.measured, loop.measured) == ("replay", "loop")
    assert report.tau == loop.tau and report.tested_by_depth == loop.tested_by_depth
    assert report.speedup is report.tokens_per_second is report.identical_to_baseline is None
    assert report.cost_ratio > 0 and report.predicted["n_star"] >= 0


def test_only_greedy_text_can_be_replayed():
    with pytest.raises(UserError, match="temperature 0.5"):
        EvalSettings(replay=True, sampling=Sampling(0.5))
