"""Families of drafts: which can be had, what each is worth here, and which is taken."""

from __future__ import annotations

from dataclasses import dataclass, replace

from conf.errors import UserError
from conf.workload import WorkloadConf
from eval.tuner.choices import Choice, Limits, best, chains, trees
from eval.tuner.costs import Costs, draft_sizes, measured_costs, memory_of, need, own_rows, roofline
from eval.tuner.engines import FAMILIES, Engine, availability
from eval.tuner.evidence import Evidence
from eval.tuner.published import Profile, cooled, published
from eval.tuner.swept import Row, at

TRAINABLE = ("eagle3", "eagle2", "eagle1", "medusa")
ALONE = ("prompt_lookup", "lookahead")  # need no model


@dataclass(frozen=True)
class Case:
    """What the rules look at."""

    load: WorkloadConf
    evidence: Evidence
    engine: Engine


@dataclass(frozen=True)
class Option:
    """A family: whether it can be had, and what it is worth here. choice: None where its cost isn't known."""

    family: str
    at_hand: bool
    in_engine: bool
    why: str
    profile: Profile | None = None
    costs: Costs | None = None
    choice: Choice | None = None

    @property
    def usable(self) -> bool:
        return self.at_hand and self.in_engine and self.choice is not None

    @property
    def measured(self) -> bool:
        return self.profile is not None and self.profile.origin == "measured"


def option_of(case: Case, family: str) -> Option:
    """Raises UserError where nothing was measured and the workload says too little to reckon with."""
    at_hand, why = _at_hand(case, family)
    in_engine, said = availability(case.engine, family, case.load.engine_version)
    option = Option(family, at_hand, in_engine, f"{why}; {said}", profile_of(case, family))
    if family == "independent" and not at_hand:
        return option
    try:
        costs = costs_of(case, family)
    except UserError:
        if case.evidence.record is None or family in case.evidence.measured:
            raise
        return replace(option, why=f"{why}; its cost isn't known without the verifier's shape")
    every = (trees if family == "eagle2" else chains)(option.profile, costs)
    choice = best(every, limits_of(case, family)) or min(every, key=lambda c: c.seconds, default=None)
    return replace(option, costs=costs, choice=choice)


def _at_hand(case: Case, family: str) -> tuple[bool, str]:
    load = case.load
    if family in case.evidence.measured or (family == "eagle2" and "eagle1" in case.evidence.measured):
        return True, "measured"
    if family in ALONE:
        return True, "needs no model"
    if family == "independent":
        return bool(load.draft_parameters), "a smaller model" if load.draft_parameters else "no smaller model at hand"
    if family in load.heads or (family == "eagle2" and "eagle1" in load.heads):
        return True, "a head at hand"
    if load.training_dialogues:
        return True, f"to be trained on {load.training_dialogues:,} dialogues"
    return False, "no head at hand, and none to be trained"


def profile_of(case: Case, family: str, temperature: float | None = None) -> Profile:
    """Measured where it is, else published; at the workload's temperature if no other is named."""
    load, evidence = case.load, case.evidence
    temperature = load.temperature if temperature is None else temperature
    for name in (family, "eagle1" if family == "eagle2" else family):
        if profiles := evidence.profiles(name):
            return replace(at(profiles, temperature), family=family)
    owned = family in load.heads or (family == "eagle2" and "eagle1" in load.heads)
    trained = None if owned or family not in TRAINABLE else load.training_dialogues or None
    return cooled(published(family, load.mix, trained), temperature)


def costs_of(case: Case, family: str, batch: int | None = None) -> Costs:
    """Measured times where they are of such a machine, another family's draft step by its size; else reckoned."""
    load = case.load
    batch = load.batch if batch is None else batch
    costs = _measured_costs(case, batch)
    if costs is None:
        return roofline(load, family, batch)
    if family == case.evidence.profile.family:
        return costs
    if family in ALONE:
        first = later = 0.0
    else:
        need(load, ("parameters", "layers", "hidden", "vocab"), "the cost of another draft is reckoned by its size")
        share = costs.times.decode / (load.parameters * 1e9)
        first, later = (size * share for size in draft_sizes(load, family))
    times = own_rows(replace(costs.times, draft_first=first, draft=later), family)
    return replace(costs, times=times, origin=costs.origin if family in case.evidence.measured else "assumption")


def _measured_costs(case: Case, batch: int) -> Costs | None:
    """The run's at its batch, else the sweep's, else reckoned from the run's of one sequence; None: there are none."""
    record, swept = case.evidence.record, case.evidence.swept
    timed = record and record["times"] and same_machine(case, record["device"])
    if timed and record["batch"] == batch:
        return measured_costs(record, batch)
    if swept and same_machine(case, swept.settings.device) and (costs := swept.costs(case.load, batch)):
        return costs
    return measured_costs(record, batch) if timed and record["batch"] == 1 else None


def same_machine(case: Case, device: str) -> bool:
    """A device is of the workload's kind; one that isn't named is the run's."""
    kind = case.load.accelerator or case.evidence.record["device"]
    return ("cpu" in kind.lower()) == device.startswith("cpu")


def in_the_loop(case: Case, family: str, batch: int | None = None) -> dict[int, Row]:
    """What the sweep found of the run's draft at the workload's temperature, by N: speed-ups that nobody reckoned."""
    swept = case.evidence.swept
    if swept is None or family != case.evidence.profile.family or not same_machine(case, swept.settings.device):
        return {}
    return swept.by_n(case.load, case.load.batch if batch is None else batch)


def limits_of(case: Case, family: str, batch: int | None = None) -> Limits:
    memory = memory_of(case.load, family, batch)
    seconds = None if case.load.p99_ms is None else case.load.p99_ms / 1000
    return Limits(memory.rows if memory else None, seconds)


def chosen(options: list[Option]) -> Option | None:
    """The fastest of those that can be had. What was measured stands before what others published."""
    usable = [option for option in options if option.usable]
    usable = [option for option in usable if option.measured] or usable
    return max(usable, key=lambda option: option.choice.speedup, default=None)


def downgrades(case: Case, options: list[Option], option: Option | None) -> list[str]:
    """Heads at hand that the engine lacks, and whatever else would be faster, were it there."""
    speed = option.choice.speedup if option else 0.0
    taken = f"; {FAMILIES[option.family]} instead" if option else ""
    return [
        f"{FAMILIES[other.family]} would give {other.choice.speedup:.2f}x: {other.why.split('; ', 1)[1]}{taken}"
        for other in options
        if other.at_hand and not other.in_engine and other.choice
        if other.family in case.load.heads or other.choice.speedup > speed
    ]
