"""A dialogue while the verifier answers it, turn after turn.

Generated ids are kept: text that is tokenised again can differ from what the verifier said.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from data.documents import Drop
from data.generate import MIN_CUT, Generation, Request
from data.log import RoundLog
from data.memory import slots_that_fit
from data.rows import Dialogue
from data.tokens import next_prompt_ids, prompt_ids

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
    """A dialogue on its way: ids and spans so far, and the turns that the verifier has still to see.

    earlier: ids and spans of the answers before these, when the template rewrote them for the next prompt.
    """

    name: str
    dialogue: Dialogue
    messages: list[dict[str, str]]
    ids: list[int]
    spans: list[tuple[int, int]]
    waiting: list[dict[str, str]]
    finish_reason: str = ""
    open: bool = True  # an answer is to come
    earlier: list[tuple[list[int], list[tuple[int, int]]]] = field(default_factory=list)

    @property
    def answers(self) -> int:
        """Given so far."""
        return sum(message["role"] == "assistant" for message in self.messages)


def request_of(item: Growing, sampling: Sampling) -> Request:
    """For the answer to come. Its name, so its random stream, is that of the dialogue and the turn."""
    limit = min(sampling.max_new_tokens, sampling.max_length - len(item.ids))
    return Request(f"{item.name}-answer-{item.answers}", item.ids, limit, sampling.temperature)


def begin(verifier: Verifier, name: str, dialogue: Dialogue, sampling: Sampling) -> Growing:
    """A dialogue up to its first answer; raises Drop."""
    users = [index for index, message in enumerate(dialogue.messages) if message["role"] == "user"]
    if not users:
        raise Drop("no user turn to answer")
    messages = [m for m in dialogue.messages[: users[0] + 1] if m["role"] != "assistant"]
    ids = prompt_ids(verifier.tokenizer, messages, dialogue.tools)
    if len(ids) + MIN_CUT > sampling.max_length:
        raise Drop("prompt beyond max_length")
    waiting = [m for m in dialogue.messages[users[0] + 1 :] if m["role"] in ("user", "tool")]
    return Growing(name, dialogue, messages, ids, [], waiting)


def grow(verifier: Verifier, item: Growing, generation: Generation | None, sampling: Sampling, counts: Counter) -> None:
    """Add an answer, and the next user turn when there is one and room for it."""
    item.open = False
    if generation is None:
        counts["answer not there at the deadline"] += 1
        if item.answers:  # the question that was to be answered goes
            item.messages.pop()
        if item.spans:
            item.ids = item.ids[: item.spans[-1][1]]
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
        if question["role"] == "tool":
            raise Drop("dialogue ended early: the result of a tool that another answer called")
        ids = next_prompt_ids(verifier, item.ids, [*item.messages, question], item.dialogue.tools)
        if len(ids) + MIN_CUT > sampling.max_length:
            raise Drop("dialogue ended early: max_length")
    except Drop as drop:
        counts[str(drop)] += 1
        return
    if ids[: len(item.ids)] != item.ids:
        item.earlier.append((item.ids, item.spans))
        item.spans = []
    item.ids, item.open = ids, True
    item.messages.append(question)


def to_rows(item: Growing) -> list[dict]:
    """As they go to the file: one with all answers, or several where the template rewrote what was before (see
    `data.tokens.to_documents`); each has the messages up to its last answer."""
    places = [index for index, message in enumerate(item.messages) if message["role"] == "assistant"]
    rows, answers = [], 0
    for ids, spans in [*item.earlier, (item.ids, item.spans)]:
        if not spans:
            continue
        answers += len(spans)
        row = {
            "id": item.dialogue.id if not rows else f"{item.dialogue.id}#{len(rows) + 1}",
            "source": item.dialogue.source,
            "conversations": item.messages[: places[answers - 1] + 1],
            "input_ids": ids,
            "answer_start": spans[0][0],
            "spans": spans,
            "finish_reason": item.finish_reason if answers == len(places) else "stop",
        }
        rows.append(row | ({"tools": item.dialogue.tools} if item.dialogue.tools else {}))
    return rows
