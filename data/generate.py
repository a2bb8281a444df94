"""The verifier's own text: continuous batching, with results that do not depend on what else is in the batch."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from data.memory import rows_that_fit
from data.progress import progress_bar

if TYPE_CHECKING:
    from models.cache import KVCache
    from models.verifier import Verifier

log = logging.getLogger(__name__)

MIN_CUT = 8  # a row that the deadline stops is kept from this many tokens on
PREFILL_TOKENS = 2048  # rows x longest prompt of one prefill: prompts of like length share it


@dataclass(frozen=True)
class Request:
    """Token ids to continue. max_new_tokens: None for the call's own limit."""

    id: str
    input_ids: list[int]
    max_new_tokens: int | None = None


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
    uniform: np.ndarray  # one number per token to come
    output_ids: list[int] = field(default_factory=list)


@torch.no_grad()
def generate(
    verifier: Verifier,
    requests: Sequence[Request],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    batch_size: int = 64,
    seed: int = 0,
    deadline: float | None = None,
    stop_ids: Sequence[int] | None = None,
    label: str = "generating",
) -> Iterator[Generation]:
    """Continuations in order of completion; finished rows leave the batch and the next requests take their place.

    temperature 0 is argmax; above, token n of a request comes from the n-th number of a random stream of its own
    (seed, request id), so neither batch size nor neighbours change it. deadline: `time.monotonic()` at which to stop;
    rows that have at least MIN_CUT tokens then are given as "cut", the others and what was not begun are left out.
    batch_size: rows at a time at most; fewer where the longest request leaves no memory for more.
    stop_ids: default the verifier's end-of-turn ids. Raises UserError for an empty prompt.
    """
    stop = frozenset(verifier.eos_ids if stop_ids is None else stop_ids)
    queue = deque(_row(request, max_new_tokens, temperature, seed) for request in requests)
    if not queue:
        return
    capacity = max(len(row.request.input_ids) + row.limit for row in queue)
    rows = rows_that_fit(verifier, min(batch_size, len(queue)), capacity)
    if rows < min(batch_size, len(queue)):
        log.info(f"{label}: {rows} rows at a time, for sequences of up to {capacity:,} tokens in the free memory")
    cache = verifier.new_cache(rows, capacity)
    cache.keep_rows([])  # rows come with `place`
    live: list[_Row] = []
    step_seconds, tokens, start = 0.0, 0, time.monotonic()
    with progress_bar() as bar:
        task = bar.add_task(label, total=len(queue), rate="")
        while queue or live:
            began = time.monotonic()
            left = float("inf") if deadline is None else deadline - began
            if left <= 0 or (not live and left < MIN_CUT * step_seconds):
                break
            free = rows - len(live)
            wanted = min(len(queue), max(1, rows // 8))
            if queue and (free >= wanted or not live) and left >= MIN_CUT * step_seconds:
                new = [queue.popleft() for _ in range(min(free, len(queue)))]
                _admit(verifier, cache, live, new, temperature)
                tokens += len(new)
            else:
                tokens_BT = torch.tensor([row.output_ids[-1:] for row in live])
                decoded = verifier.decode(cache, tokens_BT.to(verifier.device), logits="last", capture=False)
                _extend(live, decoded.logits, temperature)
                step_seconds = time.monotonic() - began
                tokens += len(live)
            finished, live = _leave(cache, live, stop)
            yield from finished
            rate = tokens / (time.monotonic() - start)
            bar.update(task, advance=len(finished), rate=f"{rate:,.0f} tokens/s, {len(live)} live")
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


def _row(request: Request, max_new_tokens: int, temperature: float, seed: int) -> _Row:
    if not request.input_ids:
        raise UserError(f"expected a prompt for request {request.id}, found no tokens")
    limit = max_new_tokens if request.max_new_tokens is None else min(max_new_tokens, request.max_new_tokens)
    if limit < 1:
        raise UserError(f"expected at least one new token for request {request.id}, found a limit of {limit}")
    name = int.from_bytes(hashlib.sha256(request.id.encode()).digest()[:8], "little")
    stream = np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), name]))
    return _Row(request, limit, stream.random(limit) if temperature > 0 else np.zeros(limit))


def _extend(rows: Sequence[_Row], logits_BV: Tensor, temperature: float) -> None:
    uniform_B = np.array([row.uniform[len(row.output_ids)] for row in rows])
    for row, token in zip(rows, choose(logits_BV, temperature, uniform_B), strict=True):
        row.output_ids.append(token)


def _admit(verifier: Verifier, cache: KVCache, live: list[_Row], new: Sequence[_Row], temperature: float) -> None:
    """Prefill the newcomers, give each its first token, and append them to the cache and to `live`.

    Equal prompts are computed once; prompts of like length go together.
    """
    same: dict[tuple[int, ...], list[_Row]] = {}
    for row in sorted(new, key=lambda row: len(row.request.input_ids)):
        same.setdefault(tuple(row.request.input_ids), []).append(row)
    prompts = list(same)
    while prompts:
        count = max(1, next((n for n in range(len(prompts), 0, -1) if n * len(prompts[n - 1]) <= PREFILL_TOKENS), 1))
        group, prompts = prompts[:count], prompts[count:]
        longest = len(group[-1])
        own = verifier.new_cache(count, longest)
        tokens_BT = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in group])
        count_B = [len(prompt) for prompt in group]
        decoded = verifier.decode(own, tokens_BT.to(verifier.device), count_B=count_B, logits="last", capture=False)
        for index, prompt in enumerate(group):
            rows = same[prompt]
            _extend(rows, decoded.logits[index].expand(len(rows), -1), temperature)
            for row in rows:
                cache.place(len(live), own, index)
                live.append(row)


def _leave(cache: KVCache, live: list[_Row], stop: frozenset[int]) -> tuple[list[Generation], list[_Row]]:
    """(finished, still live); the last rows move into the places of those that left, so few are copied."""
    finished, staying = [], []
    for index, row in enumerate(live):
        if row.output_ids[-1] in stop:
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
