"""Dialogues as texts, by the tokenizer's own chat template: what each answer's prompt is, and what the answer.

Nothing is searched for: the prompt is the rendering of all messages before the answer with the generation header, and
the answer is what the rendering with it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from conf.errors import UserError
from data.documents import Drop
from data.thinking import CLOSE, OPEN, spoken, thought
from models.chat import SENTINEL, answer_frame, encode, render_text, template_text, thinking_switch, user_closing

Turn = tuple[str, str]  # what the verifier is served; that with the answer and all that the template writes after it


def rendered(tokenizer, messages: Sequence[dict], add_generation_prompt: bool, tools=None, **variables) -> str:
    """`models.chat.render_text`, and Drop where the template refuses the messages."""
    try:
        return render_text(tokenizer, messages, add_generation_prompt, tools, **variables)
    except UserError as error:
        if not getattr(tokenizer, "chat_template", None):
            raise  # no row can do anything about that
        reason = " ".join(str(error.__cause__ or error).split())
        raise Drop(f"template refuses the dialogue ({reason[:60]})") from None


def turns_of(tokenizer, messages: Sequence[dict], tools: list[dict] | None = None) -> list[Turn]:
    """One for each answer. Raises Drop where there is none, and where the template does not write all messages."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise Drop("no answer given")
    turns = [_turn(tokenizer, messages[:index], messages[index], tools) for index in answers]
    _require_written(tokenizer, messages[: answers[-1]], messages[answers[-1]], tools, turns[-1][0])
    return turns


def _turn(tokenizer, before: Sequence[dict], answer: dict, tools) -> Turn:
    """The answer's own thinking, or that it has none, is what a template with a switch for it was asked for."""
    switch = thinking_switch(tokenizer, bool(thought(answer)))
    prompt = rendered(tokenizer, before, True, tools, **switch)
    whole = rendered(tokenizer, [*before, answer], False, tools, **switch)
    own = whole[len(prompt) :] if whole.startswith(prompt) else None
    if own is None or (CLOSE in (answer["content"] or "") and thought(answer) not in own):
        whole = prompt + _as_generated(tokenizer, prompt, whole, answer)
    for call in answer.get("tool_calls") or ():
        if str(call.get("function", call).get("name")) not in whole[len(prompt) :]:
            raise Drop("template does not write tool calls")
    return prompt, whole


def _as_generated(tokenizer, prompt: str, whole: str, answer: dict) -> str:
    """An answer that the template does not write after its prompt: what the verifier wrote is its content.

    So with templates that cut an answer's thinking even while it is the last one (DeepSeek-R1), and with those that
    write the system prompt into the last turn if that is a user's (Mistral).
    """
    lead, trail, _ = _frame(tokenizer, template_text(tokenizer))
    speech, thinking = spoken(answer), thought(answer)
    if answer.get("tool_calls") or not whole.removesuffix(trail).rstrip().endswith(speech.strip()):
        raise Drop("template does not write the answer after its prompt")
    text = answer["content"] or ""
    if thinking and CLOSE not in text:
        text = f"{OPEN}\n{thinking}\n{CLOSE}\n\n{text}"
    if not prompt.rstrip().endswith(OPEN):
        return lead + text + trail
    if not thinking:
        raise Drop("template opens a thought, and the answer has none")
    text = text.lstrip().removeprefix(OPEN)
    return (text.lstrip("\n") if prompt.endswith("\n") else text) + trail


def _require_written(tokenizer, messages: Sequence[dict], answer: dict, tools, prompt: str) -> None:
    """Drop for a turn that could say anything and the prompt would be the same."""
    switch = thinking_switch(tokenizer, bool(thought(answer)))
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "assistant" or (role != "tool" and content.strip() in prompt):
            continue
        other = [*messages[:index], {**message, "content": SENTINEL}, *messages[index + 1 :]]
        try:
            written = render_text(tokenizer, other, True, tools, **switch) != prompt
        except UserError:
            written = True
        if not written:
            raise Drop(f"template leaves out {role} turns")


def turns_of_text(tokenizer, text: str, ends: Sequence[str]) -> list[Turn]:
    """The answers of text that carries headers already, up to and including one of `ends` (or where the text ends).

    An answer begins only where all that the template writes after a user's turn stands before it, so a user's text
    with an answer's header in it is no answer. One that imitates the end of its own turn as well is: nothing in such
    text tells that apart; give conversations where users may do that.
    """
    closing, bos = _closing(tokenizer, template_text(tokenizer))
    if bos:  # exactly once
        while text.startswith(bos):
            text = text.removeprefix(bos)
        text = bos + text
    turns, at = [], 0
    while closing and (found := text.find(closing, at)) >= 0:
        start = found + len(closing)
        at = min((place + len(end) for end in ends if (place := text.find(end, start)) >= 0), default=len(text))
        turns.append((text[:start], text[:at]))
    if not turns:
        raise Drop(f"preformatted text without what this template writes before an answer {closing!r}")
    return turns


def trail_ids(tokenizer) -> tuple[int, ...]:
    """Ids of what the template writes after the content of the last answer."""
    return _frame(tokenizer, template_text(tokenizer))[2]


@lru_cache(maxsize=16)
def _frame(tokenizer, template: str) -> tuple[str, str, tuple[int, ...]]:
    """`models.chat.answer_frame`, looked up once, and the ids of its second part."""
    lead, trail = answer_frame(tokenizer)
    return lead, trail, tuple(encode(tokenizer, trail))


@lru_cache(maxsize=16)
def _closing(tokenizer, template: str) -> tuple[str, str]:
    """(what is written between a user's text and an answer, the token that every text begins with or "")."""
    bos = tokenizer.bos_token or ""
    text = render_text(tokenizer, [{"role": "user", "content": SENTINEL}], True)
    return user_closing(tokenizer), bos if text.startswith(bos) else ""
