"""What a run is going to take, said before it starts: data, steps, tokens, time, disk, memory."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table
from transformers import AutoConfig

from conf import disk
from conf.errors import UserError
from conf.paths import cache_dir
from conf.schema import TrainConf
from data.prepare import needs_verifier
from data.quantize import STORE_DTYPES, states_bytes, store_dtype
from models import embedded
from models.heads import captured_layers
from models.introspect import check_aux_layers, check_layer, find_parts, geometry
from models.loading import explained, native_dtype, pick_dtype
from models.parts import outline
from models.vocab import draft_vocab_size
from train.build import draft_steps
from train.cost import HeadCost, VerifierCost
from train.fit import device_count

PROMPT_TOKENS = 48  # a guess at template and question; exact numbers follow when the data is there
ANSWER_SHARE = 0.75  # of max_new_tokens that an answer fills, by guess
MARGIN = 1.02  # files hold a little more than their tensors
EFFICIENCY = 0.3  # of the matrix-multiplication rate that a whole step reaches, by guess


@dataclass(frozen=True)
class Sizes:
    """What verifier and head are, for `train.cost`."""

    verifier: VerifierCost
    head: HeadCost

    @property
    def hidden(self) -> int:
        return self.verifier.hidden

    @property
    def aux(self) -> int:
        """Captured layers."""
        return self.head.aux


def sizes(cfg: TrainConf) -> Sizes:
    """From the verifier's config alone: no weights are read, and none need be there."""
    source = cfg.verifier.source
    local = embedded.folder() if source == embedded.NAME else Path(source).expanduser()
    local = local if local.is_dir() else None
    options = {"trust_remote_code": cfg.verifier.trust_remote_code, "revision": cfg.verifier.revision}
    try:
        config = AutoConfig.from_pretrained(str(local or source), **options)
        model = outline(config, trust_remote_code=cfg.verifier.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        # What is no folder and no possible hub name comes as a ValueError, but is a place that cannot be reached.
        unreachable = local is None and isinstance(error, ValueError)
        raise explained(source, local, OSError(str(error)) if unreachable else error) from error
    text = config.get_text_config()
    verifier = VerifierCost.of(model, find_parts(model).layers, text)
    check_layer(cfg.head.start_layer, verifier.layers)
    shape, V = geometry(text, verifier.vocab), verifier.vocab
    head = HeadCost(
        kind=cfg.head.name,
        hidden=shape["hidden_size"],
        mlp=shape["intermediate_size"],
        query=shape["num_attention_heads"] * shape["head_dim"],
        key_value=2 * shape["num_key_value_heads"] * shape["head_dim"],
        draft_vocab=V if cfg.head.name == "eagle1" else draft_vocab_size(cfg.head.draft_vocab_size, V),
        aux=len(check_aux_layers(captured_layers(cfg.head.name, cfg.verifier.aux_layers), verifier.layers)),
        steps=draft_steps(cfg.head),
        train_lm_head=cfg.head.train_lm_head,
        layers=cfg.head.layers if cfg.head.name == "independent" else 1,
        blocks=cfg.head.blocks,
    )
    return Sizes(verifier, head)


def answer_tokens(cfg: TrainConf) -> int:
    """Of a document, by guess."""
    return max(1, int(ANSWER_SHARE * cfg.data.max_new_tokens))


def document_tokens(cfg: TrainConf) -> tuple[int, int]:
    """(all tokens, answer tokens) that the limits on the data allow, by guess; zeros when only a clock limits it."""
    answer = answer_tokens(cfg)
    bounds = [cfg.data.max_documents, cfg.data.max_tokens and cfg.data.max_tokens // answer]
    documents = min((bound for bound in bounds if bound), default=0)
    return documents * (answer + PROMPT_TOKENS), documents * answer


def matmul_rate(device: torch.device) -> float:
    """Operations per second of a 1024-square product here, in the dtype that training takes, the best of a few."""
    x = torch.randn(1024, 1024, device=device, dtype=native_dtype(device))
    best = 1e9
    for _ in range(4):
        begun = time.perf_counter()
        (x @ x).sum().item()
        best = min(best, time.perf_counter() - begun)
    return 2 * 1024**3 / best


def plan_rows(cfg: TrainConf, device: torch.device) -> list[tuple[str, str]]:
    """(what, how much) of the run; guesses say `about`."""
    size = sizes(cfg)
    verifier, head = size.verifier, size.head
    given = cfg.trainer.tflops
    peak = given * 1e12 if given else matmul_rate(device)
    rate, ranks = EFFICIENCY * peak, device_count(cfg.trainer) * cfg.trainer.num_nodes
    tokens, answers = document_tokens(cfg)
    stored = stored_bytes(cfg, size, tokens, answers, pick_dtype(cfg.verifier.dtype, device))
    if given is None:  # else it is another machine's plan
        check_disk(stored)
    steps = _steps(cfg, tokens, ranks)
    answer = answer_tokens(cfg)
    length = answer + PROMPT_TOKENS
    share = 1.0 if cfg.data.supervised == "dialogue" else answer / length
    step_tokens = cfg.trainer.tokens_per_step * cfg.trainer.accumulate  # of a rank
    anchors = share * step_tokens
    online = 0.0 if cfg.data.store else verifier.capture(step_tokens, anchors, length)
    per_step = head.step(step_tokens, anchors, length) + online
    origin = "written by the verifier" if cfg.data.path is None else f"{cfg.data.path}, answers {cfg.data.answers}"
    writes = needs_verifier(cfg.data)  # given answers take no clock, and one pass for their states
    minutes = cfg.data.minutes if writes else None
    passes = verifier.capture(tokens, answers, length) if cfg.data.store else 0.0
    passes += verifier.capture(tokens - answers, 0, length) + verifier.write(answers, length) if writes else 0.0
    experts = "" if verifier.active == verifier.total else f" ({_count(verifier.active)} in layers for a token)"
    where = f"{device}" if cfg.verifier.device_map is None else "several devices"
    return [
        ("verifier", f"{cfg.verifier.source}: {_count(verifier.total + verifier.ends)} parameters{experts}, "
                     f"{verifier.layers} layers on {where}"),
        ("head", f"{head.kind}: {_count(head.body + head.lm_head)} parameters, {_count(head.trained)} trained, "
                 f"K = {head.steps}, R = {head.draft_vocab}"),
        ("budget", cfg.budget_name or "none named"),
        ("data", ", ".join([origin, *([f"about {_count(tokens)} tokens"] if tokens else [])])),
        ("data time", _span(minutes, passes / rate / 60 if tokens else None)),
        ("training", ", ".join(_training(cfg, steps, step_tokens * ranks))),
        ("training time", _span(cfg.trainer.minutes, steps * per_step / rate / 60 if steps else None)),
        ("of a token", _token(verifier, head, length, share)),
        ("of a step", f"{_count(ranks * per_step)}FLOP on {ranks} rank{'s' * (ranks > 1)}, "
                      f"{_count(head.optimizer_bytes())}B moved by AdamW on each"),
        ("rate", f"{_count(rate)}FLOP/s a device: {EFFICIENCY:.0%} of {_count(peak)}FLOP/s, "
                 + ("as given" if given else "a matrix product's here")),
        ("evaluation", f"{cfg.evaluation.limit or 'all'} prompts a suite, {cfg.decode.max_new_tokens} tokens each"
                       if cfg.verifier.whole else "none, for the verifier has no layers here"),
        ("whole job", _whole(cfg)),
        ("disk", _disk(cfg.data.store, stored)),
        ("states", _states(cfg, size, share)),
        ("memory", _memory(cfg, size, device, step_tokens / cfg.trainer.accumulate, share)),
    ]  # fmt: skip


def _token(verifier: VerifierCost, head: HeadCost, length: float, share: float) -> str:
    """Operations of a training token by part, where `share` of the tokens are answer."""
    parts = {
        "verifier": verifier.capture(1, share, length),
        "head": head.every_row() + share * head.anchor(),
        "its attention": share * head.attention(length),
        "its logits": share * head.logits(),
        "teacher": share * head.teacher(),
    }
    return ", ".join(f"{name} {_count(value)}FLOP" for name, value in parts.items())


def _states(cfg: TrainConf, size: Sizes, share: float) -> str:
    """Bytes of a token's states in each dtype that they may be kept in."""
    many = 1_000_000
    kept = {}
    for dtype in STORE_DTYPES:
        other = replace(cfg, data=replace(cfg.data, store=True, store_dtype=dtype))
        kept[dtype] = stored_bytes(other, size, many, round(share * many), torch.float32) / many
    return ", ".join(f"{dtype} {_count(value)}B a token" for dtype, value in kept.items())


def _memory(cfg: TrainConf, size: Sizes, device: torch.device, tokens: float, share: float) -> str:
    """Of each process, by part. Training and writing don't overlap, so the verifier's caches are left out."""
    verifier, dtype = size.verifier, pick_dtype(cfg.verifier.dtype, device)
    weights = verifier.weight_bytes(dtype.itemsize) if cfg.verifier.whole else verifier.ends * dtype.itemsize
    head = size.head.memory(tokens, share * tokens)
    over = " over its devices" if cfg.verifier.device_map is not None else ""
    parts = f"verifier {weights / 1e9:.1f} GB{over}, head and step {head / 1e9:.1f} GB"
    return f"about {(weights + head) / 1e9:.1f} GB: {parts}"


def stored_bytes(cfg: TrainConf, size: Sizes, tokens: int, answers: int, computed: torch.dtype) -> int:
    """What the states of so many tokens take on the disk; 0 when none are kept."""
    labels = tokens if cfg.data.supervised == "dialogue" else answers
    kind = store_dtype(cfg.data.store_dtype, computed)
    return states_bytes(kind, size.hidden, size.aux, tokens, labels) if cfg.data.store else 0


def check_disk(stored: float) -> None:
    """UserError when states of `stored` bytes would not fit; those in the cache may be the very ones."""
    free = shutil.disk_usage(cache_dir()).free
    there = sum(path.stat().st_size for path in cache_dir("states").rglob("*.safetensors"))
    if stored * MARGIN > free + there:
        raise UserError(
            f"expected {disk.size(stored * MARGIN)} free in {cache_dir()} for the verifier's states, found "
            f"{disk.size(free)}: set data.store=false (computed in every step), lower data.max_documents, or move "
            "the cache with EYRIE_CACHE"
        )


def show(rows: list[tuple[str, str]]) -> Table:
    table = Table(title="plan", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _steps(cfg: TrainConf, tokens: int, ranks: int) -> int | None:
    per_step = cfg.trainer.tokens_per_step * cfg.trainer.accumulate * ranks
    by_epochs = int(cfg.trainer.epochs * tokens / per_step) if cfg.trainer.epochs and tokens else None
    return min((bound for bound in (cfg.trainer.max_steps, by_epochs) if bound), default=None)


def _training(cfg: TrainConf, steps: int | None, step_tokens: int) -> list[str]:
    parts = [f"steps of {step_tokens:,} tokens"]
    if steps:
        about = "" if steps == cfg.trainer.max_steps else "about "
        parts.append(f"{about}{steps:,} steps = {_count(steps * step_tokens)} tokens")
    if cfg.trainer.epochs:
        parts.append(f"{cfg.trainer.epochs:g} epochs")
    if cfg.trainer.minutes:
        parts.append(f"until {cfg.trainer.minutes:g} min are over")
    return parts


def _span(limit: float | None, guess: float | None) -> str:
    if limit is not None and (guess is None or guess > limit):
        return f"{limit:g} min at most"
    if guess is None:
        return "not known yet"
    return f"about {guess:,.1f} min" if guess < 120 else f"about {guess / 60:,.1f} h"


def _whole(cfg: TrainConf) -> str:
    if cfg.minutes is None or cfg.resume:
        return "no clock over all of it"
    return f"{cfg.minutes:g} min after the start, {cfg.evaluation.minutes:g} of them kept for the evaluation"


def _disk(store: bool, size: float) -> str:
    known = f"about {size / 1e9:.2f} GB of states" if size else "states as they come"
    states = known if store else "no states kept"
    return f"{states}, {shutil.disk_usage(cache_dir()).free / 1e9:.1f} GB free in {cache_dir()}"


def _count(number: float) -> str:
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.{3 if number < 1000 * unit else 4}g}{name}"
    return f"{number:.0f}"
