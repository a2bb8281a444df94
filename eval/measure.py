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
from eval.speculative.clock import Clock
from eval.speculative.drafter import Drafter, PromptLookup
from eval.speculative.loop import Decoded, Round, plain_decode, speculative_decode, top_two_gap
from eval.speculative.processors import Sampling
from eval.theory import Times

log = logging.getLogger(__name__)
WIDTHS = (1, 2, 4, 8, 16)  # rows of the verify calls that are timed
LINE_PROMPTS, LINE_SECONDS = 10, 30  # between two lines of progress where there is no terminal
TIMED_TOKENS = 24  # of the one text that a replay times its verify calls on
TIE = 1e-3  # top two logits closer than this are a numerical tie


@dataclass(frozen=True)
class EvalSettings:
    """How a drafter is measured.

    baseline: also decode plainly, for speed and identity. threads: torch's threads during the run, None as it is.
    """

    depth: int = 5
    sampling: Sampling = Sampling()
    max_new_tokens: int = 128
    baseline: bool = True
    seed: int = 0
    threads: int | None = None
    mode: str = "chain"
    replay: bool = False  # on the verifier's recorded greedy text, without verify calls

    def __post_init__(self) -> None:
        if self.mode != "chain":
            raise UserError(f"decode must be chain, found {self.mode}")
        if self.replay and not self.sampling.greedy:
            raise UserError(
                f"replay follows the verifier's greedy text, found temperature {self.sampling.temperature:g}: "
                "leave replay out, or set temperature=0"
            )
        if self.depth < 1:
            raise UserError(f"decode.depth must be 1 or more, found {self.depth}")
        if self.max_new_tokens < 2:
            raise UserError(f"max_new_tokens must be 2 or more, found {self.max_new_tokens}")


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
        warm_up = _run_one(verifier, drafter, prompts[0], settings, 0, warm_up=True)
        if progress:
            log.info("%s", estimate(warm_up, len(prompts), settings.max_new_tokens))
    with _bar(len(prompts), progress) as update:
        for index, prompt in enumerate(prompts):
            runs.append(_run_one(verifier, drafter, prompt, settings, index))
            update(runs)
    return runs


def replay_prompts(
    verifier, drafter: Drafter, prompts: Sequence[Prompt], settings: EvalSettings, progress: bool
) -> list[PromptRun]:
    """The same rounds as `run_prompts` at temperature 0, without running the verifier's calls (eval.replay)."""
    runs: list[PromptRun] = []
    recordings = record(verifier, prompts, settings.max_new_tokens, settings.depth)
    with _bar(len(prompts), progress) as update:
        for recording in recordings:
            decoded = replay(drafter, recording, states_of(verifier, recording), settings.depth, settings.seed)
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
    settings = replace(settings, max_new_tokens=min(TIMED_TOKENS, settings.max_new_tokens))
    _run_one(verifier, drafter, longest, settings, 0, warm_up=True)
    times = measure_times(verifier, [_run_one(verifier, drafter, longest, settings, 0)], settings.depth)
    return times and replace(times, draft_first=median(first), draft=median(later) if later else median(first))


def _draft_seconds(rounds: Iterable[Round]) -> tuple[list[float], list[float]]:
    """Times of first passes and of later draft steps, where there are any."""
    rounds = list(rounds)
    first = [r.draft_first_seconds for r in rounds if r.draft_first_seconds is not None]
    return first, [r.draft_step_seconds for r in rounds if r.draft_step_seconds is not None]


def estimate(warm_up: PromptRun, prompts: int, max_new_tokens: int) -> str:
    """What lies ahead, from the rates of a first short text."""
    text = f"evaluating {prompts} prompts of up to {max_new_tokens} new tokens, with drafts and without"
    halves = [decode_rate([warm_up.speculative]), decode_rate([warm_up.baseline])]
    if not all(tokens for tokens, _ in halves):
        return text
    seconds = prompts * (max_new_tokens - 1) * sum(seconds / tokens for tokens, seconds in halves)
    return f"{text}: up to about {f'{seconds:.0f} s' if seconds < 100 else f'{seconds / 60:.0f} minutes'}"


def _run_one(
    verifier, drafter: Drafter, prompt: Prompt, settings: EvalSettings, index: int, warm_up: bool = False
) -> PromptRun:
    ids, length = list(prompt.input_ids), 8 if warm_up else settings.max_new_tokens
    common = {"max_new_tokens": length, "sampling": settings.sampling, "seed": settings.seed + index}
    baseline = None
    if settings.baseline and index % 2 == 0:
        baseline = plain_decode(verifier, ids, **common)
    speculative = speculative_decode(verifier, drafter, ids, depth=settings.depth, **common)
    if settings.baseline and index % 2 == 1:
        baseline = plain_decode(verifier, ids, **common)
    counts = Counts()
    for call in speculative.rounds:
        counts.add(call)
    return PromptRun(prompt, speculative, baseline, counts, lookup_counts(ids, speculative.tokens, settings.depth))


def lookup_counts(prompt_ids: list[int], text: list[int], depth: int) -> Counts:
    """What prompt lookup would have had accepted on this text, without running it.

    Its candidates are point masses, so a candidate is accepted exactly when it is the token that the
    verifier's law gives: greedily the argmax, otherwise with probability p(d). A text that follows p can
    therefore be replayed. Only calls that begin `depth` + 1 tokens or more before the end are counted.
    """
    drafter, counts, at = PromptLookup(), Counts(), 1
    drafter.start(prompt_ids, text[0])
    while at + depth < len(text):
        tokens = drafter.draft(depth).tokens_N.tolist()
        passed = 0
        while passed < len(tokens) and tokens[passed] == text[at + passed]:
            passed += 1
        new = text[at : at + passed + 1]
        counts.add(Round(tuple(tokens), len(tokens), passed, tuple(new)))
        drafter.accepted(new)
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


def measure_times(verifier, runs: Sequence[PromptRun], depth: int) -> Times | None:
    """Median seconds of each part of a round; None without a baseline or without a drafter that keeps its times.

    Verify calls of other widths than the run's are timed afterwards, and scaled by how much faster or slower
    the run's own width is then: on a shared machine the load may have changed in between.
    """
    rounds = [r for run in runs for r in run.speculative.rounds]
    steps = [s for run in runs if run.baseline for s in run.baseline.step_seconds]
    first, later = _draft_seconds(rounds)
    if not steps or not first:
        return None
    longest = max(runs, key=lambda run: len(run.prompt.input_ids))
    by_width = time_verify(verifier, list(longest.prompt.input_ids), sorted({*WIDTHS, depth + 1}))
    full = [r.verify_seconds for r in rounds if len(r.drafted) == depth]
    if full:
        scale = median(full) / by_width[depth + 1]
        by_width = {width: seconds * scale for width, seconds in by_width.items()}
    other = median(r.seconds - r.draft_seconds - r.verify_seconds for r in rounds)
    return Times(median(steps), by_width, median(first), median(later) if later else median(first), other)


@torch.no_grad()
def time_verify(verifier, context: list[int], widths: Sequence[int], repeats: int = 5) -> dict[int, float]:
    """Median seconds of a verify of each width after `context`, the widths taking turns."""
    clock, times = Clock(verifier.device), {width: [] for width in widths}
    cache = verifier.new_cache(1, len(context) + max(widths))
    verifier.decode(cache, torch.tensor([context], device=verifier.device), logits="none", capture=False)
    for _ in range(repeats):
        for width in widths:
            tokens_1T = torch.tensor([(context * width)[:width]], device=verifier.device)
            begun = clock.now()
            verifier.decode(cache, tokens_1T, logits="all", capture=True)
            times[width].append(clock.now() - begun)
            cache.truncate([len(context)])
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
