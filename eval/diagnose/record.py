"""diagnose.json: what was seen, the causes, and what to try first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conf.parse import yaml_file
from conf.paths import cache_dir
from data.files import read_json
from data.parts import read_corpus
from eval.command import Candidate
from eval.counts import wilson
from eval.diagnose.advice import Subject, advice_for
from eval.diagnose.causes import CAUSES, Rules, categories_of, cause_of, confidence, shares
from eval.diagnose.evidence import Checked
from eval.diagnose.templates import Templates
from models.export.native import read_head
from models.export.warm import is_published
from models.heads.eagle import EagleHead

EXAMPLES = 5  # of each cause


@dataclass(frozen=True)
class Traced:
    """Every tested draft, and the verify calls and those of them without a draft. skipped: prompts without room."""

    tested: list[Checked]
    calls: int
    undrafted: int
    prompts: int
    skipped: list[str]


def diagnosis(cfg, verifier, candidate: Candidate, templates: Templates, traced: Traced, depth: int) -> dict:
    """diagnose.json."""
    tested, labels = traced.tested, training_labels(cfg, verifier)
    categories = categories_of(tested)
    rules = Rules(cfg.unlikely, frozenset(row["category"] for row in categories if row["far"]), labels)
    missing = not_asked(candidate, templates, verifier, categories, labels)
    rows = shares(tested, rules, missing, traced.calls, depth)
    misses = [draft for draft in tested if not draft.hit]
    largest = max((row for row in rows if row["misses"]), key=lambda row: row["misses"], default=None)
    subject = subject_of(cfg, verifier, candidate, templates, depth, categories)
    by_depth = [[draft for draft in tested if draft.depth == k + 1] for k in range(depth)]
    accepted = [sum(draft.hit for draft in some) for some in by_depth]
    return {
        "verifier": verifier.name,
        "head": candidate.name,
        "head_hash": candidate.hash,
        "depth": depth,
        "prompts": traced.prompts,
        "skipped": traced.skipped,
        "verify_calls": traced.calls,
        "calls_without_draft": traced.undrafted,
        "tau": 1 + sum(accepted) / traced.calls if traced.calls else None,
        "tested_by_depth": [len(some) for some in by_depth],
        "accepted_by_depth": accepted,
        "intervals_by_depth": [wilson(hits, len(some)) for hits, some in zip(accepted, by_depth, strict=True)],
        "misses": len(misses),
        "causes": rows,
        "order": [cause.name for cause in CAUSES],
        "largest": None if largest is None else largest["cause"],
        "advice": None if largest is None else vars(advice_for(largest["cause"], subject)),
        "template": templates.said,
        "unlikely": cfg.unlikely,
        "entropy": {"hits": _mean(d.entropy for d in tested if d.hit), "misses": _mean(d.entropy for d in misses)},
        "categories": categories,
        "by_confidence": confidence(tested),
        "training_labels": None if labels is None else int(sum(labels)),
        "examples": examples(verifier.tokenizer, misses, rules),
    }


def not_asked(candidate: Candidate, templates: Templates, verifier, categories, labels) -> dict[str, str]:
    """Causes that make no sense for this drafter, or that nothing is known about, and why."""
    missing, head = {}, candidate.head
    ids_R = getattr(getattr(head, "vocab", None), "ids_R", None)
    if head is None and candidate.name != "prompt_lookup":
        missing["vocabulary"] = "the draft has the verifier's vocabulary"
    elif ids_R is not None and len(ids_R) == verifier.vocab_size:
        missing["vocabulary"] = "the head drafts from the whole vocabulary"
    if templates.training is None:
        missing["template"] = templates.missing if head is not None else "nothing was trained on a template"
    if not isinstance(head, EagleHead):
        missing["drift"] = "the drafter reads no features of its own"
    if len(categories) < 2 and labels is None:
        missing["domain"] = "one category of prompts, and the training set isn't in the cache"
    return missing


def training_labels(cfg, verifier) -> list[int] | None:
    """How often each token is a label of the run's training set, where that still lies in the cache."""
    noted = read_json(Path(cfg.run).expanduser() / "provenance.json").get("data") if cfg.run else None
    folder = noted.get("folder") if isinstance(noted, dict) else None
    if not isinstance(folder, str) or not Path(folder).resolve().is_relative_to(cache_dir().resolve()):
        return None
    corpus = read_corpus(Path(folder))
    return None if corpus is None else corpus.label_counts(verifier.vocab_size).tolist()


def subject_of(cfg, verifier, candidate: Candidate, templates: Templates, depth: int, categories) -> Subject:
    """What is known of the head, for the advice."""
    training, name, head = {}, None, candidate.head
    if cfg.run and not is_published(run := Path(cfg.run).expanduser()):
        training = read_head(run).training
        saved = yaml_file(run / "config.yaml") if (run / "config.yaml").is_file() else {}
        name = saved.get("name") if isinstance(saved, dict) else None
    far = [row["category"] for row in categories if row["far"]]
    steps, tokens = (training.get(key) for key in ("ttt_steps", "tokens"))
    return Subject(
        run=candidate.name,
        kind=None if head is None else head.config.kind,
        depth=depth,
        steps=steps if isinstance(steps, int) else None,
        tokens=tokens if isinstance(tokens, int) else None,
        size=len(head.vocab) if head is not None else None,
        vocab_size=verifier.vocab_size,
        template=templates.said,
        worst=far[0] if far else None,
        name=name if isinstance(name, str) else None,
    )


def examples(tokenizer, misses: list[Checked], rules: Rules) -> dict[str, list[dict]]:
    """A few misses of each cause, evenly spaced, as words."""
    by_cause: dict[str, list[Checked]] = {cause.name: [] for cause in CAUSES}
    for draft in misses:
        by_cause[cause_of(draft, rules)].append(draft)

    def shown(draft: Checked) -> dict:
        read = tokenizer.decode
        return {"prompt": draft.prompt, "position": draft.position, "depth": draft.depth,
                "after": read(list(draft.context)), "verifier": read([draft.token]), "drafted": read([draft.drafted]),
                "best": draft.best, "of_drafted": draft.of_drafted}  # fmt: skip

    return {
        name: [shown(d) for d in some[:: max(1, len(some) // EXAMPLES)][:EXAMPLES]] for name, some in by_cause.items()
    }


def _mean(values) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None
