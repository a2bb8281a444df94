"""See which tokens are supervised: documents in colour, ids under the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from conf.errors import printable
from conf.terminal import KEPT
from data.convert import Conversion, Converter, reasons
from data.documents import Document, Drop
from data.rows import Dialogue
from data.tokens import prompt_ids

if TYPE_CHECKING:
    from conf.schema import DataConf
    from models.verifier import Verifier

PROMPT, FIRST, LABEL, END = "dim", "cyan", "bold green", "bold black on green"
LEGEND = ((PROMPT, "prompt: no loss"), (FIRST, "first answer token: read, never a label"), (LABEL, "label"))


def documents_of(
    dialogues: Iterable[Dialogue], verifier: Verifier, cfg: DataConf, counts: Counter
) -> Iterator[Document]:
    """What tokenising makes of dialogues; of a prompt that nobody has answered, what the verifier would be asked.

    What is left out or changed is counted by reason in `counts` as it is met.
    """
    converter = Converter(verifier, Conversion(cfg.max_length, cfg.thinking))
    for dialogue in dialogues:
        if dialogue.input_ids is None and dialogue.opening and not dialogue.answered:
            try:
                ids = prompt_ids(verifier.tokenizer, dialogue.opening, dialogue.tools)
                yield Document(dialogue.id, ids, [], dialogue.source)
            except Drop as drop:
                counts[str(drop)] += 1
            continue
        for documents, _ in converter.convert([dialogue]):
            counts.update(converter.changed + reasons(converter.dropped))
            converter.changed.clear()
            converter.dropped.clear()
            yield from documents


def styles(document: Document, eos_ids: Sequence[int]) -> list[str]:
    """The style of each token: PROMPT, FIRST, LABEL, or END for an end-of-turn token that is a label."""
    found = [PROMPT] * len(document.input_ids)
    for start, end in document.spans:
        for index in range(start, end):
            is_end = document.input_ids[index] in eos_ids
            found[index] = FIRST if index == start else END if is_end else LABEL
    return found


def view(document: Document, tokenizer, eos_ids: Sequence[int], ids: bool = True) -> RenderableType:
    """Text of a document with the supervised tokens highlighted, then its ids alike."""
    chosen = styles(document, eos_ids)
    title = Text(
        printable(f"{document.id}  {document.source}")
        + f"  {len(document.input_ids)} tokens, {len(document.spans)} answer(s) of "
        f"{document.answer_tokens} tokens, {document.labels} labels",
        style="bold",
    )
    text, numbers = Text(), Text()
    end = 0
    for style, run in groupby(chosen):
        start, end = end, end + len(list(run))
        # Line breaks are shown and kept: whether they are supervised is the question.
        shown = printable(_text(tokenizer, document.input_ids, start, end), KEPT).replace("\n", "\u21b5\n")
        text.append(shown, style=style)
        for token in document.input_ids[start:end]:
            numbers.append(str(token), style=style)
            numbers.append(" ")
    return Group(title, text, numbers, Text()) if ids else Group(title, text, Text())


def _text(tokenizer, ids: list[int], start: int, end: int) -> str:
    """The text of some tokens as it stands after those before them: alone, the first would lose its space."""
    before = ids[max(0, start - 4) : start]
    known, through = tokenizer.decode(before), tokenizer.decode(before + ids[start:end])
    return through[len(known) :] if through.startswith(known) else tokenizer.decode(ids[start:end])


def show(documents: Sequence[Document], tokenizer, eos_ids: Sequence[int], console: Console) -> None:
    """Print documents and the legend."""
    for document in documents:
        console.print(view(document, tokenizer, eos_ids))
    legend = Text("legend: ")
    for style, meaning in (*LEGEND, (END, "end of turn, a label")):
        legend.append(meaning, style=style)
        legend.append("   ")
    console.print(legend)
