"""Decoding one sequence and many, against transformers' own loop on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from data.generate import Request, generate
from eval.command import load_verifier
from eval.prompts import load_prompts
from eval.rivals import against, in_turns
from eval.speculative.clock import Clock
from eval.speculative.drafter import HeadDrafter, PromptLookup
from eval.speculative.loop import Decoded, Round, plain_decode, speculative_decode
from eval.speculative.processors import Sampling
from models.export.native import load_head, read_head
from models.loading import load_model
from models.verifier import Verifier

GREEDY = Sampling()


def bench_decode(cfg) -> tuple[Verifier, list[dict]]:
    """Rows of tokens a second, prefill included on all sides, and their ratio to plain decoding by our adapter."""
    if cfg.run is None:
        verifier, head = Verifier.load(**vars(cfg.verifier)), None
    else:
        verifier = load_verifier(Path(cfg.run), read_head(cfg.run), cfg.verifier.dtype)
        head = load_head(cfg.run, verifier, verifier.dtype)
    prompts = [list(prompt.input_ids) for prompt in load_prompts(verifier, "eyrie", cfg.repeats)]
    rows = _one_sequence(cfg, verifier, head, prompts)
    return verifier, rows + _many_sequences(cfg, verifier, prompts, rows[0]["tokens_per_second"])


def _one_sequence(cfg, verifier: Verifier, head, prompts: list[list[int]]) -> list[dict]:
    """Plain decoding first, then its rivals. Each round is another prompt, the same for all."""
    clock, plain, theirs = Clock(verifier.device), "plain decoding", "transformers generate"
    drafters = {f"prompt lookup, N={cfg.depth}": (PromptLookup(), cfg.depth)}
    if head is not None:
        drafters |= {f"head, N={n}": (HeadDrafter(head, GREEDY), n) for n in range(1, cfg.depth + 1)}
    texts: dict[str, list[Decoded]] = {}

    def timed(name: str, decode: Callable[..., Decoded], *models, **options) -> Callable[[int], float]:
        def run(turn: int) -> float:
            begun = clock.now()
            text = decode(*models, prompts[turn % len(prompts)], max_new_tokens=cfg.max_new_tokens, **options)
            seconds = clock.now() - begun
            texts.setdefault(name, []).append(text)
            return len(text.tokens) / seconds

        return run

    rivals = {plain: timed(plain, plain_decode, verifier, sampling=GREEDY)}
    rivals[theirs] = timed(theirs, _transformers(cfg, verifier))
    for name, (drafter, depth) in drafters.items():
        rivals[name] = timed(name, speculative_decode, verifier, drafter, depth=depth, sampling=GREEDY)
    rates = in_turns(rivals, cfg.repeats)
    rows = []
    for name, rate in rates.items():
        same = [text.tokens == ours.tokens for text, ours in zip(texts[name], texts[plain], strict=True)][1:]
        row = {"name": name, "tokens_per_second": median(rate), "ratio": against(rate, rates[plain])}
        row["same_text"] = f"{sum(same)} of {len(same)}"
        rows.append(row | _time_split([call for text in texts[name][1:] for call in text.rounds]))
    return rows


def _many_sequences(cfg, verifier: Verifier, prompts: list[list[int]], plain: float) -> list[dict]:
    """The data generator on full batches that never stop early, so that every round is the same work."""
    clock = Clock(verifier.device)

    def batch(size: int) -> Callable[[int], float]:
        requests = [Request(str(i), prompts[i % len(prompts)]) for i in range(size)]
        options = {"max_new_tokens": cfg.max_new_tokens, "batch_size": size, "stop_ids": []}

        def run(turn: int) -> float:
            begun = clock.now()
            done = list(generate(verifier, requests, **options))
            return sum(len(one.output_ids) for one in done) / (clock.now() - begun)

        return run

    rates = in_turns({f"batch of {size}": batch(size) for size in cfg.batches}, min(cfg.repeats, 2))
    return [
        {"name": name, "tokens_per_second": median(rate), "ratio": median(rate) / plain} for name, rate in rates.items()
    ]


def _transformers(cfg, verifier: Verifier) -> Callable[..., Decoded]:
    """Greedy `generate` on a second, untouched copy of the weights: the adapter changes its own in place."""
    saved = {"trust_remote_code": cfg.verifier.trust_remote_code, "revision": cfg.verifier.revision}
    model = load_model(verifier.name, dtype=verifier.dtype, device=str(verifier.device), **saved).model.eval()
    options = {"do_sample": False, "eos_token_id": list(verifier.eos_ids), "pad_token_id": verifier.eos_ids[0]}

    def decode(prompt_ids: list[int], max_new_tokens: int) -> Decoded:
        ids_1T = torch.tensor([prompt_ids], device=verifier.device)
        mask_1T = torch.ones_like(ids_1T)
        out_1T = model.generate(ids_1T, attention_mask=mask_1T, max_new_tokens=max_new_tokens, **options)
        return Decoded(out_1T[0, len(prompt_ids) :].tolist(), "", 0.0, 0.0)

    return decode


def _time_split(calls: list[Round]) -> dict:
    """tau, and median milliseconds of a round's parts."""
    if not calls:
        return {}
    parts = {
        "draft_ms": [call.draft_seconds for call in calls],
        "verify_ms": [call.verify_seconds for call in calls],
        "other_ms": [call.seconds - call.draft_seconds - call.verify_seconds for call in calls],
    }
    tau = 1 + sum(call.accepted for call in calls) / len(calls)
    return {"tau": tau} | {name: 1e3 * median(seconds) for name, seconds in parts.items()}
