"""Dialogues to documents, one after another: what is filtered, what is cut, and a count for all that is left out."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from conf.errors import UserError
from data.documents import Document, Drop, clip, describe
from data.quarantine import SHOWN
from data.rows import Dialogue
from data.tokens import to_documents
from data.unique import ASKED, SHARED, Exclusion, Seen, document_key, question_key

if TYPE_CHECKING:
    from models.verifier import Verifier

UNIQUE = ("document", "prompt")
WORKERS = min(4, os.cpu_count() or 1)  # of two cores, both; more threads than four wait for Python


@dataclass(frozen=True)
class Conversion:
    """How dialogues become documents; `settings` is what the result depends on, for a content key.

    unique: "document": equal ones count once; "prompt": and only the first dialogue that asks a question.
    exclude: questions that no document may ask.  max_documents, max_tokens: when there are enough; tokens of answers.
    """

    max_length: int
    thinking: str = "template"
    unique: str = "document"
    exclude: Exclusion | None = None
    max_documents: int | None = None
    max_tokens: int | None = None

    @property
    def settings(self) -> dict:
        own = {name: value for name, value in vars(self).items() if name != "exclude"}
        return own | {"exclude": None if self.exclude is None else self.exclude.hash}


@dataclass
class _Tried:
    """A dialogue by itself: what it asks, and its documents or why there are none."""

    texts: list[str]
    documents: list[Document] = field(default_factory=list)
    changed: Counter[str] = field(default_factory=Counter)
    excluded: str = ""
    refused: str = ""


class Converter:
    """Turns dialogues into documents and remembers what it has seen.

    documents, answer_tokens: so far.  changed: what was cut or done otherwise, by reason.
    dropped: (place, reason, beginning of the text) of each dialogue or document that was left out. The caller may empty
    both.
    """

    def __init__(self, verifier: Verifier, how: Conversion):
        self.verifier, self.how = verifier, how
        self.documents = self.answer_tokens = 0
        self.changed: Counter[str] = Counter()
        self.dropped: list[tuple[str, str, str]] = []
        self.contents, self.questions = Seen(), Seen()

    @property
    def wanted(self) -> float:
        """How many documents more, at most."""
        if self.how.max_tokens is not None and self.answer_tokens >= self.how.max_tokens:
            return 0
        return math.inf if self.how.max_documents is None else max(0, self.how.max_documents - self.documents)

    @property
    def enough(self) -> bool:
        return self.wanted == 0

    def convert(self, dialogues: Sequence[Dialogue]) -> Iterator[tuple[list[Document], int]]:
        """For each, (its documents, possibly none; the key of its question, 0 without one).

        Some are tokenised at a time: tokenizers let other threads run meanwhile.
        """
        with ThreadPoolExecutor(WORKERS) as pool:
            for dialogue, tried in zip(dialogues, pool.map(self._try, dialogues), strict=True):
                yield self._take(dialogue, tried)

    def _try(self, dialogue: Dialogue) -> _Tried:
        """What needs no look at other dialogues."""
        tried = _Tried(_asked(dialogue, self.verifier))
        if self.how.exclude is not None and (reason := self.how.exclude.reason(tried.texts)):
            tried.excluded = reason
            return tried
        try:
            tried.documents = to_documents(dialogue, self.verifier, self.how.thinking, tried.changed)
        except Drop as drop:
            tried.refused = str(drop)
        return tried

    def _take(self, dialogue: Dialogue, tried: _Tried) -> tuple[list[Document], int]:
        question, kept = question_key(tried.texts[0]) if tried.texts[0].strip() else 0, []
        once = self.how.unique == "prompt" and question
        repeated = "duplicate prompt" if once and question in self.questions else ""
        if reason := tried.excluded or repeated or tried.refused:
            self._drop(dialogue, tried, reason)
            return kept, question
        self.changed += tried.changed
        for whole in tried.documents:
            if self.enough:
                break
            try:
                document = clip(whole, self.how.max_length)
                if document_key(document) in self.contents:
                    raise Drop("duplicate document")
            except Drop as drop:
                self._drop(dialogue, tried, str(drop))
                continue
            self._keep(document, whole)
            kept.append(document)
        if kept and once:
            self.questions.add(question)
        return kept, question

    def _keep(self, document: Document, whole: Document) -> None:
        self.contents.add(document_key(document))
        self.documents += 1
        self.answer_tokens += document.answer_tokens
        if document is not whole:
            in_answer = len(document.spans) == 1 and document.spans[0][1] < whole.spans[0][1]
            what = "first answer cut at max_length" if in_answer else "later turns beyond max_length left out"
            self.changed[what] += 1
            self.changed["answer tokens beyond max_length"] += whole.answer_tokens - document.answer_tokens

    def _drop(self, dialogue: Dialogue, tried: _Tried, reason: str) -> None:
        self.dropped.append((dialogue.place or dialogue.id, reason, tried.texts[0][:SHOWN]))


def reasons(dropped: Iterable[tuple[str, str, str]]) -> Counter[str]:
    """How often each was why something was left out."""
    return Counter(reason for _, reason, _ in dropped)


def refuse(dropped: Counter, verifier: Verifier) -> None:
    """UserError when all was dropped (another model's template, in most cases)."""
    if dropped:
        raise UserError(
            f"expected dialogues for the chat template of {verifier.name}, could use none of {dropped.total()}: "
            f"{describe(dropped)}; give conversations as text, or use the verifier that wrote them"
            + ("; data.exclude=[] keeps what evaluation asks" if {ASKED, SHARED} & dropped.keys() else "")
        )


def _asked(dialogue: Dialogue, verifier: Verifier) -> list[str]:
    """The user's turns; of a row without turns all that is not an answer, the template's words included."""
    if turns := [message["content"] for message in dialogue.messages if message["role"] == "user"]:
        return turns
    if dialogue.input_ids is None:
        return [dialogue.text or ""]
    edges = [0, *(edge for span in dialogue.spans for edge in span)]
    return [verifier.tokenizer.decode(dialogue.input_ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=False)]
