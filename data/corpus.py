"""Tokenised documents as memory-mapped Arrow: a sequence of Documents of which memory holds a few numbers each."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa

from data.documents import Document, with_prompt

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "source": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "edges": pa.list_(pa.int32()),  # of the spans: start, end, start, end ...
        "prompt": pa.list_(pa.int32()),  # start and end of the prompt span, or nothing
        "content": pa.binary(32),  # Document.content_hash
        "question": pa.uint64(),  # data.unique.question_key, 0 where nobody asked
    }
)
BLOCK = 65536  # documents whose hashes are looked at together


class Corpus(Sequence[Document]):
    """Chosen rows of Arrow batches. A slice or `select` is a view, and so is `with_prompts`.

    lengths_N, labels_N, answer_tokens_N: int64, of each document, as Document has them.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch]):
        self._parts = _Parts(batches)
        self._rows_N, self._prompts = np.arange(self._parts.firsts[-1]), False

    @classmethod
    def of(cls, documents: Sequence[Document]) -> Corpus:
        """A Corpus as it is; other documents as a Corpus in memory."""
        if isinstance(documents, Corpus):
            return documents
        columns = Columns()
        for document in documents:
            columns.add(document)
        return cls([columns.batch()])

    def select(self, indices_N: np.ndarray | Sequence[int]) -> Corpus:
        """These documents, in this order."""
        return self._view(self._rows_N[np.asarray(indices_N, dtype=np.int64)], self._prompts)

    def with_prompts(self) -> Corpus:
        """The same documents with the prompts supervised that the verifier wrote (`data.documents.with_prompt`)."""
        return self._view(self._rows_N, True)

    def split(self, validation: int) -> tuple[Corpus, Corpus]:
        """(train, validation) by hash of content, so that no question can be in both; both keep the order.

        The `validation` documents with the lowest hashes are held out, at most a fifth of all: adding rows moves few
        documents across. Documents of one question (a dialogue in several documents, say) count by the hash of the
        first and stay together, so there may be fewer. Documents must differ from one another.
        """
        wanted = min(validation, len(self) // 5)
        question_N, key_N = self._parts.questions_N[self._rows_N], self.keys_N
        _, first_U, which_N = np.unique(question_N, return_index=True, return_inverse=True)
        key_N = np.where(question_N > 0, key_N[first_U[which_N]], key_N)
        held_N = key_N < np.sort(key_N)[wanted] if wanted else np.zeros(len(self), dtype=bool)
        return self.select(np.flatnonzero(~held_N)), self.select(np.flatnonzero(held_N))

    def label_counts(self, vocab_size: int) -> np.ndarray:
        """int64 [V]: how often each token is a label. The first token of an answer never is: nothing predicts it."""
        counts_V = np.zeros(vocab_size, dtype=np.int64)
        for part, rows_N, _ in self._parts.of(self._rows_N):
            counts_V += np.bincount(part.labels_of(rows_N, self._prompts), minlength=vocab_size)
        return counts_V

    def contents(self) -> np.ndarray:
        """uint8 [N, 32]: the documents' content hashes."""
        found_N32 = np.empty((len(self), 32), dtype=np.uint8)
        for part, rows_N, here_N in self._parts.of(self._rows_N):
            found_N32[here_N] = part.contents_N32[rows_N]
        for index in np.flatnonzero(self._parts.prompted_N[self._rows_N]) if self._prompts else ():
            found_N32[index] = np.frombuffer(bytes.fromhex(self[int(index)].content_hash), dtype=np.uint8)
        return found_N32

    @cached_property
    def content_hash(self) -> str:
        return content_hash(self)

    @property
    def keys_N(self) -> np.ndarray:
        """uint64 [N]: data.unique.document_key of each, prompts not supervised."""
        return self._parts.keys_N[self._rows_N]

    @cached_property
    def lengths_N(self) -> np.ndarray:
        return self._parts.lengths_N[self._rows_N]

    @cached_property
    def labels_N(self) -> np.ndarray:
        return self._parts.labels_N[int(self._prompts)][self._rows_N]

    @cached_property
    def answer_tokens_N(self) -> np.ndarray:
        return self._parts.answer_tokens_N[int(self._prompts)][self._rows_N]

    def __len__(self) -> int:
        return len(self._rows_N)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self._view(self._rows_N[index], self._prompts)
        document = self._parts.document(int(self._rows_N[index]))
        return with_prompt(document) if self._prompts else document

    def _view(self, rows_N: np.ndarray, prompts: bool) -> Corpus:
        view = Corpus.__new__(Corpus)
        view._parts, view._rows_N, view._prompts = self._parts, rows_N, prompts
        return view


def content_hash(*corpora: Corpus) -> str:
    """One sha256 hex for ordered documents: over the `content_hash` of each."""
    digest = hashlib.sha256()
    for corpus in corpora:
        for first in range(0, len(corpus), BLOCK):
            digest.update(corpus[first : first + BLOCK].contents().tobytes())
    return digest.hexdigest()


class Columns:
    """Documents on their way into a batch, four bytes a token."""

    def __init__(self) -> None:
        self.names: tuple[list[str], list[str]] = ([], [])
        self.ids, self.edges, self.prompts = _Lists(), _Lists(), _Lists()
        self.contents, self.questions = bytearray(), array("Q")

    def __len__(self) -> int:
        return len(self.questions)

    @property
    def tokens(self) -> int:
        return len(self.ids.values)

    def add(self, document: Document, question: int = 0) -> None:
        for column, text in zip(self.names, (document.id, document.source), strict=True):
            column.append(text.encode("utf-8", "replace").decode())  # JSON may hold half a surrogate pair
        self.ids.add(document.input_ids)
        self.edges.add([edge for span in document.spans for edge in span])
        self.prompts.add(document.prompt_span or ())
        self.contents += bytes.fromhex(document.content_hash)
        self.questions.append(question)

    def batch(self) -> pa.RecordBatch:
        contents = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(32), len(self), [None, pa.py_buffer(bytes(self.contents))]
        )
        lists = [column.arrow() for column in (self.ids, self.edges, self.prompts)]
        names = [pa.array(column, pa.string()) for column in self.names]
        questions = pa.array(np.frombuffer(self.questions, np.uint64), pa.uint64())
        return pa.RecordBatch.from_arrays([*names, *lists, contents, questions], schema=SCHEMA)


class _Lists:
    """A column of lists of int32: all values one after another, and where each list starts."""

    def __init__(self) -> None:
        self.values, self.starts = array("i"), array("i", [0])

    def add(self, values: Sequence[int]) -> None:
        self.values.extend(values)
        self.starts.append(len(self.values))

    def arrow(self) -> pa.ListArray:
        return pa.ListArray.from_arrays(*(pa.array(np.frombuffer(a, np.int32)) for a in (self.starts, self.values)))


class _Ragged:
    """The same column read: views of its values and of where each list starts."""

    def __init__(self, column: pa.ListArray):
        self.values, self.starts_N = column.values.to_numpy(), column.offsets.to_numpy()

    def __getitem__(self, row: int) -> list[int]:
        return self.values[self.starts_N[row] : self.starts_N[row + 1]].tolist()


class _Parts:
    """Batches one after another, and columns over all of them, made when they are first asked for.

    labels_N, answer_tokens_N: without, and with, the verifier's own prompts.  prompted_N: who has one.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch]):
        self.parts = [_Part(batch) for batch in batches if batch.num_rows]
        self.firsts = np.cumsum([0, *(len(part) for part in self.parts)])

    def document(self, row: int) -> Document:
        number = int(np.searchsorted(self.firsts, row, side="right")) - 1
        return self.parts[number].document(row - int(self.firsts[number]))

    def of(self, rows_N: np.ndarray) -> Iterator[tuple[_Part, np.ndarray, np.ndarray]]:
        """(part, its own numbers of the rows that lie in it, where these stand in `rows_N`) of each that has any."""
        number_N = np.searchsorted(self.firsts, rows_N, side="right") - 1
        for number in np.unique(number_N):
            here_N = np.flatnonzero(number_N == number)
            yield self.parts[number], rows_N[here_N] - self.firsts[number], here_N

    @cached_property
    def keys_N(self) -> np.ndarray:
        return self._column(np.uint64, lambda part: part.keys_N)

    @cached_property
    def questions_N(self) -> np.ndarray:
        return self._column(np.uint64, lambda part: part.batch["question"].to_numpy())

    @cached_property
    def lengths_N(self) -> np.ndarray:
        return self._column(np.int64, lambda part: np.diff(part.ids.starts_N))

    @cached_property
    def labels_N(self) -> list[np.ndarray]:
        return self._sums(lambda sizes: np.maximum(sizes - 1, 0))

    @cached_property
    def answer_tokens_N(self) -> list[np.ndarray]:
        return self._sums(lambda sizes: sizes)

    @cached_property
    def prompted_N(self) -> np.ndarray:
        return self._column(bool, lambda part: np.diff(part.prompts.starts_N) > 0)

    def _sums(self, of: Callable) -> list[np.ndarray]:
        return [self._column(np.int64, lambda part, own=own: part.sums_N(of, own)) for own in (False, True)]

    def _column(self, kind: type, of: Callable) -> np.ndarray:
        return np.concatenate([np.zeros(0, kind), *(of(part).astype(kind) for part in self.parts)])


class _Part:
    """numpy's views of one Arrow batch that is not empty."""

    def __init__(self, batch: pa.RecordBatch):
        self.batch = batch
        self.ids, self.edges, self.prompts = (_Ragged(batch[name]) for name in ("input_ids", "edges", "prompt"))
        self.contents_N32 = np.frombuffer(batch["content"].buffers()[1], np.uint8)[: 32 * len(self)].reshape(-1, 32)

    def __len__(self) -> int:
        return self.batch.num_rows

    @property
    def keys_N(self) -> np.ndarray:
        """uint64: the first eight bytes of each content hash, in whose order they sort (data.unique.document_key)."""
        return np.ascontiguousarray(self.contents_N32[:, :8]).view(">u8")[:, 0].astype(np.uint64)

    def document(self, row: int) -> Document:
        flat, prompt = self.edges[row], self.prompts[row]
        spans = list(zip(flat[::2], flat[1::2], strict=True))
        names = (self.batch[name][row].as_py() for name in ("id", "source"))
        return Document(next(names), self.ids[row], spans, next(names), tuple(prompt) if prompt else None)

    def sums_N(self, of: Callable, prompts: bool) -> np.ndarray:
        """int64 [N]: of each document, the sum of `of` its spans' sizes."""
        total_N = np.zeros(len(self), dtype=np.int64)
        for column in (self.edges, self.prompts)[: 1 + prompts]:
            ends = np.concatenate(([0], np.cumsum(of(column.values[1::2] - column.values[::2]), dtype=np.int64)))
            total_N += np.diff(ends[column.starts_N // 2])
        return total_N

    def labels_of(self, rows_N: np.ndarray, prompts: bool) -> np.ndarray:
        """The ids that are labels in these rows, one after another."""
        chosen_N = np.zeros(len(self), dtype=bool)
        chosen_N[rows_N] = True
        marks = np.zeros(len(self.ids.values) + 1, dtype=np.int32)
        for column in (self.edges, self.prompts)[: 1 + prompts]:
            row_S = np.repeat(np.arange(len(self)), np.diff(column.starts_N) // 2)
            start_S, end_S = (column.values[side::2] + self.ids.starts_N[row_S] for side in (0, 1))
            used_S = chosen_N[row_S] & (end_S - start_S > 1)
            np.add.at(marks, start_S[used_S] + 1, 1)
            np.add.at(marks, end_S[used_S], -1)
        return self.ids.values[np.cumsum(marks[:-1]) > 0]
