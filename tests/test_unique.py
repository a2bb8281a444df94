"""What evaluation asks is not trained on, nor a question twice where that is wanted; every row left out is counted."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import data.unique
from conf.errors import UserError
from conf.schema import DataConf
from data.convert import Conversion, Converter
from data.documents import clip
from data.prepare import conversion, excluding, prepare
from data.rows import Dialogue
from data.tokens import to_documents
from data.unique import ASKED, RUN, SHARED, Exclusion, Seen, question_key
from tiny import tiny_tokenizer, tiny_verifier
from tiny_writer import turns

LONG = " ".join(f"w{i}" for i in range(20))


@pytest.mark.parametrize(
    "text, reason",
    [
        ("what is\n the  CAPITAL of France?", ASKED),
        ("What is the capital of France, then?", None),
        ("What is the capital of France", None),  # whole questions keep their punctuation
        ("Say: " + " ".join(f"W{i}," for i in range(3, 3 + RUN)) + " and so on", SHARED),
        ("Say: " + " ".join(f"w{i}" for i in range(3, 2 + RUN)) + " and so on", None),
        (" ".join(f"w{i} x" for i in range(20)), None),
        (LONG, ASKED),
        ("", None),
    ],
)
def test_reasons(text, reason):
    exclusion = Exclusion(["What is the capital of France?", LONG])
    assert exclusion.reason([text]) == reason
    assert exclusion.reason(["something else", text]) == reason, "any turn counts"


def test_the_hash_is_of_the_questions():
    hashes = {Exclusion(some).hash for some in (["a", "b"], ["b", " A"], ["a"], ["a b"], [])}
    assert len(hashes) == 4


def test_half_a_character_is_a_question_too():
    """JSON may escape one."""
    exclusion = Exclusion(["\ud800"])
    assert exclusion.reason(["\ud800 "]) == ASKED and exclusion.hash and question_key("\ud800") != question_key("?")


def test_seen_is_a_set(monkeypatch):
    monkeypatch.setattr(data.unique, "LOOSE", 16)
    rng = np.random.default_rng(0)
    keys = [int(key) for key in rng.integers(0, 2**64, 500, dtype=np.uint64)] + [0, 2**64 - 1]
    seen, plain = Seen(), set()
    for key in [*keys, *keys[::-1]]:
        assert (key in seen) == (key in plain)
        seen.add(key)
        plain.add(key)
    other = Seen()
    other.update(np.array(keys, dtype=np.uint64))
    assert all(key in other for key in keys) and 17 not in other


def converter(**how):
    verifier = SimpleNamespace(tokenizer=tiny_tokenizer(), eos_ids=(2,), vocab_size=512, name="tiny")
    return Converter(verifier, Conversion(256, **how))


def test_one_dialogue_for_each_first_question():
    made = converter(unique="prompt")
    rows = [
        turns("How many?", "a<|im_end|>b"),  # cannot be used, so the question is free
        turns("How many?", "Three."),
        turns("how  MANY?", "Four.", "And now?", "Five."),
        turns("And now?", "Five."),
        turns("How many?", "Three."),
    ]
    found = made.convert([Dialogue(str(index), "", row) for index, row in enumerate(rows)])
    assert [index for index, (documents, _) in enumerate(found) if documents] == [1, 3]
    assert [(place, reason) for place, reason, _ in made.dropped] == [
        ("0", "end-of-turn token inside an answer"),
        ("2", "duplicate prompt"),
        ("4", "duplicate prompt"),
    ]


def test_questions_are_found_in_every_kind_of_row():
    made = converter(exclude=Exclusion([LONG, "Why?"]))
    encode, render = made.verifier.tokenizer.encode, made.verifier.tokenizer.apply_chat_template
    asked = render(turns(LONG, "Hm."), tokenize=False)
    ids, said = encode(asked.removesuffix("Hm.<|im_end|>\n")), encode(LONG)
    rows = {
        "second turn": Dialogue("a", "", turns("Hello", "Hi.", "why?", "So.")),
        "text": Dialogue("b", "", [], text=asked),
        "ids": Dialogue("c", "", [], input_ids=[*ids, 50, 51], spans=[(len(ids), len(ids) + 2)]),
        "an answer may say it": Dialogue("d", "", turns("Hello", LONG)),
        "and so in ids": Dialogue("e", "", [], input_ids=[5, *said], spans=[(1, len(said) + 1)]),
    }
    found = zip(rows, made.convert(list(rows.values())), strict=True)
    assert {name for name, (documents, _) in found if documents} == {"an answer may say it", "and so in ids"}
    assert [reason for _, reason, _ in made.dropped] == [ASKED, SHARED, SHARED]


def test_settings_name_what_to_leave_out(tmp_path):
    suite = tmp_path / "suite.jsonl"
    suite.write_text(json.dumps({"turns": ["Who?", "Why?"]}) + "\n")
    assert conversion(DataConf(path=None)).exclude is None
    for given in (str(suite), [str(suite)]):
        assert conversion(DataConf(path=None, exclude=given)).exclude.whole == {"who?"}, "the question that is asked"
    assert "from typing import list def has_close_elements" in str(
        sorted(conversion(DataConf(path=None, exclude=["humaneval"])).exclude.runs)
    )
    assert excluding(DataConf(path=None), ["eyrie"]).exclude == ["eyrie"]
    assert excluding(DataConf(path=None, exclude=[]), ["eyrie"]).exclude == []
    with pytest.raises(UserError, match="expected data.unique to be one of document, prompt, found 'row'"):
        conversion(DataConf(path=None, unique="row"))
    with pytest.raises(UserError, match="no prompts 'nowhere'"):
        conversion(DataConf(path=None, exclude=["nowhere"]))


def test_given_rows_are_left_out_counted_and_kept_for_people(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("EYRIE_CACHE", str(tmp_path / "cache"))
    path, suite = tmp_path / "given.jsonl", tmp_path / "suite.jsonl"
    rows = [{"conversations": turns(f"Question {i}?", f"Answer {i}.")} for i in range(12)]
    rows += [rows[3], {"conversations": turns("question 3?", "Another.")}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    suite.write_text(json.dumps({"prompt": "QUESTION 5?"}) + "\n")
    verifier = tiny_verifier(layers=3, hidden=32, aux_layers=())
    settings = DataConf(path=str(path), answers="given", validation=2, exclude=[str(suite)])
    with caplog.at_level("INFO"):
        first = prepare(settings, verifier)
    assert first.counts["dropped"] == {"malformed JSON": 1, ASKED: 1, "duplicate document": 1}
    assert len(first.train) + len(first.validation) == 12
    found = [json.loads(line) for line in (first.folder / "quarantine.jsonl").read_text().splitlines()]
    assert [(row["place"], row["reason"]) for row in found] == [
        (f"{path}:15", "malformed JSON"), (f"{path}:6", ASKED), (f"{path}:13", "duplicate document"),
    ]  # fmt: skip
    assert f"rows that were left out: {first.folder / 'quarantine.jsonl'}" in caplog.text
    settings.unique = "prompt"
    by_prompt = prepare(settings, verifier)
    assert by_prompt.counts["dropped"] == {"malformed JSON": 1, ASKED: 1, "duplicate prompt": 2}
    settings.exclude = []
    everything = prepare(settings, verifier)
    assert everything.counts["dropped"] == {"malformed JSON": 1, "duplicate prompt": 2}
    assert len({some.folder for some in (first, by_prompt, everything)}) == 3
    assert len({some.folder.parent for some in (first, by_prompt, everything)}) == 1, "the same dialogues"


def test_threads_change_nothing():
    """Against one dialogue after another, by the plain function."""
    made, rng = converter(), np.random.default_rng(0)
    texts = [f"{'what is a ' * int(rng.integers(1, 30))}{i}" for i in range(200)]
    rows = [Dialogue(str(i), "", turns(text, text[::-1], "And?", text)) for i, text in enumerate(texts)]
    wanted = [[clip(document, 256)] for row in rows for document in to_documents(row, made.verifier)]
    assert [documents for documents, _ in made.convert(rows)] == wanted
    assert made.documents == 200 and made.answer_tokens == sum(d.answer_tokens for (d,) in wanted)
