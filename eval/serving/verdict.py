"""What a running server's counts say beside our loop's: whether they are the same, and what is likely wrong if not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eval.counts import Counts, bootstrap_tau, wilson
from eval.measure import TIE, PromptRun
from eval.serving.client import Completion
from eval.serving.metrics import Tally
from eval.speculative.loop import top_two_gap
from models.export.warm import CHANCE

CLOSE = 0.01  # of tau, relative; of a position's acceptance, absolute
FLIPS = 2  # drafts that may fall otherwise in float rounding, whatever CLOSE says
FEW = 1000  # drafts; where texts differ and there are fewer, the loop's 95 % intervals decide
NEAR = 0.5  # logits; greedy texts that part at closer ones are explained by a coarser dtype


@dataclass(frozen=True)
class TextDifference:
    """Where a server's greedy text leaves the verifier's. token: of the answer, from 0. gap: the verifier's two best
    logits there. ours, theirs: what stands there, "" behind a text's end."""

    prompt: str
    token: int
    ours: str
    theirs: str
    gap: float


@dataclass(frozen=True)
class Template:
    """The prompt ids of one dialogue by our template and by the server's. same: None where it couldn't be asked."""

    same: bool | None
    said: str


@dataclass(frozen=True)
class Evidence:
    """All that the verdict rests on. server, ours: counted by the same rule, over the same prompts.

    each: our tally of each prompt. texts: of those that differ. wavers: the same request gave two texts.
    traffic: why the counters are not of our requests alone, or "".  trees: the server drafts such.
    faults: known ones that would give the server's acceptance (eval.serving.suspects).
    """

    server: Tally
    ours: Tally
    each: Sequence[Tally]
    dtype: str
    texts: Sequence[TextDifference] = ()
    wavers: bool = False
    template: Template = Template(None, "")
    traffic: str = ""
    trees: bool = False
    faults: Sequence[str] = ()

    @property
    def moved(self) -> list[TextDifference]:
        """Texts that part at more than a numerical tie."""
        return [text for text in self.texts if not text.gap < TIE]

    @property
    def tau_interval(self) -> list[float] | None:
        """95 % of our tau, prompts drawn anew."""
        return bootstrap_tau([Counts(verify_calls=t.drafts, accepted=t.accepted) for t in self.each])

    @property
    def rate_intervals(self) -> list[list[float] | None]:
        return [wilson(hits, self.ours.drafts) for hits in self.ours.by_position or ()]

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """(server's, ours) acceptance of each position; none where either doesn't tell."""
        return [p for p in zip(self.server.rates, self.ours.rates, strict=False) if None not in p]


@dataclass(frozen=True)
class Verdict:
    """same: whether the server gets what was measured. line: in words, with what decided it."""

    same: bool
    by: str
    line: str


def judge(evidence: Evidence) -> Verdict:
    """By CLOSE, FLIPS aside; where the server wrote other texts and drafts are few, by the loop's intervals.

    Identical texts leave no chance to a comparison: then an interval over prompts would only hide a fault.
    """
    theirs, ours = evidence.server.tau, evidence.ours.tau
    if theirs is None or ours is None:
        return Verdict(False, "none", "no verdict: nothing was drafted, or the server doesn't tell how much passed")
    if theirs == ours == 1:
        return Verdict(False, "none", "no verdict: neither side accepted a draft, so that nothing was tested")
    if evidence.traffic:
        said = f"no verdict: the server's counters are not of these requests alone ({evidence.traffic})"
        return Verdict(False, "none", said)
    numbers = f"tau {theirs:.3f} on the server, {ours:.3f} in the loop"
    slack = FLIPS / max(evidence.ours.drafts or 0, 1)
    close = abs(theirs - ours) <= max(CLOSE * ours, slack)
    if close and all(abs(a - b) <= max(CLOSE, slack) for a, b in evidence.pairs):
        return Verdict(True, "1 %", f"the server gets the acceptance that was measured: {numbers}, equal within 1 %")
    interval = evidence.tau_interval
    drafts = evidence.ours.drafts or 0
    if evidence.texts and drafts < FEW and interval and interval[0] <= theirs <= interval[1]:
        inside = zip(evidence.pairs, evidence.rate_intervals, strict=False)
        if all(span is None or span[0] <= a <= span[1] for (a, _), span in inside):
            return Verdict(
                True,
                "95 % interval",
                f"{numbers}: within the loop's 95 % interval ({interval[0]:.3f} to {interval[1]:.3f}) on these "
                f"{drafts} drafts; more prompts would tell more",
            )
    word = "less" if theirs < ours else "more"
    if close:
        word = "another acceptance by position"
    return Verdict(
        False, "difference", f"the server gets {word} than was measured: {numbers} ({theirs / ours - 1:+.1%})"
    )


def likely_causes(evidence: Evidence) -> list[str]:
    """What may be wrong, each with what speaks for it, most likely first.

    First whatever spoils the comparison itself (traffic, trees), then what changes the text or the drafts' length, then
    the known faults that give the server's acceptance, or what its shape by depth points to.
    """
    causes = remarks(evidence)
    template = causes[-1:] if evidence.template.same is False else []
    causes = causes[: len(causes) - len(template)]
    if evidence.trees:
        causes.append("the server drafts trees, the loop a chain of the same depth: serve with one draft a level")
    if short := short_drafts(evidence):
        causes.append(short)
    causes += evidence.faults
    if not evidence.faults and (shape := shape_cause(evidence)):
        causes.append(shape)
    return causes + template or [
        "none that the counts show; python -m eval.serving.check runs the engine itself and compares each draft"
    ]


def remarks(evidence: Evidence) -> list[str]:
    """What is wrong whether or not acceptance is the same."""
    found = text_causes(evidence)
    if evidence.traffic:
        found.insert(0, f"the counters are not those of these requests alone: {evidence.traffic}")
    if evidence.template.same is False:
        found.append(f"chat template, for chat requests and not for these token ids: {evidence.template.said}")
    return found


def text_causes(evidence: Evidence) -> list[str]:
    """What other texts say: sampling, other weights, or a coarser dtype."""
    total, moved = len(evidence.each), evidence.moved
    if evidence.wavers:
        return ["temperature: the same request gave two different texts, so the server samples (or overrides it)"]
    if not moved:
        return []
    first = moved[0]
    where = (
        f"{len(moved)} of {total} texts are not the verifier's greedy ones; {first.prompt} parts at token "
        f"{first.token} ({first.theirs!r} for {first.ours!r}, the two best logits {first.gap:.2g} apart)"
    )
    if all(text.gap < NEAR for text in moved):
        return [f"dtype: {where}, at near ties only; the loop ran in {evidence.dtype}, decode.dtype=... sets it"]
    return [f"other verifier weights, quantisation or sampling (a penalty, a temperature): {where}"]


def short_drafts(evidence: Evidence) -> str:
    """Other draft lengths than ours, by the mean; the rules of counting are already the same."""
    server, ours = evidence.server, evidence.ours
    if not (server.drafted and server.drafts and ours.drafted and ours.drafts):
        return ""
    theirs, mine = server.drafted / server.drafts, ours.drafted / ours.drafts
    if abs(theirs - mine) < 0.02 * mine:
        return ""
    return (
        f"K: the server drafts {theirs:.2f} tokens a call where the loop drafts {mine:.2f}: drafts are cut by a "
        "confidence threshold, a batch limit, or the end of its context"
    )


def lower(rate: float, expected: float, drafts: int) -> bool:
    """Whether a position's acceptance is lower by more than CLOSE and twice its standard error."""
    error = (expected * (1 - expected) / max(drafts, 1)) ** 0.5
    return expected - rate > max(CLOSE, 2 * error)


def shape_cause(evidence: Evidence) -> str:
    """What acceptance by depth, the server's against ours, points to."""
    pairs, drafts = evidence.pairs, evidence.server.drafts or 0
    if not pairs:
        return ""
    shown = ", ".join(f"{a:.3f} for {b:.3f}" for a, b in pairs)
    first, ours = pairs[0]
    if lower(first, ours, drafts) and first < max(CHANCE, ours / 5):
        return (
            f"captured layers one off, or the vocabulary map: no depth is better than chance ({shown}); "
            "else tensors that the engine did not load"
        )
    down = [lower(a, b, drafts) for a, b in pairs]
    if any(down[1:]) and not down[0]:
        return (
            f"positions of later drafts, the state they are fed (norm_output), or keys and values of drafts that are "
            f"not run again: the first depth is equal, later ones are lower ({shown})"
        )
    if all(a <= b for a, b in pairs) and first >= ours / 2 and any(a < b for a, b in pairs):
        return (
            f"dtype of verifier or head: every depth is somewhat lower ({shown}); the loop ran in {evidence.dtype}, "
            "decode.dtype=... sets it"
        )
    if down[0]:
        return f"the head's inputs (captured layers, their order, norms): the first depth is already lower ({shown})"
    return f"another head or other prompts: the server accepts more ({shown})" if first > ours else ""


def compare_texts(verifier, runs: Sequence[PromptRun], texts: Sequence[Completion]) -> list[TextDifference]:
    """The prompts whose text is not the verifier's own, token for token, or as text where ids are not given."""
    found = [text_difference(verifier, run, text) for run, text in zip(runs, texts, strict=True)]
    return [difference for difference in found if difference]


def text_difference(verifier, run: PromptRun, text: Completion) -> TextDifference | None:
    """A missing end-of-turn token is no difference: some servers keep it to themselves."""
    mine, decode = run.speculative.tokens, verifier.tokenizer.decode
    ended = mine[:-1] if mine[-1] in verifier.eos_ids else mine
    if text.token_ids is None:
        ours, theirs = (t.strip() for t in (decode(ended, skip_special_tokens=True), text.text))
        if ours == theirs:
            return None
        same = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        lengths = range(len(ended) + 1)
        at = max(n for n in lengths if len(decode(ended[:n], skip_special_tokens=True).lstrip()) <= same)
        piece = theirs[same : same + 12]
    else:
        given = list(text.token_ids)
        if given in (mine, ended):
            return None
        at = next((i for i, (a, b) in enumerate(zip(mine, given, strict=False)) if a != b), min(len(mine), len(given)))
        piece = decode(given[at : at + 1])
    gap = top_two_gap(verifier, [*run.prompt.input_ids, *mine[:at]])
    return TextDifference(run.prompt.id, at, decode(mine[at : at + 1]), piece, gap)
