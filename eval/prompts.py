"""Evaluation prompts by name or file, rendered through the verifier's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conf.errors import UserError
from data.suites import read_suite, suite_names
from models.chat import render


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
    prompts = []
    for row in questions(names, limit):
        ids = render(verifier.tokenizer, row["messages"], add_generation_prompt=True)
        prompts.append(Prompt(row["id"], row["category"], tuple(ids)))
    return prompts


def questions(names: str | Sequence[str], limit: int | None = None) -> list[dict]:
    """Their rows {"id", "category", "messages"}; arguments and errors as `load_prompts`."""
    names = suite_names(names, "prompts")
    if not names:
        raise UserError("no prompts named: give prompts=eyrie, humaneval, or a JSONL file")
    return [row for name in names for row in spaced(read_suite(name), limit)]


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
