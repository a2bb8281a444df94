"""From settings to tokenised documents: the one way in for training and for `python -m data`."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import UserError
from conf.paths import cache_dir
from data.answers import Sampling
from data.clock import Limits
from data.documents import Document, content_hash, describe, split, with_prompt
from data.files import key_of, only_writer, read_json, write_json
from data.log import RoundLog
from data.memory import KeptStates
from data.progress import progress_bar
from data.regenerate import regenerate
from data.rows import Dialogue, to_dialogue
from data.sources import read_dialogues, sources_hash, sources_of
from data.synthesize import synthesize
from data.tokens import tokenize

if TYPE_CHECKING:
    from conf.schema import DataConf
    from models.states import DocumentStates
    from models.verifier import Verifier

log = logging.getLogger(__name__)

FORMAT = 4  # of the dialogues' folders; raise it when what the same settings give changes
ANSWERS = ("regenerate", "given")


@dataclass(frozen=True)
class Prepared:
    """Documents to train on and documents held out, disjoint by content.

    folder: where dialogues and settings lie.  content_hash: of train and validation documents, for provenance.
    counts: documents, tokens and answer tokens of both parts, and what was dropped, by reason, under "dropped".
    states: by hash of the ids, those of the verifier's states that its writing has left behind.
    """

    train: list[Document]
    validation: list[Document]
    folder: Path
    content_hash: str
    counts: dict[str, Any]
    states: dict[str, DocumentStates] = field(default_factory=dict)


def prepare(cfg: DataConf, verifier: Verifier, keep_states: bool = False) -> Prepared:
    """Dialogues of the settings (written by the verifier where they ask for it, and kept in the cache), tokenised.

    Nothing is generated twice: the same settings, verifier and files find the same folder. keep_states: keep what the
    verifier computes while it writes. That is done on a CPU, where computing it again takes half as long as writing,
    and where a clock ends the writing, so that no two runs are alike anyway: such states depend in their last bits on
    what shared the batch. Raises UserError for
    settings that cannot work, for files without a usable row, and when fewer than two documents come out.
    """
    writes, folder = needs_verifier(cfg), dialogues_folder(cfg, verifier)
    dropped: Counter[str] = Counter()
    keep_states = keep_states and cfg.minutes is not None and verifier.device.type == "cpu"
    kept = KeptStates(verifier.device) if keep_states else None
    if writes:
        rows = write_dialogues(cfg, verifier, folder, kept)
        dropped.update(rows.counts)
        dialogues: Iterable[Dialogue] = (to_dialogue(row, row["id"]) for row in rows.rows)
    else:
        dialogues = read_dialogues(sources_of(cfg.path), dropped)
    documents = list(_limited(tokenize(dialogues, verifier, cfg.max_length, dropped), cfg))
    if len(documents) < 2:
        raise UserError(
            f"expected at least two documents, found {len(documents)} ({describe(dropped) or 'nothing was dropped'}); "
            "give more data: data.path, data.max_documents, data.max_tokens or data.minutes"
        )
    train, validation, duplicates = split(documents, cfg.validation)
    totals = {"train": _totals(train), "validation": _totals(validation)}
    if cfg.supervised == "dialogue":
        train = [with_prompt(document) for document in train]
        totals["train"]["labels"] = sum(document.labels for document in train)
    dropped["duplicate document"] += duplicates
    dropped = +dropped  # without zeros
    counts = {**totals, "dropped": dict(dropped)}
    if len(validation) < cfg.validation:
        log.info(f"validation: {len(validation)} of {cfg.validation} documents, a fifth of all at most")
    if dropped:
        log.info(f"dropped or changed: {describe(dropped)}")
    write_json(folder / "counts.json", counts)
    return Prepared(train, validation, folder, content_hash([*train, *validation]), counts, kept or {})


def needs_verifier(cfg: DataConf) -> bool:
    """Whether the verifier has to write anything for these settings; UserError for an unknown `answers`."""
    if cfg.answers not in ANSWERS:
        raise UserError(f"expected data.answers to be one of {', '.join(ANSWERS)}, found {cfg.answers!r}")
    return cfg.path is None or cfg.answers == "regenerate"


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
    folder = cache_dir("dialogues", key_of(settings)[:16])
    if not (folder / "settings.json").exists():
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
        if finished.get("rows") == len(rows.rows) > 0:
            log.info(f"dialogues: {len(rows.rows)} from {path}")
            rows.counts.update(finished["bad rows"])
            return rows
        if rows.rows:
            log.info(f"dialogues: continuing after {len(rows.rows)} in {path}")
        bad: Counter[str] = Counter()
        if cfg.path is None:
            rows = synthesize(verifier, path, _sampling(cfg), _limits(cfg), kept)
        else:
            rows = regenerate(verifier, read_dialogues(sources_of(cfg.path), bad), path, _sampling(cfg), _limits(cfg))
        if not rows.rows:
            found = describe(rows.counts + bad) or "nothing was dropped"
            raise UserError(f"expected dialogues from {verifier.name}, none was finished ({found}); raise data.minutes")
        write_json(state, {"rows": len(rows.rows), "used": rows.used, "seconds": rows.seconds, "bad rows": bad})
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


def _limited(documents: Iterator[Document], cfg: DataConf) -> Iterator[Document]:
    """Documents until the limits on their number and answer tokens are met, without reading any further."""
    tokens = 0
    with progress_bar() as bar:
        task = bar.add_task("tokenizing", total=cfg.max_documents, rate="")
        for document in itertools.islice(documents, cfg.max_documents):
            if cfg.max_tokens is not None and tokens >= cfg.max_tokens:
                return
            tokens += document.answer_tokens
            bar.update(task, advance=1, rate=f"{tokens:,} answer tokens")
            yield document


def _totals(documents: list[Document]) -> dict[str, int]:
    return {
        "documents": len(documents),
        "tokens": sum(len(document.input_ids) for document in documents),
        "answer tokens": sum(document.answer_tokens for document in documents),
        "labels": sum(document.labels for document in documents),
    }
