"""Which rows a job reads, and in which order: files and mixes of them, as dialogues."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from conf.errors import UserError
from data.documents import Drop
from data.files import file_hash
from data.quarantine import Quarantine
from data.rows import SHAPES, Dialogue, parse_row


@dataclass(frozen=True)
class Source:
    """One entry of data.path. given: as it was written; files: what it stands for, in order."""

    given: str
    files: tuple[Path, ...]


def sources_of(path: Any) -> list[Source]:
    """What data.path names: a file, a folder (its *.jsonl and *.jsonl.gz), a glob, or a list; UserError when none."""
    entries = [path] if isinstance(path, str | Path | Source) else path
    return [entry if isinstance(entry, Source) else Source(str(entry), tuple(_files(entry))) for entry in entries]


def resolve(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files of `sources_of`, each once."""
    return list(dict.fromkeys(file for source in sources_of(paths) for file in source.files))


def sources_hash(sources: Sequence[Source]) -> str:
    """sha256 hex over what is read, in order; names do not enter."""
    digest = hashlib.sha256()
    for source in sources:
        for path in source.files:
            digest.update(bytes.fromhex(file_hash(path)))
    return digest.hexdigest()


def read_dialogues(
    sources: Sequence[Source], counts: Counter, quarantine: Quarantine | None = None
) -> Iterator[Dialogue]:
    """Dialogues of the sources, one row in memory at a time.

    What cannot be used is counted by reason in `counts` as it is met, and noted in `quarantine`.
    Raises UserError at the end of a file of which no row was usable.
    """
    for path in (path for source in sources for path in source.files):
        bad, good = Counter(), 0
        for number, line in enumerate(_lines(path, bad), 1):
            place = f"{path}:{number}"
            try:
                dialogue = parse_row(line, f"{path.name.split('.')[0]}:{number}", place)
            except Drop as drop:
                bad[str(drop)] += 1
                if quarantine is not None:
                    quarantine.add(place, str(drop), line)
                continue
            good += 1
            yield dialogue
        counts.update(bad)
        if not good:
            reasons = ", ".join(f"{count} x {reason}" for reason, count in bad.most_common()) or "the file is empty"
            raise UserError(f"expected rows with {SHAPES} in {path}, found none: {reasons}")


def read_questions(path: Any, counts: Counter) -> Iterator[Dialogue]:
    """The first question of each dialogue: its system messages and first user turn, without answers or ids.

    For asking a verifier what files of prompts or dialogues ask; path: as in `sources_of`. Errors and counts as in
    `read_dialogues`.
    """
    for dialogue in read_dialogues(sources_of(path), counts):
        users = [index for index, message in enumerate(dialogue.messages) if message["role"] == "user"]
        if not users:
            counts["no user turn"] += 1
            continue
        opening = [m for m in dialogue.messages[: users[0] + 1] if m["role"] != "assistant"]
        yield replace(dialogue, messages=opening, input_ids=None, spans=None, text=None, prompt_span=None)


def _files(given: str | Path) -> Iterable[Path]:
    path = Path(given).expanduser()
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.name.endswith((".jsonl", ".jsonl.gz")))
    elif has_magic(str(path)) and not path.exists():
        found = [Path(p) for p in sorted(glob(str(path), recursive=True))]
    else:
        found = [path] if path.is_file() else []
    if not found:
        raise UserError(f"expected JSONL files at data.path={given}, found none; check the path")
    return found


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
