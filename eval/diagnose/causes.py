"""The causes of a miss, in the order in which they are asked for, and how much falls to each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval.counts import ratio, wilson
from eval.diagnose.evidence import Checked

NEAR = 0.8  # a draft that the verifier finds this much as likely as its own token was as good a guess
FAR = 0.75  # a category is far off when even the upper end of its interval is below so much of all others' acceptance
FEWEST = 50  # first drafts of a category; with fewer nothing is said
BINS = (0.3, 0.5, 0.8)  # of the verifier's best probability


@dataclass(frozen=True)
class Rules:
    """What decides. unlikely: see conf.schema. far: categories far below the others. labels: how often each token is
    a label of the training set, None where that isn't known."""

    unlikely: float
    far: frozenset[str]
    labels: Sequence[int] | None = None


@dataclass(frozen=True)
class Cause:
    """holds: whether a miss falls under it, if it fell under none before."""

    name: str
    title: str
    meaning: str
    holds: Callable[[Checked, Rules], bool]


def _unsure(draft: Checked, rules: Rules) -> bool:
    return draft.best < rules.unlikely or draft.of_drafted >= NEAR * draft.best


def _domain(draft: Checked, rules: Rules) -> bool:
    unseen = rules.labels is not None and not rules.labels[draft.token]
    return draft.category in rules.far or unseen


CAUSES = (
    Cause(
        "vocabulary",
        "vocabulary",
        "the verifier's token is none that the drafter can propose",
        lambda draft, rules: not draft.proposable,
    ),
    Cause(
        "template",
        "template",
        "behind the same prompt in the head's own chat template the draft would have been right",
        lambda draft, rules: bool(draft.with_template),
    ),
    Cause(
        "drift",
        "feature drift",
        "with the verifier's true features in place of the head's own the draft would have been right",
        lambda draft, rules: bool(draft.with_true_features),
    ),
    Cause(
        "unsure",
        "verifier unsure",
        "no guess is a good one: the verifier's likeliest token has a probability below `unlikely`, or it finds the "
        f"draft at least {NEAR:g} times as likely as its own token",
        _unsure,
    ),
    Cause(
        "domain",
        "domain",
        f"the prompt's category is far below the others (the upper end of the 95 % interval of its first drafts is "
        f"below {FAR:g} of the others' acceptance), or the token is never a label of the training set",
        _domain,
    ),
    Cause(
        "head",
        "the head itself",
        "none of the others: the head has the token, true features and a clear target, and drafts another",
        lambda draft, rules: True,
    ),
)


def cause_of(draft: Checked, rules: Rules) -> str:
    """The first cause that holds of a miss."""
    return next(cause.name for cause in CAUSES if cause.holds(draft, rules))


def categories_of(tested: Sequence[Checked]) -> list[dict]:
    """Acceptance of first drafts by category, beside that of all others; `far`: far below it.

    excess: how many first drafts more would be right at the others' rate.
    """
    first = [draft for draft in tested if draft.depth == 1]
    trials, hits = Counter(d.category for d in first), Counter(d.category for d in first if d.hit)
    rows = []
    for name, count in trials.items():
        others = ratio(hits.total() - hits[name], trials.total() - count)
        span = wilson(hits[name], count)
        far = others is not None and count >= FEWEST and span[1] < FAR * others
        excess = others * count - hits[name] if far else 0.0
        rows.append({"category": name, "tested": count, "accepted": hits[name], "share": hits[name] / count,
                     "interval": span, "others": others, "far": far, "excess": excess})  # fmt: skip
    return sorted(rows, key=lambda row: row["share"])


def shares(tested: Sequence[Checked], rules: Rules, missing: dict[str, str], calls: int, depth: int) -> list[dict]:
    """A row for each cause: misses by depth and in all, and the least that tau would gain without them.

    missing: why a cause isn't asked for. reversed: accepted drafts that the other template or the true features would
    have lost; where they are as many as the misses, these are chance.
    """
    misses = [(draft, cause_of(draft, rules)) for draft in tested if not draft.hit]
    lost = {
        "template": sum(draft.hit and draft.with_template is False for draft in tested),
        "drift": sum(draft.hit and draft.with_true_features is False for draft in tested),
    }
    rows = []
    for cause in CAUSES:
        mine = Counter(draft.depth for draft, name in misses if name == cause.name)
        asked = cause.name not in missing
        rows.append({
            "cause": cause.name,
            "title": cause.title,
            "meaning": cause.meaning,
            "not_asked": missing.get(cause.name),
            "misses": mine.total() if asked else None,
            "share": ratio(mine.total(), len(misses)) if asked else None,
            "by_depth": [mine[k + 1] for k in range(depth)] if asked else None,
            "tau_gain_at_least": ratio(mine.total(), calls) if asked else None,
            "reversed": lost.get(cause.name) if asked else None,
        })  # fmt: skip
    return rows


def confidence(tested: Sequence[Checked]) -> list[dict]:
    """Acceptance of first drafts by the probability of the verifier's likeliest token."""
    edges = [0.0, *BINS, 1.0]
    rows = []
    for low, high in zip(edges, edges[1:], strict=False):
        mine = [d for d in tested if d.depth == 1 and (low <= d.best < high or (high == 1.0 and d.best >= 1.0))]
        hits = sum(draft.hit for draft in mine)
        rows.append({"from": low, "to": high, "tested": len(mine), "accepted": hits,
                     "share": ratio(hits, len(mine)), "interval": wilson(hits, len(mine))})  # fmt: skip
    return rows
