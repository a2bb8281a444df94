"""The decisions, in their order: what is refused, which draft, how many tokens, which tree, and when to stop.

Every number is measured, published or an assumption, and says which. A refusal is an answer: the work is shown and what
would mend it, but nothing is recommended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from conf.errors import UserError
from conf.workload import WorkloadConf
from eval.tuner.choices import WORTH, Choice, Limits, around, best, chains
from eval.tuner.costs import Memory, memory_of
from eval.tuner.engines import ENGINES, FAMILIES
from eval.tuner.evidence import Evidence
from eval.tuner.families import TRAINABLE, Case, Option, chosen, downgrades, in_the_loop, limits_of, option_of
from eval.tuner.gates import Tier, best_tree, remarks, tiers_of, warmest
from eval.tuner.published import TASKS
from eval.tuner.swept import SAME_T

HOT, CREATIVE = 0.8, 0.5  # a temperature, and a share of creative work, from which telemetry comes first
ABOVE_ZERO = (
    *("parameters", "layers", "hidden", "vocab", "kv_heads", "head_dim", "weight_bits", "kv_bits", "draft_parameters"),
    *("bandwidth", "tflops", "memory", "prompt_tokens", "answer_tokens", "p50_ms", "p99_ms"),
)


@dataclass(frozen=True)
class Refusal:
    """Why not, and what to do about it. rule: its name in docs/tuner.md."""

    rule: str
    reason: str
    do: str


@dataclass(frozen=True)
class Found:
    """What the last rules look at. every: chains of all depths that are known. picked: the best within limits."""

    case: Case
    option: Option
    every: list[Choice]
    picked: Choice
    limits: Limits


@dataclass(frozen=True)
class Answer:
    """All that was found; `choice` is what is recommended, None when refused. n_star: without limits, 0: none pays.

    picked: the choice, also when refused. candidates: three chains around the best.
    """

    case: Case
    refusals: list[Refusal]
    options: list[Option]
    option: Option | None = None
    picked: Choice | None = None
    n_star: int = 0
    candidates: list[Choice] = field(default_factory=list)
    tree: Choice | None = None
    memory: Memory | None = None
    warmest: float | None = None
    tiers: list[Tier] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def refused(self) -> bool:
        return bool(self.refusals)

    @property
    def choice(self) -> Choice | None:
        return None if self.refused else self.picked


def recommend(load: WorkloadConf, evidence: Evidence) -> Answer:
    """Raises UserError for a workload that makes no sense, or that says too little to reckon with."""
    check(load)
    case = Case(load, evidence, ENGINES[load.engine])

    # 1 to 4: what no number can mend
    refusals = [refusal for rule in (lossy, another_head, no_rollback, uncalibrated) if (refusal := rule(case))]

    # 5: the fastest family that is at hand and in the engine; measured ones first
    options = [option_of(case, family) for family in FAMILIES]
    option = chosen(options)
    notes = downgrades(case, options, option)
    if option is None:
        return Answer(case, refusals or [no_family(case)], options, notes=notes)

    # 6: N of the best chain, and 7: a tree where the engine has them and it gains more
    limits, every = limits_of(case, option.family), chains(option.profile, option.costs)
    picked, tree = option.choice, best_tree(case, option, limits_of(case, option.family))
    if tree and picked.shape == "chain" and tree.speedup > WORTH * picked.speedup:
        picked = tree

    # 8 to 10: what the numbers refuse
    found = Found(case, option, every, picked, limits)
    refusals += [refusal for rule in (no_room, too_slow_a_round, below_break_even) if (refusal := rule(found))]
    free = best(every)
    return Answer(
        case, refusals, options, option, picked,
        n_star=free.depth if free.speedup > 1 else 0,
        candidates=around(every, picked.depth if picked.shape == "chain" else free.depth),
        tree=tree,
        memory=memory_of(load, option.family),
        warmest=warmest(case, option, picked),
        tiers=tiers_of(case, option),
        notes=notes + remarks(case, option, picked, every),
    )  # fmt: skip


def check(load: WorkloadConf) -> None:
    """Raises UserError."""
    if load.engine not in ENGINES:
        raise UserError(f"no engine '{load.engine}'; there are: {', '.join(ENGINES)}")
    mix = load.mix
    good = isinstance(mix, dict) and all(isinstance(n, int | float) and 0 <= n < math.inf for n in mix.values())
    if not good or not sum(mix.values()) > 0:
        raise UserError(f"expected shares of tasks above zero, workload.tasks={{chat:0.8,code:0.2}}, found {mix}")
    if unknown := [name for name in mix if name not in TASKS]:
        raise UserError(f"no task '{unknown[0]}' in workload.tasks; there are: {', '.join(TASKS)}")
    if unknown := [name for name in load.heads if name not in TRAINABLE]:
        raise UserError(f"no head '{unknown[0]}' in workload.heads; there are: {', '.join(TRAINABLE)}")
    if not 1 <= load.batch <= 4096 or not 0 <= load.temperature <= 10 or load.training_dialogues < 0:
        raise UserError(
            f"expected a batch of 1 to 4096, a temperature of 0 to 10 and training_dialogues of 0 or more, found "
            f"{load.batch}, {load.temperature:g} and {load.training_dialogues}"
        )
    for name in ABOVE_ZERO:
        value = getattr(load, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"expected workload.{name} above zero, found {value}")


# --- 1 to 4 -------------------------------------------------------------------------------------------------------


def lossy(case: Case) -> Refusal | None:
    if case.load.acceptance == "exact":
        return None
    return Refusal(
        "lossy",
        f"acceptance '{case.load.acceptance}' changes what the verifier would have written",
        "workload.acceptance=exact: rejection sampling keeps the verifier's law (docs/theory.md)",
    )


def another_head(case: Case) -> Refusal | None:
    """A head reads one verifier's states: other weights or another tokenizer are another verifier."""
    load, card = case.load, case.evidence.card or {}
    pairs = {
        "tokenizer": (load.tokenizer, load.head_tokenizer or card.get("tokenizer_hash")),
        "revision": (load.verifier_revision, load.head_verifier_revision or card.get("weights_hash")),
    }
    for what, (served, head) in pairs.items():
        if served and head and not (served.startswith(head) or head.startswith(served)):
            return Refusal(
                "head",
                f"the head is for another {what} of the verifier: {head[:16]}, served is {served[:16]}",
                "train one for what is served, or serve what the head was trained for",
            )
    return None


def no_rollback(case: Case) -> Refusal | None:
    if case.load.rollback or (case.load.rollback is None and case.engine.families):
        return None
    return Refusal(
        "rollback",
        f"{case.engine.name} can't take rejected drafts out of this model's state, or it isn't known to",
        "an engine that can: " + ", ".join(engine.name for engine in ENGINES.values() if engine.rollback),
    )


def uncalibrated(case: Case) -> Refusal | None:
    """At a high temperature and for creative work published numbers say little: measure first."""
    load, own = case.load, case.evidence.profile
    share = load.mix.get("creative", 0.0) / sum(load.mix.values())
    profiles = case.evidence.profiles(own.family) if own else []
    known = any(profile.temperature >= load.temperature - SAME_T for profile in profiles)
    if known or load.temperature < HOT or share < CREATIVE:
        return None
    return Refusal(
        "calibrate",
        f"{share:.0%} creative work at T={load.temperature:g}, and no acceptance measured there",
        f"python -m eval run=DIR temperature={load.temperature:g} prompts=FILE; or a sweep with temperatures="
        f"[{load.temperature:g}]; or serve a little with drafts and give metrics=[BEFORE,AFTER]",
    )


# --- 5, and 8 to 10 -----------------------------------------------------------------------------------------------


def no_family(case: Case) -> Refusal:
    return Refusal(
        "family",
        f"no family of drafts is both at hand and in {case.engine.name}",
        "train a head (workload.training_dialogues), or take an engine that has one",
    )


def no_room(found: Found) -> Refusal | None:
    if found.limits.rows is None or found.limits.rows >= 2:
        return None
    load, memory = found.case.load, memory_of(found.case.load, found.option.family)
    return Refusal(
        "memory",
        f"{load.memory:g} GiB hold no drafts beside weights {memory.weights:.1f}, the draft's {memory.draft:.1f} and "
        f"caches {memory.caches:.1f} of {load.batch} sequences",
        "fewer sequences at once, shorter ones, or fewer bits",
    )


def too_slow_a_round(found: Found) -> Refusal | None:
    if found.limits.seconds is None or found.picked.seconds <= found.limits.seconds:
        return None
    plain = found.option.costs.times.decode * 1000
    return Refusal(
        "p99",
        f"the shortest round takes {found.picked.seconds * 1000:.1f} ms, p99 is to be {found.case.load.p99_ms:g}; the "
        f"verifier alone takes {plain:.1f}",
        "fewer sequences at once, or a faster machine: a round is never shorter than a step",
    )


def below_break_even(found: Found) -> Refusal | None:
    """Small verifiers and one sequence on a CPU often end here; it is the numbers that decide."""
    picked, option = found.picked, found.option
    if picked.speedup > 1:
        return _lost_in_the_loop(found)
    measured = option.measured and option.costs.origin == "measured"
    needed = "no acceptance would pay" if picked.pays_from is None else f"it pays from {picked.pays_from:.2f}"
    return Refusal(
        "break_even",
        f"{'measured' if measured else 'expected'}: nothing is faster than plain decoding; the best, {picked.shape} of "
        f"{picked.nodes}, gives {picked.speedup:.2f}x at n-alpha {option.profile.point[0]:.2f}, and {needed}",
        "plain decoding, until the head is better or a round cheaper"
        if measured
        else "measure before you believe it: python -m eval run=DIR",
    )


def _lost_in_the_loop(found: Found) -> Refusal | None:
    """Where a sweep measured the choice itself, and neither it nor another N may pay, the formula doesn't count."""
    seen, picked = in_the_loop(found.case, found.option.family), found.picked
    rows = [row for row in seen.values() if row.speedup_interval]
    if picked.shape != "chain" or seen.get(picked.depth) not in rows:
        return None
    top = max(rows, key=lambda row: row.speedup_interval[1])
    low, high = top.speedup_interval
    if high > 1:
        return None
    return Refusal(
        "break_even",
        f"measured: of {len(rows)} N in the loop none is faster than plain decoding; N={top.depth} gives "
        f"{top.speedup:.2f}x ({low:.2f} to {high:.2f}), where {picked.speedup:.2f}x was reckoned",
        "plain decoding, until the head is better or a round cheaper",
    )
