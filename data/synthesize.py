"""Dialogues in the verifier's own words: it writes prompts and answers (`synthesize`), or answers given prompts
(`regenerate`). Prompt writing is the Magpie idea (2406.08464): after the template's user header, an aligned model
continues with a user's prompt.

Both write rounds to an append-only file, so a kill loses one round at most and a rerun continues with what an
uninterrupted run would have written. Generated ids are kept: text that is tokenised again can differ from what the
verifier said.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.errors import UserError
from data.clock import Clock, Limits
from data.documents import Drop, describe
from data.generate import MIN_CUT, Generation, Request, generate
from data.log import RoundLog
from data.sources import Dialogue
from data.tokens import next_turn_ids, prompt_ids
from models.chat import user_end_ids, user_header_ids

if TYPE_CHECKING:
    from models.verifier import Verifier

PROMPT_TOKENS = 64  # of a prompt that the verifier writes; longer ones are dropped
MIN_PROMPT_TOKENS = 4
PROMPT_SHARE = 0.4  # of the time that is left, at most, for a round's prompts: they are worth nothing unanswered
EMPTY_ROUNDS = 3  # rounds without one usable prompt after which to give up


@dataclass(frozen=True)
class Sampling:
    """How the verifier writes."""

    max_new_tokens: int = 192
    max_length: int = 2048
    temperature: float = 0.0
    prompt_temperature: float = 1.0
    batch_size: int = 64
    seed: int = 0

    @property
    def round_size(self) -> int:
        """Twice the batch: half of a round keeps the batch full, and a kill loses about a minute."""
        return 2 * self.batch_size


def synthesize(verifier: Verifier, path: Path, sampling: Sampling, limits: Limits) -> RoundLog:
    """Write dialogues to `path` until a limit is met; returns the log with rows and counts.

    Raises UserError without any limit, or when the verifier writes no usable prompts.
    """
    if limits == Limits():
        raise UserError("expected a bound for synthesis, found none: set data.max_documents, max_tokens or minutes")
    log = RoundLog(path)
    seen = {row["conversations"][0]["content"] for row in log.rows}
    pending, empty, index = Counter(), 0, log.rounds
    clock = Clock(log, limits)
    while not clock.met():
        number = clock.affordable(sampling.round_size)
        prompts = _write_prompts(verifier, sampling, index, number, clock.share(PROMPT_SHARE), seen, pending)
        if limits.max_documents is not None:
            prompts = dict(itertools.islice(prompts.items(), limits.max_documents - len(log.rows)))
        named = {
            name: Dialogue(name, "synthetic", [{"role": "user", "content": text}]) for name, text in prompts.items()
        }
        rows = _answer(verifier, named, sampling, clock.deadline, pending)
        empty = 0 if rows else empty + 1
        if empty == EMPTY_ROUNDS and not clock.late():
            reasons = describe(pending) or "they were all seen before"
            raise UserError(f"{verifier.name} writes no usable prompts ({reasons}); give prompts with data.path=FILE")
        if rows := clock.fitting(rows):
            clock.close_round(rows, index, pending)
            pending = Counter()
        index += 1
    log.counts.update(pending)
    return log


def regenerate(
    verifier: Verifier, dialogues: Iterable[Dialogue], path: Path, sampling: Sampling, limits: Limits
) -> RoundLog:
    """Answer the user turns of `dialogues` with the verifier, in order, and write them to `path`.

    Every assistant turn is generated, one after another, each seeing the verifier's earlier answers as they were
    generated; an answer cut by a limit ends its dialogue. Answers in the file are dropped.
    """
    log, pending = RoundLog(path), Counter()
    clock = Clock(log, limits)
    source = iter(dialogues)
    for index in itertools.count():
        chunk = list(itertools.islice(source, sampling.round_size))
        if not chunk or clock.met():
            break
        if index < log.rounds:
            continue  # done by an earlier run
        if limits.max_documents is not None:
            chunk = chunk[: limits.max_documents - len(log.rows)]
        # Named by place in the source: ids of a file need not be unique, and batch size must not matter.
        named = {str(index * sampling.round_size + n): dialogue for n, dialogue in enumerate(chunk)}
        rows = clock.fitting(_answer(verifier, named, sampling, clock.deadline, pending))
        if rows:
            clock.close_round(rows, index, pending)
            pending = Counter()
    log.counts.update(pending)
    return log


def _write_prompts(
    verifier: Verifier,
    sampling: Sampling,
    index: int,
    count: int,
    deadline: float | None,
    seen: set[str],
    counts: Counter,
) -> dict[str, str]:
    """Name -> text of the usable ones of `count` prompts of round `index`.

    `seen` grows, and `counts` says why others were not usable.
    """
    tokenizer = verifier.tokenizer
    header, ends = user_header_ids(tokenizer), set(user_end_ids(tokenizer)) | set(verifier.eos_ids)
    first = index * sampling.round_size
    requests = [Request(f"synthetic-{first + number}", header) for number in range(count)]
    written = generate(
        verifier,
        requests,
        max_new_tokens=PROMPT_TOKENS,
        temperature=sampling.prompt_temperature,
        batch_size=sampling.batch_size,
        seed=sampling.seed,
        deadline=deadline,
        stop_ids=sorted(ends),
        label=f"prompts, round {index + 1}",
    )
    outputs = {generation.id: generation for generation in written}
    special, usable = set(tokenizer.all_special_ids), {}
    for request in requests:
        try:
            text = _prompt_text(tokenizer, outputs.get(request.id), special)
            if text in seen:
                raise Drop("duplicate prompt")
        except Drop as drop:
            counts[str(drop)] += 1
            continue
        seen.add(text)
        usable[request.id] = text
    return usable


def _prompt_text(tokenizer, generation: Generation | None, special: set[int]) -> str:
    if generation is None or generation.finish_reason == "cut":
        raise Drop("prompt unfinished at the deadline")
    if generation.finish_reason == "length":
        raise Drop("prompt too long")
    ids = generation.output_ids[:-1]
    if special.intersection(ids):
        raise Drop("special token in a prompt")
    text = tokenizer.decode(ids).strip()
    if not text or "\ufffd" in text:
        raise Drop("prompt empty or not text")
    if len(ids) < MIN_PROMPT_TOKENS:
        raise Drop("prompt too short")
    return text


@dataclass
class _Growing:
    """A dialogue on its way: ids and spans so far, and the user turns that the verifier has still to see."""

    name: str
    dialogue: Dialogue
    messages: list[dict[str, str]]
    ids: list[int]
    spans: list[tuple[int, int]]
    waiting: list[dict[str, str]]
    finish_reason: str = ""
    open: bool = True  # an answer is to come


def _answer(
    verifier: Verifier, named: dict[str, Dialogue], sampling: Sampling, deadline: float | None, counts: Counter
) -> list[dict]:
    """One row per dialogue with at least one answer, in the dialogues' order."""
    growing = []
    for name, dialogue in named.items():
        try:
            growing.append(_begin(verifier, name, dialogue, sampling))
        except Drop as drop:
            counts[str(drop)] += 1
    active, turn = growing, 0
    while active:
        requests = [
            Request(f"{item.name}-answer-{turn}", item.ids, sampling.max_length - len(item.ids)) for item in active
        ]
        written = generate(
            verifier,
            requests,
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            batch_size=sampling.batch_size,
            seed=sampling.seed,
            deadline=deadline,
            label="answers" if not turn else f"answers, turn {turn + 1}",
        )
        outputs = {generation.id: generation for generation in written}
        for item, request in zip(active, requests, strict=True):
            _grow(verifier, item, outputs.get(request.id), sampling, counts)
        active, turn = [item for item in active if item.open], turn + 1
    return [_row(item) for item in growing if item.spans]


def _begin(verifier: Verifier, name: str, dialogue: Dialogue, sampling: Sampling) -> _Growing:
    users = [index for index, message in enumerate(dialogue.messages) if message["role"] == "user"]
    if not users:
        raise Drop("no user turn to answer")
    messages = [m for m in dialogue.messages[: users[0] + 1] if m["role"] != "assistant"]
    ids = prompt_ids(verifier.tokenizer, messages)
    if len(ids) + MIN_CUT > sampling.max_length:
        raise Drop("prompt beyond max_length")
    return _Growing(name, dialogue, messages, ids, [], [dialogue.messages[index] for index in users[1:]])


def _grow(
    verifier: Verifier, item: _Growing, generation: Generation | None, sampling: Sampling, counts: Counter
) -> None:
    """Add an answer, and the next user turn when there is one and room for it."""
    item.open = False
    if generation is None:
        counts["answer not begun at the deadline"] += 1
        if item.spans:  # the question that was to be answered goes
            item.ids = item.ids[: item.spans[-1][1]]
            item.messages.pop()
        return
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


def _row(item: _Growing) -> dict:
    return {
        "id": item.dialogue.id,
        "source": item.dialogue.source,
        "conversations": item.messages,
        "input_ids": item.ids,
        "answer_start": item.spans[0][0],
        "spans": item.spans,
        "finish_reason": item.finish_reason,
    }
