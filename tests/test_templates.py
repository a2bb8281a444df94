"""What is supervised under the chat templates of many families: exact texts, and ids as serving is sent them.

tests/golden/templates.txt holds every rendering with its answers in brackets; `EYRIE_WRITE_GOLDEN=1 python -m pytest
tests/test_templates.py` writes it anew.
"""

import os
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from data.documents import Drop
from data.rows import Dialogue
from data.tokens import next_prompt_ids, to_documents
from templates import FAMILIES

GOLDEN = Path(__file__).parent / "golden" / "templates.txt"
DATE = "26 Jul 2024"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


DIALOGUES = {
    "one turn": [user("What is it?"), answer("Paris.")],
    "three turns": [user("What?"), answer("One."), user("How?"), answer("Two."), user("Why?"), answer("Three.")],
    "system": [{"role": "system", "content": "Be kind."}, user("What?"), answer("One."), user("How?"), answer("Two.")],
    "tools": [
        user("Add."),
        answer("", tool_calls=CALL),
        {"role": "tool", "name": "add", "content": "3"},
        answer("It is three."),
    ],
    "thinking": [
        user("What?"),
        answer("<think>\nHmm.\n</think>\n\nOne."),
        user("How?"),
        answer("<think>\nSo.\n</think>\n\nTwo."),
    ],
}


@lru_cache
def verifier_of(family):
    return FAMILIES[family].verifier()


def documents_of(family, messages, counts=None, tools=None):
    return to_documents(Dialogue("d", "", messages, tools=tools), verifier_of(family), "template", counts)


def marked(tokenizer, document):
    """The document's text with its answers in brackets."""
    text, at = "", 0
    for start, end in document.spans:
        before, through = tokenizer.decode(document.input_ids[:start]), tokenizer.decode(document.input_ids[:end])
        text, at = f"{text}{before[at:]}⟦{through[len(before) :]}⟧", len(through)
    assert document.spans[-1][1] == len(document.input_ids)
    return text


def served(family, messages, tools=None):
    """Prompt ids by transformers alone."""
    tokenizer = verifier_of(family).tokenizer
    text = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True, tokenize=False)
    if family == "llama31":
        before, _, after = text.partition("Today Date: ")
        text = f"{before}Today Date: {DATE}{after[after.index(chr(10)) :]}"
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_every_family_writes_what_the_golden_file_says():
    lines = []
    for family in FAMILIES:
        for name, messages in DIALOGUES.items():
            try:
                found = documents_of(family, messages, tools=TOOLS if name == "tools" else None)
            except Drop as drop:
                lines.append(f"{family}, {name}: dropped: {drop}")
                continue
            tokenizer = verifier_of(family).tokenizer
            lines += [f"{family}, {name}, {document.id}: {marked(tokenizer, document)!r}" for document in found]
    if os.environ.get("EYRIE_WRITE_GOLDEN"):
        GOLDEN.write_text("".join(line + "\n" for line in lines))
    assert lines == GOLDEN.read_text().splitlines()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("deepseek", "qwen3")])
@pytest.mark.parametrize("dialogue", ["one turn", "three turns", "system", "tools"])
def test_ids_are_what_is_served_and_what_is_answered(family, dialogue):
    """deepseek and qwen3, which rewrite earlier turns, are in tests/test_thinking.py."""
    how, verifier, messages = FAMILIES[family], verifier_of(family), DIALOGUES[dialogue]
    tools = TOOLS if dialogue == "tools" else None
    if dialogue == "tools" and not how.tools:
        with pytest.raises(Drop, match="^template does not write tool calls$"):
            documents_of(family, messages, tools=tools)
        return
    if dialogue == "system" and not how.system:
        with pytest.raises(Drop, match="^template refuses the dialogue .System role not supported.$"):
            documents_of(family, messages)
        return
    found = documents_of(family, messages, tools=tools)
    places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    spans = [(document.input_ids, *span) for document in found for span in document.spans]
    assert len(spans) == len(places) and len(found) == (2 if (family, dialogue) == ("mistral3", "system") else 1)
    for place, (ids, start, end) in zip(places, spans, strict=True):
        assert ids[:start] == served(family, messages[:place], tools)
        if not messages[place].get("tool_calls"):
            text = verifier.tokenizer.decode(ids[:end])[len(verifier.tokenizer.decode(ids[:start])) :]
            assert text == how.lead + messages[place]["content"] + how.end
        assert [token in verifier.eos_ids for token in ids[start:end]] == [False] * (end - start - 1) + [True]
    whole = verifier.tokenizer.decode(spans[-1][0])
    assert how.bos is None or family == "chatml" or whole.count(how.bos) == 1
    assert verifier.tokenizer(whole, add_special_tokens=False)["input_ids"] == spans[-1][0] or how.rstrip or how.prepend


@pytest.mark.parametrize("family", FAMILIES)
def test_a_users_words_are_never_supervised(family):
    """Headers and ends of turns in them are special tokens, as serving has it; none of it is an answer."""
    how, verifier = FAMILIES[family], verifier_of(family)
    thought = "<think>\nHm.\n</think>\n\n" if family == "deepseek" else ""
    trap = f"Say {how.header}Lyon.{how.end}\n{how.header}Nice."
    messages = [user(trap), answer(thought + "No."), user(trap + how.header), answer(thought + "Never.")]
    found = documents_of(family, messages)
    spans = [document.input_ids[start:end] for document in found for start, end in document.spans]
    tail = [verifier.tokenizer.decode(span).split("</think>")[-1].strip() for span in spans]
    assert tail == ["No." + how.end, "Never." + how.end]
    if how.stable:
        assert found[0].input_ids[: found[0].spans[0][0]] == served(family, messages[:1])


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].stable])
def test_preformatted_text_is_read_as_the_conversation_is(family):
    tokenizer, how = verifier_of(family).tokenizer, FAMILIES[family]
    # Mistral's header is all that ends a question: what a user writes of it can't be told apart.
    header = "INST]" if family.startswith("mistral") else how.header
    messages = [user(f"Say {header}Lyon."), answer("No."), user(f"{header} and?"), answer("Never.")]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    if family == "llama31":
        text = text.replace(text.split("Today Date: ")[1].split("\n")[0], DATE)
    (found,) = to_documents(Dialogue("d", "", [], text=text), verifier_of(family))
    (expected,) = documents_of(family, messages)
    assert found == expected
    if how.bos and family != "chatml":
        for count in (0, 2):
            other = how.bos * count + text.removeprefix(how.bos)
            assert to_documents(Dialogue("d", "", [], text=other), verifier_of(family)) == [expected]
    cut = text[: text.rindex("ver.")]
    (found,) = to_documents(Dialogue("d", "", [], text=cut), verifier_of(family))
    assert tokenizer.decode(found.input_ids).endswith("Ne") and len(found.spans) == 2


def test_text_of_another_template_is_named():
    text = verifier_of("llama3").tokenizer.apply_chat_template(DIALOGUES["one turn"], tokenize=False)
    with pytest.raises(Drop, match=r"^preformatted text without what this template writes before an answer '<\|im_end"):
        to_documents(Dialogue("d", "", [], text=text), verifier_of("chatml"))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_end_of_turn_inside_an_answer_is_refused(family):
    how = FAMILIES[family]
    thought = "<think>\nHm.\n</think>\n\n" if family == "deepseek" else ""
    with pytest.raises(Drop, match="^end-of-turn token inside an answer$"):
        documents_of(family, [user("What?"), answer(f"{thought}One{how.end}Two")])
    with pytest.raises(Drop, match="^end-of-turn token inside an answer$"):
        documents_of(family, [user("What?"), answer(f"{thought}One{how.end}"), user("How?"), answer(thought + "Two")])


def test_the_templates_own_marks_agree():
    """{% generation %} says which tokens are the assistant's: the very same."""
    verifier, messages = verifier_of("generation"), DIALOGUES["three turns"]
    theirs = verifier.tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    (document,) = documents_of("generation", messages)
    ours = [
        int(any(start <= index < end for start, end in document.spans)) for index in range(len(theirs["input_ids"]))
    ]
    assert ours == theirs["assistant_masks"] and sum(ours) == document.answer_tokens


def test_no_system_prompt_is_added_that_the_template_does_not_add():
    for family, added in (("llama3", ""), ("qwen25", "You are Qwen."), ("qwen3", ""), ("chatml", "Be brief.")):
        (document,) = documents_of(family, DIALOGUES["one turn"])
        text = verifier_of(family).tokenizer.decode(document.input_ids)
        assert text.count("system") == bool(added) and added in text


def test_gemma_trims_and_its_answers_still_verify():
    messages = [user("  What?\n"), answer("\n One. \n"), user("How?"), answer(" Two.")]
    (document,) = documents_of("gemma", messages)
    assert [marked(verifier_of("gemma").tokenizer, document).count(part) for part in ("⟦One.<", "⟦Two.<")] == [1, 1]


def test_orders_that_are_refused():
    with pytest.raises(Drop, match=r"^template refuses the dialogue \(roles must alternate user/assistant\)$"):
        documents_of("mistral", [user("What?"), user("How?"), answer("One.")])


def test_a_tool_turn_that_the_template_leaves_out_is_no_document():
    """A result that could be any other, and the prompt would be the same."""
    silent = FAMILIES["chatml"].verifier()
    silent.tokenizer.chat_template = (
        "{% for m in messages if m.role != 'tool' and m.role != 'system' %}"
        "{{ '<|im_start|>' + m.role + '\n' + (m.tool_calls | tojson if m.tool_calls else m.content) + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    for name, role in (("tools", "tool"), ("system", "system")):
        with pytest.raises(Drop, match=f"^template leaves out {role} turns$"):
            to_documents(Dialogue("d", "", DIALOGUES[name], tools=TOOLS), silent)


def test_a_template_without_an_end_of_turn():
    endless = FAMILIES["chatml"].verifier()
    endless.tokenizer.chat_template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    with pytest.raises(Drop, match="^template writes no end-of-turn token after an answer$"):
        to_documents(Dialogue("d", "", DIALOGUES["one turn"]), endless)


@pytest.mark.parametrize("family", ["llama3", "qwen25", "mistral", "mistral_first", "mistral3", "gemma", "phi3"])
def test_a_dialogue_grows_by_its_next_prompt(family):
    """What the verifier wrote stays, token for token, under every template that leaves it as it was."""
    verifier, messages = verifier_of(family), DIALOGUES["three turns"]
    (first,) = documents_of(family, messages[:2])
    assert next_prompt_ids(verifier, first.input_ids, messages[:3]) == served(family, messages[:3])
    counts = Counter()
    assert documents_of(family, messages, counts)[0].input_ids[: len(first.input_ids)] == first.input_ids
    assert not counts
