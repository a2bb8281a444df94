"""The tokenised dialogue that everything after tokenisation works on, and why rows get dropped."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise


class Drop(Exception):
    """A row that cannot be used. The message is the reason under which it is counted: keep it short and fixed."""


@dataclass(frozen=True)
class Document:
    """One dialogue as token ids, with the answers (and by `with_prompt` the prompt) that are supervised.

    input_ids: the whole dialogue, generated answers exactly as they were generated.
    spans:     half-open [start, end) of each answer, ascending, disjoint: its tokens and its end-of-turn
               token (absent when the answer was cut), without what the template writes after that.
    prompt_span: the same of a first prompt that the verifier wrote itself, its given opening left out.
    """

    id: str
    input_ids: list[int]
    spans: list[tuple[int, int]]
    source: str = ""
    prompt_span: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        edges = [0, *(edge for span in self.spans for edge in span), len(self.input_ids)]
        assert all(a <= b for a, b in pairwise(edges)), f"spans {self.spans} do not fit {len(self.input_ids)} ids"

    @property
    def labels(self) -> int:
        """How many rows of the verifier's law label something (`models.states.label_rows`)."""
        return sum(max(0, end - start - 1) for start, end in self.spans)

    @property
    def answer_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)

    @property
    def ids_hash(self) -> str:
        """sha256 hex of the ids alone."""
        return ids_hash(self.input_ids)

    @cached_property
    def content_hash(self) -> str:
        """sha256 hex of ids and spans; name and source do not enter."""
        flat = array("q", [len(self.input_ids), *self.input_ids, *(edge for span in self.spans for edge in span)])
        return hashlib.sha256(flat.tobytes()).hexdigest()


def ids_hash(ids: Sequence[int]) -> str:
    """sha256 hex of token ids."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()


def with_prompt(document: Document) -> Document:
    """The document with its prompt supervised like an answer, where the verifier wrote that."""
    own = document.prompt_span
    return document if own is None else replace(document, spans=[own, *document.spans])


def clip(document: Document, max_length: int) -> Document:
    """At most `max_length` tokens: up to the last answer that fits whole or, where none does, into the first one.

    Raises Drop when nothing supervised is left. What is left out is the caller's to count.
    """
    if len(document.input_ids) > max_length:
        spans = [span for span in document.spans if span[1] <= max_length]
        if not spans and document.spans and document.spans[0][0] < max_length:
            spans = [(document.spans[0][0], max_length)]
        own = document.prompt_span
        document = replace(
            document,
            input_ids=document.input_ids[: spans[-1][1] if spans else max_length],
            spans=spans,
            prompt_span=own if own is None or own[1] <= max_length else None,
        )
        if not document.labels:
            raise Drop("answer begins beyond max_length")
    elif not document.labels:
        raise Drop("answer shorter than two tokens")
    return document


def describe(counts: Counter | dict[str, int]) -> str:
    """`3 bad JSON, 1 empty answer`, most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item))
    return ", ".join(f"{count} {reason}" for reason, count in ordered if count)
