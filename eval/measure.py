"""Runs prompts through the speculative loop and through plain decoding, side by side, with their times."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from conf.errors import UserError
from data.progress import progress_bar
from eval.counts import Counts, pool, ratio
from eval.prompts import Prompt
from eval.replay import record, replay, states_of
from eval.speculative.acceptance import accept_points
from eval.speculative.clock import Clock
from eval.speculative.copying import NoDraft, PromptLookup
from eval.speculative.drafter import Drafter
from eval.speculative.loop import Decoded, Round, decode_batch, plain_decode, round_of, top_two_gap
from eval.speculative.processors import Sampling
from eval.speculative.shapes import FixedTree, Shape
from eval.theory import Times

log = logging.getLogger(__name__)
WIDTHS = (1, 2, 4, 8, 16)  # rows of the verify calls that are timed
LINE_PROMPTS, LINE_SECONDS = 10, 30  # between two lines of progress where there is no terminal
TIMED_TOKENS = 24  # of the one text that a replay times its verify calls on
TIE = 1e-3  # top two logits closer than this are a numerical tie


@dataclass(frozen=True)
class EvalSettings:
    """How a drafter is measured.

    shape: of the drafts. points: a drafter's best tokens, not draws from its law, also at a temperature.
    batch: sequences decoded at once. baseline: also decode plainly, for speed and identity.
    threads: torch's threads during the run, None as it is.
    replay: on the verifier's recorded greedy text, without verify calls.
    """

    shape: Shape = FixedTree.chain(5)
    sampling: Sampling = Sampling()
    points: bool = False
    max_new_tokens: int = 128
    batch: int = 1
    baseline: bool = True
    seed: int = 0
    threads: int | None = None
    replay: bool = False

    @property
    def depth(self) -> int:
        """Levels of a draft."""
        return self.shape.depth

    @property
    def room(self) -> int:
        """Positions that a text needs behind its prompt."""
        return self.max_new_tokens + 2 * (self.depth + 1)

    def prompt_room(self, positions: int) -> int:
        """Tokens that a prompt may have. UserError where not even an empty one fits."""
        if self.room >= positions:
            raise UserError(
                f"an answer of decode.max_new_tokens={self.max_new_tokens} with drafts of depth {self.depth} needs "
                f"{self.room} positions, found {positions}: lower them"
            )
        return positions - self.room

    def __post_init__(self) -> None:
        if self.replay and not self.sampling.greedy:
            raise UserError(
                f"replay follows the verifier's greedy text, found temperature {self.sampling.temperature:g}: "
                "leave replay out, or set temperature=0"
            )
        if self.max_new_tokens < 2:
            raise UserError(f"max_new_tokens must be 2 or more, found {self.max_new_tokens}")
        if self.batch < 1:
            raise UserError(f"decode.batch must be 1 or more, found {self.batch}")


@dataclass
class PromptRun:
    """One prompt: the speculative text and, unless it was left out, the plain one."""

    prompt: Prompt
    speculative: Decoded
    baseline: Decoded | None
    counts: Counts
    lookup: Counts


def run_prompts(
    verifier, drafter: Drafter, prompts: Sequence[Prompt], settings: EvalSettings, progress: bool
) -> list[PromptRun]:
    """Decodes each prompt both ways, taking turns at which goes first, after a warm-up of each."""
    runs: list[PromptRun] = []
    if settings.baseline:
        warm_up = _run_some(verifier, drafter, prompts[: settings.batch], settings, 0, warm_up=True)
        if progress:
            log.info("%s", estimate(warm_up, len(prompts), settings.max_new_tokens))
    with _bar(len(prompts), progress) as update:
        for index in range(0, len(prompts), settings.batch):
            runs += _run_some(verifier, drafter, prompts[index : index + settings.batch], settings, index)
            update(runs)
    return runs


def replay_prompts(
    verifier, drafter: Drafter, prompts: Sequence[Prompt], settings: EvalSettings, progress: bool
) -> list[PromptRun]:
    """The same rounds as `run_prompts` at temperature 0, without running the verifier's calls (eval.replay)."""
    runs: list[PromptRun] = []
    recordings = record(verifier, prompts, settings.max_new_tokens, drafter.depth)
    with _bar(len(prompts), progress) as update:
        for recording in recordings:
            decoded = replay(drafter, recording, states_of(verifier, recording))
            ids, counts = list(recording.prompt.input_ids), Counts()
            for call in decoded.rounds:
                counts.add(call)
            lookup = lookup_counts(ids, decoded.tokens, settings.depth)
            runs.append(PromptRun(recording.prompt, decoded, None, counts, lookup))
            update(runs)
    return runs


def replay_times(verifier, drafter: Drafter, runs: Sequence[PromptRun], settings: EvalSettings) -> Times | None:
    """As `measure_times`: drafts as they were replayed, the rest from the loop on a piece of the longest prompt."""
    first, later = _draft_seconds(r for run in runs for r in run.speculative.rounds)
    if not first:
        return None
    longest = max(runs, key=lambda run: (bool(run.speculative.rounds), len(run.prompt.input_ids))).prompt
    settings = replace(settings, max_new_tokens=min(TIMED_TOKENS, settings.max_new_tokens), batch=1)
    _run_some(verifier, drafter, [longest], settings, 0, warm_up=True)
    times = measure_times(verifier, drafter, _run_some(verifier, drafter, [longest], settings, 0), 1)
    return times and replace(times, draft_first=median(first), draft=median(later) if later else median(first))


def _draft_seconds(rounds: Iterable[Round]) -> tuple[list[float], list[float]]:
    """Times of first passes and of later draft steps, where there are any."""
    rounds = list(rounds)
    first = [r.draft_first_seconds for r in rounds if r.draft_first_seconds is not None]
    return first, [r.draft_step_seconds for r in rounds if r.draft_step_seconds is not None]


def estimate(warm_up: Sequence[PromptRun], prompts: int, max_new_tokens: int) -> str:
    """What lies ahead, from the rates of a first short text."""
    text = f"evaluating {prompts} prompts of up to {max_new_tokens} new tokens, with drafts and without"
    halves = [decode_rate(run.speculative for run in warm_up), decode_rate(run.baseline for run in warm_up)]
    if not all(tokens for tokens, _ in halves):
        return text
    seconds = prompts * (max_new_tokens - 1) * sum(seconds / tokens for tokens, seconds in halves)
    return f"{text}: up to about {f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} minutes'}"


def _run_some(
    verifier, drafter: Drafter, prompts: Sequence[Prompt], settings: EvalSettings, index: int, warm_up: bool = False
) -> list[PromptRun]:
    """One batch, both ways. index: of its first prompt."""
    ids, length = [list(prompt.input_ids) for prompt in prompts], 8 if warm_up else settings.max_new_tokens
    common = {"max_new_tokens": length, "sampling": settings.sampling, "seed": settings.seed + index}
    plain_first, baseline = index // settings.batch % 2 == 0, [None] * len(prompts)
    if settings.baseline and plain_first:
        baseline = _plainly(verifier, ids, settings, common)
    speculative = decode_batch(verifier, drafter, ids, **common)
    if settings.baseline and not plain_first:
        baseline = _plainly(verifier, ids, settings, common)
    runs = []
    for prompt, text, plain in zip(prompts, speculative, baseline, strict=True):
        counts = Counts()
        for call in text.rounds:
            counts.add(call)
        lookup = lookup_counts(list(prompt.input_ids), text.tokens, settings.depth)
        runs.append(PromptRun(prompt, text, plain, counts, lookup))
    return runs


def _plainly(verifier, prompts: list[list[int]], settings: EvalSettings, common: dict) -> list[Decoded]:
    """The verifier alone, in batches of the same size."""
    if settings.batch == 1:
        return [plain_decode(verifier, prompts[0], **common)]
    texts = decode_batch(verifier, NoDraft(), prompts, **common)
    return [replace(text, step_seconds=[call.seconds for call in text.rounds], rounds=[]) for text in texts]


def lookup_counts(prompt_ids: list[int], text: list[int], depth: int) -> Counts:
    """What prompt lookup would have had accepted on this text, without running it.

    Its candidates are point masses, so a candidate is accepted exactly when it is the token that the
    verifier's law gives: greedily the argmax, otherwise with probability p(d). A text that follows p can
    therefore be replayed. Only calls that begin `depth` + 1 tokens or more before the end are counted.
    """
    drafter, counts, at = PromptLookup(depth), Counts(), 1
    drafter.start([prompt_ids], text[:1])
    while at + depth < len(text):
        [nodes] = drafter.draft().nodes_B
        [verdict] = accept_points([nodes], lambda _, level, at=at: [text[at + level]])
        new = text[at : at + len(verdict.nodes) + 1]
        counts.add(round_of(nodes, verdict, new))
        drafter.accepted([new])
        at += len(new)
    return counts


def first_difference(verifier, run: PromptRun) -> dict | None:
    """Where the greedy texts part, and how close the verifier's two best logits are there; None if they don't."""
    ours, plain = run.speculative.tokens, run.baseline.tokens
    at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), None)
    if at is None:
        assert len(ours) == len(plain), "one text ends inside the other"
        return None
    gap = top_two_gap(verifier, list(run.prompt.input_ids) + plain[:at])
    return {"prompt": run.prompt.id, "position": at, "plain": plain[at], "speculative": ours[at], "gap": gap}


def measure_times(verifier, drafter: Drafter, runs: Sequence[PromptRun], batch: int) -> Times | None:
    """Median seconds of each part of a round; None without a baseline or without a drafter that keeps its times.

    Verify calls of other widths than the run's are timed afterwards, and scaled by how much faster or slower
    the run's own width is then: on a shared machine the load may have changed in between. In a batch all times are a
    sequence's share.
    """
    rounds = [r for run in runs for r in run.speculative.rounds]
    steps = [s for run in runs if run.baseline for s in run.baseline.step_seconds]
    first, later = _draft_seconds(rounds)
    if not steps or not first:
        return None
    longest, width = max(runs, key=lambda run: len(run.prompt.input_ids)), drafter.nodes + 1
    by_width = time_verify(verifier, list(longest.prompt.input_ids), sorted({*WIDTHS, width}), batch)
    full = [r.verify_seconds for r in rounds if len(r.drafted) == drafter.nodes]
    if full:
        scale = median(full) / by_width[width]
        by_width = {width: seconds * scale for width, seconds in by_width.items()}
    other = median(r.seconds - r.draft_seconds - r.verify_seconds for r in rounds)
    return Times(median(steps), by_width, median(first), median(later) if later else median(first), other)


@torch.no_grad()
def time_verify(
    verifier, context: list[int], widths: Sequence[int], batch: int = 1, repeats: int = 5
) -> dict[int, float]:
    """Median seconds of a verify of each width after `context`, a sequence's share, the widths taking turns."""
    clock, times = Clock(verifier.device), {width: [] for width in widths}
    cache = verifier.new_cache(batch, len(context) + max(widths))
    verifier.decode(cache, torch.tensor([context] * batch, device=verifier.device), logits="none", capture=False)
    for _ in range(repeats):
        for width in widths:
            tokens_BT = torch.tensor([(context * width)[:width]] * batch, device=verifier.device)
            begun = clock.now()
            verifier.decode(cache, tokens_BT, logits="all", capture=True)
            times[width].append((clock.now() - begun) / batch)
            cache.truncate(len(context))
    return {width: median(seconds) for width, seconds in times.items()}


@contextlib.contextmanager
def use_threads(threads: int | None) -> Iterator[int]:
    """torch's thread count inside, put back after; yields the count in use."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _bar(total: int, show: bool) -> Iterator[Callable[[list[PromptRun]], None]]:
    """A bar on standard error: prompts done, tau so far, tokens a second, time left.

    Where that is no terminal: a log line every LINE_PROMPTS prompts or LINE_SECONDS.
    """
    if not show:
        yield lambda runs: None
        return
    with progress_bar() as bar:
        task = bar.add_task("evaluating", total=total, rate="")
        last_line = (0, time.monotonic())  # prompts done, when

        def update(runs: list[PromptRun]) -> None:
            nonlocal last_line
            tokens, seconds = decode_rate(run.speculative for run in runs)
            tau, speed = pool(run.counts for run in runs).tau, ratio(tokens, seconds)
            note = f"prompts, tau {tau:.3f}" if tau else "prompts"
            note += f", {speed:.1f} tokens/s" if speed else ""
            bar.update(task, completed=len(runs), rate=note)
            done, now = len(runs), time.monotonic()
            if bar.disable and (done - last_line[0] >= LINE_PROMPTS or now - last_line[1] >= LINE_SECONDS):
                log.info("%d of %d %s", done, total, note)
                last_line = (done, now)

        yield update


def decode_rate(texts: Iterable[Decoded]) -> tuple[int, float]:
    """Tokens after the prefill's, and the seconds that they took."""
    texts = list(texts)
    return sum(len(text.tokens) - 1 for text in texts), sum(text.seconds for text in texts)
