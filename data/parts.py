"""Documents written in parts as they are tokenised: a part is whole or absent, and a killed run goes on after it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa

from conf.errors import UserError
from data.convert import Converter, reasons, refuse
from data.corpus import SCHEMA, Columns, Corpus
from data.files import file_hash, key_of, only_writer, read_json, replacing, write_json
from data.progress import progress_bar
from data.quarantine import Quarantine
from data.rows import Dialogue

log = logging.getLogger(__name__)

QUARANTINE = "quarantine.jsonl"
PART_ROWS, PART_TOKENS = 4096, 1 << 22  # a part ends after so many dialogues or tokens
TOGETHER = 256  # dialogues that are tokenised at a time; so many may be read beyond a limit of tokens
Read = Callable[[Counter, Quarantine], Iterator[Dialogue]]


def tokenized(folder: Path, converter: Converter, read: Read) -> tuple[Corpus, Counter[str]]:
    """(the corpus in `folder`, what was left out or changed on the way to it), tokenising what is not there yet.

    What was left out is in its quarantine.jsonl.

    read: gives the dialogues, always the same ones in the same order, and takes what counts bad rows. It begins anew
    in a run that goes on, and is not asked for a corpus that is complete. Damaged parts, and those after them, are
    made again. Any number of processes may ask: one writes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        entries, done = _whole(folder), folder / "complete.json"
        finished = _read_sealed(done)
        if finished.get("parts") != len(entries):
            if finished:
                log.warning(f"documents: part {len(entries)} of {folder} is damaged and will be made again")
            done.unlink(missing_ok=True)
            finished = _write(folder, entries, converter, read)
            _write_sealed(done, finished)
    dropped = sum((Counter(entry["left_out"]) for entry in entries), Counter(finished["read"]))
    corpus = Corpus([_batch(folder / entry["file"]) for entry in entries])
    if not len(corpus):
        refuse(dropped, converter.verifier)
    return corpus, sum((Counter(entry["changed"]) for entry in entries), dropped)


def _write(folder: Path, entries: list[dict], converter: Converter, read: Read) -> dict:
    """The parts that `entries` lacks, which is added to; returns what complete.json is to hold."""
    kept = {Path(entry["file"]).stem for entry in entries}
    for left in folder.glob("part-*"):  # damaged, after a damaged one, or half written
        if left.name.partition(".")[0] not in kept or left.suffix == ".tmp":
            left.unlink()
    bad: Counter[str] = Counter()
    begun, before = time.monotonic(), sum(entry["rows"] for entry in entries)
    if entries:
        log.info(f"documents: continuing after {before:,} dialogues in {folder}")
    with Quarantine(folder / QUARANTINE) as quarantine, progress_bar() as bar:
        rows, task = read(bad, quarantine), bar.add_task("tokenizing", total=converter.how.max_documents, rate="")
        for entry in entries:
            path = folder / entry["file"]
            _pass_over(rows, entry["rows"])
            _remember(converter, _batch(path))
            _note(quarantine, _read_sealed(path.with_suffix(".json"))["dropped"])
        while not converter.enough:
            columns, used = _fill(rows, converter)
            if not used:
                break
            entries.append(_save(_path(folder, len(entries)), columns, used, converter))
            _note(quarantine, converter.dropped)
            converter.changed, converter.dropped = Counter(), []
            bar.update(task, completed=converter.documents, rate=f"{converter.answer_tokens:,} answer tokens")
    rows = sum(entry["rows"] for entry in entries)
    rate = (rows - before) / max(time.monotonic() - begun, 1e-9)
    log.info(f"documents: {converter.documents:,} of {rows:,} dialogues, {rate:,.0f} dialogues/s, in {folder}")
    return {"parts": len(entries), "rows": rows, "documents": converter.documents, "read": +bad}


def _fill(rows: Iterator[Dialogue], converter: Converter) -> tuple[Columns, int]:
    """The next part's documents, and how many dialogues were read for it, those beyond a limit of tokens too."""
    columns, used = Columns(), 0
    while used < PART_ROWS and columns.tokens < PART_TOKENS:
        wanted = min(TOGETHER, PART_ROWS - used, converter.wanted)
        some = list(islice(rows, wanted))
        used += len(some)
        for documents, question in converter.convert(some):
            for document in documents:
                columns.add(document, question)
            if converter.enough:
                return columns, used
        if len(some) < wanted:
            break
    return columns, used


def _remember(converter: Converter, batch: pa.RecordBatch) -> None:
    """As if the converter had made the documents of this part."""
    corpus = Corpus([batch])
    converter.documents += len(corpus)
    converter.answer_tokens += int(corpus.answer_tokens_N.sum())
    converter.contents.update(corpus.keys_N)
    converter.questions.update(batch["question"].to_numpy())  # 0 among them, which is nobody's


def _pass_over(rows: Iterator[Dialogue], count: int) -> None:
    """UserError where a source has fewer rows than when the part was made: it changed while it was read."""
    if (passed := sum(1 for _ in islice(rows, count))) < count:
        raise UserError(
            f"expected the {count} dialogues that were read before, found {passed}: data.path has changed, run it again"
        )


def _note(quarantine: Quarantine, dropped: list) -> None:
    for place, reason, text in dropped:
        quarantine.add(place, reason, text)


def _save(path: Path, columns: Columns, rows: int, converter: Converter) -> dict:
    """The part, and then beside it what tells whether it is whole, and what was left out; returns that without rows."""
    batch = columns.batch()
    with replacing(path) as temporary, pa.ipc.new_file(str(temporary), SCHEMA) as writer:
        writer.write_batch(batch)
    entry = {"file": path.name, "bytes": path.stat().st_size, "sha256": file_hash(path), "rows": rows}
    entry |= {"documents": len(columns), "tokens": columns.tokens, "changed": converter.changed}
    entry |= {"left_out": reasons(converter.dropped)}
    _write_sealed(path.with_suffix(".json"), entry | {"dropped": converter.dropped})
    return entry


def read_corpus(folder: Path) -> Corpus | None:
    """The documents in a folder of `tokenized`; None where there are none, or nothing that is whole."""
    entries = _whole(folder)
    return Corpus([_batch(folder / entry["file"]) for entry in entries]) if entries else None


def _write_sealed(path: Path, values: dict) -> None:
    write_json(path, values | {"seal": key_of(values)})


def _read_sealed(path: Path) -> dict:
    """What was written; {} when it is absent or damaged."""
    values = read_json(path)
    seal = values.pop("seal", None)
    return values if seal == key_of(values) else {}


def _path(folder: Path, number: int) -> Path:
    return folder / f"part-{number:05d}.arrow"


def _whole(folder: Path) -> list[dict]:
    """What lies beside the parts up to the first that is missing or damaged, without the rows that were left out."""
    entries: list[dict] = []
    while True:
        path = _path(folder, len(entries))
        entry = _read_sealed(path.with_suffix(".json"))
        if not path.is_file() or path.stat().st_size != entry.get("bytes") or file_hash(path) != entry.get("sha256"):
            return entries
        del entry["dropped"]
        entries.append(entry)


def _batch(path: Path) -> pa.RecordBatch:
    """Views of the mapped file: pages come as they are read, and the file need not stay open."""
    with pa.memory_map(str(path)) as mapped:
        return pa.ipc.open_file(mapped).get_batch(0)
