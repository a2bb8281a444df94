"""Which tokens are an answer: the exact spans, for text, generated ids and preformatted text; and what is refused."""

from collections import Counter

import pytest

from conf.errors import UserError
from data.documents import Document, Drop
from data.inspect import END, FIRST, LABEL, PROMPT, styles
from data.rows import Dialogue
from data.tokens import draft_vocab, label_counts, next_prompt_ids, prompt_ids, to_document
from models.chat import render
from tiny import CHATML, tiny_tokenizer, tiny_verifier
from tiny_writer import tokenize

QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "The capital of France is Paris."}
SECOND = {"role": "user", "content": "How many apples are there?"}
THIRD = {"role": "assistant", "content": "There are three."}


@pytest.fixture(scope="module")
def verifier():
    return tiny_verifier(layers=7, hidden=32)


def with_template(verifier, template):
    """A stand-in for the same verifier under another chat template."""

    class Other:
        tokenizer = tiny_tokenizer(template=template)
        eos_ids, vocab_size, name = verifier.eos_ids, verifier.vocab_size, "other"

    return Other()


def dialogue(*messages, **more):
    return Dialogue("a", "s", list(messages), **more)


def test_span_is_answer_and_end_of_turn_without_the_newline(verifier):
    document = to_document(dialogue(QUESTION, ANSWER), verifier)
    ((start, end),) = document.spans
    assert verifier.tokenizer.decode(document.input_ids[start:end]) == ANSWER["content"] + "<|im_end|>"
    assert document.input_ids[:start] == render(verifier.tokenizer, [QUESTION], add_generation_prompt=True)
    assert end == len(document.input_ids) and document.labels == end - start - 1


def test_every_answer_of_a_dialogue_is_a_span(verifier):
    document = to_document(dialogue(QUESTION, ANSWER, SECOND, THIRD, SECOND), verifier)
    texts = [verifier.tokenizer.decode(document.input_ids[start:end]) for start, end in document.spans]
    assert texts == [ANSWER["content"] + "<|im_end|>", THIRD["content"] + "<|im_end|>"]
    whole = render(verifier.tokenizer, [QUESTION, ANSWER, SECOND, THIRD])
    assert document.input_ids == whole[:-1], "all but the newline after the last end of turn"


def test_styles_name_exactly_the_labels(verifier):
    document = Document("a", [5, 6, 7, 8, verifier.eos_ids[0], 9], [(2, 5)])
    assert styles(document, verifier.eos_ids) == [PROMPT, PROMPT, FIRST, LABEL, END, PROMPT]
    assert label_counts([document], 12).nonzero().flatten().tolist() == sorted([8, verifier.eos_ids[0]])


def test_generated_ids_are_kept_as_they_are(verifier):
    """Another tokenisation of the same text must not be mended (SpecForge #296)."""
    prompt = prompt_ids(verifier.tokenizer, [QUESTION])
    spelled = [verifier.tokenizer.convert_tokens_to_ids(letter) for letter in "Paris"]
    assert spelled != verifier.tokenizer("Paris")["input_ids"]
    ids = prompt + spelled + [verifier.eos_ids[0]]
    found = to_document(dialogue(QUESTION, ANSWER, input_ids=ids, spans=[(len(prompt), len(ids))]), verifier)
    assert found.input_ids == ids and found.spans == [(len(prompt), len(ids))]
    cut = to_document(dialogue(input_ids=ids[:-1], spans=[(len(prompt), len(ids) - 1)]), verifier)
    assert cut.spans == [(len(prompt), len(ids) - 1)], "an answer that met its limit has no end-of-turn token"


def test_generated_ids_of_another_template(verifier):
    """SpecForge #392: not silent, and an error when no row fits."""
    ids = [1, *prompt_ids(verifier.tokenizer, [QUESTION]), 50, 51, verifier.eos_ids[0]]
    row = dialogue(QUESTION, ANSWER, input_ids=ids, spans=[(len(ids) - 3, len(ids))])
    with pytest.raises(UserError, match="prompt ids differ from this template's rendering"):
        list(tokenize([row, row], verifier, 512, Counter()))
    counts = Counter()
    assert len(list(tokenize([row, dialogue(QUESTION, ANSWER)], verifier, 512, counts))) == 1
    assert counts.total() == 1


def test_ids_out_of_range_and_ends_inside(verifier):
    with pytest.raises(Drop, match="outside the vocabulary"):
        to_document(dialogue(input_ids=[1, verifier.vocab_size], spans=[(1, 2)]), verifier)
    with pytest.raises(Drop, match="inside an answer"):
        to_document(dialogue(input_ids=[1, verifier.eos_ids[0], 5], spans=[(1, 3)]), verifier)
    with pytest.raises(Drop, match="inside an answer"):
        to_document(dialogue(QUESTION, {"role": "assistant", "content": "a<|im_end|>b"}), verifier)


def test_preformatted_text(verifier):
    text = verifier.tokenizer.apply_chat_template([QUESTION, ANSWER, SECOND, THIRD], tokenize=False)
    found = to_document(Dialogue("a", "s", [], text=text), verifier)
    assert found == to_document(
        dialogue(
            QUESTION,
            ANSWER,
            SECOND,
            THIRD,
        ),
        verifier,
    )
    foreign = (
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHi"
    )
    with pytest.raises(UserError, match="what this template writes before an answer '<.im_end.>"):
        list(tokenize([Dialogue("a", "s", [], text=foreign)], verifier, 512, Counter()))


def test_templates_that_refuse(verifier):
    other = with_template(verifier, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Drop, match="template refuses the dialogue .roles must alternate"):
        to_document(dialogue(QUESTION, ANSWER), other)
    with pytest.raises(UserError, match="chat template"):
        to_document(dialogue(QUESTION, ANSWER), with_template(verifier, None))
    endless = with_template(verifier, CHATML.replace("message['content'] + '<|im_end|>'", "message['content']"))
    with pytest.raises(Drop, match="no end-of-turn token"):
        to_document(dialogue(QUESTION, ANSWER), endless)
    with pytest.raises(Drop, match="no answer given"):
        to_document(dialogue(QUESTION), verifier)


def test_the_next_prompt_grows_a_dialogue_without_tokenising_again(verifier):
    first = to_document(dialogue(QUESTION, ANSWER), verifier)
    whole = prompt_ids(verifier.tokenizer, [QUESTION, ANSWER, SECOND])
    assert next_prompt_ids(verifier, first.input_ids, [QUESTION, ANSWER, SECOND]) == whole
    spelled = [verifier.tokenizer.convert_tokens_to_ids(letter) for letter in "Paris"]
    generated = [*prompt_ids(verifier.tokenizer, [QUESTION]), *spelled, verifier.eos_ids[0]]
    paris = {"role": "assistant", "content": "Paris"}
    more = next_prompt_ids(verifier, generated, [QUESTION, paris, SECOND])
    assert more[: len(generated)] == generated
    assert verifier.tokenizer.decode(more) == verifier.tokenizer.decode(
        prompt_ids(verifier.tokenizer, [QUESTION, paris, SECOND])
    )


def test_draft_vocab_covers_the_labels(verifier):
    documents = [Document("a", [5, 6, 7, 7, 8], [(1, 5)]), Document("b", [7, 7], [(0, 2)])]
    vocab, share = draft_vocab(documents, 20, 2)
    assert vocab.ids_R.tolist() == [7, 8] and share == 1.0
    vocab, share = draft_vocab(documents, 20, 1)
    assert vocab.ids_R.tolist() == [7] and share == 0.75
    assert len(draft_vocab(documents, 20)[0]) == 20


def test_long_dialogues_end_at_a_turn_and_what_is_left_out_is_counted(verifier):
    long = dialogue(QUESTION, ANSWER, SECOND, THIRD)
    whole = to_document(long, verifier)
    (first, second), counts = whole.spans, Counter()
    for length in (first[1], second[1] - 1):
        (found,) = tokenize([long], verifier, length, counts)
        assert found.spans == [first] and found.input_ids == whole.input_ids[: first[1]]
    assert counts["later turns beyond max_length left out"] == 2
    assert counts["answer tokens beyond max_length"] == 2 * (second[1] - second[0])
    (found,) = tokenize([long], verifier, first[1] - 2, counts := Counter())
    assert found.spans == [(first[0], first[1] - 2)]
    lost = whole.answer_tokens - found.answer_tokens
    assert counts == {"first answer cut at max_length": 1, "answer tokens beyond max_length": lost}
    (found,) = tokenize([long], verifier, second[1], counts := Counter())
    assert found.spans == whole.spans and not +counts
