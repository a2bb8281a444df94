"""What a chat template writes around messages, found by rendering sentinels and looking, never by naming a model."""

from __future__ import annotations

import hashlib
from itertools import takewhile

from conf.errors import UserError

SENTINEL = "zqxsentinelxqz"


def _template(tokenizer) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(
            f"expected a tokenizer with a chat template, found none in {name}: use an instruction-tuned verifier, "
            "or put a chat_template.jinja beside its tokenizer"
        )
    return template


def render_text(tokenizer, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """The template's text for these messages."""
    _template(tokenizer)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # jinja2 raises its own errors for roles or orders that a template refuses
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise UserError(f"the chat template refuses messages with roles [{roles}]: {error}") from error


def encode(tokenizer, text: str) -> list[int]:
    """Token ids of text that already carries every special token that it needs."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(tokenizer, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> list[int]:
    """Token ids of the messages; with `add_generation_prompt`, up to where the assistant's answer begins.

    Raises UserError without a chat template, or when the template refuses the messages.
    """
    return encode(tokenizer, render_text(tokenizer, messages, add_generation_prompt))


def user_header_ids(tokenizer, opening: str = "") -> list[int]:
    """Ids of the template cut right after the user header, or after the first words of a user's prompt.

    What follows is the prompt, or the rest of it (Magpie, 2406.08464).
    """
    text = render_text(tokenizer, [{"role": "user", "content": SENTINEL}])
    header, found, _ = text.partition(SENTINEL)
    if not found:
        raise UserError("expected the chat template to write a user's text as it is, and it does not")
    return encode(tokenizer, header + opening)


def user_closing_ids(tokenizer) -> list[int]:
    """Ids of what the template writes after a user's prompt, up to where the answer begins.

    Two prompts' common end, because a tokenizer may cut it otherwise where it stands alone. Raises UserError when the
    template writes nothing there.
    """
    one, other = (render(tokenizer, [{"role": "user", "content": text}], True) for text in ("?", "!"))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(one), reversed(other), strict=False))
    closing = [token for token, _ in same][::-1]
    if not closing:
        raise UserError("expected the chat template to end a user's turn before an answer, and it does not")
    return closing


def user_end_ids(tokenizer) -> tuple[int, ...]:
    """Ids of special tokens that may end a user's prompt: the first one after the content."""
    text = render_text(tokenizer, [{"role": "user", "content": SENTINEL}])
    return _first_special(tokenizer, encode(tokenizer, text.partition(SENTINEL)[2]))


def _first_special(tokenizer, ids: list[int]) -> tuple[int, ...]:
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    return tuple(i for i in ids if i in special)[:1]


def answer_end_ids(tokenizer) -> tuple[int, ...]:
    """What belongs to an answer after its content, up to the end-of-turn token; empty when the template has none.

    Seen on an answer that is the last message of a dialogue.
    """
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}]
    text = render_text(tokenizer, messages)
    _, found, suffix = text.partition(SENTINEL)
    if not found:
        raise UserError("expected the chat template to write an assistant's text as it is, and it does not")
    ids = encode(tokenizer, suffix)
    end = _first_special(tokenizer, ids)
    return tuple(ids[: ids.index(end[0]) + 1]) if end else ()


def end_of_turn_ids(tokenizer, generation_config=None) -> tuple[int, ...]:
    """Ids that end an answer, ascending: the template's end-of-turn token, the tokenizer's and the generation
    config's end-of-text. Without a tokenizer or a template, what is known of these."""
    ids: set[int] = set()
    if tokenizer is not None:
        if tokenizer.eos_token_id is not None:
            ids.add(tokenizer.eos_token_id)
        if getattr(tokenizer, "chat_template", None):
            ids.update(answer_end_ids(tokenizer)[-1:])
    configured = getattr(generation_config, "eos_token_id", None)
    if configured is not None:
        ids.update([configured] if isinstance(configured, int) else configured)
    return tuple(sorted(ids))


def tokenizer_hash(tokenizer) -> str:
    """sha256 of all that turns text into ids (vocabulary, merges, normalisation, added tokens), and of the template."""
    if tokenizer is None:
        return hashlib.sha256(b"").hexdigest()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        body = backend.to_str()
    else:
        added = {i: str(t) for i, t in tokenizer.added_tokens_decoder.items()}
        body = repr(sorted(tokenizer.get_vocab().items())) + repr(sorted(added.items()))
    return hashlib.sha256((body + "\0" + template_text(tokenizer)).encode()).hexdigest()


def template_text(tokenizer) -> str:
    """The chat template's source, or an empty string."""
    return str(getattr(tokenizer, "chat_template", None) or "")


def template_hash(tokenizer) -> str:
    """sha256 of the chat template's source."""
    return hashlib.sha256(template_text(tokenizer).encode()).hexdigest()
