"""Dialogues -> Documents: which tokens are an answer follows from the structure of the dialogue, never from a search.

The prompt of an answer is the template's rendering of all messages before it with the generation header; the answer is
what the rendering with that message adds, up to and including the end-of-turn token. Both must be prefixes of the whole
rendering, token for token, as they are when the verifier serves the dialogue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from data.corpus import Corpus
from data.documents import Document, Drop
from data.prefixes import Prefixes
from data.rows import Dialogue
from data.thinking import CLOSE, settled
from data.turns import Turn, rendered, trail_ids, turns_of, turns_of_text
from models.chat import encode, thinking_switch
from models.vocab import DraftVocab, draft_vocab_size

if TYPE_CHECKING:
    from models.verifier import Verifier


def to_documents(
    dialogue: Dialogue, verifier: Verifier, thinking: str = "template", counts: Counter | None = None
) -> list[Document]:
    """One dialogue as Documents: one, or several where a later prompt does not begin with what came before it.

    That is so where the template rewrites earlier turns (it takes their thinking out, say), and where the tokenizer
    merges an answer with its prompt, which serving does of old answers alone. Each answer then is supervised after
    the prompt that serving would send. The second one's id is the dialogue's with #2.

    thinking: `data.thinking`, see data/thinking.py. counts: grows by what was done, by reason. Raises Drop.
    """
    counts = Counter() if counts is None else counts
    if dialogue.input_ids is not None:
        parts = [_from_ids(dialogue, verifier, thinking)]
    elif dialogue.text is not None:
        parts = _from_text(dialogue.text, verifier, thinking, counts)
    else:
        parts = _from_messages(dialogue, verifier, thinking, counts)
    name, source, own = dialogue.id, dialogue.source, dialogue.prompt_span
    return [
        Document(f"{name}#{number}" if number > 1 else name, ids, spans, source, own if number == 1 else None)
        for number, (ids, spans) in enumerate(parts, 1)
    ]


def to_document(dialogue: Dialogue, verifier: Verifier) -> Document:
    """The only Document of a dialogue; raises Drop."""
    (document,) = to_documents(dialogue, verifier)
    return document


def prompt_ids(tokenizer, messages: Sequence[dict], tools: list[dict] | None = None) -> list[int]:
    """What the verifier is served: the messages and the header of the answer to come. Raises Drop."""
    return encode(tokenizer, rendered(tokenizer, messages, True, tools))


def same_text(tokenizer, ids: list[int], others: list[int]) -> bool:
    """Whether ids stand for the same text: what a model writes need not be cut into tokens as the tokenizer cuts it."""
    return ids == others or tokenizer.decode(ids) == tokenizer.decode(others)


def next_prompt_ids(
    verifier: Verifier, ids: list[int], messages: Sequence[dict], tools: list[dict] | None = None
) -> list[int]:
    """The prompt of the next answer; messages end with [.., assistant, user], and `ids` are theirs before that user's.

    It begins with `ids`, so that generated ids are never tokenised again, unless the template rewrites earlier turns:
    then it is what serving would send. Raises Drop.
    """
    prompt = prompt_ids(verifier.tokenizer, messages, tools)
    for end in (index + 1 for index, token in enumerate(prompt) if token == ids[-1]):
        if same_text(verifier.tokenizer, prompt[:end], ids):
            return ids + prompt[end:]
    return prompt


def label_counts(documents: Sequence[Document], vocab_size: int) -> torch.Tensor:
    """int64 [V]: how often each token is a label. The first token of an answer never is: nothing predicts it."""
    return torch.from_numpy(Corpus.of(documents).label_counts(vocab_size))


def draft_vocab(documents: Sequence[Document], vocab_size: int, size: int | None = None) -> tuple[DraftVocab, float]:
    """(vocabulary of the most frequent labels, the share of labels that it covers).

    size: see models.vocab.draft_vocab_size.
    """
    counts_V = label_counts(documents, vocab_size)
    vocab = DraftVocab.from_counts(counts_V, draft_vocab_size(size, vocab_size))
    return vocab, int(counts_V[vocab.ids_R].sum()) / max(1, int(counts_V.sum()))


Part = tuple[list[int], list[tuple[int, int]]]  # ids, and the spans of answers in them


def _from_messages(dialogue: Dialogue, verifier: Verifier, thinking: str, counts: Counter) -> list[Part]:
    tokenizer = verifier.tokenizer
    turns = turns_of(tokenizer, settled(dialogue.messages, thinking), dialogue.tools)
    after = tuple(token for token in trail_ids(tokenizer) if token in verifier.eos_ids)[1:]

    def end_of(answer: list[int]) -> int:
        ends = [index for index, token in enumerate(answer) if token in verifier.eos_ids]
        if not ends:
            raise Drop("template writes no end-of-turn token after an answer")
        if tuple(answer[index] for index in ends[1:]) != after:
            raise Drop("end-of-turn token inside an answer")
        return ends[0] + 1

    return _parts(tokenizer, turns, end_of, counts)


def _from_text(text: str, verifier: Verifier, thinking: str, counts: Counter) -> list[Part]:
    turns = turns_of_text(verifier.tokenizer, text, verifier.tokenizer.convert_ids_to_tokens(verifier.eos_ids))
    _require_no_thinking((whole[len(prompt) :] for prompt, whole in turns), thinking)
    return _parts(verifier.tokenizer, turns, len, counts)


def _parts(tokenizer, turns: Sequence[Turn], end_of: Callable[[list[int]], int], counts: Counter) -> list[Part]:
    """The turns as ids: an answer is joined to those before it where its prompt begins with their ids.

    end_of: how much of what follows a prompt is the answer.
    """
    encoded = Prefixes(tokenizer)
    encoded(turns[-1][1])  # the longest text, which gives most of the others
    parts: list[Part] = []
    for prompt, whole in turns:
        ids, asked = encoded(whole), encoded(prompt)
        if ids[: len(asked)] == asked:
            answer = ids[len(asked) :]
        else:
            answer = _apart(tokenizer, asked, whole[len(prompt) :], ids)
            counts["answer tokenised apart: the tokenizer merges it with its prompt"] += 1
        before, spans = parts[-1] if parts else ([], [])
        if asked[: len(before)] == before:
            parts = parts[:-1]
        else:
            spans = []
            counts["answer in a document of its own: the template rewrites earlier turns"] += 1
        end = len(asked) + end_of(answer)
        parts.append(((asked + answer)[:end], [*spans, (len(asked), end)]))
    return parts


def _apart(tokenizer, asked: list[int], answer: str, whole: list[int]) -> list[int]:
    """Ids of an answer after its prompt's, where the tokenizer would merge across the border; raises Drop.

    Standing alone it may be given a space that is not there (SentencePiece): it is tried after other texts too.
    """
    for before in ("", tokenizer.eos_token or "", "\n"):
        alone = encode(tokenizer, before)
        ids = encode(tokenizer, before + answer)
        if ids[: len(alone)] == alone and same_text(tokenizer, asked + ids[len(alone) :], whole):
            return ids[len(alone) :]
    raise Drop("tokenizer cannot write the answer apart from its prompt")


def _from_ids(dialogue: Dialogue, verifier: Verifier, thinking: str) -> Part:
    ids, spans, tokenizer = dialogue.input_ids, dialogue.spans, verifier.tokenizer
    if max(ids) >= verifier.vocab_size:
        raise Drop("token id outside the vocabulary")
    if any(token in verifier.eos_ids for start, end in spans for token in ids[start : end - 1]):
        raise Drop("end-of-turn token inside an answer")
    _require_no_thinking((tokenizer.decode(ids[start:end]) for start, end in spans), thinking)
    # Answers before the first that is supervised stand in other documents.
    answers = [index for index, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    before = dialogue.messages[: answers[-len(spans) :][0] if answers else None]
    if before and not _is_prompt(ids[: spans[0][0]], before, dialogue.tools, tokenizer):
        raise Drop("prompt ids differ from this template's rendering (written by another model?)")
    return ids[: spans[-1][1]], spans


def _require_no_thinking(answers: Iterable[str], thinking: str) -> None:
    """Drop where a policy would change answers that must stay as they are."""
    if thinking != "template" and any(CLOSE in answer for answer in answers):
        raise Drop(f"thinking in preformatted text or ids, with data.thinking={thinking}")


def _is_prompt(ids: list[int], messages: Sequence[dict], tools, tokenizer) -> bool:
    """Whether ids are what serving sends, with the template's own choice of thinking or with either."""
    options = [{}, thinking_switch(tokenizer, True), thinking_switch(tokenizer, False)]
    texts = (rendered(tokenizer, messages, True, tools, **some) for some in options[: 3 if options[1] else 1])
    return any(same_text(tokenizer, ids, encode(tokenizer, text)) for text in texts)
