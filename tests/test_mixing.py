"""Several sources: in turn, or dealt by weight in an order that is always the same; and what names a source."""

import json
import logging
from collections import Counter
from fractions import Fraction
from itertools import islice

import pytest

from conf.errors import UserError
from data.sources import read_dialogues, sources_hash, sources_of


@pytest.fixture
def files(tmp_path):
    """Files a, b, c of 8, 4 and 2 prompts: a1, a2, ..."""
    for name, number in (("a", 8), ("b", 4), ("c", 2)):
        rows = [{"prompt": f"{name}{n}"} for n in range(1, number + 1)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda **weights: [
        {"path": str(tmp_path / f"{name}.jsonl")} | ({} if weight is None else {"weight": weight})
        for name, weight in weights.items()
    ]


def order(path, limit=None, counts=None):
    found = read_dialogues(sources_of(path), Counter() if counts is None else counts)
    return " ".join(dialogue.messages[0]["content"] for dialogue in islice(found, limit))


def test_without_weights_one_after_the_other(files):
    assert order(files(c=None, b=None)) == "c1 c2 b1 b2 b3 b4"
    assert order([*files(b=None), *files(b=None)]) == "b1 b2 b3 b4 b1 b2 b3 b4"


@pytest.mark.parametrize(
    "weights, expected",
    [
        ({"a": 1, "b": 1}, "a1 b1 a2 b2 a3 b3 a4 b4 a5 a6 a7 a8"),
        ({"a": 3, "b": 1}, "a1 a2 b1 a3 a4 a5 b2 a6 a7 a8 b3 b4"),
        ({"a": 0.3, "b": 0.1}, "a1 a2 b1 a3 a4 a5 b2 a6 a7 a8 b3 b4"),
        ({"b": 1, "a": 3}, "a1 b1 a2 a3 a4 b2 a5 a6 a7 b3 a8 b4"),
        ({"a": 2, "b": 1, "c": 1}, "a1 b1 c1 a2 a3 b2 c2 a4 a5 b3 a6 b4 a7 a8"),
        ({"c": 7}, "c1 c2"),
    ],
)
def test_the_order_of_a_mix(files, weights, expected):
    assert order(files(**weights)) == expected
    assert order(files(**weights), 5) == " ".join(expected.split()[:5])


def test_shares_hold_at_every_point(tmp_path):
    """No source is ever a whole row ahead of its share by more than its neighbours: the dealing is smooth."""
    weights = {"a": 5, "b": 2.5, "c": 0.5}
    for name in weights:
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 800)
    entries = [{"path": tmp_path / f"{name}.txt", "weight": weight} for name, weight in weights.items()]
    taken = order(entries, 800).split()
    for n in range(1, 801):
        counts = Counter(taken[:n])
        assert all(abs(counts[name] - n * weight / 8) < 1 for name, weight in weights.items())
    assert Counter(taken) == {"a": 500, "b": 250, "c": 50}


def test_a_source_that_runs_out_is_named(files, caplog):
    with caplog.at_level(logging.WARNING):
        order(files(a=1, b=1, c=1))
    a, b, c = (entry["path"] for entry in files(a=1, b=1, c=1))
    assert [record.getMessage() for record in caplog.records] == [
        f"{c} has run out after 2 dialogues: only {a}, {b} from here",
        f"{b} has run out after 4 dialogues: only {a} from here",
    ]


def test_bad_rows_take_no_turn(files, tmp_path):
    lines = (tmp_path / "b.jsonl").read_text().splitlines()
    (tmp_path / "b.jsonl").write_text("\n".join(["{", lines[0], "{", lines[1]]))
    counts = Counter()
    assert order(files(a=1, b=1), 4, counts) == "a1 b1 a2 b2" and counts == {"malformed JSON": 2}


def test_one_entry_may_be_several_files(files, tmp_path):
    entry = {"path": [str(tmp_path / "c.jsonl"), str(tmp_path / "[b]*")], "weight": 1}
    assert order([entry, *files(a=1)]) == "c1 a1 c2 a2 b1 a3 b2 a4 b3 a5 b4 a6 a7 a8"
    assert order(entry) == order([str(tmp_path / "c.jsonl"), str(tmp_path / "b.jsonl")]) == "c1 c2 b1 b2 b3 b4"
    assert sources_of(entry)[0].weight == Fraction(1) and sources_of("a/b")[0].weight is None


def test_hash_of_what_is_read(files, tmp_path):
    def digest(path):
        return sources_hash(sources_of(path))

    a, b = files(a=None, b=None)
    whole = digest([a, b])
    assert whole == digest([a["path"], tmp_path / "b.jsonl"])
    mixed = [digest(files(a=x, b=y)) for x, y in ((1, 1), (2, 1), (2.0, 1.0), (1, 2))]
    assert mixed[1] == mixed[2]
    assert len({whole, digest([b, a]), digest(a), digest([a, b, b]), *mixed}) == 7, "order and weights are part of it"
    (tmp_path / "b.jsonl").rename(tmp_path / "d.jsonl")
    assert digest([a, tmp_path / "d.jsonl"]) == whole, "names are not"
    (tmp_path / "d.jsonl").rename(tmp_path / "d.txt")
    assert digest([a, tmp_path / "d.txt"]) != whole, "a text file is read in another way"
    (tmp_path / "d.txt").rename(tmp_path / "b.jsonl")
    (tmp_path / "b.jsonl").write_text((tmp_path / "b.jsonl").read_text().replace("b4", "b5"))
    assert digest([a, b]) != whole


MISTAKES = [
    ("nowhere.jsonl", "expected .jsonl, .json, .txt, .parquet, .arrow files at data.path=nowhere.jsonl, found none"),
    ("data/nowhere.parquet", "files at data.path=data/nowhere.parquet, found none; check the path"),
    ("nowhere/chats.json.gz", "files at data.path=nowhere/chats.json.gz, found none"),
    ("nowhere", "files at data.path=nowhere, found none; check the path (a dataset of the hub is OWNER/NAME)"),
    ("*.csv", "files at data.path=*.csv, found none"),
    ("", "expected a path at data.path, found ''"),
    (7, "expected a path, or {path, weight, split, name, revision}, at data.path, found 7"),
    ([], "expected files or datasets at data.path, found an empty list"),
    ({"weight": 1}, "expected a path, or {path, weight, split, name, revision}, at data.path, found {'weight': 1}"),
    ({"path": "a/b", "wieght": 1}, "at data.path, found wieght in {'path': 'a/b', 'wieght': 1}"),
    ({"path": "a/b", "weight": 0}, "expected the weight of a/b to be a number above 0, found 0"),
    ({"path": "a/b", "weight": "3"}, "expected the weight of a/b to be a number above 0, found '3'"),
    ({"path": "a/b", "weight": float("nan")}, "expected the weight of a/b to be a number above 0, found nan"),
    ({"path": "a/b", "revision": 1}, "expected revision of a/b to be a text, found 1: quote it"),
    (
        [{"path": "a/b", "weight": 1}, "c/d"],
        "expected a weight for every source of a mix or for none, found none for c/d",
    ),
]


@pytest.mark.parametrize("path, message", MISTAKES)
def test_mistakes(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        sources_of(path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_mistakes_with_files(files, tmp_path):
    entry = files(a=None)[0]
    with pytest.raises(UserError, match="split, name and revision are of datasets, found them for the file .*a.jsonl"):
        sources_of(entry | {"split": "train"})
    for name in ("rows.csv", "rows.parquet.gz", "rows"):
        (tmp_path / name).write_text("a\n")
        with pytest.raises(UserError, match="expected a file named .jsonl, .json, .txt, .parquet, .arrow, found"):
            sources_of(tmp_path / name)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("a\n")
    with pytest.raises(UserError, match="in the folder .*empty, found none; name text files by a glob"):
        sources_of(empty)
    assert order(str(empty / "*.txt")) == "a"


def test_what_is_here_goes_before_the_hub(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [part.kind for part in sources_of("owner/name")[0].parts] == ["hub"]
    (tmp_path / "owner/name").mkdir(parents=True)
    (tmp_path / "a.jsonl").rename("owner/name/x.jsonl")
    assert [part.kind for part in sources_of("owner/name")[0].parts] == [".jsonl"]
    assert [part.path for part in sources_of({"path": "owner/name", "split": "train"})[0].parts] == [
        str(tmp_path / "owner/name")
    ]
