"""`python -m eval.diagnose`: planted causes come out on top, and the evidence is what a serial look says."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from conf.cli import load
from conf.explain import options
from data.batches import packed_rows
from data.documents import Document
from eval.command import evaluate_run
from eval.compare import read_alpha
from eval.diagnose.advice import Subject, advice_for
from eval.diagnose.causes import CAUSES, Rules, categories_of, cause_of, shares
from eval.diagnose.command import run as diagnose
from eval.diagnose.evidence import Checked, drafts_along, examine
from eval.diagnose.templates import templates_of, with_template
from eval.prompts import Prompt
from eval.replay import Recording, record, states_of
from eval.speculative.copying import PromptLookup
from eval.speculative.processors import Sampling
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree
from models.chat import render, template_hash, tokenizer_hash
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.supervision import supervised
from models.verifier import Verifier
from models.vocab import DraftVocab
from tiny import tiny_model, tiny_tokenizer
from tiny_run import save_run

LENGTH, DEPTH = 24, 4
PLAIN = "{% for m in messages %}Q: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
WORDS = ("What is two?", "Name a fox.", "Why jump?", "How lazy is it?")


def make_verifier(sharpness=40.0):
    """Sure of itself: its law is near a point mass."""
    model = tiny_model(layers=7, hidden=32)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return Verifier(model, tiny_tokenizer(), "tiny")


@pytest.fixture(scope="module")
def verifier():
    return make_verifier()


def prompts_of(seed, category="known", count=4):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 250, (6,), generator=generator).tolist() for _ in range(count)]
    return [Prompt(f"{category}-{i}", category, tuple(row)) for i, row in enumerate(rows)]


def by_heart(verifier, documents, steps=1, updates=60):
    """An EAGLE-3 head over all tokens that has learnt these texts' own tokens: K = `steps`."""
    torch.manual_seed(0)
    states = verifier.states(*packed_rows(documents))
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, verifier.vocab_size)
    head = Eagle3Head(config, verifier.embedding_VD, DraftVocab.identity(verifier.vocab_size))
    head.start(verifier, -1, True)
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3)
    target_P = F.pad(states.input_ids_BT.flatten()[states.last_index_P + 1], (0, steps))
    counted_KP, P = supervised(states, steps), len(states.last_index_P)
    for _ in range(updates):
        loss = 0.0
        for k, out_PD in enumerate(head.unroll(states, steps)):
            loss = loss + F.cross_entropy(head.logits(out_PD[counted_KP[k]]), target_P[k : k + P][counted_KP[k]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
    return head.eval()


def documents_of(recordings, prompts=None):
    rows = [
        ([*(p or r.prompt).input_ids], [*r.tokens]) for r, p in zip(recordings, prompts or [None] * 9, strict=False)
    ]
    return [Document("", p + t, [(len(p), len(p) + len(t))]) for p, t in rows]


def look_at(verifier, head, prompts, depth=DEPTH, meant=None):
    """Every tested draft on the recorded texts, and the number of calls."""
    drafter = drafter_for(head, FixedTree.chain(depth), Sampling())
    found, calls = [], 0
    for recording, prompt in zip(record(verifier, prompts, LENGTH, depth), meant or [None] * len(prompts), strict=True):
        other = None
        if prompt is not None:
            again = replace(recording, prompt=prompt)
            other = (again, states_of(verifier, again))
        tested, of_text = examine(verifier, drafter, head, recording, states_of(verifier, recording), 1.0, other)
        found += tested
        calls += len(of_text.starts)
    return found, calls


def shares_of(tested, calls, depth=DEPTH, unlikely=0.3):
    far = frozenset(row["category"] for row in categories_of(tested) if row["far"])
    rows = shares(tested, Rules(unlikely, far), {}, calls, depth)
    assert sum(row["misses"] for row in rows) == sum(not draft.hit for draft in tested) > 20
    assert all(sum(row["by_depth"]) == row["misses"] for row in rows)
    return {row["cause"]: row["share"] for row in rows}


@pytest.fixture(scope="module")
def known(verifier):
    return prompts_of(1)


@pytest.fixture(scope="module")
def without_ttt(verifier, known):
    """Knows the texts, but has only ever read true features."""
    return by_heart(verifier, documents_of(record(verifier, known, LENGTH, DEPTH)))


# --- planted causes -------------------------------------------------------------------------------------------


def test_a_head_without_ttt_drifts(verifier, known, without_ttt):
    tested, calls = look_at(verifier, without_ttt, known)
    first = [draft for draft in tested if draft.depth == 1]
    assert sum(draft.hit for draft in first) > 0.95 * len(first)
    found = shares_of(tested, calls)
    assert max(found, key=found.get) == "drift" and found["drift"] > 0.9, found


def test_a_head_of_few_tokens_lacks_vocabulary(verifier, known, without_ttt):
    kept = torch.arange(0, verifier.vocab_size, 8)
    config = replace(without_ttt.config, draft_vocab_size=len(kept))
    head = Eagle3Head(config, verifier.embedding_VD, DraftVocab(kept, verifier.vocab_size))
    values = without_ttt.state_dict()
    head.load_state_dict(values | {"lm_head.weight": values["lm_head.weight"][kept]})
    found = shares_of(*look_at(verifier, head.eval(), known))
    assert max(found, key=found.get) == "vocabulary" and found["vocabulary"] > 0.5, found


def untrained(verifier):
    torch.manual_seed(0)
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, verifier.vocab_size)
    return Eagle3Head(config, verifier.embedding_VD, DraftVocab.identity(verifier.vocab_size)).eval()


def test_a_flat_verifier_is_unsure():
    flat = make_verifier(0.3)
    found = shares_of(*look_at(flat, untrained(flat), prompts_of(1)))
    assert found["unsure"] == 1.0, found


def test_a_head_behind_another_template(verifier):
    other = with_template(verifier.tokenizer, PLAIN)
    served, meant = (
        [Prompt(word, "chat", tuple(render(tokenizer, [{"role": "user", "content": word}], True))) for word in WORDS]
        for tokenizer in (other, verifier.tokenizer)
    )
    recordings = record(verifier, served, LENGTH, 1)
    head = by_heart(verifier, documents_of(recordings, meant))  # those texts, behind its own template alone
    found = shares_of(*look_at(verifier, head, served, 1, meant), depth=1)
    assert max(found, key=found.get) == "template" and found["template"] > 0.8, found
    # Asked without the other template, nothing is known of it.
    assert shares_of(*look_at(verifier, head, served, 1), depth=1)["template"] == 0


def test_a_domain_that_it_has_never_seen(verifier, known, without_ttt):
    strange = prompts_of(7, "strange")
    tested, calls = look_at(verifier, without_ttt, [*known, *strange], 1)
    rows = {row["category"]: row for row in categories_of(tested)}
    assert rows["strange"]["far"] and not rows["known"]["far"] and rows["strange"]["excess"] > 30
    found = shares_of(tested, calls, 1)
    assert max(found, key=found.get) == "domain" and found["domain"] > 0.8, found


def test_an_untrained_head_is_just_not_good_enough(verifier):
    found = shares_of(*look_at(verifier, untrained(verifier), prompts_of(1)))
    assert max(found, key=found.get) == "head" and found["head"] > 0.7, found


# --- the rules ------------------------------------------------------------------------------------------------


def draft(**changes):
    """A miss that falls under nothing but the last cause."""
    values = {"prompt": "p", "category": "c", "position": 3, "depth": 2, "token": 5, "drafted": 6, "proposable": True,
              "with_true_features": False, "with_template": False, "best": 0.9, "of_drafted": 0.01,
              "entropy": 0.1}  # fmt: skip
    return Checked(**(values | changes))


def test_the_order_decides_between_causes():
    marks = {"vocabulary": {"proposable": False}, "template": {"with_template": True},
             "drift": {"with_true_features": True}, "unsure": {"best": 0.2}, "domain": {"category": "far"},
             "head": {}}  # fmt: skip
    assert list(marks) == [cause.name for cause in CAUSES]
    rules = Rules(0.3, frozenset(["far"]))
    for name, mark in marks.items():
        assert cause_of(draft(**mark), rules) == name
    both = {}
    for name in reversed(marks):
        both |= marks[name]
        assert cause_of(draft(**both), rules) == name
    assert cause_of(draft(best=0.5, of_drafted=0.4), rules) == "unsure"  # as good a guess
    assert cause_of(draft(best=0.5, of_drafted=0.39), rules) == "head"
    assert cause_of(draft(), replace(rules, labels=[1] * 5 + [0])) == "domain"  # never a label


def test_shares_and_what_they_are_worth():
    tested = [draft(proposable=False), draft(depth=1), draft(depth=1, token=6, with_true_features=False)]
    rows = {row["cause"]: row for row in shares(tested, Rules(0.3, frozenset()), {"template": "why"}, 4, 2)}
    assert (rows["vocabulary"]["share"], rows["vocabulary"]["by_depth"]) == (0.5, [0, 1])
    assert rows["vocabulary"]["tau_gain_at_least"] == 0.25
    assert rows["drift"]["reversed"] == 1 and rows["head"]["by_depth"] == [1, 0]
    assert rows["template"]["not_asked"] == "why" and rows["template"]["misses"] is None


def test_evidence_is_what_a_serial_look_says(verifier, known, without_ttt):
    (recording,) = record(verifier, known[:1], LENGTH, DEPTH)
    tested, _ = look_at(verifier, without_ttt, known[:1])
    for one in tested[::5]:
        ids = [*recording.prompt.input_ids, *recording.tokens[: one.position]]
        cache = verifier.new_cache(1, len(ids))
        logits = verifier.decode(cache, torch.tensor([ids]), logits="last").logits[0]
        p = logits.softmax(-1)
        assert int(p.argmax()) == one.token == recording.tokens[one.position]
        assert float(p.max()) == pytest.approx(one.best, abs=1e-4)
        assert float(p[one.drafted]) == pytest.approx(one.of_drafted, abs=1e-4)
        assert float(-(p * p.clamp_min(1e-30).log()).sum()) == pytest.approx(one.entropy, abs=1e-3)
        if one.depth > 1:  # a loop that begins there reads the verifier's features alone
            shorter = Recording(Prompt("", "", tuple(ids[:-1])), recording.tokens[one.position - 1 :], 2, "length")
            drafter = drafter_for(without_ttt, FixedTree.chain(1), Sampling())
            (first,) = drafts_along(drafter, shorter, states_of(verifier, shorter), [1])
            assert (first[0] == one.token) is one.with_true_features


def test_copying_can_propose_what_was_written(verifier, known):
    (recording,) = record(verifier, known[:1], LENGTH, DEPTH)
    again = replace(recording, prompt=replace(recording.prompt, input_ids=(*recording.prompt.input_ids, 300, 9, 300)))
    text = (9, 301, 9, 302, 9, 303, 9, 304, 9, 305)
    again = replace(again, tokens=text, length=4)
    tested, calls = examine(verifier, PromptLookup(2), None, again, states_of(verifier, again), 1.0)
    miss = tested[0]
    assert (miss.token, miss.drafted, miss.proposable, miss.depth) == (301, 300, False, 1)
    assert miss.with_true_features is None and calls.starts[0] == 1


# --- templates ------------------------------------------------------------------------------------------------


def test_which_template_is_whose(tmp_path):
    tokenizer = tiny_tokenizer()
    own, file = template_hash(tokenizer), tmp_path / "other.jinja"
    file.write_text(PLAIN)
    theirs = template_hash(with_template(tokenizer, PLAIN))
    same = templates_of(tokenizer, own, None)
    assert same.training is None and "the same" in same.missing
    served = templates_of(tokenizer, own, str(file))
    assert template_hash(served.serving) == theirs and template_hash(served.training) == own
    trained = templates_of(tokenizer, theirs, str(file))
    assert template_hash(trained.serving) == own and template_hash(trained.training) == theirs
    assert "names no template" in templates_of(tokenizer, None, None).missing
    for given in (None, str(file)):
        with pytest.raises(ValueError, match=r"another chat template \(0123.*template=FILE.jinja"):
            templates_of(tokenizer, "0123", given)
    with pytest.raises(ValueError, match="expected a chat template"):
        templates_of(tokenizer, own, str(tmp_path / "absent"))


# --- advice ---------------------------------------------------------------------------------------------------


def test_every_advice_is_a_command_that_composes():
    found = {}
    for kind in ("eagle3", "eagle1", "medusa", "independent", None):
        for steps in (None, 1, 7):
            subject = Subject("outputs/x", kind, 5, steps, 1000, 64, 512, "the same", "maths", "ttt_study")
            assert subject.experiment in options("experiment")
            found |= {(cause.name, kind, steps): advice_for(cause.name, subject).command for cause in CAUSES}
    assert "head.ttt_steps=7" in found["drift", "eagle3", 1] and "objective=" not in found["drift", "eagle3", 1]
    assert "objective=on_policy" in found["drift", "eagle3", 7]
    assert "experiment=eagle3_llama" in found["drift", "eagle1", 1] and "decode=tree" in found["unsure", None, None]
    # One of each: words and choices; their combinations with experiments are those of test_experiments.
    for command in {" ".join(command.split()[4:]): command for command in found.values()}.values():
        _, _, module, *words = command.split()
        assert load(module, words)


# --- the command ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run"))


WORDS_OF = ["decode.max_new_tokens=20", "decode.depth=3"]


def test_the_command_agrees_with_eval(run, tmp_path, command):
    words = [f"run={run}", f"prompts={run}/prompts.jsonl", *WORDS_OF]
    code, out, err = command("diagnose", diagnose, *words, f"out={tmp_path}/d", "json=true")
    assert code == 0, err
    values = json.loads(out.splitlines()[-1])
    assert json.loads((tmp_path / "d" / "diagnose.json").read_text())["misses"] == values["misses"]
    assert (tmp_path / "d" / "diagnose.png").read_bytes()[:4] == b"\x89PNG"
    assert "first misses in" in err and "try first" in err
    assert command("eval", evaluate_run, *words, "replay=true", "report=false", "plots=false",
                   f"out={tmp_path}/e")[0] == 0  # fmt: skip
    alpha = read_alpha(tmp_path / "e")
    names = ("tau", "verify_calls", "tested_by_depth", "accepted_by_depth")
    assert [values[name] for name in names] == [alpha[name] for name in names]
    rows = {row["cause"]: row for row in values["causes"]}
    assert values["largest"] == max((r for r in rows.values() if r["misses"]), key=lambda r: r["misses"])["cause"]
    assert "the same" in rows["template"]["not_asked"] and rows["drift"]["not_asked"] is None


def test_what_cannot_be_asked_is_said(run, tmp_path, command):
    words = ["draft=prompt_lookup", f"verifier_source={run}/verifier", f"prompts={run}/prompts.jsonl", *WORDS_OF]
    code, out, err = command("diagnose", diagnose, *words, f"out={tmp_path}/d", "plots=false")
    assert code == 0, err
    assert "n/a, feature drift: the drafter reads no features of its own" in " ".join(out.split())
    values = json.loads((tmp_path / "d" / "diagnose.json").read_text())
    assert {row["cause"] for row in values["causes"] if row["not_asked"]} == {"template", "drift", "domain"}
    assert values["calls_without_draft"] > 0


def test_a_head_of_another_template(run, tmp_path, command):
    """Trained with PLAIN, while the verifier's folder has ChatML: refused, and taken with the template of training."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    file, card = copy / "head" / "config.json", json.loads((copy / "head" / "config.json").read_text())
    trained = with_template(tiny_tokenizer(), PLAIN)
    card["verifier"] |= {"template_hash": template_hash(trained), "tokenizer_hash": tokenizer_hash(trained)}
    file.write_text(json.dumps(card))
    (tmp_path / "plain.jinja").write_text(PLAIN)
    words = [f"run={copy}", f"prompts={run}/prompts.jsonl", *WORDS_OF, f"out={tmp_path}/d", "plots=false"]
    code, _, err = command("diagnose", diagnose, *words)
    assert code == 2 and "give the one of training, template=FILE.jinja" in err and len(err.splitlines()) == 1
    code, _, err = command("diagnose", diagnose, *words, f"template={tmp_path}/plain.jinja")
    assert code == 0, err
    values = json.loads((tmp_path / "d" / "diagnose.json").read_text())
    assert values["template"].startswith("trained with") and values["causes"][1]["not_asked"] is None


def test_the_pages_commands_compose():
    page = (Path(__file__).parent.parent / "docs" / "measuring.md").read_text()
    commands = re.findall(r"^    python -m eval\.(\w+) (.+)$", page, re.M)
    assert {name for name, _ in commands} == {"sweep", "diagnose"}
    for name, words in commands:
        assert load(name, words.split())


def test_labels_of_training_come_from_the_cache_alone(run, tmp_path, command):
    (run / "provenance.json").write_text(json.dumps({"data": {"folder": str(tmp_path)}}))
    words = [f"run={run}", f"prompts={run}/prompts.jsonl", *WORDS_OF, f"out={tmp_path}/d", "plots=false"]
    assert command("diagnose", diagnose, *words)[0] == 0
    assert json.loads((tmp_path / "d" / "diagnose.json").read_text())["training_labels"] is None


@pytest.mark.parametrize(
    "words, hint",
    [
        (["run=/x", "decode=tree"], "expected decode=chain"),
        (["draft=lookahead"], "can be replayed"),
        (["run=/x", "unlikely=2"], "in [0, 1]"),
        (["run=/absent"], "/absent"),
        ([], "run="),
    ],
)
def test_mistakes_are_one_line(words, hint, command):
    code, _, err = command("diagnose", diagnose, *words)
    assert code == 2 and hint in err and len(err.splitlines()) == 1
