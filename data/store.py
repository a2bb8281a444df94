"""Frozen verifier states on disk: computed once, read every epoch, the same record as online.

A folder holds `index.json`, shards of whole documents (safetensors, memory-mapped when read), and beside each a JSON
file with its checksum. A shard has what every position needs (`aux`), and what label rows need (`last`, `top`, `lse`).
Any number of processes that are asked for the same store share its shards between them.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from conf.disk import size
from conf.errors import UserError
from conf.paths import cache_dir
from data.batches import packed_rows
from data.corpus import Corpus
from data.documents import Document
from data.files import file_hash, key_of, read_json, replacing, write_json
from data.progress import progress_bar
from data.quantize import STORE_DTYPES, dequantize, quantize, states_bytes, store_dtype
from models.loading import DTYPES
from models.states import DocumentStates, VerifierStates, label_rows
from models.verifier import Verifier

log = logging.getLogger(__name__)

FORMAT = 2
SHARD_TOKENS = 16384
SECONDS_PER_LINE = 30  # between log lines on the way
FORWARD_TOKENS = 1024  # one packed row of the verifier's forward: attention is quadratic in it
PARTS = ("aux", "last", "top", "lse")

# (aux_TAD, last_PD, top_P, lse_P) of each document, or of several at once, in order
Pieces = Callable[[Sequence[Document]], Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]]


class StateStore:
    """States of `documents`; `states(indices)` is what `verifier.states` gives for the same packed documents.

    To rounding, and but for the last token of documents whose states generation has left behind (DocumentStates).
    shards: of each, its file, bytes, checksum, documents and tokens, and who computed it.
    """

    def __init__(self, folder: Path, documents: Sequence[Document], index: dict, shards: list[dict]):
        self.folder, self.documents, self.index, self.shards = Path(folder), Corpus.of(documents), index, shards
        self.dtype = DTYPES[index["record_dtype"]]
        self._open: dict[int, dict[str, Tensor]] = {}
        self._firsts = np.array([first for first, _ in _shards(self.documents.lengths_N, index["shard_tokens"])])
        self._starts = [_starts(counts_N) for counts_N in (self.documents.lengths_N, self.documents.labels_N)]

    @property
    def bytes(self) -> int:
        return sum(shard["bytes"] for shard in self.shards)

    @classmethod
    def capture(
        cls,
        verifier: Verifier,
        documents: Sequence[Document],
        folder: Path | None = None,
        dtype: str = "auto",
        shard_tokens: int = SHARD_TOKENS,
        kept: Mapping[str, DocumentStates] | None = None,
        pieces: Pieces | None = None,
        server: str | None = None,
    ) -> StateStore:
        """The store of these documents, computing what is not there yet. Default folder: by content key in the cache.

        dtype: "auto", the one in which the verifier computes.  kept: by hash of the ids, states that are at hand from
        generation and need no computing.  pieces: who computes the others, in place of this verifier: a server.
        Shards appear whole or not at all, so a killed run continues where it was. Raises UserError for an unknown
        dtype, for states that are not finite, or when the disk cannot hold them (before anything is computed).
        """
        dtype, documents = store_dtype(dtype, verifier.dtype), Corpus.of(documents)
        index = {
            "format": FORMAT,
            "verifier": verifier.weights_hash,
            "aux_layers": list(verifier.aux_layers),
            "documents": documents.content_hash,
            "dtype": dtype,
            "record_dtype": str(verifier.dtype).removeprefix("torch."),
            "shard_tokens": shard_tokens,
        }
        folder = Path(folder) if folder is not None else cache_dir("states", key_of(index)[:16])
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"expected a folder that can be made at {folder}, found {error.strerror}") from error
        found = read_json(folder / "index.json")
        if not found and any(folder.glob("states-*.safetensors")):
            raise UserError(
                f"expected index.json beside the shards in {folder}, found none that can be read: put it back, or "
                "remove the folder and capture again"
            )
        different = [name for name, value in index.items() if found and found.get(name) != value]
        if different:
            raise UserError(f"{folder} holds states of another {different[0]}; choose another folder or remove it")
        if not found:
            write_json(folder / "index.json", index | {"name": verifier.name, "count": len(documents)})
        by = {"server": server} if server else _described(verifier)
        shards = _Writer(verifier, documents, folder, index, kept or {}, pieces, by).write()
        return cls(folder, documents, index, shards)

    def verify(self) -> None:
        """Read every shard and compare its checksum; UserError naming the first that differs."""
        for number in range(len(self.shards)):
            self._checked(number)

    def _checked(self, number: int) -> Path:
        """Where a shard lies; UserError when it is not what was written."""
        shard = self.shards[number]
        path = self.folder / shard["file"]
        if not path.is_file() or file_hash(path) != shard["sha256"]:
            found = "another sha256 than was written" if path.is_file() else "no file"
            raise UserError(
                f"shard {number} of {self.folder} is damaged, found {found}: remove {path.name}, and the same command "
                "(a run: resume=) computes it again"
            )
        return path

    def states(self, indices: Sequence[int]) -> VerifierStates:
        """The packed record [B = 1] of these documents, in this order, on the CPU, in the verifier's dtype."""
        documents = [self.documents[index] for index in indices]
        input_ids_BT, document_BT, position_BT, span_BT = packed_rows(documents)
        parts: dict[str, list[Tensor]] = {name: [] for name in PARTS}
        for index, document in zip(indices, documents, strict=True):
            number = int(np.searchsorted(self._firsts, index, side="right")) - 1
            token, label = (int(starts_N[index] - starts_N[self._firsts[number]]) for starts_N in self._starts)
            tokens, labels = slice(token, token + len(document.input_ids)), slice(label, label + document.labels)
            for name in PARTS:
                parts[name].append(self._rows(number, name, tokens if name == "aux" else labels))
        whole = {name: torch.cat(pieces) for name, pieces in parts.items()}
        return VerifierStates(
            input_ids_BT=input_ids_BT,
            document_BT=document_BT,
            position_BT=position_BT,
            span_BT=span_BT,
            aux_BTAD=whole["aux"][None],
            last_PD=whole["last"],
            last_index_P=label_rows(span_BT),
            top_P=whole["top"],
            lse_P=whole["lse"],
        )

    def _rows(self, number: int, name: str, rows: slice) -> Tensor:
        shard = self._shard(number)
        if name not in ("aux", "last"):
            return shard[name][rows]
        scale = shard.get(f"{name}_scale")
        return dequantize(shard[name][rows], None if scale is None else scale[rows], self.dtype)

    def _shard(self, number: int) -> dict[str, Tensor]:
        if number not in self._open:
            path = self._checked(number)  # the first look at it: the pass warms the pages that are mapped then
            with safe_open(path, "pt") as stream:  # tensors are views of the mapped file: pages come as they are read
                self._open[number] = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        return self._open[number]


def bytes_needed(verifier: Verifier, documents: Sequence[Document], dtype: str = "auto") -> int:
    """Size of the store on disk, headers aside."""
    documents = Corpus.of(documents)
    tokens, labels = int(documents.lengths_N.sum()), int(documents.labels_N.sum())
    kind = store_dtype(dtype, verifier.dtype)
    return states_bytes(kind, verifier.hidden_size, len(verifier.aux_layers), tokens, labels)


def _described(verifier: Verifier) -> dict[str, str]:
    return {"verifier": verifier.name, "dtype": str(verifier.dtype), "device": str(verifier.device)}


def _starts(counts_N: np.ndarray) -> np.ndarray:
    """int64 [N + 1]: where each document's rows begin, were all documents one after another."""
    return np.concatenate(([0], np.cumsum(counts_N)))


def _shards(lengths: Sequence[int] | np.ndarray, shard_tokens: int) -> list[tuple[int, int]]:
    """Half-open ranges of documents of these lengths; each ends with the document that fills `shard_tokens`."""
    starts_N, ranges, first = _starts(np.asarray(lengths, dtype=np.int64)), [], 0
    while first < len(lengths):
        full = int(np.searchsorted(starts_N, starts_N[first] + shard_tokens))
        ranges.append((first, min(max(full, first + 1), len(lengths))))
        first = ranges[-1][1]
    return ranges


class _Writer:
    """Writes the shards that are not there. Each is locked while it is computed; one that is locked is another's."""

    def __init__(
        self,
        verifier: Verifier,
        documents: Corpus,
        folder: Path,
        index: dict,
        kept: Mapping[str, DocumentStates],
        pieces: Pieces | None,
        by: dict[str, str],
    ):
        self.verifier, self.documents, self.folder, self.index = verifier, documents, folder, index
        self.kept, self.pieces, self.by = kept, pieces or self._computed, by
        self.ranges = _shards(documents.lengths_N, index["shard_tokens"])

    def write(self) -> list[dict]:
        self.missing = [number for number in range(len(self.ranges)) if self._entry(number) is None]
        if self.missing:
            todo = self.documents.select(np.concatenate([np.arange(*self.ranges[number]) for number in self.missing]))
            self._plan(todo)
            with progress_bar() as self.bar:
                self.total, self.begun = int(todo.lengths_N.sum()), time.monotonic()
                self.said = self.looked = self.begun
                self.task = self.bar.add_task("verifier states", total=self.total, rate="")
                for wait in (0, -1):  # first what nobody works at, then what others have left
                    for number in self.missing:
                        self._share(number, wait)
        return [self._entry(number) for number in range(len(self.ranges))]

    def _share(self, number: int, wait: float) -> None:
        if self._entry(number) is not None:
            return
        locks = self.folder / ".locks"
        try:
            locks.mkdir(exist_ok=True)
            with FileLock(locks / f"{number:05d}", timeout=wait):
                if self._entry(number) is None:
                    self._write(number)
                    self._tell()
        except Timeout:
            pass
        except PermissionError as error:
            raise UserError(
                f"expected a folder that can be written, for {self.folder} lacks shards: found {error.strerror} at "
                f"{error.filename}; choose another with out= or EYRIE_CACHE"
            ) from error

    def _plan(self, todo: Corpus) -> None:
        """What it will take. UserError where the disk is too small."""
        tokens, free = int(todo.lengths_N.sum()), shutil.disk_usage(self.folder).free
        needed = bytes_needed(self.verifier, todo, self.index["dtype"])
        log.info(
            f"states: {tokens:,} tokens of {needed / tokens:,.0f} bytes, {size(needed)} in {self.folder}, "
            f"{size(free)} free{self._estimate(todo) if needed * 1.02 <= free else ''}"
        )
        if needed * 1.02 > free:
            raise UserError(
                f"expected {size(needed)} of free disk for the verifier's states, found {size(free)} at "
                f"{self.folder}; set EYRIE_CACHE, data.store_dtype=int8, a smaller data.max_tokens, or data.store=false"
            )

    def _estimate(self, todo: Corpus) -> str:
        """The time that it will take, where a look at a thousand tokens of it is cheap."""
        if self.kept:
            todo = todo.select([index for index, document in enumerate(todo) if document.ids_hash not in self.kept])
        tokens = int(todo.lengths_N.sum())
        if tokens < 16 * FORWARD_TOKENS:
            return ""
        first = todo[: _shards(todo.lengths_N, FORWARD_TOKENS)[0][1]]
        begun = time.monotonic()
        for _ in self.pieces(first):
            pass
        seconds = (time.monotonic() - begun) / int(first.lengths_N.sum()) * tokens
        return f", about {seconds / 60:.1f} min" if seconds >= 60 else f", about {seconds:.0f} s"

    def _tell(self) -> None:
        """How far all processes are; every second or so, for each shard is looked at."""
        now = time.monotonic()
        if self.looked != self.begun and now - self.looked < min(1, SECONDS_PER_LINE):
            return
        self.looked = now
        self.missing = [number for number in self.missing if self._entry(number) is None]
        left = sum(int(self._documents(number).lengths_N.sum()) for number in self.missing)
        rate = (self.total - left) / (now - self.begun)
        if left and (self.said == self.begun or now - self.said >= SECONDS_PER_LINE):
            self.said = now
            log.info(f"states: {1 - left / self.total:.0%}, {rate:,.0f} tokens/s, about {left / rate:.0f} s to go")
        self.bar.update(self.task, completed=self.total - left, rate=f"{rate:,.0f} tokens/s")

    def _documents(self, number: int) -> Corpus:
        return self.documents[slice(*self.ranges[number])]

    def _path(self, number: int) -> Path:
        return self.folder / f"states-{number:05d}.safetensors"

    def _entry(self, number: int) -> dict | None:
        """What lies beside a shard; None unless both are whole."""
        path = self._path(number)
        entry = read_json(path.with_suffix(".json"))
        named = entry.get("file") == path.name and isinstance(entry.get("sha256"), str)  # the file is no other folder's
        return entry if named and path.is_file() and path.stat().st_size == entry.get("bytes") else None

    def _write(self, number: int) -> None:
        documents, path, dtype = self._documents(number), self._path(number), self.index["dtype"]
        parts: dict[str, list[Tensor]] = {}
        for piece in self._pieces(documents):
            for name, tensor in zip(PARTS, piece, strict=True):
                for key, part in _stored(name, tensor, dtype).items():
                    parts.setdefault(key, []).append(part.cpu())
        for left in self.folder.glob(f"{path.name}.*"):  # by a process that was killed as it wrote
            left.unlink(missing_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)  # of a shard that was here before, and as large
        with replacing(path) as temporary:
            save_file({name: torch.cat(some).contiguous() for name, some in parts.items()}, temporary)
        entry = {"file": path.name, "bytes": path.stat().st_size, "sha256": file_hash(path)}
        entry |= {"documents": len(documents), "tokens": int(documents.lengths_N.sum()), "computed_by": self.by}
        write_json(path.with_suffix(".json"), entry)

    def _pieces(self, documents: Sequence[Document]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of the documents in order: those at hand one by one, others as they are computed."""
        for at_hand, run in groupby(documents, lambda document: document.ids_hash in self.kept):
            if not at_hand:
                yield from self.pieces(list(run))
                continue
            for document in run:
                states, (_, _, _, span_BT) = self.kept[document.ids_hash], packed_rows([document])
                row_P = label_rows(span_BT)
                yield states.aux_TAD, states.last_TD[row_P], states.top_T[row_P], states.lse_T[row_P]

    def _computed(self, documents: Sequence[Document]) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        for first, last in _shards([len(document.input_ids) for document in documents], FORWARD_TOKENS):
            states = self.verifier.states(*packed_rows(documents[first:last]))
            yield states.aux_BTAD[0], states.last_PD, states.top_P, states.lse_P


def _stored(name: str, tensor: Tensor, dtype: str) -> dict[str, Tensor]:
    """The tensors of a shard that one of PARTS becomes."""
    if name not in ("aux", "last"):
        return {name: tensor.float() if name == "lse" else tensor}
    values, scale = quantize(tensor, STORE_DTYPES[dtype])
    return {name: values} if scale is None else {name: values, f"{name}_scale": scale}
