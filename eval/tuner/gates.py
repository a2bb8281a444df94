"""What goes with a choice: its tree, the temperature up to which it pays, other batch sizes, and remarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from conf.errors import UserError
from eval.tuner.choices import WORTH, Choice, Limits, best, chain, chains, measured_tree, tree, trees
from eval.tuner.costs import DRAFT_ROWS
from eval.tuner.families import Case, Option, costs_of, limits_of
from eval.tuner.published import WARMEST, cooled

BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Tier:
    """The best chain and tree at a batch size. fits: into the memory, None where it isn't known."""

    batch: int
    chain: Choice
    tree: Choice | None
    fits: bool | None

    @property
    def best(self) -> Choice:
        return self.tree if self.tree and self.tree.speedup > WORTH * self.chain.speedup else self.chain


def best_tree(case: Case, option: Option, limits: Limits) -> Choice | None:
    """None where the engine has no trees for the family. A measured tree stands before reckoned ones."""
    support = case.engine.families.get(option.family)
    if support is None or support.tree is None:
        return None
    if case.evidence.tree and option.family == case.evidence.profile.family:
        hits, nodes = case.evidence.tree
        found = [measured_tree(cooled(hits, case.load.temperature), option.costs, nodes)]
    else:
        found = trees(option.profile, option.costs)
    return best(found, limits)


def warmest(case: Case, option: Option, picked: Choice) -> float | None:
    """The highest temperature, in tenths, at which the choice is expected to pay.

    None where it doesn't pay at the workload's, or nothing is known that warm: see published.WARMEST.
    """
    known = max(WARMEST, option.profile.temperature if option.measured else 0.0)
    tenths = range(round(case.load.temperature * 10), round(known * 10) + 1)
    return max((t / 10 for t in tenths if _at(option, picked, t / 10).speedup > 1), default=None)


def _at(option: Option, picked: Choice, temperature: float) -> Choice:
    profile = cooled(option.profile, temperature)
    if picked.shape == "chain":
        return chain(profile, option.costs, picked.depth)
    if picked.origin == "measured":  # its own levels' hits, which fall as n-alpha does
        share = profile.expected(picked.depth) / option.profile.expected(picked.depth)
        return replace(picked, speedup=picked.speedup * share)
    return tree(profile, option.costs, picked.depth, picked.nodes)


def tiers_of(case: Case, option: Option) -> list[Tier]:
    """The best at other batch sizes; those alone whose cost can be had. p99 is not looked at, memory is."""
    support, rows = case.engine.families[option.family], []
    for batch in sorted({*BATCHES, case.load.batch}):
        try:
            costs = costs_of(case, option.family, batch)
        except UserError:
            continue
        limits = replace(limits_of(case, option.family, batch), seconds=None)
        some = chains(option.profile, costs)
        fits = None if limits.rows is None else limits.rows >= 2
        picked = best(some, limits) or some[0]
        grown = best(trees(option.profile, costs), limits) if support.tree else None
        rows.append(Tier(batch, picked, grown, fits))
    return rows


def remarks(case: Case, option: Option, picked: Choice, every: list[Choice]) -> list[str]:
    """What a reader should know before believing the rest."""
    load, lines = case.load, []
    if option.measured and best(every) == every[-1]:
        lines.append("the best N is the deepest that was measured: measure deeper, decode.depth=N")
    if picked.speedup > 1 >= picked.low:
        lines.append(f"it may not pay: the range begins at {picked.low:.2f}x; switch it on with the alarms below")
    token = picked.seconds / picked.expected * 1000
    if load.p50_ms is not None and token > load.p50_ms:
        lines.append(f"p50 is missed: {token:.2f} ms a token, {load.p50_ms:g} asked for")
    if load.temperature > WARMEST and not option.measured:
        lines.append(f"nothing was published above T={WARMEST:g}: the temperature's effect is carried on in a line")
    if option.profile.family == "eagle3" and not option.measured:
        lines.append(f"a head with {DRAFT_ROWS:,} draft tokens is reckoned with")
    record = case.evidence.record
    if record and record["times"] and option.costs.source.startswith("reckoned"):
        lines.append(f"the run's times are of {record['device']} at batch {record['batch']}: not used")
    if option.family == "prompt_lookup" and record and (record["repetition_rate"] or 0) > 0.1:
        lines.append(f"{record['repetition_rate']:.0%} of the run's tokens repeat: prompt lookup is flattered")
    if case.engine.remark:
        lines.append(f"{case.engine.name}: {case.engine.remark}")
    return lines
