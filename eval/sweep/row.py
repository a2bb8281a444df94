"""One point of a sweep as a row of sweep.json."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from eval.counts import Counts, bootstrap_tau, pool, ratio, wilson
from eval.measure import TIE, EvalSettings, PromptRun, decode_rate, first_difference
from eval.sweep.points import Point, coordinates

RESAMPLES = 2000
FEW = 4  # turns; drawn anew, fewer would show a spread that is too small

DEFINITIONS = {
    "tau, alpha, alpha_by_depth": "as in alpha.json, pooled. At temperature 0 a prompt's text is the same each time "
    "and counts once; above, every repeat counts, each with another seed.",
    "tau_interval": "95 %, bootstrap over prompts. alpha_interval: 95 %, Wilson.",
    "tokens_per_second": "of all sequences together, after each one's first token, the prefill left out.",
    "speedup": "tokens_per_second / baseline_tokens_per_second. The baseline decodes the same prompts in batches of "
    "the same size, the two taking turns batch by batch.",
    "speedup_interval": f"95 %, bootstrap over turns; null for fewer than {FEW}. speedup_range: of all turns.",
    "live": "sequences in a call, on the mean: sequences leave a batch when they end.",
    "prompt_tokens": "tokens of the prompts, on the mean.",
    "differences": "texts at temperature 0 that are not plain decoding's, numerical ties apart; null above.",
    "times": "median seconds, a sequence's share of the call: see alpha.json.",
}


def row_of(verifier, point: Point, settings: EvalSettings, runs: Sequence[PromptRun]) -> dict:
    """Counts, intervals, speeds and times of one point. runs: in the order in which they were decoded."""
    by_prompt = counts_by_prompt(runs, once=settings.sampling.greedy)
    counts = pool(by_prompt.values())
    turns = [turn_rates(runs[at : at + settings.batch]) for at in range(0, len(runs), settings.batch)]
    greedy = settings.sampling.greedy
    found = [first_difference(verifier, run) for run in runs] if greedy else []
    numbers = ("tau", "alpha", "alpha_by_depth", "accepted_by_depth", "tested_by_depth", "verify_calls", "drafted",
               "accepted", "emitted")  # fmt: skip
    rate, plain = (ratio(*decode_rate(texts)) for texts in (_drafted(runs), _plain(runs)))
    return coordinates(point) | {name: getattr(counts, name) for name in numbers} | {
        "prompts": len(by_prompt),
        "texts": len(runs),
        "prompt_tokens": round(sum(len(run.prompt.input_ids) for run in runs) / len(runs), 1),
        "tau_interval": bootstrap_tau(list(by_prompt.values())),
        "alpha_interval": wilson(counts.accepted, counts.tested),
        "prompt_lookup_tau": pool(run.lookup for run in runs).tau,
        "tokens_per_second": rate,
        "baseline_tokens_per_second": plain,
        "speedup": rate / plain if rate and plain else None,
        "speedup_interval": speedup_interval(turns),
        "speedup_range": _range([drafted / alone for drafted, alone in _ratios(turns)]),
        "live": live(runs, settings.batch),
        "ties": sum(f["gap"] < TIE for f in found if f) if greedy else None,
        "differences": sum(f["gap"] >= TIE for f in found if f) if greedy else None,
        "times": times(runs),
    }  # fmt: skip


def counts_by_prompt(runs: Sequence[PromptRun], once: bool) -> dict[str, Counts]:
    """Of each prompt, the first run's counts or the sum of all."""
    found: dict[str, Counts] = {}
    for run in runs:
        if run.prompt.id not in found:
            found[run.prompt.id] = pool([run.counts])
        elif not once:
            found[run.prompt.id] += run.counts
    return found


def turn_rates(runs: Sequence[PromptRun]) -> tuple[float, float, float, float]:
    """(tokens, seconds) with drafts, and without, of one batch."""
    return *decode_rate(_drafted(runs)), *decode_rate(_plain(runs))


def _drafted(runs: Sequence[PromptRun]) -> list:
    return [run.speculative for run in runs]


def _plain(runs: Sequence[PromptRun]) -> list:
    return [run.baseline for run in runs]


def _ratios(turns: Sequence[tuple]) -> list[tuple[float, float]]:
    """Tokens a second, both ways, of the turns that decoded anything."""
    return [(t / s, u / v) for t, s, u, v in turns if t and s and u and v]


def _range(values: Sequence[float]) -> list[float] | None:
    return [min(values), max(values)] if values else None


def speedup_interval(turns: Sequence[tuple], seed: int = 0) -> list[float] | None:
    """95 % of the pooled ratio when turns are drawn anew."""
    sums_S4 = np.array([turn for turn in turns if turn[0] and turn[2]], dtype=float)
    if len(sums_S4) < FEW:
        return None
    rows = np.random.default_rng(seed).integers(len(sums_S4), size=(RESAMPLES, len(sums_S4)))
    t, s, u, v = sums_S4[rows].sum(1).T
    return [float(x) for x in np.percentile((t / s) / (u / v), [2.5, 97.5])]


def live(runs: Sequence[PromptRun], batch: int) -> float | None:
    """Mean sequences of a verify call."""
    groups = [runs[at : at + batch] for at in range(0, len(runs), batch)]
    calls = sum(max(len(run.speculative.rounds) for run in group) for group in groups)
    return ratio(sum(len(run.speculative.rounds) for run in runs), calls)


def times(runs: Sequence[PromptRun]) -> dict | None:
    """Medians; None where nothing was drafted."""
    rounds = [call for run in runs for call in run.speculative.rounds]
    steps = [seconds for text in _plain(runs) for seconds in text.step_seconds]
    first = [call.draft_first_seconds for call in rounds if call.draft_first_seconds is not None]
    later = [call.draft_step_seconds for call in rounds if call.draft_step_seconds is not None]
    if not steps or not rounds:
        return None
    widest = max(len(call.drafted) for call in rounds)
    full = [call.verify_seconds for call in rounds if len(call.drafted) == widest]
    return {
        "t_decode": median(steps),
        "t_verify": {str(widest + 1): median(full)},
        "t_draft_first": median(first) if first else None,
        "t_draft": median(later) if later else None,
        "t_other": median(call.seconds - call.draft_seconds - call.verify_seconds for call in rounds),
    }
