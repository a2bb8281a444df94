"""Where prompt and answer meet: tokenizers that merge over the border, and those that put spaces before texts."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from data.documents import Drop
from data.inspect import PROMPT, view
from data.prefixes import Prefixes
from data.rows import Dialogue
from data.tokens import to_documents
from models.chat import end_of_turn_ids
from templates import FAMILIES, MISTRAL
from tiny import tiny_pieces, tiny_tokenizer

MERGED = "answer tokenised apart: the tokenizer merges it with its prompt"
OWN = "answer in a document of its own: the template rewrites earlier turns"


def stand_in(tokenizer):
    return SimpleNamespace(
        tokenizer=tokenizer, eos_ids=end_of_turn_ids(tokenizer), vocab_size=len(tokenizer), name="tiny"
    )


def merging(*pair):
    """The tiny byte-level tokenizer with one more merge."""
    tokenizer = tiny_tokenizer()
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"]["".join(pair)] = max(state["model"]["vocab"].values()) + 1
    state["model"]["merges"].append(list(pair))
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    return stand_in(tokenizer)


def conversation(*texts):
    roles = ("user", "assistant")
    return Dialogue("d", "", [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)])


def served(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_an_answer_that_begins_with_a_line_break():
    """The header's last line break and the answer's first are one token in the rendering, and two when generated."""
    verifier, row, counts = merging("Ċ", "Ċ"), conversation("What?", "\n\nOne.", "How?", "Two."), Counter()
    tokenizer = verifier.tokenizer
    first, second = to_documents(row, verifier, counts=counts)
    ((start, end),) = first.spans
    assert first.input_ids[:start] == served(tokenizer, row.messages[:1])
    assert tokenizer.convert_ids_to_tokens(first.input_ids[start - 1 : start + 1]) == ["Ċ", "Ċ"]
    assert tokenizer.decode(first.input_ids[start:end]) == "\n\nOne.<|im_end|>"
    # The second question comes with the first answer as a server reads it, which is another beginning.
    ((start, end),) = second.spans
    assert second.input_ids[:start] == served(tokenizer, row.messages[:3])
    assert "ĊĊ" in tokenizer.convert_ids_to_tokens(second.input_ids)
    assert tokenizer.decode(second.input_ids[start:end]) == "Two.<|im_end|>"
    assert (first.id, second.id) == ("d", "d#2") and counts == {MERGED: 1, OWN: 1}
    counts.clear()
    assert len(to_documents(conversation("What?", "One.", "How?", "Two."), verifier, counts=counts)) == 1
    assert not counts


@pytest.mark.parametrize("prepend", ["first", "always", "never"])
def test_pieces_that_take_the_space_before_a_word(prepend):
    """Llama-2's tokenizer and its like, under a template whose header ends with a space."""
    spaced = MISTRAL.replace("' [/INST]'", "' [/INST] '").replace("' ' + m.content", "m.content")
    tokenizer = tiny_pieces(spaced, ("<unk>", "<s>", "</s>"), prepend)
    verifier, row, counts = stand_in(tokenizer), conversation("What is", "The capital é\n."), Counter()
    (document,) = to_documents(row, verifier, counts=counts)
    ((start, end),) = document.spans
    asked, whole = served(tokenizer, row.messages[:1]), tokenizer.apply_chat_template(row.messages, tokenize=False)
    assert document.input_ids[:start] == asked
    assert tokenizer.decode(document.input_ids) == tokenizer.decode(
        tokenizer(whole, add_special_tokens=False).input_ids
    )
    answer = tokenizer.decode(document.input_ids)[len(tokenizer.decode(asked)) :]
    assert answer == "The capital é\n.</s>"
    assert document.input_ids[start:].count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("prepend", ["first", "always", "never"])
@pytest.mark.parametrize("text", ["Paris.", " Paris", "\nParis", "é", "日本語 🙂", "x  y\n\n", "▁", "- a\n- b"])
def test_sentence_pieces_at_the_borders(prepend, text):
    tokenizer = tiny_pieces(MISTRAL, ("<unk>", "<s>", "</s>"), prepend)
    row = conversation("What is\n", text, "How many", text)
    (document,) = to_documents(row, stand_in(tokenizer))
    decode = tokenizer.decode
    for number, (start, end) in enumerate(document.spans):
        assert document.input_ids[:start] == served(tokenizer, row.messages[: 2 * number + 1])
        shown = text.replace("▁", " ")  # the pieces have one sign for both
        assert decode(document.input_ids[:end])[len(decode(document.input_ids[:start])) :] == f" {shown}</s>"
    assert document.input_ids.count(tokenizer.bos_token_id) == 1


def test_what_can_not_be_written_apart_is_refused(monkeypatch):
    verifier = merging("Ċ", "Ċ")
    monkeypatch.setattr("data.tokens.same_text", lambda *_: False)
    with pytest.raises(Drop, match="^tokenizer cannot write the answer apart from its prompt$"):
        to_documents(conversation("What?", "\n\nOne."), verifier)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_are_what_encoding_them_gives(family):
    """Every beginning of a text, read off the whole or encoded: the same ids."""
    tokenizer = FAMILIES[family].tokenizer()
    how = FAMILIES[family]
    whole = "".join(["What is\n\n it? ", how.header, " The  é\n", how.end, "🙂 x", *how.special])
    prefixes, read = Prefixes(tokenizer), 0
    assert prefixes(whole) == tokenizer(whole, add_special_tokens=False)["input_ids"]
    for length in range(1, len(whole)):
        text, known = whole[:length], len(prefixes.known)
        assert prefixes(text) == tokenizer(text, add_special_tokens=False)["input_ids"], text
        read += len(prefixes.known) == known
        del prefixes.known[1:]
    assert read >= 6, "most of those that end where a token does are read off"


def test_prefixes_encode_what_merges():
    tokenizer = merging("Ċ", "Ċ").tokenizer
    prefixes = Prefixes(tokenizer)
    assert tokenizer.convert_ids_to_tokens(prefixes("<|im_end|>\n\n"))[-1] == "ĊĊ"
    assert tokenizer.convert_ids_to_tokens(prefixes("<|im_end|>\n"))[-1] == "Ċ"


@pytest.mark.parametrize("family", ["mistral", "mistral3", "chatml"])
def test_inspect_shows_the_text_as_it_is(family):
    verifier, row = (
        FAMILIES[family].verifier(),
        conversation("What is é?", "The 🙂 is\nit.", "How many?", "Yes, 日本語"),
    )
    (document,) = to_documents(row, verifier)
    _, text, ids, _ = view(document, verifier.tokenizer, verifier.eos_ids).renderables
    assert text.plain.replace("\u21b5", "") == verifier.tokenizer.decode(document.input_ids)
    assert [int(number) for number in ids.plain.split()] == document.input_ids
    shown = [text.plain[span.start : span.end] for span in text.spans if span.style != PROMPT]
    end = FAMILIES[family].end
    assert "".join(shown).replace("\u21b5", "").split(end)[0].strip() == "The 🙂 is\nit."
