"""Acceptance, tau and speed of a drafter on prompts: the record behind alpha.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path

import torch
from torch import nn

from conf.errors import UserError
from data.files import replacing
from eval.counts import Counts, bootstrap_tau, pool, ratio, repeated_tokens, wilson
from eval.exposure import answered, exposure_record, measure_exposure
from eval.measure import (
    TIE,
    EvalSettings,
    PromptRun,
    decode_rate,
    first_difference,
    measure_times,
    replay_prompts,
    replay_times,
    run_prompts,
    use_threads,
)
from eval.prompts import Prompt
from eval.rounds import TEXTS, text_rounds, write_rounds
from eval.speculative.drafter import Drafter
from eval.theory import Times, measured_outlook
from models.heads.eagle import EagleHead

DEFINITIONS = {
    "tau": "1 + accepted / verify_calls: emitted tokens per verify call, the verifier's own included, the prefill's "
    "token left out, counted before anything is cut off by end-of-turn or length. Pooled over prompts.",
    "alpha": "accepted drafts / tested drafts; a draft is tested when all before it were accepted.",
    "alpha_by_depth": "n-alpha: P(draft n accepted | drafts 1..n-1 accepted). Pooled counts, Wilson 95 % intervals.",
    "accepted_by_position": "P(draft n accepted) over calls that drafted to depth n: unconditional, as in engine logs.",
    "out_of_vocab_rate": "share of emitted tokens that the drafter has no candidate for.",
    "times": "median seconds: t_decode a plain step, t_verify by rows of the call, t_draft_first the pass over all new "
    "rows, t_draft each later draft step, t_other the rest of a round.",
    "cost_ratio": "t_draft / t_verify of the drafts that were run.",
    "nodes": "the most candidates of a draft; as many as `depth` in a chain.",
    "batch": "sequences decoded at once; all times are then a sequence's share of the call.",
    "predicted_speedup": "tau t_decode / (t_verify + t_draft_first + (levels - 1) t_draft + t_other), of this run.",
    "repetition_rate": "share of tokens inside an 8-gram that occurs more than once in its text: many flatter tau.",
    "prompt_lookup_tau": "tau that copying from the text so far (suffix of up to 3 tokens) reaches on the same texts.",
    "tokens_per_second": "tokens handed out after the first / seconds of decoding, the prefill left out of both.",
    "speedup": "tokens_per_second / baseline_tokens_per_second, the two runs taking turns prompt by prompt.",
    "identical_to_baseline": f"every text equals plain decoding token for token, apart from numerical ties (top two "
    f"logits closer than {TIE:g}), which are listed. Greedy only.",
    "measured": "loop: by the speculative loop. replay: the loop's rounds followed on the verifier's recorded greedy "
    "text, which gives the same acceptance and no speed; the verifier's times are then those of one prompt, and drafts "
    "are timed without verify calls between them.",
    "exposure": "EAGLE heads, greedy: at every anchor of the texts, by own features read. true_accuracy, own_accuracy: "
    "the same drafts with the verifier's true features and with the head's own, where all drafts before passed; gap: "
    "their difference, which is exposure bias. teacher_forced: true features, whatever passed before. "
    "own_given_tokens: own features and the text's tokens, whatever passed before.",
    "intervals": "95 %: Wilson for shares, bootstrap over prompts for tau and exposure.",
}  # fmt: skip


@dataclass
class AlphaReport:
    """alpha.json as a record; `DEFINITIONS` says what each number means. None: it wasn't or couldn't be measured."""

    tau: float | None
    alpha: float | None
    alpha_by_depth: list[float | None]
    accepted_by_position: list[float | None]
    verify_calls: int
    drafted: int
    accepted: int
    emitted: int
    out_of_vocab_rate: float | None
    times: dict | None
    cost_ratio: float | None
    dtype: str
    threads: int
    repetition_rate: float | None
    prompt_lookup_tau: float | None
    tokens_per_second: float | None
    baseline_tokens_per_second: float | None
    speedup: float | None
    identical_to_baseline: bool | None
    ties: list[dict]
    differences: list[dict]
    measured: str
    decode: str
    depth: int
    nodes: int
    batch: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    seed: int
    device: str
    verifier: str
    verifier_hash: str
    head: str | None
    head_hash: str | None
    intervals: dict
    tested_by_depth: list[int]
    accepted_by_depth: list[int]
    predicted: dict | None
    predicted_speedup: float | None
    by_category: dict[str, dict]
    prompts: list[dict]
    skipped: list[str]
    exposure: dict | None
    texts: list[dict]
    definitions: dict[str, str] = field(default_factory=lambda: dict(DEFINITIONS))

    def to_dict(self) -> dict:
        """All but `texts`."""
        return {name: value for name, value in asdict(self).items() if name != "texts"}

    def write(self, path: Path) -> Path:
        """Writes alpha.json whole or not at all, and before it the `texts` as rounds.json (eval.rounds) beside it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rounds(path.parent, self.texts)
        with replacing(path) as part:
            part.write_text(json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        return path


def evaluate(
    verifier,
    drafter_factory: Callable[[], Drafter],
    prompts: Sequence[Prompt],
    settings: EvalSettings,
    progress: bool = True,
    head: str | None = None,
    head_hash: str | None = None,
    module: nn.Module | None = None,
) -> AlphaReport:
    """Measures a drafter on `prompts`. `head`, `head_hash`: how it is named in the report.

    module: the head itself; of an EAGLE head, exposure bias is counted on the greedy texts as well.

    Prompts that leave no room for the answer within the verifier's positions are skipped and listed.
    Raises UserError when none is left.
    """
    positions = verifier.head_geometry["max_position_embeddings"]
    room = settings.prompt_room(positions)
    fitting = [p for p in prompts if len(p.input_ids) <= room]
    if not fitting:
        raise UserError(
            f"expected a prompt of at most {room} tokens ({positions} positions less the answer), found "
            f"{len(prompts)} prompts, none that short: lower max_new_tokens or give other prompts"
        )
    drafter = drafter_factory()
    with use_threads(settings.threads) as threads:
        if settings.replay:
            runs = replay_prompts(verifier, drafter, fitting, settings, progress)
            times = replay_times(verifier, drafter, runs, settings) if settings.baseline else None
        else:
            runs = run_prompts(verifier, drafter, fitting, settings, progress)
            times = measure_times(verifier, drafter, runs, settings.batch) if settings.baseline else None
        same_rule = settings.baseline and settings.sampling.greedy and not settings.replay
        found = [first_difference(verifier, run) for run in runs] if same_rule else []
        exposure = _exposure(verifier, module, runs, settings)
    return _report(verifier, drafter, runs, settings, times, [f for f in found if f], same_rule, threads, head,
                   head_hash, [p.id for p in prompts if len(p.input_ids) > room], exposure)  # fmt: skip


def _exposure(verifier, module: nn.Module | None, runs: Sequence[PromptRun], settings: EvalSettings) -> dict | None:
    """`exposure` of an alpha.json. None for a head without own features, and for sampled text."""
    if not isinstance(module, EagleHead) or not settings.sampling.greedy:
        return None
    documents = [answered(run.prompt, run.speculative.tokens) for run in runs]
    return exposure_record(measure_exposure(verifier, {"head": module}, documents, settings.depth)["head"])


def _report(verifier, drafter, runs, settings, times, found, same_rule, threads, head, head_hash, skipped, exposure):
    counts = pool(run.counts for run in runs)
    differences = [f for f in found if f["gap"] >= TIE]
    rate = None if settings.replay else ratio(*decode_rate(run.speculative for run in runs))
    plain = ratio(*decode_rate(run.baseline for run in runs if run.baseline))
    return AlphaReport(
        **_numbers(counts),
        out_of_vocab_rate=_out_of_vocab_rate(drafter, runs),
        times=times_to_dict(times) if times else None,
        cost_ratio=times.draft / times.verify(drafter.nodes + 1) if times else None,
        dtype=str(verifier.dtype).removeprefix("torch."),
        threads=threads,
        repetition_rate=_repetition_rate(runs),
        prompt_lookup_tau=pool(run.lookup for run in runs).tau,
        tokens_per_second=rate,
        baseline_tokens_per_second=plain,
        speedup=rate / plain if rate and plain else None,
        identical_to_baseline=not differences if same_rule else None,
        ties=[f for f in found if f["gap"] < TIE],
        differences=differences,
        measured="replay" if settings.replay else "loop",
        decode=shape_name(drafter, settings),
        depth=drafter.depth,
        nodes=drafter.nodes,
        batch=settings.batch,
        temperature=settings.sampling.temperature,
        top_p=settings.sampling.top_p,
        top_k=settings.sampling.top_k,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
        device=str(verifier.device),
        verifier=verifier.name,
        verifier_hash=verifier.weights_hash,
        head=head,
        head_hash=head_hash,
        intervals=_intervals(counts, runs),
        tested_by_depth=counts.tested_by_depth,
        accepted_by_depth=counts.accepted_by_depth,
        predicted=_predicted(counts, times) if drafter.depth == drafter.nodes else None,
        predicted_speedup=predicted_speedup(counts, times, drafter),
        by_category=_by_category(runs),
        prompts=[_prompt_row(run) for run in runs],
        skipped=skipped,
        exposure=exposure,
        texts=[_text(verifier.tokenizer, run) for run in _one_of_each(runs, TEXTS)],
    )


def _numbers(counts: Counts) -> dict:
    names = ("tau", "alpha", "alpha_by_depth", "accepted_by_position", "verify_calls", "drafted", "accepted", "emitted")
    return {name: getattr(counts, name) for name in names}


def _intervals(counts: Counts, runs: Sequence[PromptRun]) -> dict:
    pairs = zip(counts.accepted_by_depth, counts.tested_by_depth, strict=True)
    return {
        "tau": bootstrap_tau([run.counts for run in runs]),
        "alpha": wilson(counts.accepted, counts.tested),
        "alpha_by_depth": [wilson(accepted, tested) for accepted, tested in pairs],
    }


def _out_of_vocab_rate(drafter: Drafter, runs: Sequence[PromptRun]) -> float | None:
    tokens = torch.tensor([t for run in runs for t in run.speculative.tokens[1:]], dtype=torch.int64)
    if drafter.ids_R is None:
        return 0.0
    return ratio(int((~torch.isin(tokens, drafter.ids_R.cpu())).sum()), len(tokens))


def _repetition_rate(runs: Sequence[PromptRun]) -> float | None:
    texts = [run.speculative.tokens for run in runs]
    return ratio(sum(repeated_tokens(text) for text in texts), sum(len(text) for text in texts))


def times_to_dict(times: Times) -> dict:
    """`times` of an alpha.json, in seconds."""
    return {
        "t_decode": times.decode,
        "t_verify": {str(width): seconds for width, seconds in sorted(times.verify_by_width.items())},
        "t_draft_first": times.draft_first,
        "t_draft": times.draft,
        "t_other": times.other,
    }


def _predicted(counts: Counts, times: Times | None) -> dict | None:
    """What the measured profile and times promise at each depth up to the one run."""
    profile = list(takewhile(lambda a: a is not None, counts.alpha_by_depth))
    return measured_outlook(profile, times).to_dict() if times and profile else None


def predicted_speedup(counts: Counts, times: Times | None, drafter: Drafter) -> float | None:
    """tau and the times of the drafts that were run: S = tau t_decode / (t_verify + t_draft_first + .. + t_other)."""
    if not times or not counts.tau:
        return None
    levels = sum(counts.drafted_by_depth) / counts.verify_calls  # fewer than depth where drafting stopped early
    width = 1 + counts.drafted / counts.verify_calls
    drafting = times.draft_first + max(0.0, levels - 1) * times.draft
    return counts.tau * times.decode / (times.verify(width) + drafting + times.other)


def shape_name(drafter: Drafter, settings: EvalSettings) -> str:
    """chain, or tree; with how it was drafted where the verifier samples."""
    name = "chain" if drafter.depth == drafter.nodes else "tree"
    points = settings.points or getattr(drafter, "points", False)  # EAGLE-2's tree takes the best in any case
    return name if settings.sampling.greedy or not points else f"{name} of best tokens"


def _by_category(runs: Sequence[PromptRun]) -> dict[str, dict]:
    rows = {}
    for name in dict.fromkeys(run.prompt.category for run in runs):
        some = [run for run in runs if run.prompt.category == name]
        counts = pool(run.counts for run in some)
        rate = ratio(*decode_rate(run.speculative for run in some))
        plain = ratio(*decode_rate(run.baseline for run in some if run.baseline))
        rows[name] = _numbers(counts) | {
            "prompts": len(some),
            "prompt_lookup_tau": pool(run.lookup for run in some).tau,
            "repetition_rate": _repetition_rate(some),
            "speedup": rate / plain if rate and plain else None,
        }
    return rows


def _prompt_row(run: PromptRun) -> dict:
    return {
        "id": run.prompt.id,
        "category": run.prompt.category,
        "prompt_tokens": len(run.prompt.input_ids),
        "tokens": len(run.speculative.tokens),
        "finish": run.speculative.finish,
        "verify_calls": run.counts.verify_calls,
        "drafted": run.counts.drafted,
        "accepted": run.counts.accepted,
        "tested_by_depth": run.counts.tested_by_depth,
        "accepted_by_depth": run.counts.accepted_by_depth,
        "tau": run.counts.tau,
        "seconds": run.speculative.seconds or None,
        "baseline_seconds": run.baseline.seconds if run.baseline else None,
    }


def _one_of_each(runs: Sequence[PromptRun], most: int) -> list[PromptRun]:
    """The first run of each category, `most` at most."""
    first: dict[str, PromptRun] = {}
    for run in runs:
        first.setdefault(run.prompt.category, run)
    return list(first.values())[:most]


def _text(tokenizer, run: PromptRun) -> dict:
    return text_rounds(tokenizer, run.prompt.id, run.prompt.category, run.prompt.input_ids, run.speculative)
