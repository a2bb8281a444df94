"""What others got, for families and tasks that were not measured here: figures of papers and projects, with sources.

Used where there is no measurement, and called "published"; what is made of them beyond the paper's own verifier, task
or temperature is an "assumption" and says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eval.theory.model import equal_alpha, expected_tokens

EAGLE3_PAPER = "EAGLE-3 paper (2503.01840), table 1"
SWEEP = "independent sweep of chains, Llama-3.1-8B"
COLUMNS = ("chat", "code", "math", "instructions", "summary")  # MT-bench, HumanEval, GSM8K, Alpaca, CNN/DM
TASKS = (*COLUMNS, "creative")
# tau, greedy, by column: Vicuna-13B, but EAGLE-3 on Llama-3.1-8B
TAU = {
    "independent": (2.27, 2.57, 2.01, 2.03, 2.33),
    "prompt_lookup": (1.63, 1.93, 1.73, 1.19, 2.50),
    "lookahead": (1.69, 1.75, 1.90, 1.51, 1.50),
    "medusa": (2.59, 2.78, 2.64, 2.45, 2.09),
    "eagle1": (3.98, 4.39, 3.97, 3.95, 3.52),
    "eagle3": (6.13, 6.74, 6.23, 6.70, 5.34),
}
# The same acceptance at every depth (eval.theory.model.equal_alpha) on MT-bench at T=0: likely, low, high, where from.
CHAINS = {
    "eagle3": (
        equal_alpha(3.32, 5), equal_alpha(2.26, 3), equal_alpha(2.36, 2),
        f"{SWEEP}: tau 3.32 at K=5 (low: 2.26 at K=3, Qwen3-8B in vLLM; high: 2.36 at K=2)",
    ),
    "eagle1": (
        equal_alpha(2.10, 2), equal_alpha(2.47, 7), equal_alpha(3.20, 5),
        f"{SWEEP}: tau 2.10 at K=2 (low: 2.47 at K=7; high: the paper's chain of 5, 3.20, 2401.15077)",
    ),
}  # fmt: skip
DEPTHS = {
    "independent": 5,
    "prompt_lookup": 10,
    "lookahead": 5,
    "medusa": 5,
}  # at which their tau is taken for a chain's
CHAIN_SHARE = 2.20 / 2.98  # of a tree's accepted drafts that a chain gets: EAGLE-1's 3.20 and 3.98
SPREAD = 0.15  # of an acceptance that was made from such a tau
DEEPEST = {"medusa": 5}  # heads; others: FOLLOWED
FOLLOWED = 10  # depth to which an equal acceptance is followed
# How much a unit of temperature takes off n-alpha. Likely: between the two.
COOLING = 0.105
COOLING_LOW, COOLING_HIGH = 0.13, 0.08
COOLING_SOURCE = (
    "n-alpha at T=1 over T=0: .92 (EAGLE-1 chain, 2401.15077), .87 (EAGLE-3's tau, 2503.01840); linear in T"
)
WARMEST = 1.0  # nothing was published above
# Answers that an EAGLE-3 head was trained on -> equal acceptance
TRAINED = {
    5_000: (equal_alpha(1.51, 3), "speculators' CI floor .40/.10/.01"),
    50_000: (equal_alpha(1.94, 5), "a user's report, tau 1.94"),
    530_000: (CHAINS["eagle3"][0], "the paper's amount"),
}
# Speed-up of a chain of 3 by sequences at once, SGLang on an H100 (2503.01840)
BATCHED = {2: 1.81, 4: 1.82, 8: 1.62, 16: 1.48, 24: 1.39, 32: 1.32, 48: 1.38, 56: 1.34, 64: 1.38}
# A tree of M nodes and L levels misses 1 - a less often by (M / L) ** -WIDER.
WIDER, WIDER_HIGH = 0.20, 0.26
WIDER_SOURCE = (
    "misses shrink with (nodes a level)^-.20: a head of ours, tau 1.683 as a chain of 5 and 2.069 as a tree of 16 "
    "(README); high .26: EAGLE-1's 3.20 and 3.94"
)


@dataclass(frozen=True)
class Profile:
    """n-alpha by depth of a family: likely, low and high, and where they are from. temperature: they hold at."""

    family: str
    point: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    origin: str
    source: str
    temperature: float = 0.0

    def expected(self, depth: int) -> float:
        return expected_tokens(self.point[:depth])


def task_factor(family: str, tasks: dict[str, float]) -> float:
    """Drafts accepted a call on this mix, over MT-bench's. creative counts as MT-bench: nobody published more."""
    row = np.array(TAU["eagle1" if family == "eagle2" else family]) - 1
    shares = np.array([tasks.get(name, 0.0) for name in COLUMNS])
    shares[0] += tasks.get("creative", 0.0)
    return float(row @ shares / shares.sum() / row[0])


def cooled(profile: Profile, temperature: float) -> Profile:
    """The same profile at another, higher temperature; lower ones are left as they are (a lower bound)."""
    by = max(0.0, temperature - profile.temperature)
    if not by:
        return profile
    point, low, high = (
        tuple(max(0.0, a * (1 - slope * by)) for a in values)
        for values, slope in ((profile.point, COOLING), (profile.low, COOLING_LOW), (profile.high, COOLING_HIGH))
    )
    source = f"{profile.source}; from T={profile.temperature:g} to {temperature:g}: {COOLING_SOURCE}"
    origin = "assumption" if profile.origin == "measured" else profile.origin
    return Profile(profile.family, point, low, high, origin, source, temperature)


def published(family: str, tasks: dict[str, float], trained_on: int | None = None) -> Profile:
    """n-alpha at T=0 of a family on a mix of tasks. trained_on: dialogues, None for a head that was trained well."""
    if family in CHAINS or family == "eagle2":
        point, low, high, source = CHAINS["eagle1" if family == "eagle2" else family]
    else:
        depth, tau = DEPTHS[family], TAU[family][0]
        source = f"{EAGLE3_PAPER}: tau {tau}, Vicuna-13B, MT-bench, taken for a chain's of {depth}"
        if family == "medusa":
            tau = 1 + (tau - 1) * CHAIN_SHARE
            source += f" with {CHAIN_SHARE:.2f} of its drafts, for that is a tree's"
        point = equal_alpha(tau, depth)
        low, high = point * (1 - SPREAD), min(1.0, point * (1 + SPREAD))
    if trained_on is not None:
        share, said = training_factor(trained_on)
        point, low, high = point * share, low * share, high * share
        source += f"; {said}"
    factor, depth = task_factor(family, tasks), DEPTHS.get(family, 5)
    if abs(factor - 1) > 1e-9:
        point, low, high = (on_task(a, factor, depth) for a in (point, low, high))
        source += f"; drafts accepted times {factor:.2f} for the tasks ({EAGLE3_PAPER}, its columns)"
    deep = DEEPEST.get(family, FOLLOWED)
    return Profile(family, (point,) * deep, (low,) * deep, (high,) * deep, "published", source)


def on_task(alpha: float, factor: float, depth: int) -> float:
    """The acceptance whose accepted drafts, in a chain of `depth`, are `factor` times those of alpha."""
    accepted = min(depth, factor * (expected_tokens([alpha] * depth) - 1))
    return equal_alpha(1 + accepted, depth) or 0.0


def training_factor(dialogues: int) -> tuple[float, str]:
    """Acceptance over a well-trained head's: between the published amounts linear in their logarithm, else constant."""
    amounts, full = list(TRAINED), CHAINS["eagle3"][0]
    alphas = [TRAINED[n][0] for n in amounts]
    alpha = float(np.interp(np.log(max(1, dialogues)), np.log(amounts), alphas))
    near = ", ".join(f"{n // 1000}k {a:.2f} ({said})" for n, (a, said) in TRAINED.items())
    return alpha / full, f"times {alpha / full:.2f} for {dialogues:,} dialogues (EAGLE-3: {near})"
