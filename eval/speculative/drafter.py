"""What proposes tokens: one protocol, and its drafters: EAGLE heads, Medusa, models of tokens alone, prompt lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eval.speculative.acceptance import DraftLaw, draw
from eval.speculative.clock import Clock
from eval.speculative.processors import Sampling, to_law


@dataclass(frozen=True)
class Features:
    """The verifier's states at T consecutive rows: captured layers [T, A, D] and post-norm last hidden [T, D]."""

    aux_TAD: Tensor
    last_TD: Tensor


@dataclass(frozen=True)
class Draft:
    """Candidates of one round.

    tokens_N:      [N] int64 on the verifier's device; N may be 0.
    q_draft:       the law of each candidate, None for point masses.
    parents_N:     index of each node's parent, -1 for the root; None: a chain.
    first_seconds: time of the pass over all new rows, which gives d_1.
    step_seconds:  mean time of each later draft step; None when there was none.
    """

    tokens_N: Tensor
    q_draft: DraftLaw | None = None
    parents_N: Tensor | None = None
    first_seconds: float | None = None
    step_seconds: float | None = None

    @property
    def depth(self) -> int:
        """Levels of the tree; the length of a chain."""
        assert self.parents_N is None, "only chains are drafted so far"
        return len(self.tokens_N)


class Drafter(Protocol):
    """Proposes candidates for one sequence at a time; `start` begins the next sequence.

    ids_R: the tokens that it can propose, None for all.
    """

    ids_R: Tensor | None

    def start(self, prompt_ids: list[int], pending: int, features: Features, capacity: int) -> None:
        """The verifier processed `prompt_ids` = x_0..x_{n-1} (features: n rows) and emitted x_n = `pending`.

        No more than `capacity` rows, drafts included, are needed for this sequence.
        """

    def draft(self, depth: int, generator: torch.Generator) -> Draft:
        """Up to `depth` levels of candidates after the last emitted token. `generator` lives on the CPU."""

    def accepted(self, tokens: list[int], features: Features) -> None:
        """`tokens` = the a accepted candidates, then the verifier's own; features of the a+1 rows before them."""


class HeadDrafter:
    """A chain of an EAGLE head, fed as the serving engines feed it (2401.15077, 2503.01840; vLLM and SGLang agree).

    Once the verifier processed x_0..x_{n-1} and emitted x_n, the first pass takes every new row i as
    (token x_{i+1}, `fuse` of the states at i, position i); its last row drafts d_1. Step j >= 2 takes (d_{j-1}, the
    previous output, position n+j-2). Accepted tokens are run again with the verifier's features in the next first pass:
    the head's cache is cut back to its true rows before it.

    Greedy sampling drafts the head's argmax (point masses). Otherwise it draws from the head's law after the
    same processors as the verifier's, and that law goes to the acceptance test.
    """

    def __init__(self, head, sampling: Sampling):
        self.head = head
        self.sampling = sampling
        self.ids_R = head.vocab.ids_R.to(next(head.parameters()).device)
        self.cache = None
        self.true_rows = 0  # rows of the cache that hold the verifier's features
        self.new_tokens: list[int] = []
        self.new_aux_TAD: Tensor | None = None

    def start(self, prompt_ids: list[int], pending: int, features: Features, capacity: int) -> None:
        self.cache = self.head.new_cache(1, capacity)
        self.true_rows = 0
        self.new_tokens = prompt_ids[1:] + [pending]
        self.new_aux_TAD = features.aux_TAD

    def accepted(self, tokens: list[int], features: Features) -> None:
        self.new_tokens = tokens
        self.new_aux_TAD = features.aux_TAD

    @torch.no_grad()
    def draft(self, depth: int, generator: torch.Generator) -> Draft:
        clock, uniform_N = Clock(self.ids_R.device), coins(depth, self.sampling, generator, self.ids_R.device)
        begun = clock.now()
        out_D = self._first_pass()
        tokens, laws = [], []
        self._choose(out_D, uniform_N, tokens, laws)
        first_done = clock.now()
        for position in range(self.true_rows, self.true_rows + depth - 1):
            hidden_11D = self.head.feedback(out_D)[None, None]
            out_D = self.head.step(tokens[-1].view(1, 1), hidden_11D, position, self.cache)[0, -1]
            self._choose(out_D, uniform_N, tokens, laws)
        return Draft(
            torch.stack(tokens),
            law_of(laws, self.ids_R),
            first_seconds=first_done - begun,
            step_seconds=(clock.now() - first_done) / (depth - 1) if depth > 1 else None,
        )

    def _first_pass(self) -> Tensor:
        """Runs the new rows with true features; the last row's output [D] drafts d_1."""
        self.cache.truncate(self.true_rows)
        tokens_1T = torch.tensor([self.new_tokens], device=self.ids_R.device)
        hidden_1TD = self.head.fuse(self.new_aux_TAD[None])
        out_1TD = self.head.step(tokens_1T, hidden_1TD, self.true_rows, self.cache)
        self.true_rows += len(self.new_tokens)
        return out_1TD[0, -1]

    def _choose(self, out_D: Tensor, uniform_N: Tensor | None, tokens: list[Tensor], laws: list[Tensor]) -> None:
        choose(self.head.logits(out_D), self.ids_R, self.sampling, uniform_N, tokens, laws)


class MedusaDrafter:
    """A chain of Medusa's heads (2401.10774): head k drafts d_{k+1}, all of them from the last processed row's state.

    The heads don't see each other's drafts, so the law of each is what its head says, whatever the others drew. At most
    as many drafts as there are heads. All of them come from the first pass, so a further draft has no time of its own.
    """

    def __init__(self, head, sampling: Sampling):
        self.head = head
        self.sampling = sampling
        self.ids_R = head.vocab.ids_R.to(head.lm_weight.device)
        self.hidden_D: Tensor | None = None

    def start(self, prompt_ids: list[int], pending: int, features: Features, capacity: int) -> None:
        self.hidden_D = self.head.fuse(features.aux_TAD[-1])

    def accepted(self, tokens: list[int], features: Features) -> None:
        self.hidden_D = self.head.fuse(features.aux_TAD[-1])

    @torch.no_grad()
    def draft(self, depth: int, generator: torch.Generator) -> Draft:
        depth = min(depth, self.head.config.heads)
        clock, uniform_N = Clock(self.ids_R.device), coins(depth, self.sampling, generator, self.ids_R.device)
        begun = clock.now()
        tokens, laws = [], []
        for logits_R in self.head.logits(torch.stack(self.head.outputs(self.hidden_D, depth))):
            choose(logits_R, self.ids_R, self.sampling, uniform_N, tokens, laws)
        seconds = clock.now() - begun
        later = 0.0 if depth > 1 else None
        return Draft(torch.stack(tokens), law_of(laws, self.ids_R), first_seconds=seconds, step_seconds=later)


class ModelDrafter:
    """A chain of a model that reads tokens alone: the independent draft of 2211.17192.

    model: `new_cache(capacity)`, `extend(cache, tokens_1T) -> logits_R after the last token`, and `ids_R`.
    What it has cached of accepted drafts stays; rejected ones are cut off.
    """

    def __init__(self, model, sampling: Sampling, device: torch.device | str):
        self.model = model
        self.sampling = sampling
        self.ids_R = model.ids_R.to(device)
        self.cache = None
        self.ids: list[int] = []  # the sequence so far
        self.cached: list[int] = []  # what the cache holds

    def start(self, prompt_ids: list[int], pending: int, features: Features, capacity: int) -> None:
        self.cache = self.model.new_cache(capacity)
        self.ids, self.cached = prompt_ids + [pending], []

    def accepted(self, tokens: list[int], features: Features) -> None:
        self.ids = self.ids + tokens

    @torch.no_grad()
    def draft(self, depth: int, generator: torch.Generator) -> Draft:
        device = self.ids_R.device
        clock, uniform_N = Clock(device), coins(depth, self.sampling, generator, device)
        begun = clock.now()
        pairs = enumerate(zip(self.cached, self.ids, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), len(self.cached))
        keep = min(same, len(self.ids) - 1)
        self.cache.truncate([keep])
        self.cached = list(self.ids)
        new_1T = torch.tensor([self.ids[keep:]], device=device)
        tokens, laws, times = [], [], []
        for _ in range(depth):
            choose(self.model.extend(self.cache, new_1T), self.ids_R, self.sampling, uniform_N, tokens, laws)
            new_1T = tokens[-1].view(1, 1)
            times.append(clock.now() - begun)
        self.cached += [int(token) for token in tokens[:-1]]
        later = (times[-1] - times[0]) / (depth - 1) if depth > 1 else None
        return Draft(torch.stack(tokens), law_of(laws, self.ids_R), first_seconds=times[0], step_seconds=later)


def coins(depth: int, sampling: Sampling, generator: torch.Generator, device) -> Tensor | None:
    """A uniform number for each candidate to be drawn, None where nothing is."""
    return None if sampling.greedy else torch.rand(depth, generator=generator, dtype=torch.float64).to(device)


def choose(
    logits_R: Tensor,
    ids_R: Tensor,
    sampling: Sampling,
    uniform_N: Tensor | None,
    tokens: list[Tensor],
    laws: list[Tensor],
) -> None:
    """Appends the candidate that these draft logits give, and the law it was drawn from unless that is a point mass."""
    if uniform_N is None:
        column = logits_R.argmax(-1)
    else:
        laws.append(to_law(logits_R, sampling))
        column = draw(laws[-1], uniform_N[len(tokens)])
    tokens.append(ids_R[column])


def law_of(laws: list[Tensor], ids_R: Tensor) -> DraftLaw | None:
    return DraftLaw(torch.stack(laws), ids_R) if laws else None


def drafter_for(head, sampling: Sampling) -> Drafter:
    """The drafter that drives this kind of head."""
    kind = head.config.kind
    if kind == "medusa":
        return MedusaDrafter(head, sampling)
    if kind == "independent":
        return ModelDrafter(head, sampling, head.lm_weight.device)
    return HeadDrafter(head, sampling)


class PromptLookup:
    """Drafts what followed the last earlier occurrence of the text's ending, no model needed.

    The longest suffix of up to `longest` tokens that occurred before wins, and of its occurrences the latest.
    Point masses. Without a match it drafts nothing and the verifier decodes one token.
    """

    ids_R = None

    def __init__(self, longest: int = 3):
        self.longest = longest
        self.ids: list[int] = []
        self.seen: dict[tuple[int, ...], int] = {}  # n-gram -> index after its latest occurrence that has a next token

    def start(self, prompt_ids: list[int], pending: int, features: Features | None = None, capacity: int = 0) -> None:
        self.ids, self.seen = [], {}
        self._extend(prompt_ids + [pending])

    def accepted(self, tokens: list[int], features: Features | None = None) -> None:
        self._extend(tokens)

    def draft(self, depth: int, generator: torch.Generator | None = None) -> Draft:
        for n in range(min(self.longest, len(self.ids) - 1), 0, -1):
            after = self.seen.get(tuple(self.ids[-n:]))
            if after is not None:
                return Draft(torch.tensor(self.ids[after : after + depth]))
        return Draft(torch.empty(0, dtype=torch.int64))

    def _extend(self, tokens: list[int]) -> None:
        """Appends tokens one by one; an n-gram is indexed once the token after it is known."""
        for token in tokens:
            for n in range(1, min(self.longest, len(self.ids)) + 1):
                self.seen[tuple(self.ids[-n:])] = len(self.ids)
            self.ids.append(token)
