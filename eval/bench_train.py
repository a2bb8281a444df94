"""The EAGLE-3 training step against bare matrix products of the same FLOPs, and its peak memory."""

from __future__ import annotations

import resource
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import median

import torch
from torch.utils.flop_counter import FlopCounterMode

from eval.rivals import against, in_turns
from eval.speculative.clock import Clock
from models.heads.eagle3 import Eagle3Config, Eagle3Head
from models.loading import native_dtype
from models.losses import head_loss
from models.objectives import Labels, Objective
from models.states import VerifierStates, label_rows
from models.verifier import Verifier
from models.vocab import DraftVocab, draft_vocab_size

TOKENS, DOCUMENTS = 1024, 6


def bench_train(cfg) -> tuple[Verifier, list[dict]]:
    """Forward and backward of the EAGLE-3 step on made-up states, in the precision that training takes here.

    ratio: the step's share of the speed that bare matrix products of the same FLOPs reach.
    peak_mib: of the process with everything in it (CPU) or of the device's allocator, before anything is timed.
    """
    verifier = Verifier.load(**vars(cfg.verifier))
    head, states = _made_up(verifier)
    clock = Clock(verifier.device)
    dtype = native_dtype(verifier.device)

    def step(K: int, counter=None) -> float:
        head.zero_grad(set_to_none=True)
        teacher_PR = verifier.logits(states.last_PD, head.vocab.ids_R)  # the loss uses its memory up
        begun = clock.now()
        with counter or nullcontext():
            with torch.autocast(verifier.device.type, dtype, enabled=dtype != torch.float32):
                labels = Labels.given(states, teacher_PR, K)
                loss, weight, _ = head_loss(head, states, labels, Objective(steps=K))
            (loss / weight).backward()
        return clock.now() - begun

    flops, peaks = {}, {}
    for K in sorted(cfg.steps):
        _forget_peak(verifier.device)
        step(K, counter := FlopCounterMode(display=False))
        flops[K], peaks[K] = counter.get_total_flops(), _peak_mib(verifier.device)
    D, wide = verifier.hidden_size, head.config.intermediate_size
    a, b = (torch.randn(shape, device=verifier.device, dtype=dtype) for shape in ((TOKENS, D), (D, wide)))
    one = 2 * TOKENS * D * wide

    def products(K: int) -> float:
        count = -(-flops[K] // one)
        begun = clock.now()
        for _ in range(count):
            a @ b
        return (clock.now() - begun) * flops[K] / (count * one)

    rivals = {}
    for K in flops:
        rivals |= {("step", K): lambda turn, K=K: step(K), ("products", K): lambda turn, K=K: products(K)}
    seconds = in_turns(rivals, cfg.repeats)
    return verifier, [
        {
            "name": f"K={K}",
            "tokens_per_second": TOKENS / median(seconds["step", K]),
            "ratio": against(seconds["products", K], seconds["step", K]),
            "step_ms": 1e3 * median(seconds["step", K]),
            "products_ms": 1e3 * median(seconds["products", K]),
            "gflop": flops[K] / 1e9,
            "peak_mib": peaks[K],
        }
        for K in flops
    ]


def _made_up(verifier: Verifier) -> tuple[Eagle3Head, VerifierStates]:
    """A head of the verifier's geometry, and one packed row of documents that are two thirds answer."""
    V, D, device = verifier.vocab_size, verifier.hidden_size, verifier.device
    R = draft_vocab_size(None, V)
    vocab = DraftVocab(torch.arange(R), V)
    config = Eagle3Config.from_verifier(verifier.head_geometry, verifier.aux_layers, R)
    head = Eagle3Head(config, verifier.embedding_VD, vocab).to(device)
    row_T = torch.arange(TOKENS)
    document_T = row_T * DOCUMENTS // TOKENS
    position_T = row_T - torch.searchsorted(document_T, document_T)
    span_T = torch.where(position_T >= TOKENS // DOCUMENTS // 3, document_T, -1)
    last_P = label_rows(span_T[None])
    last_PD = torch.randn(len(last_P), D).to(device, verifier.dtype)
    logits_PR = verifier.logits(last_PD, vocab.ids_R)
    top_P, lse_P = vocab.ids_R.to(device)[logits_PR.argmax(-1)], logits_PR.logsumexp(-1)
    states = VerifierStates(
        torch.randint(V, (1, TOKENS)), document_T[None], position_T[None], span_T[None],
        torch.randn(1, TOKENS, len(verifier.aux_layers), D), last_PD, last_P, top_P, lse_P,
    )  # fmt: skip
    return head, states.to(device)


def _forget_peak(device: torch.device) -> None:
    """Loading a model needs more than a step; where the system can't forget that peak (not Linux), it stays."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _peak_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    with suppress(OSError):
        (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:")]
        return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
