"""Drafters without a model of their own: none, prompt lookup, and Lookahead's n-grams from Jacobi iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conf.errors import UserError
from eval.speculative.drafter import Draft, Features, pad
from eval.speculative.shapes import verify_rows


class NoDraft:
    """Drafts nothing: every round is a plain decoding step."""

    name, ids_R, nodes, depth = "none", None, 0, 0

    def start(self, prompts, pending, features, capacity) -> None:
        self.shape, self.device = (len(prompts), 0), features.last_BTD.device

    def draft(self, uniform_BN: Tensor | None = None) -> Draft:
        nothing = torch.empty(self.shape, dtype=torch.int64, device=self.device)
        return Draft(nothing, nothing)

    def accepted(self, tokens, features, logits_BMV) -> None:
        pass

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.shape = (len(rows), 0)


class Suffixes:
    """One text, and of every n-gram of up to `longest` tokens where its latest occurrence with a next token ends."""

    def __init__(self, ids: Sequence[int], longest: int):
        self.longest = longest
        self.ids: list[int] = []
        self.seen: dict[tuple[int, ...], int] = {}
        self.extend(ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens one by one; an n-gram is indexed once the token after it is known."""
        for token in tokens:
            for n in range(1, min(self.longest, len(self.ids)) + 1):
                self.seen[tuple(self.ids[-n:])] = len(self.ids)
            self.ids.append(token)

    def following(self, count: int) -> list[int]:
        """What came after the latest earlier occurrence of the longest ending that has one."""
        for n in range(min(self.longest, len(self.ids) - 1), 0, -1):
            after = self.seen.get(tuple(self.ids[-n:]))
            if after is not None:
                return self.ids[after : after + count]
        return []


class PromptLookup:
    """Drafts what followed the last earlier occurrence of the text's ending, no model needed.

    The longest suffix of up to `longest` tokens that occurred before wins, and of its occurrences the latest.
    Point masses. Without a match it drafts nothing and the verifier decodes one token.
    """

    name, ids_R = "prompt_lookup", None

    def __init__(self, depth: int, longest: int = 3):
        self.nodes = self.depth = depth
        self.longest = longest
        self.texts: list[Suffixes] = []
        self.device = torch.device("cpu")

    def start(self, prompts, pending, features: Features | None = None, capacity: int = 0) -> None:
        self.texts = [Suffixes([*ids, token], self.longest) for ids, token in zip(prompts, pending, strict=True)]
        if features is not None:
            self.device = features.last_BTD.device

    def accepted(self, tokens, features: Features | None = None, logits_BMV: Tensor | None = None) -> None:
        for text, new in zip(self.texts, tokens, strict=True):
            text.extend(new)

    def draft(self, uniform_BN: Tensor | None = None) -> Draft:
        found = [text.following(self.depth) for text in self.texts]
        tokens_BN = pad(found, self.device)
        N = tokens_BN.shape[1]
        live_BN = torch.tensor([[n < len(row) for n in range(N)] for row in found]).view(len(found), N)
        return Draft(tokens_BN, torch.arange(-1, N - 1)[None], live_BN=live_BN.to(self.device))

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]


@dataclass
class Window:
    """One sequence of Lookahead. trail_LW: the last L steps of a Jacobi iteration over the next W positions.

    pool: for a token, the n-grams that came after it, the latest last.
    """

    trail_LW: list[list[int]]
    prompt: list[int]
    generator: torch.Generator
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)

    def guess(self) -> int:
        """A token of the prompt, to begin an iteration from."""
        return self.prompt[int(torch.randint(len(self.prompt), (), generator=self.generator))]


class Lookahead:
    """Lookahead decoding (2402.02057): a Jacobi iteration over the next `window` positions runs beside the verifier.

    The tree of a verify call has two parts. Candidates: up to `guesses` n-grams that were seen after the pending token.
    And the window, whose nodes can't be accepted: its oldest step hangs below the pending token as a chain, and from
    each of its columns the later steps go on as a branch, so that a row sees what the paper's mask lets it see. What
    the verifier says after the ends of these branches is the next step; each column read downwards is a new n-gram.
    """

    name, ids_R = "lookahead", None

    def __init__(self, window: int = 5, ngram: int = 4, guesses: int = 5, seed: int = 0):
        if window < 1 or ngram < 2 or guesses < 1:
            raise UserError(
                f"Lookahead needs window >= 1, ngram >= 2 and guesses >= 1, found {window}, {ngram} and {guesses}"
            )
        self.window, self.steps, self.guesses, self.seed = window, ngram - 1, guesses, seed
        self.depth = ngram - 1
        self.nodes = guesses * self.depth + window * self.steps
        self.windows: list[Window] = []

    def start(self, prompts, pending, features: Features, capacity: int) -> None:
        self.device, self.pending = features.last_BTD.device, list(pending)
        self.windows = [Window([], list(ids), torch.Generator().manual_seed(self.seed)) for ids in prompts]
        for one in self.windows:
            one.trail_LW = [[one.guess() for _ in range(self.window)] for _ in range(self.steps)]

    def draft(self, uniform_BN: Tensor | None = None) -> Draft:
        """The window's nodes first, so that their places are the same in every sequence; then the n-grams."""
        W, L = self.window, self.steps
        below = [[*range(-1, W - 1)], *([*range(W * (step - 1), W * step)] for step in range(1, L))]
        window_parents = [parent for level in below for parent in level]
        tokens, parents, live = [], [], []
        for pending, one in zip(self.pending, self.windows, strict=True):
            own_tokens, own_parents = _prefix_tree(one.pool.get(pending, {}), W * L)
            tokens.append([token for level in one.trail_LW for token in level] + own_tokens)
            parents.append(window_parents + own_parents)
            live.append([False] * (W * L) + [True] * len(own_tokens))
        N = max(map(len, tokens))
        fill = [N - len(row) for row in tokens]
        parents_BN = torch.tensor([row + [-1] * more for row, more in zip(parents, fill, strict=True)])
        live_BN = torch.tensor([row + [False] * more for row, more in zip(live, fill, strict=True)])
        rows = verify_rows(parents_BN, W + L)
        return Draft(pad(tokens, self.device), parents_BN, rows, live_BN=live_BN.to(self.device))

    def accepted(self, tokens: list[list[int]], features: Features, logits_BMV: Tensor) -> None:
        W, L = self.window, self.steps
        ends = slice(1 + W * (L - 1), 1 + W * L)  # rows of the newest step; row 0 is the pending token
        newest_BW = logits_BMV[:, ends].argmax(-1).tolist()
        for one, newest, emitted in zip(self.windows, newest_BW, tokens, strict=True):
            for first, *rest in zip(*one.trail_LW, newest, strict=True):
                seen = one.pool.setdefault(first, {})
                seen.pop(tuple(rest), None)
                seen[tuple(rest)] = None
                if len(seen) > self.guesses:
                    del seen[next(iter(seen))]
            moved = len(emitted) - 1  # a step is one position on; accepted drafts are so many more
            trail = [*one.trail_LW[1:], newest]
            one.trail_LW = [[*row[moved:], *(one.guess() for _ in range(min(moved, W)))] for row in trail]
        self.pending = [row[-1] for row in tokens]

    def keep_rows(self, rows: Sequence[int]) -> None:
        self.windows, self.pending = [self.windows[row] for row in rows], [self.pending[row] for row in rows]


def _prefix_tree(ngrams: Sequence[tuple[int, ...]], offset: int) -> tuple[list[int], list[int]]:
    """Tokens and parents (-1: the root) of n-grams that share their beginnings; nodes are numbered from `offset`."""
    nodes: dict[tuple[int, ...], int] = {}
    tokens, parents = [], []
    for ngram in ngrams:
        for length in range(1, len(ngram) + 1):
            path = tuple(ngram[:length])
            if path not in nodes:
                nodes[path] = offset + len(tokens)
                tokens.append(path[-1])
                parents.append(nodes.get(path[:-1], -1))
    return tokens, parents
