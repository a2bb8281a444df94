"""The stages of the data, one by one, as `python -m data task=...` runs them."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.table import Table

from conf.cli import Outcome
from conf.errors import UserError
from conf.paths import cache_dir, made
from conf.schema import DataCommandConf
from conf.terminal import TextConsole
from data.clock import answer_tokens
from data.convert import refuse
from data.documents import Document, describe, with_prompt
from data.files import read_json, replacing, write_json
from data.inspect import documents_of, show
from data.log import RoundLog
from data.prepare import Prepared, dialogues_folder, excluding, prepare, write_dialogues
from data.server_states import ServerStates
from data.sources import read_dialogues, sources_of
from data.store import StateStore
from data.tokens import draft_vocab, label_counts
from models.heads import captured_layers
from models.verifier import Verifier


def run(cfg: DataCommandConf) -> Outcome:
    """Do one task; a short table of what came out, and the path that was written."""
    if cfg.task not in TASKS:
        raise UserError(f"expected task={'|'.join(TASKS)}, found {cfg.task}; e.g. python -m data task=inspect")
    if cfg.server is not None and cfg.task != "capture":
        raise UserError(f"expected server=URL with task=capture, found it with task={cfg.task}: leave it out")
    if cfg.out == "":
        raise UserError("expected out= to name what is written, found nothing: leave it out for the cache")
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    cfg.data = excluding(cfg.data, cfg.evaluation.prompts)
    layers = captured_layers(cfg.head.name, cfg.verifier.aux_layers)
    verifier = Verifier.load(**asdict(cfg.verifier) | {"aux_layers": layers})
    outcome = TASKS[cfg.task](cfg, verifier)
    table = Table("what", "value", title=f"{cfg.task}: {verifier.name}")
    for name, value in outcome.values.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    TextConsole(stderr=cfg.json).print(table)
    return outcome


def synthesize_task(cfg: DataCommandConf, verifier: Verifier) -> Outcome:
    """The verifier writes prompts and answers."""
    if cfg.data.path is not None:
        raise UserError("task=synthesize writes its own prompts; to answer those of data.path use task=regenerate")
    return _write(cfg, verifier)


def regenerate_task(cfg: DataCommandConf, verifier: Verifier) -> Outcome:
    """The verifier answers given prompts."""
    if cfg.data.path is None:
        raise UserError("task=regenerate answers the prompts of a file: give data.path=FILE")
    return _write(cfg, verifier)


def _write(cfg: DataCommandConf, verifier: Verifier) -> Outcome:
    settings = replace(cfg.data, answers="regenerate")
    folder = dialogues_folder(settings, verifier)
    rows = write_dialogues(settings, verifier, folder)
    reasons, tokens = Counter(), 0
    for row in rows:
        reasons[row["finish_reason"]] += 1
        tokens += answer_tokens(row)
    values = {
        "dialogues": len(rows),
        "answer tokens": tokens,
        "answers ended by": dict(reasons),
        "seconds": round(rows.seconds, 1),
        "dropped": dict(rows.counts),
    }
    path = folder / "dialogues.jsonl"
    if cfg.out is not None:
        path = Path(shutil.copyfile(path, _out(cfg.out)))
    return Outcome(path, values)


def tokenize_task(cfg: DataCommandConf, verifier: Verifier) -> Outcome:
    """Documents as rows of ids and spans, which `data.path` reads again."""
    prepared = prepare(cfg.data, verifier)
    path = prepared.folder / "documents.jsonl" if cfg.out is None else _out(cfg.out)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for part in ("train", "validation"):
            for document in getattr(prepared, part):
                answers = [span for span in document.spans if span != document.prompt_span]
                row = asdict(document) | {"spans": answers, "split": part}
                stream.write(json.dumps(row, ensure_ascii=False) + "\n")
    return Outcome(path, _values(prepared))


def vocab_task(cfg: DataCommandConf, verifier: Verifier) -> Outcome:
    """The draft vocabulary, and how much of train and of held-out labels it covers."""
    prepared = prepare(cfg.data, verifier)
    vocab, share = draft_vocab(prepared.train, verifier.vocab_size, cfg.head.draft_vocab_size)
    held_out_V = label_counts(prepared.validation, verifier.vocab_size)
    total, inside = int(held_out_V.sum()), int(held_out_V[vocab.t2d].sum())
    values = {
        "draft_vocab_size": len(vocab),
        "coverage of train labels": round(share, 5),
        "coverage of validation labels": round(inside / total, 5) if total else None,
        "hash": vocab.hash,
    }
    path = prepared.folder / f"vocab-{len(vocab)}.json" if cfg.out is None else _out(cfg.out)
    write_json(path, values | {"vocab_size": verifier.vocab_size, "ids": vocab.ids_R.tolist()})
    return Outcome(path, values)


def capture_task(cfg: DataCommandConf, verifier: Verifier) -> Outcome:
    """The verifier's states of the training documents; what is there already is checked against its checksums."""
    pieces = None if cfg.server is None else ServerStates(cfg.server, verifier).pieces
    folder = None if cfg.out is None else Path(cfg.out).expanduser()
    if folder is not None and folder.exists() and not folder.is_dir():
        raise UserError(f"expected out= to name a folder for the states, found the file {folder}")
    prepared = prepare(cfg.data, verifier, keep_states=pieces is None)
    store = StateStore.capture(
        verifier, prepared.train, folder, cfg.data.store_dtype, kept=prepared.states, pieces=pieces, server=cfg.server
    )
    store.verify()
    values = _values(prepared) | {"bytes": store.bytes, "shards": len(store.shards), "verified": True}
    return Outcome(store.folder / "index.json", values)


def inspect_task(cfg: DataCommandConf, verifier: Verifier) -> Outcome:
    """Some documents in colour. Files are shown with the answers that they have; nothing is generated."""
    sources = sources_of(cfg.data.path or _synthetic(cfg, verifier) / "dialogues.jsonl")
    counts: Counter[str] = Counter()
    found = documents_of(read_dialogues(sources, counts), verifier, cfg.data, counts)
    documents: list[Document] = list(itertools.islice(found, cfg.limit or 3))
    if not documents:
        refuse(counts, verifier)
    if cfg.data.supervised == "dialogue":
        documents = [with_prompt(document) for document in documents]
    show(documents, verifier.tokenizer, verifier.eos_ids, TextConsole(stderr=cfg.json))
    values = {
        "documents shown": len(documents),
        "tokens": sum(len(document.input_ids) for document in documents),
        "answer tokens": sum(document.answer_tokens for document in documents),
        "labels": sum(document.labels for document in documents),
        "dropped on the way": describe(+counts) or "nothing",
    }
    return Outcome(Path(sources[0].given), values)


def _synthetic(cfg: DataCommandConf, verifier: Verifier) -> Path:
    """The dialogues of these settings, or without them the ones that this verifier wrote last."""
    own = dialogues_folder(cfg.data, verifier)
    if RoundLog.exists(own / "dialogues.jsonl"):
        return own
    folders = [path.parent for path in cache_dir("dialogues").glob("*/dialogues.jsonl") if RoundLog.exists(path)]
    mine = [f for f in folders if read_json(f / "settings.json").get("verifier") == verifier.weights_hash]
    if not mine:
        raise UserError(f"expected dialogues by {verifier.name} in the cache, found none: run task=synthesize first")
    return max(mine, key=lambda folder: (folder / "dialogues.jsonl").stat().st_mtime)


def _values(prepared: Prepared) -> dict:
    return {**prepared.counts, "content_hash": prepared.content_hash}


def _out(path: str) -> Path:
    target = Path(path).expanduser()
    made(target.parent)
    return target


TASKS: dict[str, Callable[[DataCommandConf, Verifier], Outcome]] = {
    "synthesize": synthesize_task,
    "regenerate": regenerate_task,
    "tokenize": tokenize_task,
    "vocab": vocab_task,
    "capture": capture_task,
    "inspect": inspect_task,
}
