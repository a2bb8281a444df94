"""The thinking of answers: where it stands, and what `data.thinking` makes of it."""

from __future__ import annotations

from collections.abc import Sequence

from conf.errors import UserError
from data.documents import Drop

OPEN, CLOSE = "<think>", "</think>"
POLICIES = ("template", "strip", "drop")
FIELDS = ("reasoning_content", "reasoning", "thinking")  # of a message: transformers takes them for one another


def require_policy(policy: str) -> None:
    """Raises UserError for an unknown `data.thinking`."""
    if policy not in POLICIES:
        raise UserError(f"expected data.thinking to be one of {', '.join(POLICIES)}, found {policy!r}")


def thought(message: dict) -> str:
    """What an answer thinks before it speaks, as text without its marks; empty when it does not.

    A thought in the content begins it: with its mark, or without where the prompt had that already.
    """
    named = next((message[name] for name in FIELDS if message.get(name)), "")
    content = message["content"] or ""
    before, closed, _ = content.partition(CLOSE)
    if not named and (content.lstrip().startswith(OPEN) or closed and OPEN not in before):
        named = before.lstrip().removeprefix(OPEN)
    return named.strip()


def spoken(message: dict) -> str:
    """The content after all thoughts; a thought without an end is all there is."""
    content = message["content"] or ""
    while content.lstrip().startswith(OPEN) or OPEN not in content.partition(CLOSE)[0] and CLOSE in content:
        content = content.partition(CLOSE)[2].lstrip()
    return content


def settled(messages: Sequence[dict], policy: str) -> Sequence[dict]:
    """The messages as `policy` wants them: as they are ("template"), or without thinking ("strip").

    Raises Drop for answers with thinking under "drop", and for one that has nothing else under "strip".
    """
    if policy == "template":
        return messages
    answers = [message for message in messages if message["role"] == "assistant"]
    if policy == "drop":
        if any(map(thought, answers)):
            raise Drop("answer with thinking")
        return messages
    return [_silent(message) if message["role"] == "assistant" else message for message in messages]


def _silent(message: dict) -> dict:
    without = {key: value for key, value in message.items() if key not in FIELDS} | {"content": spoken(message)}
    if message["content"] and not without["content"].strip() and not message.get("tool_calls"):
        raise Drop("answer is thinking alone")
    return without
