"""Decoding one sequence and many, against transformers' own loops on the same weights."""

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
from eval.speculative.copying import Lookahead, PromptLookup
from eval.speculative.drafter import Drafter
from eval.speculative.loop import Decoded, Round, plain_decode, speculative_decode
from eval.speculative.processors import Sampling
from eval.speculative.scorers import ModelScorer, TreeDrafter, drafter_for
from eval.speculative.shapes import FixedTree, GrowingShape
from models import introspect
from models.draft_model import DraftModel
from models.export.native import load_head, read_head
from models.loading import load_model
from models.verifier import Verifier

GREEDY = Sampling()
TREES = {"tree [2,2,2]": FixedTree.of([2, 2, 2]), "EAGLE-2 of 16": GrowingShape(4, 4, 16)}


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


def drafters(cfg, verifier: Verifier, head) -> dict[str, Drafter]:
    """Ours, by name: those without a model, the verifier's first layers as a draft, and the head by chain and tree.

    Chains are `depth` long where no other length is said; so are transformers'.
    """
    chain, layers = FixedTree.chain(cfg.depth), cfg.draft_layers
    first = Verifier(_copy(cfg, verifier, layers), verifier.tokenizer, verifier.name, aux_layers=[])
    scorer = ModelScorer(DraftModel(first, verifier), verifier.device)
    found: dict[str, Drafter] = {
        "prompt lookup": PromptLookup(cfg.depth),
        "Lookahead": Lookahead(),
        f"first {layers} layers": TreeDrafter(scorer, chain, GREEDY),
    }
    if head is not None:
        shapes = {f"N={n}": FixedTree.chain(n) for n in range(1, cfg.depth + 1)} | TREES
        found |= {f"head, {name}": drafter_for(head, shape, GREEDY) for name, shape in shapes.items()}
    return found


def _one_sequence(cfg, verifier: Verifier, head, prompts: list[list[int]]) -> list[dict]:
    """Plain decoding first, then its rivals. Each round is another prompt, the same for all."""
    clock, plain = Clock(verifier.device), "plain decoding"
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
    rivals |= {name: timed(name, decode) for name, decode in _transformers(cfg, verifier).items()}
    for name, drafter in drafters(cfg, verifier, head).items():
        rivals[name] = timed(name, speculative_decode, verifier, drafter, sampling=GREEDY)
    rates = in_turns(rivals, cfg.repeats)
    rows = []
    for name, rate in rates.items():
        same = [text.tokens == ours.tokens for text, ours in zip(texts[name], texts[plain], strict=True)][1:]
        row = {"name": name, "tokens_per_second": median(rate), "ratio": against(rate, rates[plain])}
        row["same_text"] = f"{sum(same)}/{len(same)}"
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


def _copy(cfg, verifier: Verifier, layers: int | None = None):
    """A second copy of the verifier's weights as transformers loads them (the adapter changes its own in place).

    layers: only the first ones.
    """
    saved = {"trust_remote_code": cfg.verifier.trust_remote_code, "revision": cfg.verifier.revision}
    model = load_model(verifier.name, dtype=verifier.dtype, device=str(verifier.device), **saved).model.eval()
    if layers is not None:
        del introspect.find_parts(model).layers[layers:]
        model.config.get_text_config().num_hidden_layers = layers
    return model


def _transformers(cfg, verifier: Verifier) -> dict[str, Callable[..., Decoded]]:
    """transformers' greedy loops by name: plain, with prompt lookup, and assisted by the model's own first layers."""
    model, assistant = _copy(cfg, verifier), _copy(cfg, verifier, cfg.draft_layers)
    assistant.generation_config.num_assistant_tokens = cfg.depth
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    options = {"do_sample": False, "eos_token_id": list(verifier.eos_ids), "pad_token_id": verifier.eos_ids[0]}

    def decoder(**more) -> Callable[..., Decoded]:
        def decode(prompt_ids: list[int], max_new_tokens: int) -> Decoded:
            ids_1T = torch.tensor([prompt_ids], device=verifier.device)
            settings = {"attention_mask": torch.ones_like(ids_1T), "max_new_tokens": max_new_tokens}
            out_1T = model.generate(ids_1T, **settings, **options, **more)
            return Decoded(out_1T[0, len(prompt_ids) :].tolist(), "", 0.0, 0.0)

        return decode

    return {
        "transformers generate": decoder(),
        "transformers prompt lookup": decoder(prompt_lookup_num_tokens=cfg.depth),
        f"transformers, {cfg.draft_layers} layers": decoder(assistant_model=assistant),
    }


def _time_split(calls: list[Round]) -> dict:
    """tau, median milliseconds of a round's parts, and the share of time outside the two models."""
    if not calls:
        return {}
    parts = {
        "draft_ms": [call.draft_seconds for call in calls],
        "verify_ms": [call.verify_seconds for call in calls],
        "other_ms": [call.seconds - call.draft_seconds - call.verify_seconds for call in calls],
    }
    tau = 1 + sum(call.accepted for call in calls) / len(calls)
    share = sum(parts["other_ms"]) / sum(call.seconds for call in calls)
    return {"tau": tau} | {name: 1e3 * median(seconds) for name, seconds in parts.items()} | {"other_share": share}
