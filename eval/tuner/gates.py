"""What goes with a choice: its tree, the temperature up to which it pays, other batch sizes, and remarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from conf.errors import UserError
from eval.tuner.choices import WORTH, Choice, Limits, best, chain, chains, measured_tree, tree, trees
from eval.tuner.costs import DRAFT_ROWS
from eval.tuner.families import Case, Option, costs_of, in_the_loop, limits_of, profile_of, same_machine
from eval.tuner.published import WARMEST, cooled
from eval.tuner.swept import Row

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LONGER = 1.5  # than measured prompts: too long for them to say much


@dataclass(frozen=True)
class Tier:
    """The best chain and tree at a batch size. fits: into the memory, None where it isn't known.

    times: where they are from. measured: in the loop, with the N that is nearest to the chain's.
    """

    batch: int
    chain: Choice
    tree: Choice | None
    fits: bool | None
    times: str
    measured: Row | None

    @property
    def best(self) -> Choice:
        return self.tree if self.tree and self.tree.speedup > WORTH * self.chain.speedup else self.chain

    @property
    def pays(self) -> bool:
        """By the formula, and not disproved where the very chain was measured."""
        seen = self.measured if self.measured and self.best is self.chain else None
        span = seen.speedup_interval if seen and seen.depth == self.chain.depth else None
        return self.best.speedup > 1 and (span is None or span[1] > 1)


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
    known = max([WARMEST, *(profile.temperature for profile in case.evidence.profiles(option.family))])
    tenths = range(round(case.load.temperature * 10), round(known * 10) + 1)
    return max((t / 10 for t in tenths if _at(case, option, picked, t / 10).speedup > 1), default=None)


def _at(case: Case, option: Option, picked: Choice, temperature: float) -> Choice:
    profile = profile_of(case, option.family, temperature)
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
        seen = in_the_loop(case, option.family, batch)
        near = min(seen, key=lambda n: abs(n - picked.depth), default=None)
        rows.append(Tier(batch, picked, grown, fits, costs.source, seen.get(near)))
    return rows


def remarks(case: Case, option: Option, picked: Choice, every: list[Choice]) -> list[str]:
    """What a reader should know before believing the rest."""
    load, lines = case.load, [*case.evidence.remarks]
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
    if case.evidence.swept:
        lines += _of_sweep(case, option, every)
    if case.engine.remark:
        lines.append(f"{case.engine.name}: {case.engine.remark}")
    return lines


def _of_sweep(case: Case, option: Option, every: list[Choice]) -> list[str]:
    """Where the sweep is no measurement of this workload, and where it gainsays what was reckoned."""
    load, swept, lines = case.load, case.evidence.swept, []
    longest = max(row.prompt_tokens for row in swept.rows)
    if load.prompt_tokens > LONGER * longest:
        lines.append(f"the workload's prompts have {load.prompt_tokens} tokens, the sweep's {longest:.0f} at most: "
                     f"contexts=[{load.prompt_tokens}]")  # fmt: skip
    if not same_machine(case, swept.settings.device):
        lines.append(f"the sweep's times and speed-ups are of {swept.settings.device}: not used")
    for n, row in in_the_loop(case, option.family).items():
        span, reckoned = row.speedup_interval, next((one.speedup for one in every if one.depth == n), None)
        if span and reckoned and not span[0] <= reckoned <= span[1]:
            found = f"{row.speedup:.2f}x ({span[0]:.2f} to {span[1]:.2f}) in the loop"
            lines.append(f"N={n}: {reckoned:.2f}x by the formula, {found}")
    return lines
