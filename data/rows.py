"""One row of a file, in any of the shapes that are found in the wild, as a Dialogue."""

from __future__ import annotations

import json
from dataclasses import dataclass

from data.documents import Drop

ROLES = ("system", "user", "assistant")
# Other trainers' spellings of the same thing.
ROLE_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", **{role: role for role in ROLES}}
ID_KEYS = ("id", "question_id", "task_id")  # the latter two are MT-bench's and HumanEval's own
SHAPES = "conversations, messages, prompt, turns, text, or input_ids with answer_start"


@dataclass(frozen=True)
class Dialogue:
    """One row.

    messages:  [{"role", "content"}]; may end with a user turn (a prompt that waits for an answer).
    input_ids: ids as they were generated, or None for text; `spans` then are the answers in them.
    text:      text that already carries a chat template's headers, or None.
    category:  the row's own, or empty; `source` falls back to it.
    prompt_span: where the verifier wrote the first prompt, as ids, itself (Document.prompt_span).
    place: the file and line that it came from, for people.
    """

    id: str
    source: str
    messages: list[dict[str, str]]
    input_ids: list[int] | None = None
    spans: list[tuple[int, int]] | None = None
    text: str | None = None
    category: str = ""
    prompt_span: tuple[int, int] | None = None
    place: str = ""


def parse_row(line: str, default_id: str, place: str = "") -> Dialogue:
    """One JSON line as a Dialogue; raises Drop with the reason when it cannot be one."""
    if not line.strip():
        raise Drop("empty line")
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        raise Drop("malformed JSON") from None
    return to_dialogue(row, default_id, place)


def to_dialogue(row: object, default_id: str, place: str = "") -> Dialogue:
    """One row as a Dialogue; raises Drop with the reason when it cannot be one."""
    if not isinstance(row, dict):
        raise Drop("row is not a JSON object")
    name = str(next((row[key] for key in ID_KEYS if row.get(key) is not None), default_id))
    category = str(row.get("category") or "")
    source = str(row.get("source") or category)
    messages = _messages(row)
    if row.get("input_ids") is not None:
        ids, spans = _generated(row)
        own = _prompt_span(row, spans)
        return Dialogue(name, source, messages, ids, spans, category=category, prompt_span=own, place=place)
    if messages:
        return Dialogue(name, source, messages, category=category, place=place)
    if isinstance(row.get("text"), str) and row["text"].strip():
        return Dialogue(name, source, [], text=row["text"], category=category, place=place)
    raise Drop("none of the known keys")


def _messages(row: dict) -> list[dict[str, str]]:
    listed = next((row[key] for key in ("conversations", "messages") if row.get(key) is not None), None)
    if listed is not None:
        return _checked(listed)
    if "turns" in row:
        if not isinstance(row["turns"], list) or not row["turns"]:
            raise Drop("turns is not a list with something in it")
        if isinstance(row["turns"][0], dict):
            return _checked(row["turns"])
        # Answers of a benchmark's turns are the verifier's to give: user turns follow one another.
        return [_message("user", turn) for turn in row["turns"]]
    return [_message("user", row["prompt"])] if "prompt" in row else []


def _checked(listed: object) -> list[dict[str, str]]:
    if not isinstance(listed, list) or not listed:
        raise Drop("conversation is not a list with something in it")
    messages = []
    for item in listed:
        if not isinstance(item, dict):
            raise Drop("turn is not an object with role and content")
        role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
        if role not in ROLE_NAMES:
            raise Drop(f"unknown role {str(role)[:20]}")
        messages.append(_message(ROLE_NAMES[role], content))
    if next((m["role"] for m in messages if m["role"] != "system"), None) != "user":
        raise Drop("conversation does not begin with a user turn")
    return messages


def _message(role: str, content: object) -> dict[str, str]:
    if not isinstance(content, str) or (role == "user" and not content.strip()):
        raise Drop("empty or null turn")
    return {"role": role, "content": content}


def _generated(row: dict) -> tuple[list[int], list[tuple[int, int]]]:
    ids = row["input_ids"]
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise Drop("input_ids is not a list of token ids")
    spans = row.get("spans", [[row["answer_start"], len(ids)]] if "answer_start" in row else None)
    try:
        spans = [(int(start), int(end)) for start, end in spans]
    except (TypeError, ValueError):
        raise Drop("input_ids without answer_start") from None
    edges = [0, *(edge for span in spans for edge in span), len(ids)]
    if not spans or sorted(edges) != edges:
        raise Drop("answer_start outside input_ids")
    return ids, spans


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
