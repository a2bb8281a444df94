"""Frozen verifier states on disk: computed once, read every epoch, the same record as online.

A folder holds shards of whole documents (safetensors, memory-mapped when read) and `index.json`:
what every position needs (`aux`), and what only the label rows need (`last`, `top`, `lse`).
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import UserError
from conf.paths import cache_dir
from data.batches import packed_rows
from data.documents import Document, content_hash
from data.files import file_hash, key_of, only_writer, read_json, write_json
from data.progress import progress_bar
from models.loading import DTYPES, FILE_DTYPES
from models.states import DocumentStates, VerifierStates, label_rows
from models.verifier import Verifier

log = logging.getLogger(__name__)

FORMAT = 1
SHARD_TOKENS = 16384
SECONDS_PER_LINE = 30  # between log lines on the way
FORWARD_TOKENS = 1024  # one packed row of the verifier's forward: attention is quadratic in it


class StateStore:
    """States of `documents`; `states(indices)` is what `verifier.states` gives for the same packed documents.

    To rounding, and but for the last token of documents whose states generation has left behind (DocumentStates).
    """

    def __init__(self, folder: Path, documents: Sequence[Document], index: dict):
        self.folder, self.documents, self.index = Path(folder), list(documents), index
        self.dtype = DTYPES[index["record_dtype"]]
        self._open: dict[int, dict[str, Tensor]] = {}
        self._place: dict[int, tuple[int, int, int]] = {}  # document -> shard, first token, first label
        for number, (first, last) in enumerate(_shards(self.documents, index["shard_tokens"])):
            token = label = 0
            for document in range(first, last):
                self._place[document] = (number, token, label)
                token += len(self.documents[document].input_ids)
                label += self.documents[document].labels

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.index["shards"].values())

    @classmethod
    def capture(
        cls,
        verifier: Verifier,
        documents: Sequence[Document],
        folder: Path | None = None,
        dtype: str = "float32",
        shard_tokens: int = SHARD_TOKENS,
        kept: Mapping[str, DocumentStates] | None = None,
    ) -> StateStore:
        """The store of these documents, computing what is not there yet. Default folder: by content key in the cache.

        kept: by hash of the ids, states that are at hand from generation and need no computing.
        Shards appear whole or not at all, so a killed run continues where it was. Raises UserError for an unknown
        dtype, or when the disk cannot hold the states (before anything is computed).
        """
        if dtype not in FILE_DTYPES:
            raise UserError(f"expected data.store_dtype in {sorted(FILE_DTYPES)}, found {dtype!r}")
        settings = {
            "format": FORMAT,
            "verifier": verifier.weights_hash,
            "aux_layers": list(verifier.aux_layers),
            "documents": content_hash(documents),
            "dtype": dtype,
            "record_dtype": str(verifier.dtype).removeprefix("torch."),
            "shard_tokens": shard_tokens,
        }
        folder = Path(folder) if folder is not None else cache_dir("states", key_of(settings)[:16])
        folder.mkdir(parents=True, exist_ok=True)
        with only_writer(folder):
            index = read_json(folder / "index.json")
            if not index:
                index = settings | {"name": verifier.name, "count": len(documents), "shards": {}}
            different = [name for name, value in settings.items() if index.get(name) != value]
            if different:
                raise UserError(f"{folder} holds states of another {different[0]}; choose another folder or remove it")
            _write_missing(verifier, documents, folder, index, kept or {})
        return cls(folder, documents, index)

    def verify(self) -> None:
        """Read every shard and compare its checksum; UserError naming the first that differs."""
        for number, entry in self.index["shards"].items():
            path = self.folder / entry["file"]
            if not path.is_file() or file_hash(path) != entry["sha256"]:
                raise UserError(f"shard {number} of {self.folder} is damaged; remove {path.name} and capture again")

    def states(self, indices: Sequence[int]) -> VerifierStates:
        """The packed record [B = 1] of these documents, in this order, on the CPU, in the verifier's dtype."""
        documents = [self.documents[index] for index in indices]
        input_ids_BT, document_BT, position_BT, span_BT = packed_rows(documents)
        parts: dict[str, list[Tensor]] = {"aux": [], "last": [], "top": [], "lse": []}
        for index, document in zip(indices, documents, strict=True):
            number, token, label = self._place[index]
            shard = self._shard(number)
            parts["aux"].append(shard["aux"][token : token + len(document.input_ids)])
            for name in ("last", "top", "lse"):
                parts[name].append(shard[name][label : label + document.labels])
        whole = {name: torch.cat(pieces) for name, pieces in parts.items()}
        return VerifierStates(
            input_ids_BT=input_ids_BT,
            document_BT=document_BT,
            position_BT=position_BT,
            span_BT=span_BT,
            aux_BTAD=whole["aux"].to(self.dtype)[None],
            last_PD=whole["last"].to(self.dtype),
            last_index_P=label_rows(span_BT),
            top_P=whole["top"],
            lse_P=whole["lse"],
        )

    def _shard(self, number: int) -> dict[str, Tensor]:
        if number not in self._open:
            path = self.folder / self.index["shards"][str(number)]["file"]
            with safe_open(path, "pt") as stream:  # tensors are views of the mapped file: pages come as they are read
                self._open[number] = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        return self._open[number]


def bytes_needed(verifier: Verifier, documents: Sequence[Document], dtype: str = "float32") -> int:
    """Size of the store on disk, headers aside."""
    width = FILE_DTYPES[dtype].itemsize * verifier.hidden_size
    tokens = sum(len(document.input_ids) for document in documents)
    return tokens * len(verifier.aux_layers) * width + sum(document.labels for document in documents) * (width + 12)


def _shards(documents: Sequence[Document], shard_tokens: int) -> list[tuple[int, int]]:
    """Half-open ranges of documents, each of about `shard_tokens` tokens."""
    ranges, first, tokens = [], 0, 0
    for index, document in enumerate(documents):
        tokens += len(document.input_ids)
        if tokens >= shard_tokens or index == len(documents) - 1:
            ranges.append((first, index + 1))
            first, tokens = index + 1, 0
    return ranges


def _write_missing(
    verifier: Verifier, documents: Sequence[Document], folder: Path, index: dict, kept: Mapping[str, DocumentStates]
) -> None:
    """Compute the shards that are not there, with the plan printed first and the index rewritten after each."""
    ranges, shards = _shards(documents, index["shard_tokens"]), index["shards"]
    missing = [number for number in range(len(ranges)) if not _complete(folder, shards.get(str(number)))]
    if not missing:
        return
    todo = [document for number in missing for document in documents[slice(*ranges[number])]]
    size, free = bytes_needed(verifier, todo, index["dtype"]), shutil.disk_usage(folder).free
    tokens = sum(len(document.input_ids) for document in todo)
    log.info(f"states: {tokens:,} tokens, {size / 1e9:.2f} GB in {folder}, {free / 1e9:.1f} GB free")
    if size * 1.02 > free:
        raise UserError(
            f"expected {size / 1e9:.2f} GB of free disk for the verifier's states, found {free / 1e9:.2f} GB at "
            f"{folder}; set EYRIE_CACHE, data.store_dtype=bfloat16, a smaller data.max_tokens, or data.store=false"
        )
    start = said = time.monotonic()
    done = 0
    with progress_bar() as bar:
        task = bar.add_task("verifier states", total=tokens, rate="")
        for number in missing:
            first, last = ranges[number]
            shards[str(number)] = _write_shard(verifier, documents[first:last], folder, number, index["dtype"], kept)
            write_json(folder / "index.json", index)
            count = sum(len(document.input_ids) for document in documents[first:last])
            done, now = done + count, time.monotonic()
            rate = done / (now - start)
            if done < tokens and (done == count or now - said >= SECONDS_PER_LINE):
                said = now
                left = (tokens - done) / rate
                log.info(f"states: {done / tokens:.0%}, {rate:,.0f} tokens/s, about {left:.0f} s to go")
            bar.update(task, completed=done, rate=f"{rate:,.0f} tokens/s")


def _complete(folder: Path, entry: dict | None) -> bool:
    path = folder / entry["file"] if entry else None
    return path is not None and path.is_file() and path.stat().st_size == entry["bytes"]


def _write_shard(
    verifier: Verifier,
    documents: Sequence[Document],
    folder: Path,
    number: int,
    dtype: str,
    kept: Mapping[str, DocumentStates],
) -> dict:
    parts: dict[str, list[Tensor]] = {"aux": [], "last": [], "top": [], "lse": []}
    for aux_TAD, last_PD, top_P, lse_P in _pieces(verifier, documents, kept):
        parts["aux"].append(aux_TAD.to(FILE_DTYPES[dtype]).cpu())
        parts["last"].append(last_PD.to(FILE_DTYPES[dtype]).cpu())
        parts["top"].append(top_P.cpu())
        parts["lse"].append(lse_P.float().cpu())
    path = folder / f"states-{number:05d}.safetensors"
    temporary = path.with_suffix(".tmp")
    save_file({name: torch.cat(pieces).contiguous() for name, pieces in parts.items()}, temporary)
    os.replace(temporary, path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": file_hash(path), "documents": len(documents)}


def _pieces(
    verifier: Verifier, documents: Sequence[Document], kept: Mapping[str, DocumentStates]
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(aux_TAD, last_PD, top_P, lse_P) of the documents in order: those at hand one by one, others several at once."""
    for at_hand, run in groupby(documents, lambda document: document.ids_hash in kept):
        group = list(run)
        if at_hand:
            for document in group:
                states, (_, _, _, span_BT) = kept[document.ids_hash], packed_rows([document])
                row_P = label_rows(span_BT)
                yield states.aux_TAD, states.last_TD[row_P], states.top_T[row_P], states.lse_T[row_P]
            continue
        for first, last in _shards(group, FORWARD_TOKENS):
            states = verifier.states(*(row.to(verifier.device) for row in packed_rows(group[first:last])))
            yield states.aux_BTAD[0], states.last_PD, states.top_P, states.lse_P
