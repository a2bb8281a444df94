"""Dialogues to documents, one after another: what is filtered, what is cut, and a count for all that is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.errors import UserError
from data.documents import Document, Drop, clip, describe
from data.rows import Dialogue
from data.tokens import to_documents
from data.unique import ASKED, SHARED, Exclusion, Seen, document_key, question_key

if TYPE_CHECKING:
    from models.verifier import Verifier

UNIQUE = ("document", "prompt")


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
    def enough(self) -> bool:
        how = self.how
        documents = how.max_documents is not None and self.documents >= how.max_documents
        return documents or (how.max_tokens is not None and self.answer_tokens >= how.max_tokens)

    def convert(self, dialogue: Dialogue) -> tuple[list[Document], int]:
        """(its documents, possibly none; the key of its question, or 0 where questions need not differ)."""
        texts, question, kept = _asked(dialogue, self.verifier), 0, []
        try:
            if self.how.exclude is not None and (reason := self.how.exclude.reason(texts)):
                raise Drop(reason)
            if self.how.unique == "prompt":
                question = question_key(texts[0])
                if question in self.questions:
                    raise Drop("duplicate prompt")
            found = to_documents(dialogue, self.verifier, self.how.thinking, self.changed)
        except Drop as drop:
            self._drop(dialogue, texts, str(drop))
            return [], question
        for whole in found:
            if self.enough:
                break
            try:
                document = clip(whole, self.how.max_length)
                if document_key(document) in self.contents:
                    raise Drop("duplicate document")
            except Drop as drop:
                self._drop(dialogue, texts, str(drop))
                continue
            self._keep(document, whole)
            kept.append(document)
        if kept and question:
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

    def _drop(self, dialogue: Dialogue, texts: list[str], reason: str) -> None:
        self.dropped.append((dialogue.place or dialogue.id, reason, texts[0][:200]))


def tokenize(
    dialogues: Iterable[Dialogue], verifier: Verifier, max_length: int, counts: Counter, thinking: str = "template"
) -> Iterator[Document]:
    """Documents of the dialogues, at most `max_length` tokens each; unusable ones are counted by reason in `counts`.

    Raises UserError at the end when no dialogue was usable.
    """
    converter = Converter(verifier, Conversion(max_length, thinking))
    for dialogue in dialogues:
        yield from converter.convert(dialogue)[0]
    dropped = reasons(converter.dropped)
    counts.update(converter.changed + dropped)
    if not converter.documents:
        refuse(dropped, verifier)


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
