"""Replaying a drafter on recorded text gives the loop's own rounds, and what is recorded is kept."""

from collections import namedtuple

import pytest
import torch

from conf.errors import UserError
from eval import replay as module
from eval.alpha import evaluate
from eval.counts import Counts
from eval.measure import EvalSettings
from eval.prompts import Prompt
from eval.replay import record, replay, states_of
from eval.speculative.copying import PromptLookup
from eval.speculative.drafter import Draft
from eval.speculative.loop import plain_decode, speculative_decode
from eval.speculative.processors import Sampling
from eval.speculative.scorers import ModelScorer, TreeDrafter, drafter_for
from eval.speculative.shapes import FixedTree
from eval.tables import headline_rows
from models.draft_model import DraftModel
from models.heads.medusa import MedusaConfig, MedusaHead
from models.vocab import DraftVocab
from tiny import tiny_verifier
from toy_head import head_of

GREEDY = Sampling()
LENGTH, DEPTH = 14, 4
CHAIN = FixedTree.chain(DEPTH)
LAYERS = {"head": None, "medusa": [-1], "model": [], "lookup": []}  # what each drafter reads


def verifier_with(aux_layers=None, seed=0, layers=7):
    return tiny_verifier(layers=layers, hidden=32, dtype=torch.float64, aux_layers=aux_layers, seed=seed)


@pytest.fixture(scope="module")
def verifiers():
    return {name: verifier_with(layers) for name, layers in LAYERS.items()}


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [Prompt(str(n), "toy", tuple(torch.randint(3, 300, (n,), generator=generator).tolist())) for n in (4, 9, 6)]


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("EYRIE_CACHE", str(tmp_path))
    return tmp_path / "recordings"


def drafter_of(name, verifier):
    torch.manual_seed(1)
    if name == "head":
        return drafter_for(head_of(verifier).double(), CHAIN, GREEDY)
    if name == "medusa":  # with fewer heads than the depth
        vocab = DraftVocab(torch.arange(0, 512, 2), 512)
        config = MedusaConfig.from_verifier(verifier.head_geometry, verifier.aux_layers, len(vocab), heads=2)
        return drafter_for(MedusaHead(config, vocab).double(), CHAIN, GREEDY)
    if name == "model":
        return TreeDrafter(ModelScorer(DraftModel(verifier_with([], seed=1, layers=1), verifier), "cpu"), CHAIN, GREEDY)
    return PromptLookup(DEPTH)


class Helped:
    """Drafts as `inner` does, but the first n of each draft are what the text says, from all of them down."""

    def __init__(self, inner, text):
        self.inner, self.text = inner, text
        self.name, self.ids_R, self.nodes, self.depth = "helped", inner.ids_R, inner.nodes, inner.depth

    def start(self, *args):
        self.at, self.turn = 1, 0
        self.inner.start(*args)

    def draft(self, uniform_BN):
        draft = self.inner.draft(uniform_BN)
        tokens_N = draft.tokens_BN[0].clone()
        right = len(tokens_N) - self.turn % (len(tokens_N) + 1)
        tokens_N[:right] = torch.tensor(self.text[self.at : self.at + right])
        self.turn += 1
        return Draft(tokens_N[None], draft.parents_BN)

    def accepted(self, tokens, features, logits_BMV):
        self.at += len(tokens[0])
        self.inner.accepted(tokens, features, logits_BMV)


def counted(decoded):
    counts = Counts()
    for call in decoded.rounds:
        counts.add(call)
    return counts


@pytest.mark.parametrize("ends", [False, True], ids=["by length", "by end-of-turn"])
@pytest.mark.parametrize("name", LAYERS)
def test_rounds_are_the_loops(verifiers, prompts, name, ends, monkeypatch):
    """Draft for draft, so the states that a drafter is handed are the loop's too; and with accepted drafts of each
    number, up to and across the end of the text.
    """
    verifier = verifiers[name]
    first, second = (
        plain_decode(verifier, list(prompt.input_ids), max_new_tokens=LENGTH, sampling=GREEDY).tokens
        for prompt in prompts[:2]
    )
    if ends:  # one text ends at its ninth token or before, another at its first
        monkeypatch.setattr(verifier, "eos_ids", (first[8], second[0]))
    accepted, finishes, across = set(), set(), 0
    inner = drafter_of(name, verifier)
    for recording in record(verifier, prompts, LENGTH, DEPTH):
        for drafter in (inner, Helped(inner, recording.tokens)):
            ids, states = list(recording.prompt.input_ids), states_of(verifier, recording)
            looped = speculative_decode(verifier, drafter, ids, max_new_tokens=LENGTH, sampling=GREEDY)
            replayed = replay(drafter, recording, states)
            assert (replayed.tokens, replayed.finish) == (looped.tokens, looped.finish)
            assert [(r.drafted, r.depth, r.accepted, r.emitted) for r in replayed.rounds] == [
                (r.drafted, r.depth, r.accepted, r.emitted) for r in looped.rounds
            ]
            assert counted(replayed) == counted(looped)
            accepted |= {r.accepted for r in looped.rounds}
            finishes.add((looped.finish, len(looped.rounds) == 0))
            across += counted(looped).emitted + 1 > len(looped.tokens)
    assert len(accepted) > 1
    if name != "lookup":  # its drafts here are short
        assert across and (ends or accepted == set(range(3 if name == "medusa" else DEPTH + 1)))
    assert finishes >= ({("stop", True), ("stop", False)} if ends else {("length", False)})


def test_texts_are_plain_decodings_and_go_on_behind_their_end(verifiers, prompts, monkeypatch, fresh_cache):
    verifier = verifiers["head"]
    ids = list(prompts[0].input_ids)
    whole = plain_decode(verifier, ids, max_new_tokens=LENGTH + DEPTH + 1, sampling=GREEDY).tokens
    at = whole.index(whole[8])
    with monkeypatch.context() as patch:
        patch.setattr(verifier, "eos_ids", (whole[8],))
        recording = record(verifier, prompts, LENGTH, DEPTH)[0]
    assert (recording.length, recording.finish) == (at + 1, "stop")
    assert list(recording.tokens) == whole[: at + 1 + DEPTH + 1]
    recording = record(verifier, prompts, LENGTH, DEPTH)[0]  # without that end, it is another text
    assert (list(recording.tokens), recording.length, recording.finish) == (whole, LENGTH, "length")


def test_a_text_is_written_once_for_all_heads(verifiers, prompts, monkeypatch, fresh_cache):
    first = record(verifiers["head"], prompts, LENGTH, DEPTH)
    monkeypatch.setattr(module, "generate", None)
    assert record(verifiers["medusa"], prompts[::-1], LENGTH, DEPTH) == first[::-1]
    shallower = record(verifiers["head"], prompts, LENGTH, DEPTH - 1)
    assert [r.tokens for r in shallower] == [r.tokens[:-1] for r in first]
    for other in ((LENGTH, DEPTH + 1), (LENGTH + 1, DEPTH)):
        with pytest.raises(TypeError):  # not there, so it would be written
            record(verifiers["head"], prompts, *other)
    with pytest.raises(TypeError):
        record(verifier_with([], seed=1, layers=1), prompts, LENGTH, DEPTH)


def test_what_was_written_before_an_interruption_is_kept(verifiers, prompts, monkeypatch, fresh_cache):
    verifier, kept = verifiers["head"], []

    def write(path, value):
        if kept:
            raise KeyboardInterrupt
        kept.append(path)
        whole(path, value)

    whole = module.write_json
    monkeypatch.setattr(module, "write_json", write)
    with pytest.raises(KeyboardInterrupt):
        record(verifier, prompts, LENGTH, DEPTH)
    written = []
    monkeypatch.setattr(module, "write_json", lambda path, value: (written.append(path), whole(path, value)))
    assert len(record(verifier, prompts, LENGTH, DEPTH)) == 3
    assert len(written) == 2 and kept[0] not in written


def test_states_are_kept_for_each_choice_of_layers(verifiers, prompts, monkeypatch, fresh_cache):
    recording = record(verifiers["head"], prompts, LENGTH, DEPTH)[0]
    rows = len(recording.prompt.input_ids) + len(recording.tokens)
    for name, layers in (("head", 3), ("medusa", 1), ("model", 0)):
        states = states_of(verifiers[name], recording)
        assert states.aux_BTAD.shape == (1, rows, layers, 32) and states.last_BTD.shape == (1, rows, 32)
        with monkeypatch.context() as patch:
            patch.setattr(verifiers[name], "capture", None)
            again = states_of(verifiers[name], recording)
        assert torch.equal(again.aux_BTAD, states.aux_BTAD) and torch.equal(again.last_BTD, states.last_BTD)
        assert again.aux_BTAD.dtype == torch.float64
    assert len(list(fresh_cache.glob("*/*.safetensors"))) == 3


def test_states_that_would_fill_the_disk_are_not_kept(verifiers, prompts, monkeypatch, fresh_cache):
    recording = record(verifiers["head"], prompts, LENGTH, DEPTH)[0]
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(1000))
    assert states_of(verifiers["head"], recording).last_BTD.shape[2] == 32
    assert not list(fresh_cache.glob("*/*.safetensors"))


def test_the_report_says_how_it_was_measured(verifiers, prompts):
    verifier = verifiers["head"]
    settings = [EvalSettings(shape=FixedTree.chain(2), max_new_tokens=12, replay=replay) for replay in (True, False)]
    replayed, looped = (
        evaluate(
            verifier,
            lambda: drafter_for(head_of(verifier).double(), FixedTree.chain(2), GREEDY),
            prompts[:2],
            each,
            progress=False,
        )
        for each in settings
    )
    assert (replayed.measured, looped.measured) == ("replay", "loop")
    assert ("measured by", "replay") in [row[:2] for row in headline_rows(replayed.to_dict())]
    for name in ("tau", "tested_by_depth", "accepted_by_depth", "drafted", "repetition_rate", "prompt_lookup_tau",
                 "out_of_vocab_rate", "intervals"):  # fmt: skip
        assert getattr(replayed, name) == getattr(looped, name), name
    assert replayed.speedup is replayed.tokens_per_second is replayed.identical_to_baseline is None
    assert {row["seconds"] for row in replayed.prompts} == {None}
    assert set(replayed.times["t_verify"]) == set(looped.times["t_verify"])
    assert min(replayed.times[name] for name in ("t_decode", "t_draft_first", "t_draft")) > 0
    assert replayed.cost_ratio == replayed.times["t_draft"] / replayed.times["t_verify"]["3"]
    assert replayed.predicted["n_star"] >= 0


def test_prompt_lookup_has_no_times_to_report(verifiers, prompts):
    settings = EvalSettings(shape=FixedTree.chain(2), max_new_tokens=12, replay=True)
    report = evaluate(verifiers["lookup"], lambda: PromptLookup(2), prompts, settings, progress=False)
    assert report.verify_calls > 0 and report.times is report.cost_ratio is report.predicted is None


def test_only_greedy_text_can_be_replayed():
    with pytest.raises(UserError, match="temperature 0.5"):
        EvalSettings(replay=True, sampling=Sampling(0.5))
