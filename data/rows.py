"""One row, in any of the shapes that are found in the wild, as a Dialogue. What cannot be one is a Drop.

{"conversations" | "messages" | "conversation": [{"role" | "from", "content" | "value", ..}], "tools", "system"}
{"turns": ["first question", "second"]}
{"prompt" | "instruction" | "question" | "input", and perhaps "completion" | "response" | "output" | "answer"}
{"text": "with a chat template's headers"}
{"input_ids", "answer_start" or "spans", and perhaps "conversations"}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from data.documents import Drop
from data.json_rows import parse

# Other trainers' spellings of the same thing.
ROLE_NAMES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLE_NAMES |= {"developer": "system", "human": "user", "gpt": "assistant", "bot": "assistant"}
ROLE_NAMES |= {"function_call": "assistant", "function": "tool", "observation": "tool", "tool_response": "tool"}
LISTS = ("conversations", "messages", "conversation")
QUESTIONS = ("prompt", "instruction", "question", "input")
ANSWERS = ("completion", "response", "output", "answer")
ID_KEYS = ("id", "question_id", "task_id")  # the latter two are MT-bench's and HumanEval's own
CONTENT = (*LISTS, "turns", *QUESTIONS, "text", "input_ids")  # a row has one of them
ABOUT = ("system", "tools", "functions", "answer_start", "spans", "prompt_span", "category", "source")
KEYS = frozenset((*CONTENT, *ANSWERS, *ID_KEYS, *ABOUT))  # all that are read
SHAPES = "conversations, messages, prompt, instruction, question, turns, text, or input_ids with answer_start"
LONGEST_NAME = 200  # characters of an id, a category, a source
DEEPEST = 64  # objects in objects of tools and their calls


@dataclass(frozen=True)
class Dialogue:
    """One row.

    messages:  [{"role", "content"}] of system, user, assistant and tool, with "tool_calls" (OpenAI's, arguments as
               objects), "reasoning_content", "tool_call_id" and "name" where the row has them, as
               `apply_chat_template` takes them; may end with a turn that waits for an answer.
    input_ids: ids as they were generated, or None for text; `spans` then are the answers in them.
    text:      text that already carries a chat template's headers, or None.
    category:  the row's own, or empty; `source` falls back to it.
    prompt_span: where the verifier wrote the first prompt, as ids, itself (Document.prompt_span).
    tools:     what may be called, [{"type": "function", "function": {..}}], or None.
    place: the file and line that it came from, for people; no part of what it is.
    """

    id: str
    source: str
    messages: list[dict[str, Any]]
    input_ids: list[int] | None = None
    spans: list[tuple[int, int]] | None = None
    text: str | None = None
    category: str = ""
    prompt_span: tuple[int, int] | None = None
    tools: list[dict[str, Any]] | None = None
    place: str = field(default="", compare=False)

    @property
    def opening(self) -> list[dict[str, Any]]:
        """Its first question: the first user turn and what stands before it; empty when nobody asks."""
        asked = next((index for index, message in enumerate(self.messages) if message["role"] == "user"), -1)
        return self.messages[: asked + 1]

    @property
    def answered(self) -> bool:
        return any(message["role"] == "assistant" for message in self.messages)


def parse_row(line: str, default_id: str, place: str = "") -> Dialogue:
    """One JSON line as a Dialogue; raises Drop with the reason when it cannot be one."""
    return to_dialogue(parse(line), default_id, place)


def to_dialogue(row: object, default_id: str, place: str = "") -> Dialogue:
    """One row as a Dialogue; raises Drop with the reason when it cannot be one. None stands for an absent value."""
    if not isinstance(row, dict):
        raise Drop("row is not a JSON object")
    name = next((found for key in ID_KEYS if (found := _name(row.get(key)))), default_id)
    category = _name(row.get("category"))
    source = _name(row.get("source")) or category
    messages, tools = _messages(row), _tools(row)
    if row.get("input_ids") is not None:  # what its messages say is for people
        ids, spans = _generated(row)
        own = _prompt_span(row, spans)
        return Dialogue(name, source, messages, ids, spans, None, category, own, tools, place)
    if messages:
        for message in messages:
            _check(message)
        return Dialogue(name, source, messages, None, None, None, category, None, tools, place)
    if (text := row.get("text")) is not None:
        _check({"role": "user", "content": text})
        return Dialogue(name, source, [], text=text, category=category, place=place)
    raise Drop("empty or null turn" if any(key in row for key in CONTENT) else "none of the known keys")


def _name(value: object) -> str:
    return str(value)[:LONGEST_NAME] if isinstance(value, str | int) else ""


def _first(row: dict, keys: tuple[str, ...]) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


def _messages(row: dict) -> list[dict[str, Any]]:
    listed, turns, question = _first(row, LISTS), row.get("turns"), _first(row, QUESTIONS)
    if listed is None and isinstance(turns, list) and turns and isinstance(turns[0], dict):
        listed = turns
    if listed is not None:
        messages = [_turn(item) for item in _listed(listed, "conversation")]
    elif turns is not None:
        # Answers of a benchmark's turns are the verifier's to give: user turns follow one another.
        messages = [{"role": "user", "content": _text(turn)} for turn in _listed(turns, "turns")]
    elif question is not None:
        messages = _pair(question, _first(row, ANSWERS), row.get("input") if row.get("prompt") is None else None)
    else:
        return []
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if next((m["role"] for m in messages if m["role"] != "system"), None) != "user":
        raise Drop("conversation does not begin with a user turn")
    return messages


def _listed(value: object, what: str) -> list:
    """A list with something in it. Some files keep it as JSON text; `datasets` once made an object of lists of it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse(value)
    if isinstance(value, dict) and value and all(isinstance(items, list) for items in value.values()):
        value = [dict(zip(value, items, strict=False)) for items in zip(*value.values(), strict=False)]
    if not isinstance(value, list) or not value:
        raise Drop(f"{what} is not a list with something in it")
    return value


def _pair(question: object, answer: object, more: object) -> list[dict[str, Any]]:
    """A question (with Alpaca's `input` below it) and perhaps its answer, each a text or a list of turns.

    A benchmark's answer may be a number, or several: only text is one that could be given.
    """
    if isinstance(question, list):
        messages = [_turn(item) for item in _listed(question, "prompt")]
    else:
        text = _text(question)
        if isinstance(more, str) and more.strip() and more is not question:
            text += "\n\n" + more
        messages = [{"role": "user", "content": text}]
    if isinstance(answer, list) and answer and isinstance(answer[0], dict):
        messages += [_turn(item) for item in answer]
    elif isinstance(answer, str) and answer.strip():
        messages.append({"role": "assistant", "content": answer})
    return messages


def _turn(item: object) -> dict[str, Any]:
    """One message of any spelling in OpenAI's."""
    if isinstance(item, str) and item.startswith("{"):
        item = parse(item)
    if not isinstance(item, dict):
        raise Drop("turn is not an object with role and content")
    spelt = _first(item, ("role", "from"))
    role = ROLE_NAMES.get(spelt) if isinstance(spelt, str) else None
    content = _first(item, ("content", "value"))
    if role is None:
        raise Drop("unknown role")
    if role == "assistant":
        return _answer(item, content, spelt == "function_call")
    message = {"role": role, "content": _text(content)}
    if role == "tool":
        message |= {key: item[key] for key in ("tool_call_id", "name") if isinstance(item.get(key), str)}
    return message


def _answer(item: dict, content: object, is_call: bool) -> dict[str, Any]:
    """An assistant's message: content, or calls of tools, or both."""
    calls = _first(item, ("tool_calls", "function_call"))
    if is_call:
        calls, content = content, None
    calls = _calls(calls)
    message = {"role": "assistant", "content": _text("" if calls and content is None else content)}
    if calls:
        message["tool_calls"] = calls
    reasoning = _first(item, ("reasoning_content", "reasoning"))
    if isinstance(reasoning, str) and reasoning.strip():
        message["reasoning_content"] = _text(reasoning)
    return message


def _text(content: object) -> str:
    """A turn's text: parts of text are joined by line breaks, as vLLM joins them for templates that take text."""
    if isinstance(content, list):
        content = "\n".join(map(_part, content))
    if not isinstance(content, str):
        raise Drop("empty or null turn" if content is None else "turn is not text")
    return content


def _check(message: dict[str, Any]) -> None:
    """Raises Drop for a turn of a file that says nothing. A tool may: its silence is an answer."""
    content = message["content"]
    if not isinstance(content, str):
        raise Drop("turn is not text")
    if message["role"] in ("user", "assistant") and not content.strip() and "tool_calls" not in message:
        raise Drop("empty or null turn")
    if "\0" in content:
        raise Drop("NUL character in a turn")


def _part(part: object) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise Drop("part of a turn is not text")
    return text


def _calls(value: object) -> list[dict[str, Any]]:
    """Tool calls with arguments as objects, which is how servers hand them to a template."""
    calls = _json(value, "tool call")
    return [_call(call) for call in (calls if isinstance(calls, list) else [calls] if calls else [])]


def _call(call: object) -> dict[str, Any]:
    call = _json(call, "tool call")
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Drop("tool call without a name")
    arguments = _json(function.get("arguments"), "tool call") or {}
    if not isinstance(arguments, dict):
        raise Drop("tool call's arguments are not an object")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return named | {"type": "function", "function": {"name": function["name"], "arguments": _bounded(arguments)}}


def _tools(row: dict) -> list[dict[str, Any]] | None:
    found = _json(_first(row, ("tools", "functions")), "tools")
    if not found:
        return None
    tools = [_json(tool, "tools") for tool in found] if isinstance(found, list) else [None]
    tools = [tool if not isinstance(tool, dict) or "function" in tool else {"function": tool} for tool in tools]
    if not all(
        isinstance(tool, dict) and isinstance(tool["function"], dict) and isinstance(tool["function"].get("name"), str)
        for tool in tools
    ):
        raise Drop("tools is not a list of functions")
    return [{"type": "function"} | _bounded(tool) for tool in tools]


def _json(value: object, what: str) -> Any:
    """A value, which some files keep as JSON text."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        return parse(value)
    except Drop as drop:
        raise Drop(f"{what}: {drop}") from None


def _bounded(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise Drop("nested too deep")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _bounded(inner, depth + 1)
    return value


def _generated(row: dict) -> tuple[list[int], list[tuple[int, int]]]:
    ids = row["input_ids"]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise Drop("input_ids is not a list of token ids")
    spans = row.get("spans") or ([[row["answer_start"], len(ids)]] if row.get("answer_start") is not None else None)
    try:
        spans = [(start, end) for start, end in spans]
    except (TypeError, ValueError):
        raise Drop("input_ids without answer_start") from None
    spans = [(_place(start), _place(end)) for start, end in spans]
    edges = [0, *(edge for span in spans for edge in span), len(ids)]
    if not spans or sorted(edges) != edges:
        raise Drop("answer_start outside input_ids")
    return ids, spans


def _place(value: object) -> int:
    """A whole number; a table with gaps keeps it as a float."""
    if type(value) not in (int, float) or value % 1 != 0:
        raise Drop("answer_start is not a whole number")
    return int(value)


def _prompt_span(row: dict, spans: list[tuple[int, int]]) -> tuple[int, int] | None:
    span = row.get("prompt_span")
    if span is None:
        return None
    if not isinstance(span, list) or len(span) != 2 or not all(type(edge) is int for edge in span):
        raise Drop("prompt_span is not a pair of places")
    start, end = span
    if not 0 <= start <= end <= spans[0][0]:
        raise Drop("prompt_span outside the prompt")
    return start, end
