"""Dialogues -> Documents: which tokens are an answer follows from the structure of the dialogue, never from a search.

The prompt of an answer is the template's rendering of all messages before it with the generation header; the answer is
what the rendering with that message adds, up to and including the end-of-turn token. Both must be prefixes of the whole
rendering, token for token, as they are when the verifier serves the dialogue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from conf.errors import UserError
from data.documents import Document, Drop, clip, describe
from data.rows import Dialogue
from models.chat import render
from models.vocab import DraftVocab, draft_vocab_size

if TYPE_CHECKING:
    from models.verifier import Verifier


def tokenize(dialogues: Iterable[Dialogue], verifier: Verifier, max_length: int, counts: Counter) -> Iterator[Document]:
    """Documents of the dialogues, at most `max_length` tokens each; unusable ones are counted by reason in `counts`.

    Raises UserError at the end when no dialogue was usable (another model's template, in most cases).
    """
    dropped, good = Counter(), 0
    for dialogue in dialogues:
        try:
            whole = to_document(dialogue, verifier)
            document = clip(whole, max_length)
        except Drop as drop:
            dropped[str(drop)] += 1
            continue
        good += 1
        if document is not whole:
            in_answer = len(document.spans) == 1 and document.spans[0][1] < whole.spans[0][1]
            counts["first answer cut at max_length" if in_answer else "later turns beyond max_length left out"] += 1
            counts["answer tokens beyond max_length"] += whole.answer_tokens - document.answer_tokens
        yield document
    counts.update(dropped)
    if dropped and not good:
        raise UserError(
            f"expected dialogues for the chat template of {verifier.name}, could use none of {dropped.total()}: "
            f"{describe(dropped)}; give conversations as text, or use the verifier that wrote them"
        )


def to_documents(dialogue: Dialogue, verifier: Verifier, thinking: str = "template") -> list[Document]:
    """One dialogue as Documents: one, or one an answer where the template rewrites earlier turns. Raises Drop."""
    return [to_document(dialogue, verifier)]


def to_document(dialogue: Dialogue, verifier: Verifier) -> Document:
    """One dialogue as a Document; raises Drop."""
    if dialogue.input_ids is not None:
        ids, spans = _from_ids(dialogue, verifier)
    elif dialogue.text is not None:
        ids, spans = _from_text(dialogue.text, verifier)
    else:
        ids, spans = _from_messages(dialogue.messages, verifier)
    return Document(dialogue.id, ids, spans, dialogue.source, dialogue.prompt_span)


def prompt_ids(tokenizer, messages: Sequence[dict]) -> list[int]:
    """What the verifier is served: the messages and the header of the answer to come. Raises Drop."""
    return _render(tokenizer, messages, True)


def same_text(tokenizer, ids: list[int], others: list[int]) -> bool:
    """Whether ids stand for the same text: what a model writes need not be cut into tokens as the tokenizer cuts it."""
    return ids == others or tokenizer.decode(ids) == tokenizer.decode(others)


def next_turn_ids(verifier: Verifier, messages: Sequence[dict]) -> list[int]:
    """What the template writes after the last answer's end-of-turn token, up to the next answer's header.

    messages end with [.., assistant, user]. With it a regenerated dialogue grows without its generated ids ever being
    tokenised again. Raises Drop.
    """
    before, after = _render(verifier.tokenizer, messages[:-1], False), _render(verifier.tokenizer, messages, True)
    _require_prefix(before, after)
    return after[_last_end(before, 0, verifier.eos_ids) :]


def label_counts(documents: Iterable[Document], vocab_size: int) -> torch.Tensor:
    """int64 [V]: how often each token is a label. The first token of an answer never is: nothing predicts it."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for document in documents:
        for start, end in document.spans:
            ids = torch.tensor(document.input_ids[start + 1 : end], dtype=torch.int64)
            counts_V += torch.bincount(ids, minlength=vocab_size)
    return counts_V


def draft_vocab(documents: Iterable[Document], vocab_size: int, size: int | None = None) -> tuple[DraftVocab, float]:
    """(vocabulary of the most frequent labels, the share of labels that it covers).

    size: see models.vocab.draft_vocab_size.
    """
    counts_V = label_counts(documents, vocab_size)
    vocab = DraftVocab.from_counts(counts_V, draft_vocab_size(size, vocab_size))
    return vocab, int(counts_V[vocab.ids_R].sum()) / max(1, int(counts_V.sum()))


def _render(tokenizer, messages: Sequence[dict], add_generation_prompt: bool) -> list[int]:
    try:
        return list(render(tokenizer, list(messages), add_generation_prompt=add_generation_prompt))
    except UserError as error:
        if not getattr(tokenizer, "chat_template", None):
            raise  # no row can do anything about that
        raise Drop(f"template refuses the dialogue ({str(error.__cause__ or error)[:60]})") from None


def _require_prefix(shorter: list[int], longer: list[int]) -> None:
    if longer[: len(shorter)] != shorter:
        raise Drop("template is not prefix-stable (it rewrites earlier turns)")


def _last_end(ids: list[int], start: int, eos_ids: Sequence[int]) -> int:
    """Index just after the last end-of-turn token at or after `start`."""
    for index in range(len(ids) - 1, start - 1, -1):
        if ids[index] in eos_ids:
            return index + 1
    raise Drop("template writes no end-of-turn token after an answer")


def _from_messages(messages: list[dict], verifier: Verifier) -> tuple[list[int], list[tuple[int, int]]]:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise Drop("no answer given")
    whole = _render(verifier.tokenizer, messages[: answers[-1] + 1], False)
    spans = []
    for index in answers:
        prompt = _render(verifier.tokenizer, messages[:index], True)
        grown = whole if index == answers[-1] else _render(verifier.tokenizer, messages[: index + 1], False)
        _require_prefix(prompt, grown)
        _require_prefix(grown, whole)
        end = _last_end(grown, len(prompt), verifier.eos_ids)
        if any(token in verifier.eos_ids for token in grown[len(prompt) : end - 1]):
            raise Drop("end-of-turn token inside an answer")
        spans.append((len(prompt), end))
    return whole[: spans[-1][1]], spans


def _from_ids(dialogue: Dialogue, verifier: Verifier) -> tuple[list[int], list[tuple[int, int]]]:
    ids, spans = dialogue.input_ids, dialogue.spans
    if max(ids) >= verifier.vocab_size:
        raise Drop("token id outside the vocabulary")
    first = next((i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"), None)
    prompt = dialogue.messages[:first]
    if prompt and not same_text(verifier.tokenizer, ids[: spans[0][0]], prompt_ids(verifier.tokenizer, prompt)):
        raise Drop("prompt ids differ from this template's rendering (written by another model?)")
    if any(token in verifier.eos_ids for start, end in spans for token in ids[start : end - 1]):
        raise Drop("end-of-turn token inside an answer")
    return ids[: spans[-1][1]], spans


def _from_text(text: str, verifier: Verifier) -> tuple[list[int], list[tuple[int, int]]]:
    """Text that carries headers already: an answer is what stands between its header's ids and the end of turn."""
    question = [{"role": "user", "content": "?"}]
    bare = _render(verifier.tokenizer, question, False)
    header = _render(verifier.tokenizer, question, True)[len(bare) :]
    ids = list(verifier.tokenizer(text, add_special_tokens=False)["input_ids"])
    spans, index = [], 0
    while header and index + len(header) <= len(ids):
        if ids[index : index + len(header)] != header:
            index += 1
            continue
        start = index + len(header)
        ends = (i + 1 for i in range(start, len(ids)) if ids[i] in verifier.eos_ids)
        index = next(ends, len(ids))
        spans.append((start, index))
    if not spans:
        shown = verifier.tokenizer.decode(header)
        raise Drop(f"preformatted text without this template's answer header {shown!r}")
    return ids[: spans[-1][1]], spans
