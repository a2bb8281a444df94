"""Dialogues in the verifier's own words: it writes prompts and answers, both in one continuous batch.

With a clock the batch runs on until time is up. Without one it works in rounds of so many prompts, each a batch of its
own: a killed run goes on with the same rounds, so with the same bits in any dtype.

Prompt writing is the Magpie idea (2406.08464): after the template's user header, an aligned model continues with a
user's prompt, or with the rest of one that begins with a given opening. Where that is usable, the same row goes on with
its answer, so no token is computed twice.

Prompts are numbered, and everything is decided in the order of their numbers (which of two equal prompts counts, which
dialogues a limit leaves out, what the append-only file has), whatever finished first: so a kill loses what is on its
way, and a rerun continues with what an uninterrupted run would have written.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from conf.errors import UserError
from data.answers import ROUND, Growing, Sampling, begin, grow, open_log, request_of, to_rows
from data.clock import Clock, Limits, answer_tokens
from data.documents import Drop, describe, ids_hash
from data.generate import MIN_CUT, Generation, Request, Writes, generate
from data.log import RoundLog
from data.progress import Meter
from data.rows import Dialogue
from data.tokens import prompt_ids, same_text
from models.chat import user_closing_ids, user_end_ids, user_header_ids

if TYPE_CHECKING:
    from data.memory import KeptStates
    from models.verifier import Verifier

PROMPT_TOKENS = 96  # that the verifier writes of a prompt; what is longer is answered as far as it goes
MIN_PROMPT_TOKENS = 4
BARREN = 6  # batches of prompts in a row, none of them usable and written to its end, after which to give up
RECENT = 256  # dialogues whose median time says how long one takes
LATE = 0.4  # of that time: a dialogue is begun while its prompt and the start of its answer can still be had


def synthesize(
    verifier: Verifier,
    path: Path,
    sampling: Sampling,
    limits: Limits,
    kept: KeptStates | None = None,
    write: Writes = generate,
) -> RoundLog:
    """Write dialogues to `path` until a limit is met; returns the log with rows and counts.

    kept: takes the states that the verifier computed for them. write: who writes, by the protocol of `generate`.
    Raises UserError without any limit, or when the verifier writes no usable prompts.
    """
    if limits == Limits():
        raise UserError("expected a bound for synthesis, found none: set data.max_documents, max_tokens or minutes")
    log = open_log(path, verifier, sampling)
    clock = Clock(log, limits)
    writer = _Writer(verifier, sampling, clock, kept)
    meter = Meter("dialogues, % of the limit", 100, writer.progress)
    while not clock.met():
        written = write(
            verifier,
            writer.requests(writer.round_size() if clock.deadline is None else None),
            max_new_tokens=max(PROMPT_TOKENS, sampling.max_new_tokens),
            batch_size=sampling.batch_size,
            seed=sampling.seed,
            deadline=clock.deadline,
            capacity=writer.capacity,
            slots=log.slots,
            capture=kept is not None,
            meter=meter,
        )
        with closing(written):
            for generation in written:
                writer.take(generation)
                if clock.full():
                    break
        writer.give_up()
        clock.close(writer.next)
        if clock.deadline is not None:
            break
    return clock.finish(writer.next)


class _Writer:
    """The requests for dialogues, and what becomes of them.

    number: of the next dialogue to ask for.   next: of the first one whose fate is not yet counted or written.
    done:   number -> row, or why there is none; it waits here for lower numbers.
    """

    def __init__(self, verifier: Verifier, sampling: Sampling, clock: Clock, kept: KeptStates | None = None):
        self.verifier, self.sampling, self.clock, self.kept = verifier, sampling, clock, kept
        tokenizer = verifier.tokenizer
        self.openings = sampling.openings or ("",)  # dialogue n begins with opening n, counted round and round
        self.headers = [user_header_ids(tokenizer, opening) for opening in self.openings]
        self.closing = user_closing_ids(tokenizer)
        self.special = set(tokenizer.all_special_ids)
        self.ends = frozenset(user_end_ids(tokenizer)) | frozenset(verifier.eos_ids)
        bare = max(len(prompt_ids(tokenizer, [{"role": "user", "content": text + "?"}])) for text in self.openings)
        least = bare + MIN_PROMPT_TOKENS + MIN_CUT
        if sampling.max_length < least:
            raise UserError(
                f"expected data.max_length of {least} at least (template, prompt, answer), found {sampling.max_length}"
            )
        answered = min(bare + PROMPT_TOKENS + sampling.max_new_tokens, sampling.max_length)
        self.capacity = max(answered, *(len(header) + PROMPT_TOKENS for header in self.headers))
        self.number = self.next = clock.log.used
        self.first = {_text(row): -1 for row in clock.log}  # text of a prompt -> lowest number
        self.prompts: dict[str, int] = {}
        self.answers: dict[str, tuple[int, Growing]] = {}
        self.begun: dict[int, float] = {}
        self.prompt: dict[int, dict] = {}  # what a row says about its prompt
        self.done: dict[int, dict | str] = {}
        self.seconds: deque[float] = deque(maxlen=RECENT)  # that the last dialogues took
        self.answered, self.tokens = 0, 0  # answers and their tokens in this run
        self.barren: Counter[str] = Counter()  # what was wrong with the last prompts in a row

    def round_size(self) -> int:
        """Prompts of a round: it depends on nothing but what is in the log."""
        size, limit = ROUND * self.sampling.batch_size, self.clock.limits.max_documents
        return size if limit is None else min(size, limit - self.clock.documents)

    def requests(self, count: int | None = None) -> Iterator[Request | None]:
        """What to write next, `count` prompts or without end; None: nothing until something else is finished."""
        end = None if count is None else self.number + count
        while end is None or self.number < end:
            if not self._more():
                yield None
                continue
            name = f"synthetic-{self.number}"
            self.prompts[name], self.begun[self.number] = self.number, time.monotonic()
            self.number += 1
            header, temperature = self.headers[self.prompts[name] % len(self.headers)], self.sampling.prompt_temperature
            yield Request(name, header, PROMPT_TOKENS, temperature, self.ends, self.prompt_written)

    def prompt_written(self, generation: Generation) -> Request | None:
        """The answer to ask for; None, with the reason on record, when the prompt is not usable."""
        number = self.prompts.pop(generation.id)
        try:
            return self._ask(number, generation)
        except Drop as drop:
            self._close(number, str(drop))
            return None

    def take(self, generation: Generation) -> None:
        """A finished answer."""
        number, item = self.answers.pop(generation.id)
        self.seconds.append(time.monotonic() - self.begun[number])
        grow(self.verifier, item, generation, self.sampling, self.clock.counts)
        (row,) = to_rows(item)
        row |= self.prompt.pop(number)
        self.answered, self.tokens = self.answered + 1, self.tokens + answer_tokens(row)
        if self.kept is not None:
            self.kept.add(ids_hash(item.ids), generation.states)
        self._close(number, row)

    def _close(self, number: int, found: dict | str) -> None:
        """A dialogue, or why there is none."""
        del self.begun[number]
        self.done[number] = found
        self._settle()
        if self.barren.total() >= BARREN * self.sampling.batch_size and not self.clock.late():
            raise UserError(
                f"{self.verifier.name} writes no usable prompts ({describe(self.barren)}); give prompts: data.path=FILE"
            )

    def give_up(self) -> None:
        """The deadline came, or a limit is met: what is still on its way comes to nothing."""
        self.done |= dict.fromkeys(self.prompts.values(), "prompt unfinished at the deadline")
        unfinished = (number for number, _ in self.answers.values())
        self.done |= dict.fromkeys(unfinished, "answer not there at the deadline")
        self._settle()

    def progress(self) -> tuple[float, str]:
        """(percent of the nearest limit, what is finished, written or not)."""
        clock = self.clock
        dialogues, tokens = clock.documents_before + self.answered, clock.tokens_before + self.tokens
        return round(100 * (clock.share_done() or 0)), f"{dialogues:,} dialogues, {tokens:,} answer tokens"

    def _more(self) -> bool:
        """Whether another prompt may be of use: the limits would not be met by what is on its way, nor is it late."""
        clock, limits = self.clock, self.clock.limits
        if (
            clock.deadline is not None
            and self.seconds
            and clock.deadline - time.monotonic() < LATE * median(self.seconds)
        ):
            return False
        rows = [row for row in self.done.values() if isinstance(row, dict)]
        coming = self.number - self.next - len(self.done)
        documents, tokens = clock.documents + len(rows), clock.tokens + sum(map(answer_tokens, rows))
        if limits.max_documents is not None and documents + coming >= limits.max_documents:
            return False
        usual = tokens / documents if documents else self.sampling.max_new_tokens
        return limits.max_tokens is None or tokens + coming * usual < limits.max_tokens

    def _ask(self, number: int, generation: Generation) -> Request:
        """The request for the answer to a finished prompt, less what its row has read already; raises Drop."""
        place = number % len(self.headers)
        text = self.openings[place] + _prompt_text(self.verifier.tokenizer, generation, self.special)
        name = generation.id
        dialogue = Dialogue(name, "synthetic", [{"role": "user", "content": text}])
        item = begin(self.verifier, name, dialogue, self.sampling)
        ids = [*self.headers[place], *_written(generation), *self.closing]
        if not same_text(self.verifier.tokenizer, ids, item.ids):
            raise Drop("the template changes the prompt's text")
        if len(ids) + MIN_CUT > self.sampling.max_length:
            raise Drop("prompt beyond max_length")
        if self.first.get(text.strip(), number) < number:
            raise Drop("duplicate prompt")
        self.first[text.strip()], item.ids = number, ids
        start, end = len(self.headers[place]), len(ids) - len(self.closing)
        end += generation.output_ids[-1] == self.closing[0]  # the end of turn counts where the verifier wrote it
        self.prompt[number] = {"prompt_span": (start, end), "prompt_finish_reason": generation.finish_reason}
        request = request_of(item, self.sampling)
        self.answers[request.id] = number, item
        return replace(request, input_ids=self.closing)

    def _settle(self) -> None:
        """Hand on what is done, in the order of the numbers."""
        clock = self.clock
        while self.next in self.done and not clock.full():
            found = self.done.pop(self.next)
            if isinstance(found, dict) and self.first[_text(found)] != self.next:
                found = "duplicate prompt"  # of a lower number that was written later
            if isinstance(found, str):
                clock.counts[found] += 1
                self.barren[found] += 1
            else:
                clock.add(found)
                if found["prompt_finish_reason"] == "stop":
                    self.barren.clear()
                else:
                    self.barren[f"prompt does not end within {PROMPT_TOKENS} tokens"] += 1
            self.next += 1
            if clock.due():
                clock.close(self.next)


def _text(row: dict) -> str:
    """What two prompts are compared by."""
    return row["conversations"][0]["content"].strip()


def _written(generation: Generation) -> list[int]:
    """The tokens of a prompt, without the one that ended it."""
    return generation.output_ids[:-1] if generation.finish_reason == "stop" else generation.output_ids


def _prompt_text(tokenizer, generation: Generation, special: set[int]) -> str:
    ids = _written(generation)
    if special.intersection(ids):
        raise Drop("special token in a prompt")
    text = tokenizer.decode(ids)
    if not text.strip() or "\ufffd" in text:
        raise Drop("prompt empty or not text")
    if len(ids) < MIN_PROMPT_TOKENS:
        raise Drop("prompt too short")
    return text
