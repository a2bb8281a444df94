"""Rows of JSONL files, in any of the shapes that are found in the wild, as dialogues."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

from conf.errors import UserError
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


def resolve(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Files for a file, a list, a folder (its *.jsonl and *.jsonl.gz) or a glob, in order; UserError when none."""
    if isinstance(paths, str | Path):
        paths = [paths]
    files: list[Path] = []
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz")))
        elif has_magic(str(path)) and not path.exists():
            found = [Path(p) for p in sorted(glob(str(path), recursive=True))]
        else:
            found = [path] if path.is_file() else []
        if not found:
            raise UserError(f"expected JSONL files at data.path={given}, found none; check the path")
        files += found
    return list(dict.fromkeys(files))


def files_hash(files: Sequence[Path]) -> str:
    """sha256 hex over the files' bytes, in order; names do not enter."""
    digest = hashlib.sha256()
    for path in files:
        inner = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                inner.update(block)
        digest.update(inner.digest())
    return digest.hexdigest()


def read_dialogues(files: Sequence[Path], counts: Counter) -> Iterator[Dialogue]:
    """Dialogues of the files, one line in memory at a time; what cannot be used is counted by reason in `counts`.

    Raises UserError at the end of a file of which no row was usable.
    """
    for path in files:
        bad, good = Counter(), 0
        for number, line in enumerate(_lines(path, bad), 1):
            try:
                dialogue = parse_row(line, default_id=f"{path.name.split('.')[0]}:{number}")
            except Drop as drop:
                bad[str(drop)] += 1
                continue
            good += 1
            yield dialogue
        counts.update(bad)
        if not good:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in bad.most_common()) or "the file is empty"
            raise UserError(f"expected rows with {SHAPES} in {path}, found none: {reasons}")


def read_questions(files: Sequence[Path], counts: Counter) -> Iterator[Dialogue]:
    """The first question of each dialogue: its system messages and first user turn, without answers or ids.

    For asking a verifier what a file of prompts or dialogues asks. Errors and counts as in `read_dialogues`.
    """
    for dialogue in read_dialogues(files, counts):
        users = [index for index, message in enumerate(dialogue.messages) if message["role"] == "user"]
        if not users:
            counts["no user turn"] += 1
            continue
        opening = [m for m in dialogue.messages[: users[0] + 1] if m["role"] != "assistant"]
        yield Dialogue(dialogue.id, dialogue.source, opening, category=dialogue.category)


def _lines(path: Path, bad: Counter) -> Iterator[str]:
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as stream:
            yield from stream
    except (EOFError, zlib.error):
        bad["compressed file cut short"] += 1
    except gzip.BadGzipFile:
        raise UserError(f"expected gzip data in {path}, found something else; rename or recompress it") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def parse_row(line: str, default_id: str) -> Dialogue:
    """One JSON line as a Dialogue; raises Drop with the reason when it cannot be one."""
    if not line.strip():
        raise Drop("empty line")
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        raise Drop("malformed JSON") from None
    if not isinstance(row, dict):
        raise Drop("row is not a JSON object")
    name = str(next((row[key] for key in ID_KEYS if row.get(key) is not None), default_id))
    category = str(row.get("category") or "")
    source = str(row.get("source") or category)
    messages = _messages(row)
    if row.get("input_ids") is not None:
        ids, spans = _generated(row)
        return Dialogue(name, source, messages, ids, spans, category=category, prompt_span=_prompt_span(row, spans))
    if messages:
        return Dialogue(name, source, messages, category=category)
    if isinstance(row.get("text"), str) and row["text"].strip():
        return Dialogue(name, source, [], text=row["text"], category=category)
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
