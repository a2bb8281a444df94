"""What a chat template writes around messages, found by rendering sentinels and looking, never by naming a model."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from datetime import date
from functools import lru_cache
from itertools import takewhile

from conf.errors import UserError

log = logging.getLogger(__name__)

SENTINEL = "zqxsentinelxqz"
DAY = date(2024, 7, 26)  # that a template writes: what is rendered tomorrow must be what was rendered today
CLOCK = re.compile(r"""strftime_now\(\s*(['"])([^'"]*)\1\s*\)""")


def _template(tokenizer) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(
            f"expected a tokenizer with a chat template, found none in {name}: use an instruction-tuned verifier, "
            "or put a chat_template.jinja beside its tokenizer"
        )
    return template


@lru_cache(maxsize=32)
def _stopped(template: str) -> str:
    """The template with DAY in place of the clock; where it computes how to write the date, it keeps today's."""
    stopped = CLOCK.sub(lambda call: repr(DAY.strftime(call[2])), template)
    if "strftime_now(" in stopped:
        log.warning("the chat template writes today's date: what is rendered tomorrow will differ from today's")
    return stopped


def render_text(
    tokenizer,
    messages: Sequence[dict],
    add_generation_prompt: bool = False,
    tools: list[dict] | None = None,
    today: bool = False,
    **variables,
) -> str:
    """The template's text for these messages.

    messages and tools are as transformers' `apply_chat_template` has them; variables: for the template, by name.
    today: the date is today's, where the template writes one; else it is DAY.
    Raises UserError without a chat template, or when the template refuses the messages.
    """
    _template(tokenizer)
    try:
        template = tokenizer.get_chat_template(tools=tools)
        return tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=template if today else _stopped(template),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except Exception as error:  # jinja2 raises its own errors for roles or orders that a template refuses
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise UserError(f"the chat template refuses messages with roles [{roles}]: {error}") from error


def encode(tokenizer, text: str) -> list[int]:
    """Token ids of text that already carries every special token that it needs."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def render(tokenizer, messages: Sequence[dict], add_generation_prompt: bool = False, **options) -> list[int]:
    """Token ids of the messages; with `add_generation_prompt`, up to where the assistant's answer begins.

    Options and errors are those of `render_text`.
    """
    return encode(tokenizer, render_text(tokenizer, messages, add_generation_prompt, **options))


@lru_cache(maxsize=64)
def _switches(template: str) -> tuple[str, ...]:
    return tuple(name for name in ("enable_thinking", "thinking") if re.search(rf"\b{name}\b", template))


def thinking_switch(tokenizer, thinking: bool) -> dict[str, bool]:
    """The template's variables that ask for an answer with or without thinking; none where it has no such switch."""
    return dict.fromkeys(_switches(template_text(tokenizer)), thinking)


def user_header_ids(tokenizer, opening: str = "") -> list[int]:
    """Ids of the template cut right after the user header, or after the first words of a user's prompt.

    What follows is the prompt, or the rest of it (Magpie, 2406.08464).
    """
    text = render_text(tokenizer, [{"role": "user", "content": SENTINEL}])
    header, found, _ = text.partition(SENTINEL)
    if not found:
        raise UserError("expected the chat template to write a user's text as it is, and it does not")
    return encode(tokenizer, header + opening)


def user_closing(tokenizer) -> str:
    """What the template writes after a user's prompt, up to where the answer begins; may be empty."""
    text = render_text(tokenizer, [{"role": "user", "content": SENTINEL}], True)
    return text.partition(SENTINEL)[2]


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


def answer_frame(tokenizer) -> tuple[str, str]:
    """What the template writes between a prompt and the answer's content, and what after the content.

    Seen on an answer without thinking that is the last message of a dialogue. Raises UserError when the content is
    not written as it is.
    """
    messages, plain = [{"role": "user", "content": "a"}], thinking_switch(tokenizer, False)
    prompt = render_text(tokenizer, messages, True, **plain)
    text = render_text(tokenizer, [*messages, {"role": "assistant", "content": SENTINEL}], **plain)
    before, found, after = text.partition(SENTINEL)
    if not found:
        raise UserError("expected the chat template to write an assistant's text as it is, and it does not")
    return before[len(prompt) :] if before.startswith(prompt) else "", after


def answer_end_ids(tokenizer) -> tuple[int, ...]:
    """What belongs to an answer after its content, up to the end-of-turn token; empty when the template has none."""
    ids = encode(tokenizer, answer_frame(tokenizer)[1])
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
        configured = configured if isinstance(configured, list | tuple) else [configured]
        if not all(type(token) is int for token in configured):
            raise UserError(
                f"expected eos_token_id of generation_config.json to be token ids, found {configured!r:.60}"
            )
        ids.update(configured)
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
