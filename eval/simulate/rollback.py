"""Two sequences in one batch, one whose drafts all pass and one that rejects at draft 2: what the caches hold.

The loop and the cache are the real ones; verifier and draft are scripts. The keys that the verifier writes are its
tokens, so that what a cache slot holds can be looked at.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice, pairwise
from types import SimpleNamespace

import torch
from rich.text import Text

from conf.errors import UserError
from eval.plots import COLOURS, new_figure, save_figure
from eval.simulate.finding import Check, Finding, table
from eval.speculative.drafter import Draft
from eval.speculative.loop import speculate
from eval.speculative.processors import Sampling
from models.cache import KVCache

VOCAB, ROUNDS = 64, 4
PROMPTS = ([11, 12, 13], [21, 22, 23, 24, 25])
NAMES = ("A", "B")
REJECTED = (None, 2)  # the draft that each sequence rejects in every round


def say(token):
    """The scripted verifier's next token: no token says itself, and none its neighbour of the same script."""
    return (5 * token + 3) % VOCAB


class WatchedCache(KVCache):
    """The cache of the loop, with a log: lengths before a verify, with its rows, and after the rollback."""

    def __init__(self, batch: int, capacity: int):
        super().__init__(batch, capacity)
        self.log: list[tuple[list[int], list[int], list[int]]] = []
        self.processed: list[tuple[int, int, int]] = []  # (sequence, position, token) of every row that was run

    def accept_paths(self, nodes_B) -> None:
        base_B, full_B = list(self.base_B), list(self.length_B)
        super().accept_paths(nodes_B)
        self.log.append((base_B, full_B, list(self.length_B)))

    def content(self, row: int) -> list[int]:
        """The tokens whose keys the valid slots hold."""
        return self.keys[0][row, 0, : self.length_B[row], 0].long().tolist()


@dataclass
class ScriptedVerifier:
    """Says `say(token)` after each token, and writes the token as its key."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    eos_ids: tuple[int, ...] = ()
    cache: WatchedCache | None = None

    def new_cache(self, batch: int, capacity: int) -> WatchedCache:
        self.cache = WatchedCache(batch, capacity)
        return self.cache

    def decode(self, cache, tokens_BT, *, count_B=None, tree=None, logits="all", capture=True):
        B, T = tokens_BT.shape
        counts = [T] * B if count_B is None else list(count_B)
        for row, (length, count) in enumerate(zip(cache.length_B, counts, strict=True)):
            cache.processed += [(row, length + i, int(tokens_BT[row, i])) for i in range(count)]
        cache.stage(T, counts, self.device)
        keys = tokens_BT[:, None, :, None].double()
        cache.update(keys, keys, 0)
        cache.advance(counts)
        logits_BTV = torch.nn.functional.one_hot(say(tokens_BT), VOCAB).float()
        last_BV = logits_BTV[torch.arange(B), torch.tensor(counts) - 1]
        nothing = torch.zeros(B, T, 1, 1)
        return SimpleNamespace(
            logits=last_BV if logits == "last" else logits_BTV, aux_BTAD=nothing, last_BTD=nothing[..., 0]
        )


class ScriptedDraft:
    """What the verifier will say, but for one wrong draft a round in the sequences of `REJECTED`."""

    name, ids_R = "script", None

    def __init__(self, depth: int):
        self.nodes = self.depth = depth

    def start(self, prompts, pending, features, capacity) -> None:
        self.last = list(pending)

    def draft(self, uniform_BN) -> Draft:
        rows = []
        for token, wrong in zip(self.last, REJECTED, strict=True):
            row = []
            for n in range(1, self.depth + 1):
                token = say(token) if n != wrong else (say(token) + 1) % VOCAB
                row.append(token)
            rows.append(row)
        return Draft(torch.tensor(rows), torch.arange(-1, self.depth - 1)[None])

    def accepted(self, tokens, features, logits_BMV) -> None:
        self.last = [new[-1] for new in tokens]

    def keep_rows(self, rows) -> None:
        self.last = [self.last[row] for row in rows]


@dataclass(frozen=True)
class Step:
    """One round of one sequence. n: tokens in its cache before; rows: that the verify wrote; after: in it now.

    exact, committed: the cache holds the text but its pending token; so does one that is filled by scratch and commit.
    """

    round: int
    sequence: str
    n: int
    rows: int
    accepted: int
    after: int
    exact: bool
    committed: bool


def play(depth: int, seed: int) -> tuple[list[Step], list[list[int]], WatchedCache]:
    """`ROUNDS` rounds: the steps, both texts with their pending token, and the cache."""
    verifier = ScriptedVerifier()
    options = {"max_new_tokens": (depth + 1) * (ROUNDS + 1), "sampling": Sampling(), "seed": seed}
    stream = speculate(verifier, ScriptedDraft(depth), [list(ids) for ids in PROMPTS], **options)
    texts = [[*prompt, *prefill.emitted] for prompt, prefill in zip(PROMPTS, stream, strict=False)]
    committed = [list(prompt) for prompt in PROMPTS]
    steps = []
    for number in range(1, ROUNDS + 1):
        for one in islice(stream, len(PROMPTS)):
            row, cache = one.sequence, verifier.cache
            n, full, after = (lengths[row] for lengths in cache.log[-1])
            scratch = [texts[row][-1], *one.drafted]  # what the verify wrote, elsewhere
            committed[row] += scratch[: 1 + one.accepted]
            texts[row] += one.emitted
            held = [cache.content(row) == texts[row][:-1], committed[row] == texts[row][:-1]]
            steps.append(Step(number, NAMES[row], n, full - n, one.accepted, after, *held))
    return steps, texts, verifier.cache


def simulate(cfg) -> Finding:
    """cfg.depth drafts a round. Raises UserError."""
    depth = cfg.depth
    if not 2 <= depth <= 16:
        raise UserError(f"expected depth from 2 to 16, found {depth}")
    steps, texts, cache = play(depth, cfg.seed)
    kept = {(row, at): token for row, text in enumerate(texts) for at, token in enumerate(text[:-1])}
    runs = [kept.get((row, at)) == token for row, at, token in cache.processed]
    right = [
        all(b == say(a) for a, b in pairwise(text[len(prompt) - 1 :]))
        for text, prompt in zip(texts, PROMPTS, strict=True)
    ]
    grown = {name: [step.after - step.n for step in steps if step.sequence == name] for name in NAMES}
    checks = [
        Check("A: rounds after which its cache holds n + 1 + N", grown["A"].count(1 + depth), ROUNDS),
        Check("B: rounds after which its cache holds n + 2", grown["B"].count(2), ROUNDS),
        Check("caches that hold the text but its pending token", sum(s.exact for s in steps), len(steps)),
        Check("caches that scratch and commit fills alike", sum(s.committed for s in steps), len(steps)),
        Check("rows of kept tokens that were run again", sum(runs) - len(kept), 0),
        Check("texts that are the verifier's own", sum(right), len(texts)),
    ]
    # With one length for all, a round keeps what the least lucky sequence does.
    again = sum(step.accepted for step in steps) - len(PROMPTS) * ROUNDS * min(step.accepted for step in steps)
    schemes = {
        "logical length": {"rows_copied": 0, "scratch_rows": 0, "rows_again": 0},
        "scratch and commit": {"rows_copied": len(steps) + sum(step.accepted for step in steps),
                               "scratch_rows": depth + 1, "rows_again": 0},
        "one length for all": {"rows_copied": 0, "scratch_rows": 0, "rows_again": again},
    }  # fmt: skip
    heads = ("rollback", "rows copied", "scratch rows", "accepted rows run again")
    rows = [(name, *(str(number) for number in scheme.values())) for name, scheme in schemes.items()]
    shown = [*drawing(steps), table(f"{ROUNDS} rounds of two sequences, N = {depth}", heads, rows)]
    values = {"depth": depth, "rounds": [asdict(step) for step in steps], "schemes": schemes}
    return Finding(values, checks, shown, partial(_plot, steps, depth))


def drawing(steps: list[Step]) -> list[Text]:
    """A line a sequence and round: what the cache held, the pending token's row, accepted and rolled-back drafts."""
    legend = ("=", "dim"), " in the cache  ", ("x", "yellow"), " the pending token's row  "
    lines = [Text.assemble(*legend, ("d", "green"), " accepted  ", ("-", "red"), " rolled back")]
    width = max(step.n + step.rows for step in steps)
    for step in steps:
        rejected = step.rows - 1 - step.accepted
        parts = ("=" * step.n, "dim"), ("x", "yellow"), ("d" * step.accepted, "green"), ("-" * rejected, "red")
        space = " " * (width - step.n - step.rows)
        grown = f"{space}  {step.n} + 1 + {step.accepted} = {step.after}"
        lines.append(Text.assemble(f"round {step.round}  {step.sequence}  ", *parts, grown, no_wrap=True))
    return lines


def _plot(steps: list[Step], depth: int, path):
    """The same, as bars."""
    figure, (axes,) = new_figure(1, size=(8, 0.9 + 0.32 * len(steps)))
    for y, step in enumerate(steps):
        left = 0
        for size, colour in ((step.n, "#c9ced6"), (1, COLOURS[3]), (step.accepted, COLOURS[2])):
            axes.barh(y, size, left=left, color=colour, edgecolor="white", height=0.8)
            left += size
        gone = step.n + step.rows - left
        axes.barh(y, gone, left=left, facecolor="none", edgecolor=COLOURS[1], hatch="////", height=0.7, lw=0.8)
        axes.text(step.n + step.rows + 0.4, y, f"{step.after}", va="center", fontsize=9)
    labels = [f"round {step.round}, {step.sequence}" for step in steps]
    axes.set_yticks(range(len(steps)), labels)
    axes.invert_yaxis()
    axes.set(
        xlabel="slots of the verifier's cache", title=f"N = {depth}: held, pending, accepted, rolled back (hatched)"
    )
    axes.grid(axis="y", visible=False)
    return save_figure(figure, path)
