"""The verifier's own text: continuous batching, with results that do not depend on what else is in the batch."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from data.memory import rows_that_fit
from data.progress import Meter
from models.states import DocumentStates

if TYPE_CHECKING:
    from models.cache import KVCache
    from models.verifier import Decoded, Verifier

log = logging.getLogger(__name__)

MIN_CUT = 8  # a row that the deadline stops is kept from this many tokens on
PREFILL_TOKENS = 2048  # rows x longest prompt of one prefill: prompts of like length share it


@dataclass(frozen=True)
class Request:
    """Token ids to continue, and how; None: as the call says. The lower one of both limits counts.

    then: asked with the finished generation (without states), which goes to nobody else; it gives what the row
    continues with, or None.
    The input_ids of that request are what follows the row's tokens so far, less the token that ended it: nothing that
    was written is computed again.
    """

    id: str
    input_ids: list[int]
    max_new_tokens: int | None = None
    temperature: float | None = None
    stop_ids: frozenset[int] | None = None
    then: Callable[[Generation], Request | None] | None = None


@dataclass(frozen=True)
class Generation:
    """finish_reason: "stop" (the last id is the end-of-turn token), "length", or "cut" (the deadline came).

    states: with capture, the verifier's at everything before and in `output_ids`.
    exact: False where the ids are of text that was tokenised again.
    """

    id: str
    output_ids: list[int]
    finish_reason: str
    states: DocumentStates | None = None
    exact: bool = True


Writes = Callable[..., Iterator[Generation]]  # who writes: `generate`, or what takes and gives the same


@dataclass
class _Row:
    """A sequence of the batch: what it is to write, what it has written, and what it is forced to read before that.

    states: those of all tokens read, in pieces (DocumentStates.of).
    """

    request: Request
    limit: int
    temperature: float
    stop: frozenset[int]
    uniform: np.ndarray  # one number per token to come; empty at temperature 0
    forced: deque[int] = field(default_factory=deque)
    output_ids: list[int] = field(default_factory=list)
    states: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def finished(self, reason: str) -> Generation:
        states = DocumentStates.of(self.states) if self.states else None
        return Generation(self.request.id, self.output_ids, reason, states)


@torch.no_grad()
def generate(
    verifier: Verifier,
    requests: Iterable[Request | None],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    batch_size: int = 64,
    seed: int = 0,
    deadline: float | None = None,
    stop_ids: Iterable[int] | None = None,
    capacity: int | None = None,
    slots: int | None = None,
    capture: bool = False,
    meter: Meter | None = None,
) -> Iterator[Generation]:
    """Continuations in order of completion; finished rows leave the batch and the next requests take their place.

    temperature 0 is argmax; above, token n of a request comes from the n-th number of a random stream of its own
    (seed, request id), so neither batch size nor neighbours change it. deadline: `time.monotonic()` at which to stop;
    rows that have at least MIN_CUT tokens then are given as "cut"; the others, those with a `then` and what was not
    begun are left out.
    batch_size: rows at a time at most; fewer where the longest request leaves no memory for more: `slots` (None: what
    is free now) over its length. In bfloat16 a text may depend on how many rows there are.
    stop_ids: default the verifier's end-of-turn ids. Raises UserError for an empty prompt.

    capacity: slots for the longest request with its new tokens. With it requests are taken from the iterator only
    when slots are free, after the caller has seen all that finished before, so what is to come may depend on that;
    None in place of a request: none now. Without it they are all read first, and none may have a `then`.
    capture: keep the verifier's states for the generations.
    """
    stop = frozenset(verifier.eos_ids if stop_ids is None else stop_ids)
    row_of = partial(_row, max_new_tokens=max_new_tokens, temperature=temperature, stop=stop, seed=seed)
    source = (request if request is None else row_of(request) for request in requests)
    if capacity is None:
        known = list(source)
        if not known:
            return
        assert not any(row.request.then for row in known), "rows that go on need a capacity"
        capacity, source = max(len(row.request.input_ids) + row.limit for row in known), iter(known)
        batch_size, meter = min(batch_size, len(known)), meter or Meter("generating", len(known))
    rows = rows_that_fit(verifier, batch_size, capacity, slots)
    if rows < batch_size:
        log.info(f"generating {rows} rows at a time, for up to {capacity:,} tokens each in the free memory")
    cache = verifier.new_cache(rows, capacity)
    cache.keep_rows([])  # rows come with `place`
    live: list[_Row] = []
    step_seconds = 0.0
    with meter or Meter("generating") as meter:
        while True:
            began = time.monotonic()
            left = float("inf") if deadline is None else deadline - began
            if left <= 0:
                break
            free, new = rows - len(live), []
            if (free >= max(1, rows // 8) or not live) and left >= MIN_CUT * step_seconds:
                new = list(takewhile(lambda row: row is not None, islice(source, free)))
            if new:
                before = len(live)
                _admit(verifier, cache, live, new, deadline, capture)
                made = len(live) - before
            elif live:
                made = _step(verifier, cache, live, capture)
                step_seconds = time.monotonic() - began
            else:
                break
            busy = len(live)
            finished, live = _leave(cache, live, row_of)
            meter.step(made, busy, len(finished))
            yield from finished
    yield from (row.finished("cut") for row in live if not row.request.then and len(row.output_ids) >= MIN_CUT)


def choose(logits_BV: Tensor, temperature: float, uniform_B: np.ndarray) -> list[int]:
    """Next tokens: argmax at temperature 0, else the inverse of each row's cumulative law at its uniform number."""
    if temperature == 0:
        return logits_BV.argmax(-1).tolist()
    cumulative_BV = torch.softmax(logits_BV / temperature, -1).cumsum(-1, dtype=torch.float64)
    target_B1 = torch.from_numpy(uniform_B).to(logits_BV.device).unsqueeze(-1) * cumulative_BV[:, -1:]
    # right=True skips tokens of probability zero; the clamp meets a product that rounds up to the total.
    token_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    last_B1 = torch.searchsorted(cumulative_BV, cumulative_BV[:, -1:].contiguous())
    return token_B1.minimum(last_B1).squeeze(-1).tolist()


def settled(request: Request, max_new_tokens: int, temperature: float, stop: frozenset[int]) -> Request:
    """The request with nothing left open. Raises UserError for one that can't be."""
    if not request.input_ids:
        raise UserError(f"expected a prompt for request {request.id}, found no tokens")
    limit = max_new_tokens if request.max_new_tokens is None else min(max_new_tokens, request.max_new_tokens)
    if limit < 1:
        raise UserError(f"expected at least one new token for request {request.id}, found a limit of {limit}")
    temperature = temperature if request.temperature is None else request.temperature
    stop = stop if request.stop_ids is None else request.stop_ids
    return replace(request, max_new_tokens=limit, temperature=temperature, stop_ids=stop)


def _row(request: Request, max_new_tokens: int, temperature: float, stop: frozenset[int], seed: int) -> _Row:
    request = settled(request, max_new_tokens, temperature, stop)
    limit, temperature, stop = request.max_new_tokens, request.temperature, request.stop_ids
    name = int.from_bytes(hashlib.sha256(request.id.encode()).digest()[:8], "little")
    stream = np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), name]))
    return _Row(request, limit, temperature, stop, stream.random(limit if temperature > 0 else 0))


def _extend(rows: Sequence[_Row], logits_BV: Tensor) -> None:
    """Give each row its next token; the work of sampling is done for the rows that sample alone."""
    places: dict[float, list[int]] = {}
    for index, row in enumerate(rows):
        places.setdefault(row.temperature, []).append(index)
    for temperature, indices in places.items():
        chosen = [rows[index] for index in indices]
        part_BV = logits_BV if len(places) == 1 else logits_BV[indices]
        uniform_B = np.array([row.uniform[len(row.output_ids)] if temperature > 0 else 0.0 for row in chosen])
        for row, token in zip(chosen, choose(part_BV, temperature, uniform_B), strict=True):
            row.output_ids.append(token)


def _step(verifier: Verifier, cache: KVCache, live: list[_Row], capture: bool) -> int:
    """One more token for every row: read when it has some to read, else written. Returns how many were written."""
    tokens_BT = torch.tensor([[row.forced[0] if row.forced else row.output_ids[-1]] for row in live])
    decoded = verifier.decode(cache, tokens_BT.to(verifier.device), logits="last", capture=capture)
    if capture:
        top_B, lse_B = decoded.logits.argmax(-1), decoded.logits.logsumexp(-1)
        parts = [part.cpu() for part in (decoded.aux_BTAD[:, 0], decoded.last_BTD[:, 0], top_B, lse_B)]
        for index, row in enumerate(live):
            row.states.append(tuple(part[index : index + 1] for part in parts))
    for row in live:
        if row.forced:
            row.forced.popleft()
    places = [index for index, row in enumerate(live) if not row.forced]
    _extend([live[index] for index in places], decoded.logits[places] if len(places) < len(live) else decoded.logits)
    return len(places)


def _admit(
    verifier: Verifier, cache: KVCache, live: list[_Row], new: Sequence[_Row], deadline: float | None, capture: bool
) -> None:
    """Prefill the newcomers, give each its first token, and append them to the cache and to `live`.

    Equal prompts are computed once; prompts of like length go together. Past the deadline the rest is left out.
    """
    same: dict[tuple[int, ...], list[_Row]] = {}
    for row in sorted(new, key=lambda row: len(row.request.input_ids)):
        same.setdefault(tuple(row.request.input_ids), []).append(row)
    prompts = list(same)
    while prompts and (deadline is None or time.monotonic() < deadline):
        count = max(1, next((n for n in range(len(prompts), 0, -1) if n * len(prompts[n - 1]) <= PREFILL_TOKENS), 1))
        group, prompts = prompts[:count], prompts[count:]
        longest = len(group[-1])
        own = verifier.new_cache(count, longest)
        tokens_BT = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in group])
        count_B = [len(prompt) for prompt in group]
        decoded = verifier.decode(own, tokens_BT.to(verifier.device), count_B=count_B, logits="last", capture=capture)
        for index, prompt in enumerate(group):
            rows = same[prompt]
            _extend(rows, decoded.logits[index].expand(len(rows), -1))
            states = _prefilled(verifier, decoded, index, len(prompt)) if capture else None
            for row in rows:
                cache.place(len(live), own, index)
                live.append(row)
                if capture:
                    row.states.append(states)


def _prefilled(verifier: Verifier, decoded: Decoded, index: int, length: int) -> tuple[Tensor, ...]:
    """The states of one prompt of a prefill."""
    aux_TAD, last_TD = decoded.aux_BTAD[index, :length], decoded.last_BTD[index, :length]
    return tuple(part.cpu() for part in (aux_TAD, last_TD, *verifier.top_and_lse(last_TD)))


def _leave(cache: KVCache, live: list[_Row], row_of: Callable[[Request], _Row]) -> tuple[list[Generation], list[_Row]]:
    """(finished, still live); the last rows move into the places of those that left, so few are copied."""
    finished, staying = [], []
    for index, row in enumerate(live):
        if row.forced:
            staying.append(index)
            continue
        stopped = row.output_ids[-1] in row.stop
        if not stopped and len(row.output_ids) < row.limit:
            staying.append(index)
            continue
        reason = "stop" if stopped else "length"
        if not row.request.then:
            finished.append(row.finished(reason))
        elif following := row.request.then(Generation(row.request.id, row.output_ids, reason)):
            unread = [] if stopped else row.output_ids[-1:]
            live[index] = replace(row_of(following), forced=deque([*unread, *following.input_ids]), states=row.states)
            staying.append(index)
    if len(staying) < len(live):
        head = [index for index in staying if index < len(staying)]
        tail = iter([index for index in staying if index >= len(staying)])
        kept = set(head)
        order = [index if index in kept else next(tail) for index in range(len(staying))]
        cache.keep_rows(order)
        live = [live[index] for index in order]
    return finished, live
