"""Rows of files: every shape that is accepted, every way in which a row is bad, and the split."""

import gzip
import json
from collections import Counter

import pytest

from conf.errors import UserError
from data.documents import Document, Drop, clip
from data.readers import CUT
from data.rows import parse_row
from data.sources import read_dialogues, read_questions, sources_hash, sources_of


def dialogues(path, counts=None):
    return list(read_dialogues(sources_of(path), Counter() if counts is None else counts))


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    "row, roles",
    [
        (
            {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "user assistant",
        ),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, "system user"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "user assistant"),
        ({"prompt": "a"}, "user"),
        ({"turns": ["a", "b"], "category": "writing"}, "user user"),
        ({"text": "<|im_start|>user"}, ""),
    ],
)
def test_shapes(row, roles):
    dialogue = parse_row(json.dumps(row), "file:1")
    assert [message["role"] for message in dialogue.messages] == roles.split()
    assert dialogue.id == "file:1" and dialogue.source == row.get("category", "")


def test_first_questions_of_every_shape(tmp_path):
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}
    more = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    rows = [
        {"id": "m1", "category": "writing", "turns": ["q", "r"], "source": "bench"},
        {"question_id": 81, "turns": [{"role": "user", "content": "q"}, *more]},
        {"task_id": "HumanEval/0", "prompt": "q"},
        {"messages": [system, user, *more], "conversations": None},
        {"conversations": [user, *more]},
        {"conversations": [system]},
        {"input_ids": [1, 2], "answer_start": 1, "prompt": "q"},
        {"text": "<|im_start|>user"},
    ]
    counts = Counter()
    found = list(read_questions([write(tmp_path / "b.jsonl", *rows)], counts))
    assert [d.id for d in found] == ["m1", "81", "HumanEval/0", "b:4", "b:5", "b:7"]
    assert [len(d.messages) for d in found] == [1, 1, 1, 2, 1, 1] and all(d.messages[-1] == user for d in found)
    assert (found[0].category, found[0].source, found[1].category) == ("writing", "bench", "")
    assert all(d.input_ids is None for d in found)
    assert counts == {"no user turn": 1, "conversation does not begin with a user turn": 1}


def test_generated_rows_keep_their_ids():
    row = {"id": 7, "input_ids": [5, 6, 7, 8], "answer_start": 2, "source": "s"}
    dialogue = parse_row(json.dumps(row), "file:1")
    assert (dialogue.id, dialogue.input_ids, dialogue.spans) == ("7", [5, 6, 7, 8], [(2, 4)])
    two = parse_row(json.dumps(row | {"spans": [[1, 2], [3, 4]]}), "file:1")
    assert two.spans == [(1, 2), (3, 4)]


BAD = [
    ("", "empty line"),
    ("{", "malformed JSON"),
    ("null", "row is not a JSON object"),
    ({"other": 1}, "none of the known keys"),
    ({"prompt": None}, "empty or null turn"),
    ({"prompt": "  "}, "empty or null turn"),
    ({"turns": []}, "turns is not a list"),
    ({"conversations": []}, "conversation is not a list"),
    ({"conversations": ["a"]}, "turn is not an object"),
    ({"conversations": [{"role": "wizard", "content": "a"}]}, "unknown role"),
    ({"conversations": [{"role": "assistant", "content": "a"}]}, "does not begin with a user turn"),
    ({"input_ids": [1, 2]}, "input_ids without answer_start"),
    ({"input_ids": [1, 2], "answer_start": 3}, "answer_start outside"),
    ({"input_ids": [1, 2], "answer_start": 1, "prompt_span": [0]}, "prompt_span is not a pair"),
    ({"input_ids": [1, 2], "answer_start": 1, "prompt_span": "01"}, "prompt_span is not a pair"),
    ({"input_ids": [1, 2], "answer_start": 1, "prompt_span": [1, 0]}, "prompt_span outside"),
    ({"input_ids": [1, 2], "answer_start": 1, "prompt_span": [0, 2]}, "prompt_span outside"),
    ({"input_ids": [1, "2"], "answer_start": 1}, "input_ids is not a list"),
]


@pytest.mark.parametrize("row, reason", BAD)
def test_bad_rows(row, reason):
    with pytest.raises(Drop, match=reason):
        parse_row(row if isinstance(row, str) else json.dumps(row), "x")


def test_bad_rows_are_counted_and_good_ones_pass(tmp_path):
    counts = Counter()
    path = write(tmp_path / "a.jsonl", *(row for row, _ in BAD), {"prompt": "good"})
    assert [dialogue.messages[0]["content"] for dialogue in dialogues(path, counts)] == ["good"]
    assert counts.total() == len(BAD) and counts["empty or null turn"] == 2


def test_nothing_usable_names_the_reasons(tmp_path):
    with pytest.raises(UserError, match="2 x malformed JSON"):
        dialogues(write(tmp_path / "a.jsonl", "{", "{"))
    with pytest.raises(UserError, match="the file is empty"):
        dialogues(write(tmp_path / "b.jsonl"))


def test_gzip_whole_cut_and_false(tmp_path):
    text = "".join(json.dumps({"prompt": f"question {i} {i * i}"}) + "\n" for i in range(500)).encode()
    whole = tmp_path / "a.jsonl.gz"
    whole.write_bytes(gzip.compress(text))
    assert len(dialogues(whole)) == 500
    cut, counts = tmp_path / "b.jsonl.gz", Counter()
    cut.write_bytes(gzip.compress(text)[:-400])
    assert 0 < len(dialogues(cut, counts)) < 500 and counts[CUT] == 1
    (tmp_path / "c.jsonl.gz").write_bytes(text)
    with pytest.raises(UserError, match="expected gzip data"):
        dialogues(tmp_path / "c.jsonl.gz")


def test_files_lists_folders_globs(tmp_path):
    a, b = write(tmp_path / "a.jsonl", {"prompt": "a"}), write(tmp_path / "b.jsonl", {"prompt": "b"})
    text = write(tmp_path / "notes.txt", "no")

    def files(path):
        return [file for source in sources_of(path) for file in source.files]

    assert files(str(a)) == files(a) == [a]
    assert files([str(b), str(a)]) == [b, a]
    assert files(str(tmp_path)) == files(str(tmp_path / "*.jsonl")) == [a, b]
    assert files(text) == files(str(tmp_path / "*.txt")) == [text]
    assert [source.given for source in sources_of([str(b), a])] == [str(b), str(a)]
    assert files(sources_of(a)) == [a]


def test_files_hash_is_of_the_bytes(tmp_path):
    a, b = write(tmp_path / "a.jsonl", {"prompt": "a"}), write(tmp_path / "b.jsonl", {"prompt": "a"})
    assert sources_hash(sources_of(a)) == sources_hash(sources_of(b))
    write(b, {"prompt": "b"})
    assert sources_hash(sources_of(a)) != sources_hash(sources_of(b))


def test_clip_keeps_what_can_be_supervised():
    document = Document("a", list(range(10)), [(2, 5), (7, 10)])
    assert clip(document, 10) is document
    for length in (5, 7, 8, 9):  # the second answer does not fit: the dialogue ends with the first
        assert clip(document, length).spans == [(2, 5)] and clip(document, length).input_ids == [0, 1, 2, 3, 4]
    assert clip(document, 4).spans == [(2, 4)] and len(clip(document, 4).input_ids) == 4
    own = Document("a", list(range(10)), [(6, 10)], prompt_span=(1, 5))
    assert clip(own, 8).prompt_span == (1, 5) and clip(own, 8).spans == [(6, 8)]
    with pytest.raises(Drop, match="beyond max_length"):
        clip(document, 3)
    with pytest.raises(Drop, match="shorter than two"):
        clip(Document("a", [1, 2], [(1, 2)]), 10)
