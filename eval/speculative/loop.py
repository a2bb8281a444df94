"""The speculative loop over a batch of sequences, and plain decoding through the same adapter and cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.speculative.acceptance import Accepted, Nodes, accept_points, accept_sampled, draw
from eval.speculative.clock import Clock
from eval.speculative.drafter import Draft, Drafter, Features, pad
from eval.speculative.processors import Sampling, to_law


@dataclass(frozen=True)
class Round:
    """One verify call of one sequence, before anything is cut off by end-of-turn or length.

    drafted: the candidates, every node of a tree; depth: their levels; accepted: how many of them passed.
    parents: of each candidate the one that it follows, by its place in `drafted`; -1: the pending token.
    tested: how many depths were tried along the accepted path: one more than passed, unless it ended in a leaf.
    emitted: the accepted ones, then the verifier's own token.
    prefill: the round that only ran the prompt: one emitted token, and no part of tau.
    sequence: its place in the batch that was asked for. source: what drafted. Times are this sequence's share: the
    call's, divided by the number of sequences in it.
    """

    drafted: tuple[int, ...]
    depth: int
    accepted: int
    emitted: tuple[int, ...]
    tested: int = 0
    prefill: bool = False
    sequence: int = 0
    source: str = ""
    parents: tuple[int, ...] = ()
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


class Coins:
    """Numbers in [0, 1) from a generator per sequence, so that a text doesn't depend on its company."""

    def __init__(self, seeds: Sequence[int], device: torch.device):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.device = device

    def block(self, count: int) -> Tensor:
        """[B, count], float64."""
        rows = [torch.rand(count, generator=generator, dtype=torch.float64) for generator in self.generators]
        return torch.stack(rows).to(self.device)

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.generators = [self.generators[row] for row in rows]


def choose(logits_BV: Tensor, sampling: Sampling, uniform_B: Tensor | None) -> list[int]:
    """The verifier's own next tokens."""
    if sampling.greedy:
        return logits_BV.argmax(-1).tolist()
    return draw(to_law(logits_BV, sampling), uniform_B).tolist()


def judge(logits_BMV: Tensor, draft: Draft, sampling: Sampling, uniform_BU: Tensor | None) -> list[Accepted]:
    """The acceptance rule of this draft and this sampling on the verifier's logits; row n + 1 follows node n."""
    index_B = torch.arange(len(logits_BMV), device=logits_BMV.device)
    if sampling.greedy:
        top_BM = logits_BMV.argmax(-1).tolist()
        return accept_points(draft.nodes_B, lambda at, level: [top[n + 1] for top, n in zip(top_BM, at, strict=True)])
    if draft.laws is None:

        def say(at: list[int], level: int) -> list[int]:
            row_B = torch.tensor(at, device=logits_BMV.device) + 1
            coin_B = uniform_BU[:, level - 1]  # the first is the last, which alone is there without candidates
            return choose(logits_BMV[index_B, row_B], sampling, coin_B)

        return accept_points(draft.nodes_B, say)
    return [
        accept_sampled(
            draft.nodes_B[b],
            draft.laws,
            b,
            lambda node, b=b: to_law(logits_BMV[b, node + 1], sampling),
            uniform_BU[b],
        )
        for b in range(len(logits_BMV))
    ]


@torch.no_grad()
def speculate(
    verifier,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
) -> Iterator[Round]:
    """Yields a prefill `Round` for each sequence, then one a sequence and verify call, as the tokens come.

    A sequence ends when `max_new_tokens` or an end-of-turn token is out, and leaves the batch. Before a round the
    verifier's cache holds n tokens of a sequence and x_n is pending: emitted, not yet processed. The verify processes
    x_n and the candidates; after a accepted the cache holds n + 1 + a tokens and the correction or bonus is the new
    pending token. The whole draft is made and tested even where the text will be cut inside it, as the engines do.
    Sequence i draws from a generator of its own, seeded with seed + i.
    """
    clock = Clock(verifier.device)
    coins = Coins([seed + i for i in range(len(prompts))], verifier.device)
    begun = clock.now()
    prompts = [list(ids) for ids in prompts]
    capacity = max(map(len, prompts)) + max_new_tokens + drafter.depth + 1  # the last draft may reach past the length
    cache = verifier.new_cache(len(prompts), capacity + drafter.nodes + 1)
    counts = [len(ids) for ids in prompts]
    decoded = verifier.decode(cache, pad(prompts, verifier.device), count_B=counts, logits="last", capture=True)
    pending = choose(decoded.logits, sampling, None if sampling.greedy else coins.block(1)[:, 0])
    drafter.start(prompts, pending, Features(decoded.aux_BTAD, decoded.last_BTD), capacity)
    share = (clock.now() - begun) / len(prompts)
    for i, token in enumerate(pending):
        yield Round((), 0, 0, (token,), prefill=True, sequence=i, seconds=share)

    stop, emitted_B = set(verifier.eos_ids), [1] * len(prompts)
    live = list(range(len(prompts)))  # which sequences the rows are
    stopped_B = [token in stop for token in pending]
    while True:
        going = [row for row, n in enumerate(emitted_B) if n < max_new_tokens and not stopped_B[row]]
        if not going:
            return
        if len(going) < len(live):
            cache.keep_rows(going)
            drafter.keep_rows(going)
            coins.keep_rows(going)
            live, pending, emitted_B = ([x[row] for row in going] for x in (live, pending, emitted_B))
        begun, B = clock.now(), len(live)
        uniform = None if sampling.greedy else coins.block(2 * drafter.nodes + 1)
        draft = drafter.draft(None if uniform is None else uniform[:, : drafter.nodes])
        drafted_at = clock.now()
        pending_B1 = torch.tensor(pending, device=verifier.device)[:, None]
        tokens_BM = torch.cat([pending_B1, draft.tokens_BN.to(verifier.device)], 1)
        decoded = verifier.decode(cache, tokens_BM, tree=draft.rows, logits="all", capture=True)
        verified_at = clock.now()
        verdicts = judge(decoded.logits, draft, sampling, None if uniform is None else uniform[:, drafter.nodes :])
        rows_BA = [[0, *(n + 1 for n in verdict.nodes)] for verdict in verdicts]
        cache.accept_paths(rows_BA)
        new = [
            [*(nodes[n][1] for n in verdict.nodes), verdict.token]
            for nodes, verdict in zip(draft.nodes_B, verdicts, strict=True)
        ]
        drafter.accepted(new, _features(decoded, rows_BA), decoded.logits)
        pending = [tokens[-1] for tokens in new]
        emitted_B = [n + len(tokens) for n, tokens in zip(emitted_B, new, strict=True)]
        stopped_B = [not stop.isdisjoint(tokens) for tokens in new]
        first, step = (x and x / B for x in (draft.first_seconds, draft.step_seconds))
        times = {
            "draft_seconds": (drafted_at - begun) / B,
            "draft_first_seconds": first,
            "draft_step_seconds": step,
            "verify_seconds": (verified_at - drafted_at) / B,
            "seconds": (clock.now() - begun) / B,
        }
        for row, verdict in enumerate(verdicts):
            yield round_of(draft.nodes_B[row], verdict, new[row], sequence=live[row], source=drafter.name, **times)


def _features(decoded, rows_BA: Sequence[Sequence[int]]) -> Features:
    """States of these rows of each sequence."""
    row_BA = pad(rows_BA, decoded.last_BTD.device)
    in_place = all(list(rows) == list(range(len(rows))) for rows in rows_BA)
    if in_place and row_BA.shape[1] == decoded.last_BTD.shape[1]:
        return Features(decoded.aux_BTAD, decoded.last_BTD)
    index_B1 = torch.arange(len(row_BA), device=row_BA.device)[:, None]
    return Features(decoded.aux_BTAD[index_B1, row_BA], decoded.last_BTD[index_B1, row_BA])


def round_of(nodes: Nodes, verdict: Accepted, emitted: Sequence[int], **rest) -> Round:
    """The record of one sequence's verify call; `rest`: further fields."""
    drafted, parents, places, depths, inner = [], [], {-1: -1}, {-1: 0}, set()
    for n, node in enumerate(nodes):
        if node is not None and node[0] in depths:
            places[n], depths[n] = len(drafted), depths[node[0]] + 1
            inner.add(node[0])
            parents.append(places[node[0]])
            drafted.append(node[1])
    end = verdict.nodes[-1] if verdict.nodes else -1
    accepted = len(verdict.nodes)
    tested = accepted + (end in inner)
    return Round(tuple(drafted), max(depths.values()), accepted, tuple(emitted), tested, parents=tuple(parents), **rest)


def cut(tokens: list[int], eos_ids: tuple[int, ...], max_new_tokens: int) -> tuple[list[int], str]:
    """The text that is handed out and why it ended: the first end-of-turn token is kept, nothing after it."""
    tokens = tokens[:max_new_tokens]
    end = next((i for i, token in enumerate(tokens) if token in eos_ids), None)
    return (tokens, "length") if end is None else (tokens[: end + 1], "stop")


def decode_batch(verifier, drafter: Drafter, prompts: Sequence[Sequence[int]], **options) -> list[Decoded]:
    """All rounds of `speculate` and the texts they give. `options` as there."""
    rounds_B: list[list[Round]] = [[] for _ in prompts]
    for one in speculate(verifier, drafter, prompts, **options):
        rounds_B[one.sequence].append(one)
    texts = []
    for prefill, *rounds in rounds_B:
        tokens = [token for r in (prefill, *rounds) for token in r.emitted]
        tokens, finish = cut(tokens, verifier.eos_ids, options["max_new_tokens"])
        texts.append(Decoded(tokens, finish, prefill.seconds, sum(r.seconds for r in rounds), rounds=rounds))
    return texts


def speculative_decode(verifier, drafter: Drafter, prompt_ids: Sequence[int], **options) -> Decoded:
    """`decode_batch` of one prompt."""
    return decode_batch(verifier, drafter, [prompt_ids], **options)[0]


@torch.no_grad()
def plain_decode(verifier, prompt_ids: list[int], *, max_new_tokens: int, sampling: Sampling, seed: int = 0) -> Decoded:
    """The verifier alone, a token a step, through the same adapter and cache: the baseline of every speed-up."""
    clock, coins = Clock(verifier.device), Coins([seed], verifier.device)
    begun = clock.now()
    cache = verifier.new_cache(1, len(prompt_ids) + max_new_tokens)
    tokens_1T = torch.tensor([list(prompt_ids)], device=verifier.device)
    tokens, times, stop = [], [], set(verifier.eos_ids)
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in stop):
        decoded = verifier.decode(cache, tokens_1T, logits="last", capture=False)
        tokens += choose(decoded.logits, sampling, None if sampling.greedy else coins.block(1)[:, 0])
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
