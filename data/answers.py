"""A dialogue while the verifier answers it, turn after turn.

Generated ids are kept: text that is tokenised again can differ from what the verifier said.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data.documents import Drop
from data.generate import MIN_CUT, Generation, Request
from data.log import RoundLog
from data.memory import slots_that_fit
from data.rows import Dialogue
from data.tokens import next_turn_ids, prompt_ids

if TYPE_CHECKING:
    from models.verifier import Verifier


ROUND = 2  # dialogues of a round, in batches: half of a round keeps the batch full, and a kill loses about a minute
RETOKENISED = "answer tokenised again: its server gives text, not ids"


@dataclass(frozen=True)
class Sampling:
    """How the verifier writes."""

    max_new_tokens: int = 192
    max_length: int = 2048
    temperature: float = 0.0
    prompt_temperature: float = 1.0
    openings: tuple[str, ...] = ()
    batch_size: int = 64
    seed: int = 0


def open_log(path: Path, verifier: Verifier, sampling: Sampling) -> RoundLog:
    """The log at `path`, with the cache slots that the first run found room for: a later one has as many rows."""
    log = RoundLog(path)
    log.slots = log.slots or max(1, min(sampling.batch_size * sampling.max_length, slots_that_fit(verifier)))
    return log


@dataclass
class Growing:
    """A dialogue on its way: ids and spans so far, and the user turns that the verifier has still to see."""

    name: str
    dialogue: Dialogue
    messages: list[dict[str, str]]
    ids: list[int]
    spans: list[tuple[int, int]]
    waiting: list[dict[str, str]]
    finish_reason: str = ""
    open: bool = True  # an answer is to come


def request_of(item: Growing, sampling: Sampling) -> Request:
    """For the answer to come. Its name, so its random stream, is that of the dialogue and the turn."""
    limit = min(sampling.max_new_tokens, sampling.max_length - len(item.ids))
    return Request(f"{item.name}-answer-{len(item.spans)}", item.ids, limit, sampling.temperature)


def begin(verifier: Verifier, name: str, dialogue: Dialogue, sampling: Sampling) -> Growing:
    """A dialogue up to its first answer; raises Drop."""
    users = [index for index, message in enumerate(dialogue.messages) if message["role"] == "user"]
    if not users:
        raise Drop("no user turn to answer")
    messages = [m for m in dialogue.messages[: users[0] + 1] if m["role"] != "assistant"]
    ids = prompt_ids(verifier.tokenizer, messages)
    if len(ids) + MIN_CUT > sampling.max_length:
        raise Drop("prompt beyond max_length")
    return Growing(name, dialogue, messages, ids, [], [dialogue.messages[index] for index in users[1:]])


def grow(verifier: Verifier, item: Growing, generation: Generation | None, sampling: Sampling, counts: Counter) -> None:
    """Add an answer, and the next user turn when there is one and room for it."""
    item.open = False
    if generation is None:
        counts["answer not there at the deadline"] += 1
        if item.spans:  # the question that was to be answered goes
            item.ids = item.ids[: item.spans[-1][1]]
            item.messages.pop()
        return
    if not generation.exact:
        counts[RETOKENISED] += 1
    start, item.finish_reason = len(item.ids), generation.finish_reason
    item.ids = item.ids + generation.output_ids
    item.spans.append((start, len(item.ids)))
    stopped = generation.finish_reason == "stop"
    text = verifier.tokenizer.decode(generation.output_ids[:-1] if stopped else generation.output_ids)
    item.messages.append({"role": "assistant", "content": text})
    if not item.waiting:
        return
    try:
        if not stopped:
            raise Drop("dialogue ended early: an answer met its limit")
        question = item.waiting.pop(0)
        ids = item.ids + next_turn_ids(verifier, [*item.messages, question])
        if len(ids) + MIN_CUT > sampling.max_length:
            raise Drop("dialogue ended early: max_length")
    except Drop as drop:
        counts[str(drop)] += 1
        return
    item.ids, item.open = ids, True
    item.messages.append(question)


def to_row(item: Growing) -> dict:
    """As it goes to the file."""
    return {
        "id": item.dialogue.id,
        "source": item.dialogue.source,
        "conversations": item.messages,
        "input_ids": item.ids,
        "answer_start": item.spans[0][0],
        "spans": item.spans,
        "finish_reason": item.finish_reason,
    }
