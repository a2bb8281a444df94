"""Thinking: what each policy does with it, and templates that take it out of earlier turns, given or regenerated."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from conf.errors import UserError
from data.answers import begin, grow, request_of, to_rows
from data.clock import Limits
from data.documents import Drop
from data.generate import Generation
from data.log import RoundLog
from data.regenerate import regenerate
from data.rows import Dialogue, parse_row
from data.thinking import require_policy, settled, spoken, thought
from data.tokens import prompt_ids, to_documents
from templates import FAMILIES
from tiny_writer import SMALL, content, tiny_writer, turns

QUESTION, FURTHER = {"role": "user", "content": "What?"}, {"role": "user", "content": "How?"}
THINKS = {"role": "assistant", "content": "<think>\nHmm.\n</think>\n\nOne."}
NAMED = {"role": "assistant", "content": "One.", "reasoning_content": "Hmm."}
PLAIN = {"role": "assistant", "content": "Two."}
OWN = "answer in a document of its own: the template rewrites earlier turns"


def documents_of(family, messages, policy="template", counts=None):
    return to_documents(Dialogue("d", "", messages), FAMILIES[family].verifier(), policy, counts)


def texts(family, documents):
    """(prompt, answer) of every span."""
    decode = FAMILIES[family].tokenizer().decode
    return [(decode(d.input_ids[:a]), decode(d.input_ids[a:b])) for d in documents for a, b in d.spans]


@pytest.mark.parametrize(
    ("text", "thinks", "speaks"),
    [
        ("<think>\nHmm.\n</think>\n\nOne.", "Hmm.", "One."),
        ("Hmm.\n</think>\n\nOne.", "Hmm.", "One."),  # the prompt had opened it
        ("<think>a</think><think>b</think> One.", "a", "One."),
        ("<think>\nHmm", "Hmm", ""),
        ("One.", "", "One."),
        ("<think>\n\n</think>\n\nOne.", "", "One."),
        ("Write <think> and </think> around it.", "", "Write <think> and </think> around it."),
    ],
)
def test_where_a_thought_ends(text, thinks, speaks):
    message = {"role": "assistant", "content": text}
    assert (thought(message), spoken(message)) == (thinks, speaks)


def test_policies():
    dialogue = [QUESTION, THINKS, {"role": "user", "content": "<think>What?</think>"}, NAMED, FURTHER, PLAIN]
    assert settled(dialogue, "template") is dialogue
    silent = settled(dialogue, "strip")
    assert [message["content"] for message in silent] == [
        "What?",
        "One.",
        "<think>What?</think>",
        "One.",
        "How?",
        "Two.",
    ]
    assert not any("reasoning_content" in message for message in silent) and "reasoning_content" in NAMED
    for thinking in (THINKS, NAMED):
        with pytest.raises(Drop, match="^answer with thinking$"):
            settled([QUESTION, thinking], "drop")
    assert settled([QUESTION, PLAIN], "drop") == [QUESTION, PLAIN]
    with pytest.raises(Drop, match="^answer is thinking alone$"):
        settled([QUESTION, {"role": "assistant", "content": "<think>\nHmm"}], "strip")
    with pytest.raises(UserError, match="^expected data.thinking to be one of template, strip, drop, found 'keep'$"):
        require_policy("keep")


@pytest.mark.parametrize("answer", [THINKS, NAMED])
def test_a_template_that_rewrites_earlier_turns_gives_a_document_an_answer(answer):
    """Each answer after what serving sends: the history without thinking, and an empty thought where it is off."""
    counts = Counter()
    found = documents_of("qwen3", [QUESTION, answer, FURTHER, PLAIN, QUESTION, answer], counts=counts)
    head, first, second = (
        "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n",
        "One.<|im_end|>\n",
        "Two.<|im_end|>\n",
    )
    how = head.replace("What?", "How?")
    assert texts("qwen3", found) == [
        (head, "<think>\nHmm.\n</think>\n\nOne.<|im_end|>"),
        (head + first + how + "<think>\n\n</think>\n\n", "Two.<|im_end|>"),
        (head + first + how + second + head, "<think>\nHmm.\n</think>\n\nOne.<|im_end|>"),
    ]
    assert [document.id for document in found] == ["d", "d#2", "d#3"] and counts == {OWN: 2}
    tokenizer = FAMILIES["qwen3"].tokenizer()
    served = tokenizer.apply_chat_template(
        [QUESTION, answer, FURTHER], add_generation_prompt=True, enable_thinking=False
    )
    assert found[1].input_ids[: found[1].spans[0][0]] == served["input_ids"]
    served = tokenizer.apply_chat_template([QUESTION, answer, FURTHER, PLAIN, QUESTION], add_generation_prompt=True)
    assert found[2].input_ids[: found[2].spans[0][0]] == served["input_ids"]


@pytest.mark.parametrize("answer", [THINKS, NAMED, {"role": "assistant", "content": "Hmm.\n</think>\n\nOne."}])
def test_a_template_that_cuts_thinking_from_the_answer_itself(answer):
    """DeepSeek-R1's: what the verifier wrote after the opened thought is the content."""
    found = documents_of("deepseek", [QUESTION, answer, FURTHER, THINKS])
    begins, ends = "<｜begin▁of▁sentence｜><｜User｜>What?<｜Assistant｜>", "<｜end▁of▁sentence｜>"
    (prompt, said), (later, again) = texts("deepseek", found)
    assert (prompt, said) == (begins + "<think>\n", "Hmm.\n</think>\n\nOne." + ends)
    assert later.replace("\n\nOne.", "One.") == begins + "One." + ends + "<｜User｜>How?<｜Assistant｜><think>\n"
    assert again == said
    for messages in ([QUESTION, PLAIN], settled([QUESTION, answer], "strip")):
        with pytest.raises(Drop, match="^template opens a thought, and the answer has none$"):
            documents_of("deepseek", messages)


def test_a_template_that_cuts_thinking_and_opens_none():
    """DeepSeek-R1's first: the thought is the answer's own, mark and all."""
    verifier = FAMILIES["deepseek"].verifier()
    verifier.tokenizer.chat_template = verifier.tokenizer.chat_template.replace("<think>\\n", "")
    verifier.tokenizer.chat_template = verifier.tokenizer.chat_template.replace("<think>\n", "")
    for messages, said in (([QUESTION, THINKS], THINKS["content"]), ([QUESTION, PLAIN], "Two.")):
        (document,) = to_documents(Dialogue("d", "", messages), verifier)
        ((start, end),) = document.spans
        assert verifier.tokenizer.decode(document.input_ids[start:end]) == said + "<｜end▁of▁sentence｜>"
        assert document.input_ids[:start] == prompt_ids(verifier.tokenizer, [QUESTION])


def test_stripped_answers_are_prompted_as_without_thinking():
    found = documents_of("qwen3", [QUESTION, THINKS], "strip")
    assert [answer for _, answer in texts("qwen3", found)] == ["One.<|im_end|>"]
    assert texts("qwen3", found)[0][0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert texts("chatml", documents_of("chatml", [QUESTION, NAMED], "strip"))[0][1] == "One.<|im_end|>"


@pytest.mark.parametrize("policy", ["strip", "drop"])
def test_thinking_in_text_and_ids_is_left_whole_or_left_out(policy):
    verifier = FAMILIES["chatml"].verifier()
    (document,) = documents_of("chatml", [QUESTION, THINKS])
    text = verifier.tokenizer.decode(document.input_ids)
    rows = [
        Dialogue("d", "", [], text=text),
        Dialogue("d", "", [QUESTION, THINKS], input_ids=document.input_ids, spans=document.spans),
    ]
    for row in rows:
        assert to_documents(row, verifier) == [document]
        with pytest.raises(Drop, match=f"^thinking in preformatted text or ids, with data.thinking={policy}$"):
            to_documents(row, verifier, policy)
        plain = replace(row, text=text.replace("think", "thank") if row.text else None)
        assert to_documents(plain, verifier) is not None


def written(verifier, family, text):
    """A generation that spells the text letter by letter, which no tokenizer would."""
    tokenizer = verifier.tokenizer
    letters = [text] if FAMILIES[family].prepend else text  # alone, each letter would come with a space
    ids = [token for letter in letters for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    return Generation("", [*ids, tokenizer.convert_tokens_to_ids(FAMILIES[family].end)], "stop")


@pytest.mark.parametrize(
    ("family", "answers", "rows"),
    [
        ("qwen3", ("<think>\nHm.\n</think>\n\nOne.", "<think>\nSo.\n</think>\n\nTwo.", "Three."), 3),
        ("qwen3", ("One.", "Two.", "<think>\nSo.\n</think>\n\nThree."), 1),
        ("deepseek", ("Hm.\n</think>\n\nOne.", "So.\n</think>\n\nTwo.", "x\n</think>\n\nThree."), 3),
        ("gemma", ("One.", "Two. ", "Three."), 2),  # its template trims
        ("llama31", ("One.", "Two.", "Three."), 1),
        ("mistral", ("One.", "Two.", "Three."), 1),
    ],
)
def test_regenerated_dialogues_go_on_as_serving_would(family, answers, rows):
    """Generated ids stay as they are; each prompt is what the template renders then."""
    verifier, counts = FAMILIES[family].verifier(), Counter()
    messages = [message for word in ("What?", "How?", "Why?") for message in turns(word)]
    dialogue, sampling = Dialogue("d", "s", messages), replace(SMALL, max_length=1000, max_new_tokens=100)
    item, asked, names = begin(verifier, "7", dialogue, sampling), [], []
    for answer in answers:
        request = request_of(item, sampling)
        asked.append(request.input_ids)
        names.append(request.id)
        grow(verifier, item, written(verifier, family, answer), sampling, counts)
    assert names == ["7-answer-0", "7-answer-1", "7-answer-2"] and not item.open and not +counts
    found = to_rows(item)
    assert [row["id"] for row in found] == ["d", "d#2", "d#3"][:rows]
    spans = [(row["input_ids"], *span) for row in found for span in row["spans"]]
    for number, (ids, start, end) in enumerate(spans):
        words = [word for pair in zip(("What?", "How?"), answers[:number], strict=False) for word in pair]
        prompt = prompt_ids(verifier.tokenizer, [*turns(*words), messages[number]])
        assert ids[:start] == asked[number]
        assert ids[start:end] == written(verifier, family, answers[number]).output_ids
        assert verifier.tokenizer.decode(ids[:start]) == verifier.tokenizer.decode(prompt)
    documents = [d for row in found for d in to_documents(parse_row(json.dumps(row), "x"), verifier)]
    assert [(d.id, d.input_ids, d.spans) for d in documents] == [
        (row["id"], row["input_ids"], [tuple(span) for span in row["spans"]]) for row in found
    ]


def test_a_tools_result_ends_a_regenerated_dialogue():
    verifier, counts = FAMILIES["qwen25"].verifier(), Counter()
    tools = [{"type": "function", "function": {"name": "add"}}]
    messages = [QUESTION, {"role": "assistant", "content": ""}, {"role": "tool", "content": "3"}, PLAIN, FURTHER]
    item = begin(verifier, "7", Dialogue("d", "s", messages, tools=tools), SMALL)
    assert "# Tools" in verifier.tokenizer.decode(item.ids)
    grow(verifier, item, written(verifier, "qwen25", "One."), SMALL, counts)
    (row,) = to_rows(item)
    assert not item.open and counts["dialogue ended early: the result of a tool that another answer called"] == 1
    assert row["tools"] == tools and row["conversations"] == turns("What?", "One.")
    (document,) = to_documents(parse_row(json.dumps(row), "x"), verifier)
    assert document.input_ids == row["input_ids"]


def test_several_rows_of_a_dialogue_resume_exactly(tmp_path, monkeypatch):
    """A history cut short by its template: every answer is a row, and a killed run goes on with the same rows."""
    monkeypatch.setattr("data.clock.GROUP_ROWS", 3)
    verifier, short = tiny_writer(end=8.0), replace(SMALL, batch_size=2)
    verifier.tokenizer.chat_template = verifier.tokenizer.chat_template.replace(
        "message['content'] +", "(message['content'] if loop.last or message['role'] != 'assistant' else '-') +"
    )
    dialogues = [Dialogue(str(n), "s", turns(f"question {n}", "", "And then?")) for n in range(10)]
    whole = regenerate(verifier, iter(dialogues), tmp_path / "a.jsonl", short, Limits())
    names = [row["id"] for row in whole.rows]
    assert any(name.endswith("#2") for name in names)
    assert names == sorted(names, key=lambda name: int(name.split("#")[0]))
    assert all(len(row["spans"]) == 1 for row in whole.rows)
    data = (tmp_path / "a.jsonl").read_bytes()
    path = tmp_path / "b.jsonl"
    path.write_bytes(data[: 2 * len(data) // 3])
    assert 0 < len(RoundLog(path).rows) < len(whole.rows)
    assert content(regenerate(verifier, iter(dialogues), path, short, Limits()).rows) == content(whole.rows)
    for row in whole.rows:
        assert to_documents(parse_row(json.dumps(row), "x"), verifier)[0].input_ids == row["input_ids"]
