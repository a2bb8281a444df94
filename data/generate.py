"""The verifier's own text: continuous batching, with results that do not depend on what else is in the batch."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from data.memory import rows_that_fit
from data.progress import Meter

if TYPE_CHECKING:
    from models.cache import KVCache
    from models.verifier import Verifier

log = logging.getLogger(__name__)

MIN_CUT = 8  # a row that the deadline stops is kept from this many tokens on
PREFILL_TOKENS = 2048  # rows x longest prompt of one prefill: prompts of like length share it


@dataclass(frozen=True)
class Request:
    """Token ids to continue, and how; None: as the call says. The lower one of both limits counts."""

    id: str
    input_ids: list[int]
    max_new_tokens: int | None = None
    temperature: float | None = None
    stop_ids: frozenset[int] | None = None


@dataclass(frozen=True)
class Generation:
    """finish_reason: "stop" (the last id is the end-of-turn token), "length", or "cut" (the deadline came)."""

    id: str
    output_ids: list[int]
    finish_reason: str


@dataclass
class _Row:
    request: Request
    limit: int
    temperature: float
    stop: frozenset[int]
    uniform: np.ndarray  # one number per token to come; empty at temperature 0
    output_ids: list[int] = field(default_factory=list)


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
    meter: Meter | None = None,
) -> Iterator[Generation]:
    """Continuations in order of completion; finished rows leave the batch and the next requests take their place.

    temperature 0 is argmax; above, token n of a request comes from the n-th number of a random stream of its own
    (seed, request id), so neither batch size nor neighbours change it. deadline: `time.monotonic()` at which to stop;
    rows that have at least MIN_CUT tokens then are given as "cut", the others and what was not begun are left out.
    batch_size: rows at a time at most; fewer where the longest request leaves no memory for more.
    stop_ids: default the verifier's end-of-turn ids. Raises UserError for an empty prompt.

    capacity: slots for the longest request with its new tokens. With it requests are taken from the iterator only
    when slots are free, after the caller has seen all that finished before, so what is to come may depend on that;
    None in place of a request: none now. Without it they are all read first.
    """
    stop = frozenset(verifier.eos_ids if stop_ids is None else stop_ids)
    source = (r if r is None else _row(r, max_new_tokens, temperature, stop, seed) for r in requests)
    if capacity is None:
        known = list(source)
        if not known:
            return
        capacity, source = max(len(row.request.input_ids) + row.limit for row in known), iter(known)
        batch_size, meter = min(batch_size, len(known)), meter or Meter("generating", len(known))
    rows = rows_that_fit(verifier, batch_size, capacity)
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
                _admit(verifier, cache, live, new, deadline)
                made = len(live) - before
            elif live:
                tokens_BT = torch.tensor([row.output_ids[-1:] for row in live])
                decoded = verifier.decode(cache, tokens_BT.to(verifier.device), logits="last", capture=False)
                _extend(live, decoded.logits)
                step_seconds, made = time.monotonic() - began, len(live)
            else:
                break
            busy = len(live)
            finished, live = _leave(cache, live)
            meter.step(made, busy, len(finished))
            yield from finished
    yield from (Generation(row.request.id, row.output_ids, "cut") for row in live if len(row.output_ids) >= MIN_CUT)


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


def _row(request: Request, max_new_tokens: int, temperature: float, stop: frozenset[int], seed: int) -> _Row:
    if not request.input_ids:
        raise UserError(f"expected a prompt for request {request.id}, found no tokens")
    limit = max_new_tokens if request.max_new_tokens is None else min(max_new_tokens, request.max_new_tokens)
    if limit < 1:
        raise UserError(f"expected at least one new token for request {request.id}, found a limit of {limit}")
    temperature = temperature if request.temperature is None else request.temperature
    stop = stop if request.stop_ids is None else request.stop_ids
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


def _admit(verifier: Verifier, cache: KVCache, live: list[_Row], new: Sequence[_Row], deadline: float | None) -> None:
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
        decoded = verifier.decode(own, tokens_BT.to(verifier.device), count_B=count_B, logits="last", capture=False)
        for index, prompt in enumerate(group):
            rows = same[prompt]
            _extend(rows, decoded.logits[index].expand(len(rows), -1))
            for row in rows:
                cache.place(len(live), own, index)
                live.append(row)


def _leave(cache: KVCache, live: list[_Row]) -> tuple[list[Generation], list[_Row]]:
    """(finished, still live); the last rows move into the places of those that left, so few are copied."""
    finished, staying = [], []
    for index, row in enumerate(live):
        if row.output_ids[-1] in row.stop:
            finished.append(Generation(row.request.id, row.output_ids, "stop"))
        elif len(row.output_ids) >= row.limit:
            finished.append(Generation(row.request.id, row.output_ids, "length"))
        else:
            staying.append(index)
    if finished:
        head = [index for index in staying if index < len(staying)]
        tail = iter([index for index in staying if index >= len(staying)])
        kept = set(head)
        order = [index if index in kept else next(tail) for index in range(len(staying))]
        cache.keep_rows(order)
        live = [live[index] for index in order]
    return finished, live
