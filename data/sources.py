"""Which rows a job reads, and in which order: what `data.path` names, as dialogues.

    chats.jsonl                                    a file: .jsonl, .json, .txt (each also .gz), .parquet or .arrow
    FOLDER                                         its files but .txt; or a dataset that `save_to_disk` wrote
    logs/*.jsonl                                   a glob
    OWNER/NAME                                     a dataset of the hub, where no file or folder here has that name
    {path: .., split: .., name: .., revision: ..}  of a dataset: a split, a configuration, a commit
    [a.jsonl, b.parquet]                           one after the other
    [{path: a.jsonl, weight: 3}, {path: b.parquet, weight: 1}]    mixed: 3 dialogues of the one to 1 of the other

A mix is dealt row by row and without chance. When one of its sources has run out, the others go on by their weights:
every row is read, and a line of the log says from where on the mix is another one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from glob import glob, has_magic
from math import lcm
from pathlib import Path
from typing import Any

from conf.errors import UserError
from data.documents import Drop
from data.files import file_hash
from data.quarantine import SHOWN, Quarantine
from data.readers import READERS, Row, read_file, suffix
from data.rows import SHAPES, Dialogue, to_dialogue
from data.tables import hub_commit, hub_files, read_arrow, read_hub, read_parquet, read_saved, saved_files

log = logging.getLogger(__name__)

TABLES = {".parquet": read_parquet, ".arrow": read_arrow}
FORMATS = (*READERS, *TABLES)
KEYS = ("path", "weight", "split", "name", "revision")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Part:
    """One thing to open. kind: the suffix of a file; or "saved", a folder of `save_to_disk`; or "hub"."""

    kind: str
    path: str
    split: str | None = None
    name: str | None = None
    revision: str | None = None

    def rows(self) -> Iterator[Row]:
        """Numbered from 1; a row that can't be read is a Drop. Raises UserError."""
        if self.kind == "saved":
            return read_saved(Path(self.path), self.split)
        if self.kind == "hub":
            return read_hub(self.path, self.split, self.name, self.revision)
        return TABLES.get(self.kind, read_file)(Path(self.path))

    def files(self) -> list[Path]:
        """What lies on this machine of it, in order."""
        if self.kind == "saved":
            return saved_files(Path(self.path), self.split)
        if self.kind == "hub":
            return hub_files(self.path, self.split, self.name, self.revision)
        return [Path(self.path)]

    def identity(self) -> list[str]:
        """What its rows follow from: what is in its files, or the commit of a dataset of the hub."""
        files = self.files()
        return [
            self.kind + (".gz" if self.path.lower().endswith(".gz") else ""),  # plain bytes of that name are a mistake
            *(map(file_hash, files) if files else hub_commit(self.path, self.split, self.name, self.revision)),
        ]


@dataclass(frozen=True)
class Source:
    """One entry of data.path. given: as it was written; parts: what it stands for, in order; weight: in a mix."""

    given: str
    parts: tuple[Part, ...]
    weight: Fraction | None = None

    @property
    def files(self) -> list[Path]:
        return [file for part in self.parts for file in part.files()]


def sources_of(path: Any) -> list[Source]:
    """The sources that `path` names, in order; nothing is opened. Raises UserError for what isn't there or can't be."""
    entries = path if isinstance(path, list | tuple) else [path]
    found = [entry if isinstance(entry, Source) else _source(entry) for entry in entries]
    weighted = [source for source in found if source.weight is not None]
    if not found:
        raise UserError("expected files or datasets at data.path, found an empty list")
    if weighted and len(weighted) < len(found):
        bare = next(source for source in found if source.weight is None)
        raise UserError(f"expected a weight for every source of a mix or for none, found none for {bare.given}")
    return found


def sources_hash(sources: Sequence[Source]) -> str:
    """sha256 hex over what is read and in which order: contents, weights, and how files are read; not their names."""
    about = [[str(source.weight), *(part.identity() for part in source.parts)] for source in sources]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def read_dialogues(
    sources: Sequence[Source], counts: Counter, quarantine: Quarantine | None = None
) -> Iterator[Dialogue]:
    """Dialogues of the sources, one after the other or mixed by weight, a few rows of each in memory.

    What cannot be used is counted by reason in `counts` as it is met, and noted in `quarantine`.
    Raises UserError at the end of a file or dataset of which no row was usable.
    """
    streams = [_dialogues(source, counts, quarantine) for source in sources]
    if any(source.weight is not None for source in sources):
        yield from _mixed(sources, streams)
    else:
        for stream in streams:
            yield from stream


def read_questions(path: Any, counts: Counter) -> Iterator[Dialogue]:
    """The first question of each dialogue: its system messages and first user turn, without answers or ids.

    For asking a verifier what files of prompts or dialogues ask; path: as in `sources_of`. Errors and counts as in
    `read_dialogues`.
    """
    for dialogue in read_dialogues(sources_of(path), counts):
        opening = dialogue.opening
        if opening:
            yield replace(dialogue, messages=opening, input_ids=None, spans=None, text=None, prompt_span=None)
        else:
            counts["no user turn"] += 1


def _mixed(sources: Sequence[Source], streams: Sequence[Iterator[Dialogue]]) -> Iterator[Dialogue]:
    """Each gains its weight in credit before every row; who has most, the first among equals, gives it and pays all."""
    scale = lcm(*(source.weight.denominator for source in sources))
    weights = {index: int(source.weight * scale) for index, source in enumerate(sources)}
    credit, taken = dict.fromkeys(weights, 0), dict.fromkeys(weights, 0)
    while weights:
        for index, weight in weights.items():
            credit[index] += weight
        chosen = max(weights, key=lambda index: credit[index])
        dialogue = next(streams[chosen], None)
        if dialogue is not None:
            credit[chosen] -= sum(weights.values())
            taken[chosen] += 1
            yield dialogue
            continue
        del weights[chosen]
        credit = dict.fromkeys(weights, 0)
        if weights:
            rest = ", ".join(sources[index].given for index in weights)
            log.warning(f"{sources[chosen].given} has run out after {taken[chosen]:,} dialogues: only {rest} from here")


def _dialogues(source: Source, counts: Counter, quarantine: Quarantine | None) -> Iterator[Dialogue]:
    for part in source.parts:
        bad, first, good = Counter(), {}, 0
        stem = Path(part.path).name.split(".")[0]
        for number, row, text in part.rows():
            try:
                if isinstance(row, Drop):
                    raise row
                dialogue = to_dialogue(row, f"{stem}:{number}", f"{part.path}:{number}")
            except Drop as drop:
                reason, place = str(drop), f"{part.path}:{number}"
                counts[reason] += 1
                bad[reason] += 1
                first.setdefault(reason, place)
                if quarantine is not None:
                    quarantine.add(place, reason, _shown(row) if text is None else text)
                continue
            good += 1
            yield dialogue
        if not good:
            reasons = ", ".join(f"{n} x {reason} (first: {first[reason]})" for reason, n in bad.most_common(3))
            raise UserError(f"expected rows with {SHAPES} in {part.path}, found none: {reasons or 'the file is empty'}")


def _shown(row: Any) -> str:
    return "" if isinstance(row, Drop) else repr({key: str(value)[:SHOWN] for key, value in row.items()})


def _source(entry: Any) -> Source:
    if isinstance(entry, str | Path):
        entry = {"path": entry}
    if not isinstance(entry, dict) or "path" not in entry or (unknown := set(entry) - set(KEYS)):
        found = f"{', '.join(map(str, unknown))} in {entry}" if isinstance(entry, dict) and "path" in entry else entry
        raise UserError(f"expected a path, or {{{', '.join(KEYS)}}}, at data.path, found {found}")
    choice = {key: entry.get(key) for key in ("split", "name", "revision")}
    for key, value in choice.items():
        if value is not None and not isinstance(value, str):
            raise UserError(f"expected {key} of {entry['path']} to be a text, found {value!r}: quote it")
    paths = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
    parts = dict.fromkeys(part for path in paths for part in _parts(path, choice))
    return Source(", ".join(map(str, paths)), tuple(parts), _weight(entry))


def _weight(entry: dict) -> Fraction | None:
    weight = entry.get("weight")
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise UserError(f"expected the weight of {entry['path']} to be a number above 0, found {weight!r}")
    return Fraction(str(weight))


def _parts(given: Any, choice: dict[str, str | None]) -> list[Part]:
    """What a path stands for. What is here goes before what the hub may have."""
    if not isinstance(given, str | Path) or not str(given):
        raise UserError(f"expected a path at data.path, found {given!r}")
    path = Path(given).expanduser()
    if path.is_dir():
        return _folder(path, choice)
    if path.is_file():
        files = [path]
    elif has_magic(str(path)):
        files = [Path(found) for found in sorted(glob(str(path), recursive=True)) if Path(found).is_file()]
    elif HUB_NAME.fullmatch(str(given)) and suffix(path) not in FORMATS:
        return [Part("hub", str(given), **choice)]
    else:
        files = []
    if not files:
        raise UserError(
            f"expected {', '.join(FORMATS)} files at data.path={given}, found none; check the path "
            "(a dataset of the hub is OWNER/NAME)"
        )
    return [_file(file, choice) for file in files]


def _file(path: Path, choice: dict[str, str | None]) -> Part:
    if suffix(path) not in FORMATS or (suffix(path) in TABLES and path.suffix == ".gz"):
        raise UserError(f"expected a file named {', '.join(FORMATS)}, found {path}: rename or convert it")
    if any(choice.values()):
        raise UserError(f"split, name and revision are of datasets, found them for the file {path}: leave them out")
    return Part(suffix(path), str(path))


def _folder(path: Path, choice: dict[str, str | None]) -> list[Part]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return [Part("saved", str(path), split=choice["split"])]
    if any(choice.values()):
        return [Part("hub", str(path.resolve()), **choice)]
    names = [file for file in sorted(path.iterdir()) if suffix(file) in FORMATS and suffix(file) != ".txt"]
    found = [file for file in names if file.is_file()]  # a pipe would wait for a writer
    if not found:
        raise UserError(
            f"expected {', '.join(FORMATS)} files in the folder {path}, found none; name text files by a glob, and "
            "give {path: FOLDER, split: train} for a dataset laid out as on the hub"
        )
    return [_file(file, choice) for file in found]
