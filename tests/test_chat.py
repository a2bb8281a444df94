"""What is found around messages by rendering sentinels."""

from datetime import date

import pytest
from transformers import GenerationConfig

from conf.errors import UserError
from models import chat
from tiny import CHATML, tiny_tokenizer

USER = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = {"role": "assistant", "content": "Paris."}
# The end-of-turn token is the user's too, nothing is written after the last answer, and texts are stripped.
LLAMA_LIKE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] | trim + '<|endoftext|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
NO_END = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


def test_render_is_the_template_with_special_tokens_parsed():
    tokenizer = tiny_tokenizer()
    ids = chat.render(tokenizer, USER, add_generation_prompt=True)
    assert ids == tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
    text = tokenizer.decode(ids)
    assert text.endswith("<|im_start|>assistant\n") and "Be brief." in text
    grown = chat.render(tokenizer, [*USER, ANSWER])
    assert grown[: len(ids)] == ids


@pytest.mark.parametrize(
    ("template", "header", "end"),
    [
        (CHATML, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n", (2,)),
        (LLAMA_LIKE, "<|im_start|>user\n\n", (0,)),
        (NO_END, "user: ", ()),
    ],
)
def test_structure_of_templates(template, header, end):
    tokenizer = tiny_tokenizer(template=template)
    assert tokenizer.decode(chat.user_header_ids(tokenizer)) == header
    assert chat.answer_end_ids(tokenizer) == chat.user_end_ids(tokenizer) == end
    assert chat.end_of_turn_ids(tokenizer) == tuple(sorted({2, *end}))  # with the tokenizer's own end of text


def test_end_of_turn_ids_join_all_that_is_known():
    assert chat.end_of_turn_ids(tiny_tokenizer(), GenerationConfig(eos_token_id=[2, 0])) == (0, 2)
    assert chat.end_of_turn_ids(tiny_tokenizer(template=None), GenerationConfig(eos_token_id=7)) == (2, 7)
    assert chat.end_of_turn_ids(None) == ()


def test_without_a_template_or_against_it():
    with pytest.raises(UserError, match="chat template"):
        chat.render(tiny_tokenizer(template=None), USER)
    with pytest.raises(UserError, match="chat template"):
        chat.user_header_ids(tiny_tokenizer(template=None))
    strict = tiny_tokenizer(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"\[user\]: roles must alternate"):
        chat.render(strict, USER)
    mute = tiny_tokenizer(template="{% for m in messages %}{{ m['content'] | upper }}{% endfor %}")
    with pytest.raises(UserError, match="as it is"):
        chat.user_header_ids(mute)
    with pytest.raises(UserError, match="as it is"):
        chat.answer_end_ids(mute)


def test_hashes_see_the_vocabulary_and_the_template():
    one, other = tiny_tokenizer(), tiny_tokenizer(template=LLAMA_LIKE)
    assert chat.tokenizer_hash(one) == chat.tokenizer_hash(tiny_tokenizer())
    assert len({chat.tokenizer_hash(t) for t in (one, other, tiny_tokenizer(vocab=300), None)}) == 4
    assert chat.template_hash(one) != chat.template_hash(other)


def test_a_date_that_a_template_computes_is_warned_of(caplog):
    tokenizer = tiny_tokenizer(300, "{{ strftime_now('%d ' + '%Y') }}{{ messages[0]['content'] }}")
    assert chat.render_text(tokenizer, [{"role": "user", "content": "a"}]) == date.today().strftime("%d %Y") + "a"
    assert "writes today's date" in caplog.text
    tokenizer.chat_template = "{{ strftime_now('%d %Y') }}"
    assert chat.render_text(tokenizer, [{"role": "user", "content": "a"}]) == "26 2024"


def test_an_end_that_is_no_id():
    assert chat.end_of_turn_ids(None, GenerationConfig(eos_token_id=[5, 3])) == (3, 5)
    config = GenerationConfig()
    config.eos_token_id = "2"
    with pytest.raises(UserError, match="to be token ids, found"):
        chat.end_of_turn_ids(None, config)
