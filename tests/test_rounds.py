"""rounds.json: who wrote each token of a text, and what was drafted in vain."""

import json

import pytest

from conf.errors import UserError
from eval.rounds import ROUNDS, RoundText, added, read_rounds, text_rounds, write_rounds
from eval.speculative.copying import PromptLookup
from eval.speculative.loop import Decoded, Round, round_of, speculative_decode
from eval.speculative.processors import Sampling
from tiny import tiny_tokenizer, tiny_verifier

TOKENIZER = tiny_tokenizer()


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def test_a_round_remembers_the_tree():
    from eval.speculative.acceptance import Accepted

    nodes = [(-1, 5), (-1, 6), None, (1, 7), (2, 8), (3, 9), (1, 7)]  # the fifth hangs on one that isn't there
    call = round_of(nodes, Accepted((1, 3), 42), [6, 7, 42])
    assert call.drafted == (5, 6, 7, 9, 7) and call.parents == (-1, -1, 1, 2, 1)
    assert (call.accepted, call.tested, call.depth) == (2, 3, 3)


def test_the_kept_words_are_the_text():
    verifier = tiny_verifier()
    prompt = [1, 40, 41, 40, 41, 42]
    decoded = speculative_decode(verifier, PromptLookup(3), prompt, max_new_tokens=40, sampling=Sampling())
    record = text_rounds(TOKENIZER, "a", "chat", prompt, decoded)
    rounds = [RoundText.model_validate(row) for row in record["rounds"]]
    words = [word for one in rounds for word in one.words()]
    assert len(words) == len(decoded.tokens) == sum(one.kept for one in rounds) and record["left_out"] == 0
    assert rounds[0].kind == "first" and rounds[0].drafts == [] and rounds[0].seconds is None
    for row, call in zip(rounds[1:], decoded.rounds, strict=True):
        assert len(row.path) == call.accepted and len(row.drafts) == len(call.drafted) and row.seconds == call.seconds
        assert row.kind == ("correction" if call.tested > call.accepted else "bonus")
    whole = TOKENIZER.decode([*prompt, *decoded.tokens])
    assert record["prompt"] + "".join(text for text, *_ in words) == whole.rstrip("\ufffd")


def test_a_cut_text_keeps_part_of_its_last_round():
    a, b, c, d = 300, 301, 302, 303
    calls = [Round((a, b), 2, 2, (a, b, c), 2, parents=(-1, 0)), Round((a, d), 2, 1, (a, c), 2, parents=(-1, 0))]
    decoded = Decoded([c, a, b, c, a], "length", 0.0, 0.0, rounds=calls)
    rounds = text_rounds(TOKENIZER, "x", "", [a], decoded)["rounds"]
    assert [(row["kind"], row["kept"], row["path"]) for row in rounds] == [
        ("first", 1, []), ("bonus", 3, [0, 1]), ("correction", 1, [0]),
    ]  # fmt: skip
    assert [who for row in rounds for _, who, _ in RoundText.model_validate(row).words()] == [
        "first", "draft", "draft", "bonus", "draft",
    ]  # fmt: skip


def test_a_character_of_several_tokens_comes_with_its_last():
    tokens = ids("a \u20ac b")  # three bytes, which the tiny tokenizer keeps apart
    pieces = [added(TOKENIZER, tokens[:n], token) for n, token in enumerate(tokens)]
    assert "".join(pieces) == "a \u20ac b" and pieces.count("") == 2 and "\u20ac" in pieces


def test_very_long_texts_are_cut_and_counted():
    calls = [Round((), 0, 0, (300,), 0)] * (ROUNDS + 4)
    decoded = Decoded([300] * (ROUNDS + 5), "length", 0.0, 0.0, rounds=calls)
    record = text_rounds(TOKENIZER, "x", "", [301], decoded)
    assert len(record["rounds"]) == ROUNDS and record["left_out"] == 5


GOOD = {"drafts": ["a", "b"], "parents": [-1, 0], "path": [0], "own": "c", "kind": "correction", "kept": 2}


def test_the_file_is_read_back(tmp_path):
    text = {"id": "a", "category": "chat", "prompt": "p", "rounds": [GOOD], "left_out": 0, "whole": True}
    write_rounds(tmp_path, [text])
    [found] = read_rounds(tmp_path)
    assert found.whole and found.rounds[0].words() == [("a", "draft", 1), ("c", "correction", 0)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parents": [-1, 1]}, "stands before it"),
        ({"parents": [-1]}, "stands before it"),
        ({"path": [1]}, "must be a path"),
        ({"path": [7]}, "must be a path"),
        ({"kept": 3}, "more tokens were kept"),
        ({"kind": "magic"}, "kind"),
        ({"own": 3}, "own"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, change, words):
    (tmp_path / "rounds.json").write_text(json.dumps({"texts": [{"prompt": "", "rounds": [GOOD | change]}]}))
    with pytest.raises(UserError, match=words) as error:
        read_rounds(tmp_path)
    assert "rounds.json is damaged" in str(error.value) and "\n" not in str(error.value)


def test_older_runs_show_what_passed(tmp_path):
    sample = {"prompt": "p", "rounds": [[[], "Hello"], [[" there", ","], " my"], [[" so", " on"], ""]]}
    [found] = read_rounds(tmp_path, [sample])
    assert not found.whole
    words = [word for one in found.rounds for word in one.words()]
    assert words == [
        ("Hello", "first", 0), (" there", "draft", 1), (",", "draft", 2), (" my", "correction", 0),
        (" so", "draft", 1), (" on", "draft", 2),
    ]  # fmt: skip
