"""The speculative loop for one sequence, and plain decoding through the same adapter and cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.speculative.acceptance import Accepted, DraftLaw, accept_chain, accept_greedy, draw
from eval.speculative.clock import Clock
from eval.speculative.drafter import Drafter, Features
from eval.speculative.processors import Sampling, to_law


@dataclass(frozen=True)
class Round:
    """One verify call, before anything is cut off by end-of-turn or length.

    drafted: the candidates; depth: their levels; accepted: how many of them passed.
    emitted: the accepted ones, then the verifier's own token.
    prefill: the round that only ran the prompt: one emitted token, and no part of tau.
    """

    drafted: tuple[int, ...]
    depth: int
    accepted: int
    emitted: tuple[int, ...]
    prefill: bool = False
    draft_seconds: float = 0.0
    draft_first_seconds: float | None = None
    draft_step_seconds: float | None = None
    verify_seconds: float = 0.0
    seconds: float = 0.0


@dataclass
class Decoded:
    """A finished text. tokens: as emitted, cut after the first end-of-turn token and at the length asked for.

    finish: "stop" or "length"; prefill_seconds: until the first token; seconds: all after it.
    """

    tokens: list[int]
    finish: str
    prefill_seconds: float
    seconds: float
    rounds: list[Round] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


def choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The verifier's own next token."""
    if sampling.greedy:
        return int(logits_V.argmax(-1))
    uniform = torch.rand((), generator=generator, dtype=torch.float64)
    return int(draw(to_law(logits_V, sampling), uniform.to(logits_V.device)))


def judge(
    logits_NV: Tensor, tokens_N: Tensor, q_draft: DraftLaw | None, sampling: Sampling, generator: torch.Generator
) -> Accepted:
    """The acceptance rule of this sampling on N+1 rows of the verifier's logits."""
    if sampling.greedy:
        return accept_greedy(logits_NV.argmax(-1), tokens_N)
    uniform_N = torch.rand(len(logits_NV), generator=generator, dtype=torch.float64).to(logits_NV.device)
    return accept_chain(to_law(logits_NV, sampling), tokens_N, q_draft, uniform_N)


@torch.no_grad()
def speculate(
    verifier,
    drafter: Drafter,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    depth: int,
    sampling: Sampling,
    seed: int = 0,
) -> Iterator[Round]:
    """Yields the prefill, then a `Round` a verify call, until `max_new_tokens` or an end-of-turn token is out.

    Before a round the verifier's cache holds n tokens and x_n is pending: emitted, not yet processed. The
    verify processes x_n, d_1..d_N; after a accepted the cache is cut to n + 1 + a tokens and the correction
    or bonus is the new pending token. The whole draft is made and tested even where the text will be cut
    inside it, as the engines do. `seed` fixes the text.
    """
    clock, generator = Clock(verifier.device), torch.Generator().manual_seed(seed)
    begun = clock.now()
    capacity = len(prompt_ids) + max_new_tokens + 2 * (depth + 1)  # the last draft may reach past the length
    cache = verifier.new_cache(1, capacity)
    prompt_1T = torch.tensor([prompt_ids], device=verifier.device)
    decoded = verifier.decode(cache, prompt_1T, logits="last", capture=True)
    pending = choose(decoded.logits[0], sampling, generator)
    drafter.start(prompt_ids, pending, Features(decoded.aux_BTAD[0], decoded.last_BTD[0]), capacity)
    emitted, cached = 1, len(prompt_ids)
    yield Round((), 0, 0, (pending,), prefill=True, seconds=clock.now() - begun)

    stop = set(verifier.eos_ids)
    stopped = pending in stop
    while emitted < max_new_tokens and not stopped:
        begun = clock.now()
        draft = drafter.draft(depth, generator)
        drafted_at = clock.now()
        tokens_N = draft.tokens_N.to(verifier.device)
        tokens_1T = torch.cat([tokens_N.new_tensor([pending]), tokens_N])[None]
        decoded = verifier.decode(cache, tokens_1T, logits="all", capture=True)
        verified_at = clock.now()
        verdict = judge(decoded.logits[0], tokens_N, draft.q_draft, sampling, generator)
        drafted = tokens_N.tolist()
        new = drafted[: verdict.count] + [verdict.token]
        cached += len(new)
        cache.truncate([cached])
        drafter.accepted(new, Features(decoded.aux_BTAD[0, : len(new)], decoded.last_BTD[0, : len(new)]))
        pending, emitted, stopped = verdict.token, emitted + len(new), not stop.isdisjoint(new)
        yield Round(
            tuple(drafted),
            draft.depth,
            verdict.count,
            tuple(new),
            draft_seconds=drafted_at - begun,
            draft_first_seconds=draft.first_seconds,
            draft_step_seconds=draft.step_seconds,
            verify_seconds=verified_at - drafted_at,
            seconds=clock.now() - begun,
        )


def cut(tokens: list[int], eos_ids: tuple[int, ...], max_new_tokens: int) -> tuple[list[int], str]:
    """The text that is handed out and why it ended: the first end-of-turn token is kept, nothing after it."""
    tokens = tokens[:max_new_tokens]
    end = next((i for i, token in enumerate(tokens) if token in eos_ids), None)
    return (tokens, "length") if end is None else (tokens[: end + 1], "stop")


def speculative_decode(verifier, drafter: Drafter, prompt_ids: list[int], **options) -> Decoded:
    """All rounds of `speculate` and the text they give. `options` as there."""
    rounds = list(speculate(verifier, drafter, prompt_ids, **options))
    tokens = [token for r in rounds for token in r.emitted]
    tokens, finish = cut(tokens, verifier.eos_ids, options["max_new_tokens"])
    return Decoded(tokens, finish, rounds[0].seconds, sum(r.seconds for r in rounds[1:]), rounds=rounds[1:])


@torch.no_grad()
def plain_decode(verifier, prompt_ids: list[int], *, max_new_tokens: int, sampling: Sampling, seed: int = 0) -> Decoded:
    """The verifier alone, a token a step, through the same adapter and cache: the baseline of every speed-up."""
    clock, generator = Clock(verifier.device), torch.Generator().manual_seed(seed)
    begun = clock.now()
    cache = verifier.new_cache(1, len(prompt_ids) + max_new_tokens)
    tokens_1T = torch.tensor([prompt_ids], device=verifier.device)
    tokens, times, stop = [], [], set(verifier.eos_ids)
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop):
        decoded = verifier.decode(cache, tokens_1T, logits="last", capture=False)
        tokens.append(choose(decoded.logits[0], sampling, generator))
        tokens_1T = torch.tensor([[tokens[-1]]], device=verifier.device)
        ended = clock.now()
        times.append(ended - begun)
        begun = ended
    finish = "stop" if tokens[-1] in stop else "length"
    return Decoded(tokens, finish, times[0], sum(times[1:]), step_seconds=times[1:])


def top_two_gap(verifier, ids: list[int]) -> float:
    """Difference of the verifier's two best logits after `ids`: near 0, greedy decoding is a numerical tie."""
    cache = verifier.new_cache(1, len(ids))
    decoded = verifier.decode(cache, torch.tensor([ids], device=verifier.device), logits="last", capture=False)
    best = decoded.logits[0].topk(2).values
    return float(best[0] - best[1])
