"""What a run is going to take, said before it starts: data, steps, tokens, time, disk, memory."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from transformers import AutoConfig

from conf.errors import UserError
from conf.paths import cache_dir
from conf.schema import TrainConf
from data.prepare import needs_verifier
from models import embedded
from models.heads import captured_layers
from models.introspect import check_aux_layers, geometry
from models.loading import FILE_DTYPES, explained
from models.vocab import draft_vocab_size
from train.build import draft_steps

PROMPT_TOKENS = 48  # a guess at template and question; exact numbers follow when the data is there
ANSWER_SHARE = 0.75  # of max_new_tokens that an answer fills, by guess
MARGIN = 1.02  # files hold a little more than their tensors
EFFICIENCY = 0.3  # of the matrix-multiplication rate that a whole step reaches, by guess


@dataclass(frozen=True)
class Sizes:
    """Parameters of verifier and head, and what a token costs."""

    layers: int
    hidden: int
    vocab: int
    draft_vocab: int
    aux: int
    verifier: int
    head: int
    embedding: int


def sizes(cfg: TrainConf) -> Sizes:
    """From the verifier's config alone: no weights are read."""
    source = cfg.verifier.source
    local = embedded.folder() if source == embedded.NAME else Path(source).expanduser()
    local = local if local.is_dir() else None
    options = {"trust_remote_code": cfg.verifier.trust_remote_code, "revision": cfg.verifier.revision}
    try:
        text = AutoConfig.from_pretrained(str(local or source), **options).get_text_config()
    except (OSError, ValueError, KeyError, ImportError) as error:
        # What is no folder and no possible hub name comes as a ValueError, but is a place that cannot be reached.
        unreachable = local is None and isinstance(error, ValueError)
        raise explained(source, local, OSError(str(error)) if unreachable else error) from error
    shape, L, V = geometry(text, text.vocab_size), text.num_hidden_layers, text.vocab_size
    D, MLP, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    A = len(check_aux_layers(captured_layers(cfg.head.name, cfg.verifier.aux_layers), L))
    R = draft_vocab_size(cfg.head.draft_vocab_size, V)
    mlp, out, qkv = 3 * D * MLP, heads * size * D, (heads + 2 * kv_heads) * size * D
    layer = mlp + out + qkv
    R = V if cfg.head.name == "eagle1" else R
    head = {
        "eagle1": 2 * D * D + layer,
        "eagle3": A * D * D + qkv + layer + R * D,
        "medusa": cfg.head.heads * cfg.head.blocks * D * D + R * D,
        "independent": cfg.head.layers * layer + R * D,
    }
    return Sizes(L, D, V, R, A, L * layer + V * D, head.get(cfg.head.name, 0), V * D)


def document_tokens(cfg: TrainConf) -> tuple[int, int]:
    """(all tokens, answer tokens) that the limits on the data allow, by guess; zeros when only a clock limits it."""
    answer = max(1, int(ANSWER_SHARE * cfg.data.max_new_tokens))
    bounds = [cfg.data.max_documents, cfg.data.max_tokens and cfg.data.max_tokens // answer]
    documents = min((bound for bound in bounds if bound), default=0)
    return documents * (answer + PROMPT_TOKENS), documents * answer


def matmul_rate(device: torch.device) -> float:
    """Multiply-adds per second of a 1024-square float32 product here, the best of a few."""
    x = torch.randn(1024, 1024, device=device)
    best = 1e9
    for _ in range(4):
        begun = time.perf_counter()
        (x @ x).sum().item()
        best = min(best, time.perf_counter() - begun)
    return 1024**3 / best


def plan_rows(cfg: TrainConf, device: torch.device) -> list[tuple[str, str]]:
    """(what, how much) of the run; guesses say `about`."""
    size, rate = sizes(cfg), EFFICIENCY * matmul_rate(device)
    tokens, answers = document_tokens(cfg)
    stored = stored_bytes(cfg, size, tokens, answers)
    check_disk(stored)
    steps = _steps(cfg, tokens)
    step_tokens = cfg.trainer.tokens_per_step * cfg.trainer.accumulate
    # Forward and backward are three passes over the head's weights per anchor and TTT step; an online verifier one.
    drafts = draft_steps(cfg.head)
    per_step = step_tokens * (3 * drafts * size.head * 0.8 + (0 if cfg.data.store else size.verifier))
    bytes_each = 4 if device.type == "cpu" else 2
    memory = bytes_each * (size.verifier + size.embedding) + 16 * size.head + 8 * size.hidden * step_tokens * 12
    origin = "written by the verifier" if cfg.data.path is None else f"{cfg.data.path}, answers {cfg.data.answers}"
    writes = needs_verifier(cfg.data)  # given answers take no clock, and one pass for their states
    minutes = cfg.data.minutes if writes else None
    passes = tokens + answers if writes else tokens
    return [
        ("verifier", f"{cfg.verifier.source}: {_count(size.verifier)} parameters, {size.layers} layers on {device}"),
        ("head", f"{cfg.head.name}: {_count(size.head)} parameters, K = {drafts}, R = {size.draft_vocab}"),
        ("budget", cfg.budget_name or "none named"),
        ("data", ", ".join([origin, *([f"about {_count(tokens)} tokens"] if tokens else [])])),
        ("data time", _span(minutes, passes * size.verifier / rate / 60 if tokens else None)),
        ("training", ", ".join(_training(cfg, steps, step_tokens))),
        ("training time", _span(cfg.trainer.minutes, steps * per_step / rate / 60 if steps else None)),
        ("evaluation", f"{cfg.evaluation.limit or 'all'} prompts a suite, {cfg.decode.max_new_tokens} tokens each"),
        ("whole job", _whole(cfg)),
        ("disk", _disk(cfg.data.store, stored)),
        ("memory", f"about {memory / 1e9:.1f} GB"),
    ]


def stored_bytes(cfg: TrainConf, size: Sizes, tokens: int, answers: int) -> int:
    """What the states of so many tokens take on the disk; 0 when none are kept."""
    width = FILE_DTYPES[cfg.data.store_dtype].itemsize * size.hidden
    labels = tokens if cfg.data.supervised == "dialogue" else answers
    return tokens * size.aux * width + labels * width if cfg.data.store else 0


def check_disk(stored: float) -> None:
    """UserError when states of `stored` bytes would not fit; those in the cache may be the very ones."""
    free = shutil.disk_usage(cache_dir()).free
    there = sum(path.stat().st_size for path in cache_dir("states").rglob("*.safetensors"))
    if stored * MARGIN > free + there:
        raise UserError(
            f"expected {stored * MARGIN / 1e9:.1f} GB free in {cache_dir()} for the verifier's states, found "
            f"{free / 1e9:.1f} GB: set data.store=false (computed in every step), lower data.max_documents, or move "
            "the cache with EYRIE_CACHE"
        )


def show(rows: list[tuple[str, str]]) -> Table:
    table = Table(title="plan", show_header=False)
    for row in rows:
        table.add_row(*row)
    return table


def _steps(cfg: TrainConf, tokens: int) -> int | None:
    per_step = cfg.trainer.tokens_per_step * cfg.trainer.accumulate
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
    return "not known yet" if guess is None else f"about {guess:,.1f} min"


def _whole(cfg: TrainConf) -> str:
    if cfg.minutes is None or cfg.resume:
        return "no clock over all of it"
    return f"{cfg.minutes:g} min after the start, {cfg.evaluation.minutes:g} of them kept for the evaluation"


def _disk(store: bool, size: float) -> str:
    known = f"about {size / 1e9:.2f} GB of states" if size else "states as they come"
    states = known if store else "no states kept"
    return f"{states}, {shutil.disk_usage(cache_dir()).free / 1e9:.1f} GB free in {cache_dir()}"


def _count(number: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:.0f}"
