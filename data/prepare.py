"""From settings to tokenised documents: the one way in for training and for `python -m data`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import UserError
from conf.paths import cache_dir
from data.answers import Sampling
from data.clock import Limits
from data.convert import UNIQUE, Conversion, Converter
from data.corpus import Corpus, content_hash
from data.documents import describe
from data.files import file_hash, key_of, only_writer, read_json, write_json
from data.fleet import served_model, urls_of
from data.log import RoundLog
from data.memory import KeptStates
from data.parts import QUARANTINE, tokenized
from data.quarantine import Quarantine
from data.regenerate import regenerate
from data.rows import Dialogue, to_dialogue
from data.server_answers import who_writes
from data.sources import read_dialogues, sources_hash, sources_of
from data.suites import read_suite, suite_names
from data.synthesize import synthesize
from data.thinking import require_policy
from data.unique import Exclusion

if TYPE_CHECKING:
    from conf.schema import DataConf
    from models.states import DocumentStates
    from models.verifier import Verifier

log = logging.getLogger(__name__)

FORMAT = 5  # of the dialogues' folders; raise it when what the same settings give changes
CORPUS_FORMAT = 2  # of the documents' folders inside them; raise it when what the same dialogues give changes
ANSWERS = ("regenerate", "given")
LEAST = dict.fromkeys(("max_documents", "max_tokens", "max_new_tokens", "max_length", "batch_size"), 1)
LEAST |= dict.fromkeys(("minutes", "temperature", "prompt_temperature", "validation"), 0)


@dataclass(frozen=True)
class Prepared:
    """Documents to train on and documents held out, disjoint by content.

    folder: where the documents lie, inside that of their dialogues.
    content_hash: of train and validation documents, for provenance.
    counts: documents, tokens and answer tokens of both parts, and what was dropped, by reason, under "dropped".
    files: of data.path: bytes and time of change, for a run that goes on after they changed.
    states: by hash of the ids, those of the verifier's states that its writing has left behind.
    """

    train: Corpus
    validation: Corpus
    folder: Path
    content_hash: str
    counts: dict[str, Any]
    files: dict[str, list[int]]
    states: dict[str, DocumentStates] = field(default_factory=dict)


def prepare(cfg: DataConf, verifier: Verifier, keep_states: bool = False) -> Prepared:
    """Dialogues of the settings (written by the verifier where they ask for it, and kept in the cache), tokenised.

    Nothing is generated twice: the same settings, verifier and files find the same folder. keep_states: keep what the
    verifier computes while it writes. That is done on a CPU, where computing it again takes half as long as writing,
    and where a clock ends the writing, so that no two runs are alike anyway: such states depend in their last bits on
    what shared the batch.

    Raises UserError for settings that cannot work, for files without a usable row, and when fewer than two documents
    come out.
    """
    how, writes, folder = conversion(cfg), needs_verifier(cfg), dialogues_folder(cfg, verifier)
    keep_states = keep_states and cfg.minutes is not None and cfg.server is None and verifier.device.type == "cpu"
    kept = KeptStates(verifier.device) if keep_states else None
    rows = write_dialogues(cfg, verifier, folder, kept) if writes else None
    dropped = Counter() if rows is None else Counter(rows.counts)

    def read(bad: Counter, quarantine: Quarantine) -> Iterator[Dialogue]:
        return read_dialogues(sources_of(cfg.path), bad, quarantine) if rows is None else _dialogues(rows)

    settings = {"format": CORPUS_FORMAT, "ends": list(verifier.eos_ids)} | how.settings
    settings["written"] = None if rows is None else file_hash(rows.path)
    folder = folder / f"documents-{key_of(settings)[:16]}"
    documents, left_out = tokenized(folder, Converter(verifier, how), read)
    dropped.update(left_out)
    if len(documents) < 2:
        raise UserError(
            f"expected at least two documents, found {len(documents)} ({describe(dropped) or 'nothing was dropped'}); "
            "give more data: data.path, data.max_documents, data.max_tokens or data.minutes"
        )
    train, validation = documents.split(cfg.validation)
    totals = {"train": _totals(train), "validation": _totals(validation)}
    if cfg.supervised == "dialogue":
        train = train.with_prompts()
        totals["train"]["labels"] = int(train.labels_N.sum())
    counts = {**totals, "dropped": dict(dropped)}
    if len(validation) < cfg.validation:
        log.info(f"validation: {len(validation)} of {cfg.validation} documents, a fifth of all at most")
    if dropped:
        log.info(f"dropped or changed: {describe(dropped)}")
    for place in (folder.parent, folder):
        if (path := place / QUARANTINE).is_file():
            log.info(f"rows that were left out: {path}")
    write_json(folder / "counts.json", counts)
    return Prepared(train, validation, folder, content_hash(train, validation), counts, _files(cfg), kept or {})


def conversion(cfg: DataConf) -> Conversion:
    """How dialogues become documents by these settings; reads the prompts that are to be left out.

    Raises UserError for settings that cannot work and for suites that cannot be read.
    """
    if cfg.unique not in UNIQUE:
        raise UserError(f"expected data.unique to be one of {', '.join(UNIQUE)}, found {cfg.unique!r}")
    require_policy(cfg.thinking)
    names = suite_names(cfg.exclude, "data.exclude")
    asked = [row["messages"][-1]["content"] for name in names for row in read_suite(name)]
    exclude = Exclusion(asked) if asked else None
    return Conversion(cfg.max_length, cfg.thinking, cfg.unique, exclude, cfg.max_documents, cfg.max_tokens)


def excluding(cfg: DataConf, prompts: str | Sequence[str]) -> DataConf:
    """The settings, with evaluation's own prompts left out of the data where `exclude` names none."""
    return cfg if cfg.exclude is not None else replace(cfg, exclude=prompts)


def needs_verifier(cfg: DataConf) -> bool:
    """Whether anything has to be written. UserError where `answers`, `server` or a number can't be."""
    for name, least in LEAST.items():
        if (value := getattr(cfg, name)) is not None and not value >= least:
            raise UserError(f"data.{name} must be {least} or more, found {value}")
    if cfg.answers not in ANSWERS:
        raise UserError(f"expected data.answers to be one of {', '.join(ANSWERS)}, found {cfg.answers!r}")
    writes = cfg.path is None or cfg.answers == "regenerate"
    if cfg.server is not None and not writes:
        raise UserError("data.answers=given keeps the answers of the file: leave out data.server, which writes them")
    if cfg.server is not None:
        urls_of(cfg.server)
    return writes


def dialogues_folder(cfg: DataConf, verifier: Verifier) -> Path:
    """The cache folder of these settings; created, with `settings.json` inside for people."""
    settings = {
        "format": FORMAT,
        "verifier": verifier.weights_hash,
        "tokenizer": verifier.tokenizer_hash,
        "files": None if cfg.path is None else sources_hash(sources_of(cfg.path)),
        "limits": asdict(_limits(cfg)),
        "max_length": cfg.max_length,
    }
    if needs_verifier(cfg):
        # dtype changes near-ties, so the text; batch size, only which dialogues time leaves out.
        settings |= {"sampling": asdict(_sampling(cfg)), "dtype": str(verifier.dtype)}
        if cfg.server is not None:
            settings |= {"dtype": None, "server": served_model(urls_of(cfg.server), cfg.server_model)}
    folder = cache_dir("dialogues", key_of(settings)[:16])
    if not read_json(folder / "settings.json"):
        path = None if cfg.path is None else [source.given for source in sources_of(cfg.path)]
        write_json(folder / "settings.json", {"name": verifier.name, "path": path} | settings)
    return folder


def write_dialogues(cfg: DataConf, verifier: Verifier, folder: Path, kept: KeptStates | None = None) -> RoundLog:
    """Run or finish the verifier's writing into `folder`/dialogues.jsonl; at once when it is complete.

    kept: takes the states of dialogues that the verifier writes whole.
    """
    path, state = folder / "dialogues.jsonl", folder / "complete.json"
    with only_writer(folder):
        rows, finished = RoundLog(path), read_json(state)
        if finished.get("rows") == len(rows) > 0:
            log.info(f"dialogues: {len(rows)} from {path}")
            rows.counts.update(finished["bad rows"])
            return rows
        if len(rows):
            log.info(f"dialogues: continuing after {len(rows)} in {path}")
        bad: Counter[str] = Counter()
        model = read_json(folder / "settings.json").get("server")
        with who_writes(cfg, verifier, model, _sampling(cfg)) as (write, sampling):
            if cfg.path is None:
                rows = synthesize(verifier, path, sampling, _limits(cfg), kept, write)
            else:
                with Quarantine(folder / QUARANTINE) as quarantine:
                    dialogues = read_dialogues(sources_of(cfg.path), bad, quarantine)
                    rows = regenerate(verifier, dialogues, path, sampling, _limits(cfg), write, quarantine)
        if not len(rows):
            found = describe(rows.counts + bad) or "nothing was dropped"
            raise UserError(f"expected dialogues from {verifier.name}, none was finished ({found}); raise data.minutes")
        write_json(state, {"rows": len(rows), "used": rows.used, "seconds": rows.seconds, "bad rows": bad})
    rows.counts.update(bad)
    return rows


def _limits(cfg: DataConf) -> Limits:
    seconds = None if cfg.minutes is None else 60 * cfg.minutes
    return Limits(cfg.max_documents, cfg.max_tokens, seconds)


def _sampling(cfg: DataConf) -> Sampling:
    return Sampling(
        max_new_tokens=cfg.max_new_tokens,
        max_length=cfg.max_length,
        temperature=cfg.temperature,
        prompt_temperature=cfg.prompt_temperature,
        openings=tuple(cfg.openings) if cfg.path is None else (),
        batch_size=cfg.batch_size,
        seed=cfg.seed,
    )


def _dialogues(rows: RoundLog) -> Iterator[Dialogue]:
    return (to_dialogue(row, row["id"], f"{rows.path}:{number}") for number, row in enumerate(rows, 1))


def _files(cfg: DataConf) -> dict[str, list[int]]:
    files = [] if cfg.path is None else [file for source in sources_of(cfg.path) for file in source.files]
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _totals(documents: Corpus) -> dict[str, int]:
    return {
        "documents": len(documents),
        "tokens": int(documents.lengths_N.sum()),
        "answer tokens": int(documents.answer_tokens_N.sum()),
        "labels": int(documents.labels_N.sum()),
    }
