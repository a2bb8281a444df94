"""Files of rows: what is wrong with a row has its reason and its place, and the rows after it are read."""

import gzip
import json
import tracemalloc
from collections import Counter

import pytest

from conf.errors import UserError
from data import json_rows, readers
from data.json_rows import BROKEN
from data.quarantine import Quarantine
from data.readers import CUT
from data.sources import read_dialogues, sources_hash, sources_of

GOOD = b'{"prompt": "good"}'


def read(path, quarantine=None):
    """(first questions, counts)"""
    counts = Counter()
    found = list(read_dialogues(sources_of(path), counts, quarantine))
    return [dialogue.messages[0]["content"] for dialogue in found], dict(counts)


def quarantined(path):
    """(what was usable, [(place, reason)])"""
    with Quarantine(path.with_name("bad.jsonl")) as quarantine:
        found, counts = read(path, quarantine)
    rows = [json.loads(line) for line in quarantine.path.read_text().splitlines()]
    assert Counter(row["reason"] for row in rows) == counts and len(rows) == quarantine.rows
    return found, [(row["place"], row["reason"]) for row in rows]


def test_every_bad_line_of_a_file_by_its_number(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = {
        b"\xef\xbb\xbf" + GOOD + b"\r": None,
        b"": "empty line",
        b"{": "malformed JSON",
        b'{"prompt": "caf\xe9"}': "not UTF-8",
        b"\0\0\0\0": "NUL bytes",
        b"[1]": "row is not a JSON object",
        b'{"prompt": "a", "prompt": "b"}': "key given twice",
        b'{"prompt": "\\ud83d"}': "half of a surrogate pair",
        b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}": "number of too many digits",
        b"[" * 100_000: "nested too deep",
        b'{"prompt": null}': "empty or null turn",
        '{"prompt": "\u2028 and \x85 end no line"}'.encode(): None,
        b'{"other": 1}': "none of the known keys",
        GOOD: None,
    }
    path.write_bytes(b"\n".join(lines))
    found, bad = quarantined(path)
    assert found == ["good", "\u2028 and \x85 end no line", "good"]
    assert bad == [(f"{path}:{number}", reason) for number, reason in enumerate(lines.values(), 1) if reason]


def test_places_and_names_are_of_the_line(tmp_path):
    path = tmp_path / "a.b.jsonl"
    path.write_bytes(b"\n" + GOOD + b'\n{"prompt": "c", "id": "mine"}')
    found = list(read_dialogues(sources_of(path), Counter()))
    assert [(d.id, d.place) for d in found] == [("a:2", f"{path}:2"), ("mine", f"{path}:3")]


def test_a_line_that_never_ends_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "LONGEST", 1 << 20)
    path = tmp_path / "a.jsonl"
    with path.open("wb") as stream:
        stream.write(GOOD + b"\n")
        stream.truncate(20 << 20)  # zeros to the reader, nothing to the disk
        stream.seek(0, 2)
        stream.write(b"\n" + GOOD + b"\n")
    tracemalloc.start()
    try:
        found, bad = quarantined(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found, bad) == (["good", "good"], [(f"{path}:2", "row longer than 16 MiB")])
    assert peak < 4 << 20


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_the_longest_line(tmp_path, monkeypatch, over, end):
    monkeypatch.setattr(readers, "LONGEST", len(GOOD) + len(end) - over)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n" + GOOD + end)
    if over:
        with pytest.raises(UserError, match="1 x row longer than"):
            read(path)
    else:
        assert read(path) == (["good"], {"none of the known keys": 1})


def test_text_is_a_prompt_a_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b'\xef\xbb\xbffirst\r\n\r\n  second \n\n\xff\na\0b\n{"prompt": 1}')
    found, bad = quarantined(path)
    assert found == ["first", "second", '{"prompt": 1}']
    assert bad == [(f"{path}:5", "not UTF-8"), (f"{path}:6", "NUL character in a turn")]


ROWS = [{"prompt": "a"}, {"prompt": "b"}]
BOTH = b'{"prompt": "a"}\n{"prompt": "b"}\n'


@pytest.mark.parametrize(
    "text, expected",
    [
        (json.dumps(ROWS).encode(), "ab"),
        (b"\xef\xbb\xbf " + json.dumps(ROWS, indent=2).replace("\n", "\r\n").encode(), "ab"),
        (b'[{"prompt": "a"},]', "a"),
        (json.dumps({"version": [1], "data": ROWS} | {"version": 1}).encode(), "ab"),
        (json.dumps({"data": ROWS, "about": {"rows": 2}}, indent=1).encode(), "ab"),
        (BOTH, "ab"),  # a row a line, whatever the file's name says
        (b'{"other": [1]}\n' + BOTH, "ab"),
        (b"{\n" + BOTH, "ab"),
        (b'{"prompt": "a", "tools": [{"name": "f"}]}', "a"),
        (b'{"messages": [\n{"role": "user", "content": "a"}]}', "a"),
    ],
)
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_json_files(tmp_path, monkeypatch, text, expected, block):
    monkeypatch.setattr(json_rows, "BLOCK", block)
    path = tmp_path / "a.json"
    path.write_bytes(text)
    assert read(path)[0] == list(expected)


@pytest.mark.parametrize(
    "text, expected, bad",
    [
        (b'[{"prompt": "a"}, 7, null, "x, ]", [{"prompt": "no"}], {"prompt": "b"}]', "ab",
         [(n, "row is not a JSON object") for n in (2, 3, 4, 5)]),
        (b'[{"prompt": "a", "prompt": "]"}, {"prompt": "b"}]', "b", [(1, "key given twice")]),
        (b'[{"prompt": "\xff"}, {"prompt": 5 5}, {"prompt": "b"}]', "b", [(1, "not UTF-8"), (2, "malformed JSON")]),
        (b'[{"n": ' + b"1" * 5000 + b'}, {"prompt": "\\ud800"}, {"prompt": "b"}]', "b",
         [(1, "number of too many digits"), (2, "half of a surrogate pair")]),
        (b'[' + b'[' * 5000 + b']' * 5000 + b', {"prompt": "b"}]', "b", [(1, "nested too deep")]),
        (b'[{"prompt": "a"}, {"prompt": "b"', "a", [(2, BROKEN)]),
        (b'[{"prompt": "a"}', "a", [(2, BROKEN)]),
        (b'[{"prompt": "a"} {"prompt": "b"}]', "a", [(2, BROKEN)]),
        (b'[{"prompt": "a"}, }, {"prompt": "b"}]', "a", [(2, BROKEN)]),
        (b'[{"prompt": "a"}, tru', "a", [(2, BROKEN)]),
        (b'[{"prompt": "a"}] and more', "a", [(2, BROKEN)]),
        (b'{"data": [{"prompt": "a"}], "data": 1}', "a", [(2, "key given twice")]),
        (b'{"data": [{"prompt": "a"}], "x" 1}', "a", [(2, BROKEN)]),
    ],
)  # fmt: skip
def test_bad_rows_of_json_files(tmp_path, monkeypatch, text, expected, bad):
    for block in (1, 1 << 20):
        monkeypatch.setattr(json_rows, "BLOCK", block)
        path = tmp_path / "a.json"
        path.write_bytes(text)
        assert quarantined(path) == (list(expected), [(f"{path}:{number}", reason) for number, reason in bad])


def test_a_row_of_a_list_that_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(json_rows, "LONGEST", 1000)
    monkeypatch.setattr(json_rows, "BLOCK", 100)
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"prompt": "a"}, {"prompt": "' + b"x" * 10_000 + b'"}]')
    assert quarantined(path) == (["a"], [(f"{path}:2", "row longer than 16 MiB: nothing after it was read")])


def test_gzip_whole_cut_and_false(tmp_path):
    rows = [{"prompt": f"question {i} {i * i}"} for i in range(500)]
    lines, plain = "".join(json.dumps(row) + "\n" for row in rows), "".join(row["prompt"] + "\n" for row in rows)
    for name, text in (("a.jsonl.gz", lines), ("a.json.gz", json.dumps(rows)), ("A.TXT.GZ", plain)):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        assert read(path)[0] == [row["prompt"] for row in rows]
        path.write_bytes(path.read_bytes()[:-400])
        found, counts = read(path)
        assert 0 < len(found) < 500 and counts == {CUT: 1}
        path.write_bytes(text.encode())
        path.with_suffix("").write_bytes(text.encode())  # read already, these very bytes: still a mistake
        assert sources_hash(sources_of(path)) != sources_hash(sources_of(path.with_suffix("")))
        with pytest.raises(UserError, match="expected gzip data in .*, found something else"):
            read(path)
    whole = gzip.compress(lines.encode())
    (tmp_path / "b.jsonl.gz").write_bytes(whole[:-8] + b"\0\0\0\0" + whole[-4:])  # its checksum is wrong
    found, counts = read(tmp_path / "b.jsonl.gz")
    assert len(found) == 500 and counts == {CUT: 1}


def test_nothing_usable_names_the_commonest_reasons(tmp_path):
    good, bad, empty = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    good.write_bytes(GOOD)
    bad.write_bytes(b"\n".join([b'{"a": 1}', b"{", b"{", b"", b"[]", b"[]", b"[]"]))
    empty.write_bytes(b"")
    expected = (
        f"found none: 3 x row is not a JSON object (first: {bad}:5), 2 x malformed JSON (first: {bad}:2), "
        f"1 x none of the known keys (first: {bad}:1)"
    )
    for path in (bad, [good, bad], [{"path": good, "weight": 1}, {"path": bad, "weight": 1}]):
        with pytest.raises(UserError) as error:
            read(path)
        assert str(error.value).endswith(expected)
    for name in ("c.jsonl", "c.json", "c.txt"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(UserError, match="found none: the file is empty"):
            read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32"])
def test_utf_16_and_32_are_named(tmp_path, name, encoding):
    (tmp_path / name).write_bytes('{"prompt": "a"}\n'.encode(encoding))
    with pytest.raises(UserError, match=f"expected UTF-8 in .*, found {encoding}; convert it: iconv -f {encoding} "):
        read(tmp_path / name)


def test_two_lists_of_rows_are_one_too_many(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"train": ROWS, "test": ROWS}))
    with pytest.raises(UserError, match="expected one list of rows in .*, found 'train' and 'test': split the file"):
        read(tmp_path / "a.json")


def test_a_quarantine_begins_anew_and_holds_little_of_each_row(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("old\n")
    with Quarantine(path) as quarantine:
        assert not path.exists(), "nothing is bad yet"
        quarantine.add("a:1", "why", "\ud800\0\x1b" + "x" * 1000)
        assert json.loads(path.read_text())["text"] == "\ud800\0\x1b" + "x" * 197, "written at once"
        quarantine.add("a:2", "why")
    assert [json.loads(line)["place"] for line in path.read_text().splitlines()] == ["a:1", "a:2"]
    assert quarantine.rows == 2 and path.read_text().isascii()


def test_bad_rows_are_counted_before_the_end(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{\n" + GOOD + b"\n{\n")
    counts = Counter()
    next(read_dialogues(sources_of(tmp_path / "a.jsonl"), counts))
    assert counts == {"malformed JSON": 1}
