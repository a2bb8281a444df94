"""Rows: every shape that is accepted, and every way in which a row of one is bad."""

import json
from collections import Counter

import pytest

from data.documents import Drop
from data.rows import Dialogue, parse_row, to_dialogue
from data.sources import read_questions

SYSTEM, QUESTION = {"role": "system", "content": "s"}, {"role": "user", "content": "q"}
ANSWER, SECOND = {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT, SILENT = {"role": "tool", "content": "rain"}, {"role": "tool", "content": ""}
THOUGHT = ANSWER | {"reasoning_content": "hm"}


def messages_of(row):
    return to_dialogue(row, "file:1").messages


SHAPES = [
    ({"messages": [SYSTEM, QUESTION, ANSWER, SECOND]}, [SYSTEM, QUESTION, ANSWER, SECOND]),
    ({"conversations": [QUESTION, ANSWER]}, [QUESTION, ANSWER]),
    ({"conversations": None, "messages": [QUESTION]}, [QUESTION]),
    ({"conversation": [QUESTION]}, [QUESTION]),
    ({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}]}, [SYSTEM, QUESTION]),
    ({"system": "s", "conversations": [{"from": "human", "value": "q"}]}, [SYSTEM, QUESTION]),
    ({"conversations": [{"from": "user", "value": "q"}, {"from": "gpt", "value": "a"}]}, [QUESTION, ANSWER]),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "bot", "value": "a"}]}, [QUESTION, ANSWER]),
    ({"system": " ", "messages": [QUESTION]}, [QUESTION]),
    ({"system": "other", "messages": [SYSTEM, QUESTION]}, [SYSTEM, QUESTION]),
    ({"messages": [{"role": "developer", "content": "s"}, QUESTION]}, [SYSTEM, QUESTION]),
    ({"messages": [QUESTION | {"content": [{"type": "text", "text": "a"}, "b"]}]}, [QUESTION | {"content": "a\nb"}]),
    ({"messages": json.dumps([QUESTION, ANSWER])}, [QUESTION, ANSWER]),  # as text, where a table could not hold it
    ({"messages": [json.dumps(QUESTION), json.dumps(ANSWER)]}, [QUESTION, ANSWER]),
    ({"messages": [QUESTION, THOUGHT]}, [QUESTION, THOUGHT]),
    ({"messages": [QUESTION, ANSWER | {"reasoning": "hm", "refusal": None}]}, [QUESTION, THOUGHT]),
    ({"messages": [QUESTION, SILENT, ANSWER]}, [QUESTION, SILENT, ANSWER]),
    ({"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}, [QUESTION, ANSWER]),
    ({"turns": ["q", "r"]}, [QUESTION, SECOND]),
    ({"turns": [QUESTION, ANSWER]}, [QUESTION, ANSWER]),
    ({"prompt": "q"}, [QUESTION]),
    ({"prompt": "q", "completion": "a"}, [QUESTION, ANSWER]),
    ({"prompt": [SYSTEM, QUESTION], "completion": [ANSWER]}, [SYSTEM, QUESTION, ANSWER]),
    ({"question": "q", "answer": "a"}, [QUESTION, ANSWER]),
    ({"question": "q", "answer": 4}, [QUESTION]),
    ({"question": "q", "answer": ["4", "four"]}, [QUESTION]),
    ({"instruction": "q", "response": "a", "system": "s"}, [SYSTEM, QUESTION, ANSWER]),
    ({"instruction": "q", "input": "", "output": "a"}, [QUESTION, ANSWER]),
    ({"instruction": "q", "input": "r", "output": ""}, [{"role": "user", "content": "q\n\nr"}]),
    ({"input": "q", "output": "a"}, [QUESTION, ANSWER]),
    ({"text": "<|im_start|>user"}, []),
]  # fmt: skip


@pytest.mark.parametrize("row, expected", SHAPES)
def test_shapes(row, expected):
    assert messages_of(row) == expected
    assert parse_row(json.dumps(row), "file:1") == to_dialogue(row, "file:1")


CALLS = [
    [{"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
    [{"role": "assistant", "tool_calls": json.dumps([CALL])}, RESULT],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]}, RESULT],
    [{"role": "assistant", "content": "", "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
     {"role": "function", "content": "rain"}],
    [{"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
     {"from": "observation", "value": "rain"}],
]  # fmt: skip


@pytest.mark.parametrize("turns", CALLS)
@pytest.mark.parametrize(
    "tools",
    [
        {"tools": TOOLS},
        {"tools": json.dumps([WEATHER])},
        {"functions": [WEATHER]},
        {"tools": [json.dumps(WEATHER)]},
    ],
)
def test_every_spelling_of_a_tool_call_is_one(turns, tools):
    found = to_dialogue({"messages": [QUESTION, *turns]} | tools, "file:1")
    assert found == Dialogue("file:1", "", [QUESTION, CALLED, RESULT], tools=TOOLS)


def test_what_a_tool_call_keeps():
    call = CALL | {"id": "call_1", "index": 0}
    told = {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "weather", "extra": 1}
    row = {"messages": [QUESTION, {"role": "assistant", "content": "Look.", "tool_calls": [call]}, told], "tools": []}
    assert messages_of(row) == [
        QUESTION,
        {"role": "assistant", "content": "Look.", "tool_calls": [CALL | {"id": "call_1"}]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1", "name": "weather"},
    ]
    assert to_dialogue(row, "x").tools is None
    silent = {
        "messages": [QUESTION, {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]}]
    }
    assert messages_of(silent)[1]["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


def test_names_and_places():
    found = to_dialogue({"prompt": "q", "id": 7, "category": "writing"}, "file:1", "file.jsonl:1")
    assert (found.id, found.category, found.source, found.place) == ("7", "writing", "writing", "file.jsonl:1")
    odd = to_dialogue({"prompt": "q", "id": ["x"], "category": ["a"], "source": "s" * 300}, "file:1")
    assert (odd.id, odd.category, odd.source) == ("file:1", "", "s" * 200)
    assert to_dialogue({"prompt": "q"}, "a", "here") == to_dialogue({"prompt": "q"}, "a", "there")


def test_first_questions_of_every_shape(tmp_path):
    more = [ANSWER, SECOND]
    rows = [
        {"id": "m1", "category": "writing", "turns": ["q", "r"], "source": "bench"},
        {"question_id": 81, "turns": [QUESTION, *more]},
        {"task_id": "HumanEval/0", "prompt": "q"},
        {"messages": [SYSTEM, QUESTION, *more], "conversations": None, "tools": TOOLS},
        {"conversations": [QUESTION, *more]},
        {"conversations": [SYSTEM]},
        {"input_ids": [1, 2], "answer_start": 1, "prompt": "q"},
        {"text": "<|im_start|>user"},
    ]
    counts, path = Counter(), tmp_path / "b.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(read_questions(path, counts))
    assert [d.id for d in found] == ["m1", "81", "HumanEval/0", "b:4", "b:5", "b:7"]
    assert [d.messages for d in found] == [[QUESTION]] * 3 + [[SYSTEM, QUESTION]] + [[QUESTION]] * 2
    assert (found[0].category, found[0].source, found[1].category) == ("writing", "bench", "")
    assert all(d.input_ids is None for d in found) and found[3].tools == TOOLS
    assert counts == {"no user turn": 1, "conversation does not begin with a user turn": 1}


def test_generated_rows_keep_their_ids():
    row = {"id": 7, "input_ids": [5, 6, 7, 8], "answer_start": 2, "source": "s", "prompt_span": [0, 1]}
    dialogue = to_dialogue(row, "file:1")
    assert (dialogue.id, dialogue.input_ids, dialogue.spans) == ("7", [5, 6, 7, 8], [(2, 4)])
    assert dialogue.prompt_span == (0, 1)
    assert to_dialogue(row | {"spans": [[1, 2], [3, 4]]}, "file:1").spans == [(1, 2), (3, 4)]
    silent = row | {"conversations": [QUESTION, ANSWER | {"content": ""}]}  # the ids are what counts
    assert to_dialogue(silent, "file:1").input_ids == [5, 6, 7, 8]


def call(**function):
    return {"messages": [QUESTION, {"role": "assistant", "tool_calls": [{"function": function}]}]}


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


BAD = [
    (7, "row is not a JSON object"),
    ([QUESTION], "row is not a JSON object"),
    ({}, "none of the known keys"),
    ({"other": 1}, "none of the known keys"),
    ({"prompt": None}, "empty or null turn"),
    ({"prompt": "  "}, "empty or null turn"),
    ({"text": "\n"}, "empty or null turn"),
    ({"text": 7}, "turn is not text"),
    ({"prompt": 7}, "turn is not text"),
    ({"prompt": "a\0b"}, "NUL character in a turn"),
    ({"prompt": []}, "prompt is not a list with something in it"),
    ({"turns": []}, "turns is not a list with something in it"),
    ({"turns": "q"}, "turns is not a list with something in it"),
    ({"turns": ["q", None]}, "empty or null turn"),
    ({"conversations": []}, "conversation is not a list with something in it"),
    ({"conversations": "q"}, "conversation is not a list with something in it"),
    ({"conversations": {"role": "user"}}, "conversation is not a list with something in it"),
    ({"conversations": "[{]"}, "malformed JSON"),
    ({"conversations": ["a"]}, "turn is not an object with role and content"),
    ({"conversations": [None]}, "turn is not an object with role and content"),
    ({"conversations": [{"role": "wizard", "content": "a"}]}, "unknown role"),
    ({"conversations": [{"role": ["user"], "content": "a"}]}, "unknown role"),
    ({"conversations": [{"content": "a"}]}, "unknown role"),
    ({"conversations": [ANSWER]}, "conversation does not begin with a user turn"),
    ({"conversations": [SYSTEM]}, "conversation does not begin with a user turn"),
    ({"messages": [QUESTION, {"role": "assistant", "content": None}]}, "empty or null turn"),
    ({"messages": [QUESTION, {"role": "assistant", "content": " "}]}, "empty or null turn"),
    ({"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": []}]}, "empty or null turn"),
    ({"messages": [QUESTION, {"role": "tool"}]}, "empty or null turn"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "turn is not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of a turn is not text"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "part of a turn is not text"),
    (call(arguments={}), "tool call without a name"),
    (call(name="f", arguments=[1]), "tool call's arguments are not an object"),
    (call(name="f", arguments="{"), "tool call: malformed JSON"),
    (call(name="f", arguments=nested(100)), "nested too deep"),
    ({"messages": [QUESTION, {"from": "function_call", "value": "f(1)"}]}, "tool call: malformed JSON"),
    ({"messages": [QUESTION], "tools": "{"}, "tools: malformed JSON"),
    ({"messages": [QUESTION], "tools": [1]}, "tools is not a list of functions"),
    ({"messages": [QUESTION], "tools": [{"function": {}}]}, "tools is not a list of functions"),
    ({"messages": [QUESTION], "tools": {"name": "f"}}, "tools is not a list of functions"),
    ({"messages": [QUESTION], "tools": [{"name": "f", "parameters": nested(100)}]}, "nested too deep"),
    ({"input_ids": [1, 2]}, "input_ids without answer_start"),
    ({"input_ids": [1, 2], "answer_start": None}, "input_ids without answer_start"),
    ({"input_ids": [1, 2], "answer_start": 3}, "answer_start outside input_ids"),
    ({"input_ids": [1, 2], "spans": [[1, 2], [0, 1]]}, "answer_start outside input_ids"),
    ({"input_ids": [1, 2], "spans": [1]}, "input_ids without answer_start"),
    ({"input_ids": [1, 2], "answer_start": 0.7}, "answer_start is not a whole number"),
    ({"input_ids": [1, 2], "answer_start": float("inf")}, "answer_start is not a whole number"),
    ({"input_ids": [1, 2], "answer_start": "1"}, "answer_start is not a whole number"),
    ({"input_ids": [1, 2], "spans": [[0, True]]}, "answer_start is not a whole number"),
    ({"input_ids": [1, "2"], "answer_start": 1}, "input_ids is not a list of token ids"),
    ({"input_ids": [1, 2**40], "answer_start": 1}, "input_ids is not a list of token ids"),
    ({"input_ids": [1, True], "answer_start": 1}, "input_ids is not a list of token ids"),
    ({"input_ids": [], "answer_start": 0}, "input_ids is not a list of token ids"),
    ({"input_ids": [1, 2], "answer_start": 1, "prompt_span": [0]}, "prompt_span is not a pair of places"),
    ({"input_ids": [1, 2], "answer_start": 1, "prompt_span": "01"}, "prompt_span is not a pair of places"),
    ({"input_ids": [1, 2], "answer_start": 1, "prompt_span": [1, 0]}, "prompt_span outside the prompt"),
    ({"input_ids": [1, 2], "answer_start": 1, "prompt_span": [0, 2]}, "prompt_span outside the prompt"),
]  # fmt: skip


@pytest.mark.parametrize("row, reason", BAD)
def test_bad_rows(row, reason):
    with pytest.raises(Drop) as found:
        to_dialogue(row, "x")
    assert str(found.value) == reason


LINES = [
    ("", "empty line"),
    (" \r\n", "empty line"),
    ("{", "malformed JSON"),
    ('{"prompt": "a"} {"prompt": "b"}', "malformed JSON"),
    ("{'prompt': 'a'}", "malformed JSON"),
    ('{"prompt": "a\0"}', "NUL bytes"),
    ("\0\0\0", "NUL bytes"),
    ("null", "row is not a JSON object"),
    ('{"prompt": "a", "prompt": "b"}', "key given twice"),
    ('{"messages": [{"role": "user", "role": "user", "content": "a"}]}', "key given twice"),
    ('{"prompt": "\\ud83d"}', "half of a surrogate pair"),
    ('{"prompt": "a", "other": "\\ude00\\ud83d"}', "half of a surrogate pair"),
    ('{"prompt": "a", "n": ' + "9" * 5000 + "}", "number of too many digits"),
    ('{"prompt": "a", "n": ' + "[" * 100_000 + "}", "nested too deep"),
    (b'{"prompt": "\xff\xfe"}'.decode("utf-8", "surrogateescape"), "not UTF-8"),
    ('{"prompt": NaN}', "empty or null turn"),
]


@pytest.mark.parametrize("line, reason", LINES)
def test_bad_lines(line, reason):
    with pytest.raises(Drop) as found:
        parse_row(line, "x")
    assert str(found.value) == reason


def test_lines_that_look_bad_and_are_not():
    assert parse_row('{"prompt": "\\ud83d\\ude00 \\\\ud800"}\r\n', "x").messages[0]["content"] == "\U0001f600 \\ud800"
    assert parse_row('{"prompt": "a", "score": NaN, "most": -Infinity}', "x").messages == [
        {"role": "user", "content": "a"}
    ]
    assert parse_row('{"prompt": "a", "n": ' + "9" * 4000 + "}", "x").messages == [{"role": "user", "content": "a"}]
