"""Files of bad rows: each is counted by its reason and named with its place, and the good ones are all there."""

import json
from collections import Counter

import pytest

from faults import Site

pytestmark = pytest.mark.slow


def turns(*texts) -> dict:
    roles = ("user", "assistant")
    return {"conversations": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


GOOD = [json.dumps(turns(f"What is {i}?", "two apples and three apples")).encode() for i in range(6)]
BAD = {
    b'{"conversations": [': "malformed JSON",
    b"two apples": "malformed JSON",
    b'{"prompt": "\xff\xfe"}': "not UTF-8",
    b"[1, 2]": "row is not a JSON object",
    b"null": "row is not a JSON object",
    b"[" * 5000 + b"]" * 5000: "nested too deep",
    b'{"prompt": "a", "prompt": "b"}': "key given twice",
    b'{"unheard": "of"}': "none of the known keys",
    b'{"prompt": ""}': "empty or null turn",
    b'{"prompt": null}': "empty or null turn",
    b'{"prompt": 7}': "turn is not text",
    json.dumps(turns("Why?", None)).encode(): "empty or null turn",
    json.dumps(turns("Why?", "a\0b")).encode(): "NUL character in a turn",
    json.dumps({"conversations": []}).encode(): "conversation is not a list with something in it",
    json.dumps({"conversations": ["Why?"]}).encode(): "turn is not an object with role and content",
    json.dumps({"conversations": [{"role": "wizard", "content": "x"}]}).encode(): "unknown role",
    json.dumps({"conversations": [{"role": "assistant", "content": "x"}]}).encode(): "begin",
    b'{"input_ids": "1 2"}': "input_ids is not a list of token ids",
    b'{"prompt": "\\ud800 half"}': "half of a surrogate pair",
    b'{"prompt": "big", "n": ' + b"9" * 5000 + b"}": "number of too many digits",
}


def given(site: Site, data: bytes, *more: str) -> list[str]:
    site.prompts.write_bytes(data)
    return ["data", "task=tokenize", *site.data("data.answers=given", *more)]


def test_bad_rows_of_every_kind(tmp_path, fault):
    """Between good ones; the last line is cut off as by a full disk."""
    site, bad = Site(tmp_path), list(BAD)
    lines = bad[:10] + GOOD[:3] + bad[10:] + GOOD[3:]
    ended = site.run(*given(site, b"\n".join([*lines, GOOD[0][:30]])))
    assert ended.code == 0, ended.err
    counts = ended.values
    assert counts["train"]["documents"] + counts["validation"]["documents"] == len(GOOD)
    (path,) = site.cache.rglob("quarantine.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    places = {row["place"]: row["reason"] for row in rows}
    for number, line in enumerate(lines, 1):
        reason = places.get(f"{site.prompts}:{number}")
        assert (reason is None) == (line in GOOD), (number, line[:60], reason)
        assert reason is None or BAD[line] in reason, (line[:60], reason)
    assert places[f"{site.prompts}:{len(lines) + 1}"], "the line that was cut off"
    assert sum(counts["dropped"].values()) == len(rows) == len(BAD) + 1
    assert Counter(row["reason"] for row in rows) == counts["dropped"]
    said = next(line for line in ended.err.splitlines() if line.startswith("dropped"))
    fault(
        f"a file with {len(BAD) + 1} bad rows of {len(set(BAD.values()))} kinds between {len(GOOD)} good ones",
        f"`{site.plain(said)}`, and each with line and reason in quarantine.jsonl; exit 0",
        f"nothing: {len(GOOD)} of {len(GOOD)} good rows are documents",
    )


EMPTY = {
    "an empty file": b"",
    "a file of white space": b"\n \n\t\n",
    "a file with nothing usable": b'{"prompt": ""}\n' * 5,
    "a file of zeros, as after a power cut": b"\0" * 4096,
    "a picture in place of a file of rows": bytes(range(256)) * 16,
}


@pytest.mark.parametrize("what", EMPTY)
def test_nothing_usable(tmp_path, fault, what):
    site = Site(tmp_path)
    ended = site.run(*given(site, EMPTY[what]))
    assert ended.code == 2 and ended.line.startswith("error: ") and "prompts.jsonl" in ended.line, ended.err
    assert "Traceback" not in ended.err
    fault(what, f"`{site.plain(ended.line)}`, exit 2", "nothing: no run begins")
