"""Given prompts, answered by the verifier: rounds of dialogues, the file appended after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from data.answers import ROUND, Growing, Sampling, begin, grow, open_log, request_of, to_rows
from data.clock import Clock, Limits
from data.documents import Drop
from data.generate import Writes, generate
from data.log import RoundLog
from data.progress import Meter
from data.rows import Dialogue

if TYPE_CHECKING:
    from data.quarantine import Quarantine
    from models.verifier import Verifier


def regenerate(
    verifier: Verifier,
    dialogues: Iterable[Dialogue],
    path: Path,
    sampling: Sampling,
    limits: Limits,
    write: Writes = generate,
    quarantine: Quarantine | None = None,
) -> RoundLog:
    """Answer the user turns of `dialogues` with the verifier, in order, and write them to `path`.

    Every assistant turn is generated, one after another, each seeing the verifier's earlier answers as they were
    generated; an answer cut by a limit ends its dialogue. Answers in the file are dropped. A kill loses one round at
    most, and a rerun continues with what an uninterrupted run would have written, to the bit in any dtype: the rounds
    are the same, and so is what shares a batch. write: who writes, by the protocol of `generate`. quarantine: takes
    what can't be asked, anew in each run.
    """
    log = open_log(path, verifier, sampling)
    clock, used = Clock(log, limits), log.used
    source = iter(dialogues)
    for dialogue in islice(source, used):  # also by a run that has nothing more to write: bad rows are told of anew
        _begun(verifier, "", dialogue, sampling, Counter(), quarantine)
    while not clock.met():
        size = ROUND * sampling.batch_size
        if limits.max_documents is not None:
            size = min(size, limits.max_documents - clock.documents)
        # Named by place in the source: ids of a file need not be unique, and batch size must not matter.
        named = {str(used + n): dialogue for n, dialogue in enumerate(islice(source, size))}
        if not named:
            break
        used += len(named)
        begun = (_begun(verifier, name, item, sampling, clock.counts, quarantine) for name, item in named.items())
        for row in _answer(verifier, [item for item in begun if item], sampling, clock, write):
            if not clock.full():
                clock.add(row)
        clock.close(used)
    return clock.finish(used)


def _begun(
    verifier: Verifier,
    name: str,
    dialogue: Dialogue,
    sampling: Sampling,
    counts: Counter,
    quarantine: Quarantine | None,
) -> Growing | None:
    """The dialogue up to its first answer; None, with the reason on record, where it can't be asked."""
    try:
        return begin(verifier, name, dialogue, sampling)
    except Drop as drop:
        counts[str(drop)] += 1
        if quarantine is not None:
            quarantine.add(dialogue.place, str(drop), dialogue.messages[-1]["content"] if dialogue.messages else "")
        return None


def _answer(verifier: Verifier, growing: list[Growing], sampling: Sampling, clock: Clock, write: Writes) -> list[dict]:
    """The rows of the dialogues with at least one answer, in the dialogues' order."""
    active, turn = growing, 0
    while active:
        requests = [request_of(item, sampling) for item in active]
        written = write(
            verifier,
            requests,
            max_new_tokens=sampling.max_new_tokens,
            batch_size=sampling.batch_size,
            seed=sampling.seed,
            deadline=clock.deadline,
            slots=clock.log.slots,
            meter=Meter("answers" if not turn else f"answers, turn {turn + 1}", len(requests)),
        )
        with closing(written):
            outputs = {generation.id: generation for generation in written}
        for item, request in zip(active, requests, strict=True):
            grow(verifier, item, outputs.get(request.id), sampling, clock.counts)
        active, turn = [item for item in active if item.open], turn + 1
    return [row for item in growing for row in to_rows(item)]
