"""The first thing to try for each cause, with the command."""

from __future__ import annotations

from dataclasses import dataclass

from conf.explain import options

DEEP = 7  # K that training-time test is worth trying with
KINDS = {"eagle3": "eagle3_llama", "eagle1": "eagle1_llama", "medusa": "medusa_llama",
         "independent": "independent_llama"}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What the advice is about. run: as given, or the draft's name. kind: of a head, None for what isn't trained here.

    steps: K of its training, None where it isn't known. size: R. worst: the category that is furthest off, or None.
    """

    run: str
    kind: str | None
    depth: int
    steps: int | None
    tokens: int | None
    size: int | None
    vocab_size: int
    template: str
    worst: str | None = None
    name: str | None = None

    @property
    def experiment(self) -> str:
        """The experiment that trained it, or the one of its kind."""
        known = self.name in options("experiment") and self.kind is not None
        return self.name if known else KINDS.get(self.kind or "eagle3", "eagle3_llama")


@dataclass(frozen=True)
class Advice:
    """What to try first, and how."""

    text: str
    command: str


def advice_for(cause: str, subject: Subject) -> Advice:
    """For a cause's name (eval.diagnose.causes)."""
    train = f"python -m train experiment={subject.experiment}"
    if subject.kind is None and cause in ("vocabulary", "domain", "head"):
        return Advice("a head that is trained for this verifier", "python -m train experiment=eagle3_llama")
    return {"vocabulary": _vocabulary, "template": _template, "drift": _drift, "unsure": _unsure, "domain": _domain,
            "head": _head}[cause](subject, train)  # fmt: skip


def _vocabulary(subject: Subject, train: str) -> Advice:
    if subject.size is None or subject.size >= subject.vocab_size:
        return Advice("a head that can propose more tokens", train)
    size = min(2 * subject.size, subject.vocab_size)
    return Advice(
        f"twice the draft vocabulary ({subject.size:,} of {subject.vocab_size:,} tokens now), counted on data that is "
        "like these prompts",
        f"{train} head.draft_vocab_size={size}",
    )


def _template(subject: Subject, train: str) -> Advice:
    return Advice(
        f"one chat template for both ({subject.template}): serve with the head's, or train on the one that is served, "
        "in a copy of the verifier's folder",
        f"{train} verifier=folder verifier.source=VERIFIER",
    )


def _drift(subject: Subject, train: str) -> Advice:
    if subject.kind == "eagle1":
        return Advice(
            "an EAGLE-3 head with training-time test, which learns to read its own features",
            f"python -m train experiment=eagle3_llama head.ttt_steps={max(DEEP, subject.depth)}",
        )
    if subject.steps is None or subject.steps < subject.depth:
        known = "" if subject.steps is None else f" (K was {subject.steps} for drafts of {subject.depth})"
        return Advice(
            f"training-time test as deep as the drafts{known}", f"{train} head.ttt_steps={max(DEEP, subject.depth)}"
        )
    return Advice(
        f"labels of the head's own drafts: K was {subject.steps}, which covers the depth",
        f"{train} objective=on_policy head.ttt_steps={subject.steps}",
    )


def _unsure(subject: Subject, train: str) -> Advice:
    which = f"run={subject.run}" if subject.kind else f"draft={subject.run}"
    return Advice(
        "several guesses in place of one: a tree; no head can do much about a verifier that hesitates",
        f"python -m eval {which} decode=tree",
    )


def _domain(subject: Subject, train: str) -> Advice:
    what = f"prompts like {subject.worst}" if subject.worst else "prompts like these"
    return Advice(
        f"more training on {what}, answered by the verifier",
        f"{train} head.start={subject.run} data.path=PROMPTS.jsonl",
    )


def _head(subject: Subject, train: str) -> Advice:
    known = f" (it has seen {subject.tokens:,} tokens)" if subject.tokens else ""
    return Advice(f"more data and more steps{known}, from where this head is", f"{train} head.start={subject.run} "
                  "budget=full")  # fmt: skip
