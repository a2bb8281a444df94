"""A loss or gradient that is no number: what is at fault, and a file with which it can be seen again.

Found before the weights are touched (train.module). The file loads with weights_only, and train.reproduce replays it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data.files import replacing
from models.losses import StepCounts
from models.states import VerifierStates

FORMAT = 1
IN_A_ROW = 10  # skipped steps after which a run ends: no single batch is at fault then
SHOWN = 4  # names in a message; the file has them all
SETTINGS = "lower optim.lr (or optim.matrix_lr), or resume with trainer.nonfinite=skip"


@dataclass
class Window:
    """The micro-batches since the last optimizer step. places: the loader's, after each."""

    places: list[dict] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    counts: StepCounts | None = None
    tokens: int = 0

    def add(self, place: dict, loss: Tensor, weight: Tensor, counts: StepCounts, tokens: int) -> None:
        self.places.append(place)
        self.losses.append(loss.detach())
        self.weights.append(weight.detach())
        self.counts = counts if self.counts is None else self.counts + counts
        self.tokens += tokens

    def __len__(self) -> int:
        return len(self.places)


def documents_before(loader, place: dict) -> list[int]:
    """Indices of the documents in the batch after which a PackedLoader stood at `place`."""
    epoch, step = place["epoch"], place["step"]
    plan = loader.plan(epoch if step else epoch - 1)
    return list(plan[(step or len(plan)) - 1])


def fault(module, window: Window) -> tuple[str, str]:
    """(what is not finite and in which documents, what to do), of a window whose gradients are still there.

    States are read again, from the store or the verifier: a step keeps none of an earlier micro-batch.
    """
    if ranks := ranks_at_fault(module, window):
        return f"loss not finite on rank {some([str(rank) for rank in ranks])}", "its own message names the documents"
    batches = [documents_before(module.loader, place) for place in window.places]
    parts, where, advice = [], sorted({index for batch in batches for index in batch}), SETTINGS
    if weights := not_finite(module.head.named_parameters()):
        parts.append(f"weights of {some(weights)}")
        advice = "lower optim.lr (or optim.matrix_lr), and resume from an earlier checkpoint"
    if bad := {index: names for batch in batches for index in batch if (names := bad_states(module.loader, index))}:
        parts.append(f"the verifier's states ({', '.join(sorted({name for names in bad.values() for name in names}))})")
        where, advice = list(bad), "capture them again (remove their folder), or leave the documents out of data.path"
    if losses := [value for value in torch.stack(window.losses).tolist() if not math.isfinite(value)]:
        parts.append(f"loss {losses[0]}")
    if grads := not_finite((name, p.grad) for name, p in module.head.named_parameters()):
        parts.append(f"gradients of {some(grads)}")
    documents = [module.loader.source.documents[index] for index in where]
    named = [f"{index} ({document.id})" for index, document in zip(where, documents, strict=True)]
    return f"{', '.join(parts) or 'the norm of the gradients'} not finite; documents {some(named)}", advice


def not_finite(tensors: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Names of those that hold something that is no finite number."""
    return [name for name, tensor in tensors if tensor is not None and not bool(tensor.isfinite().all())]


def ranks_at_fault(module, window: Window) -> list[int]:
    """Other ranks whose loss is not finite, where this one's is; every rank asks in the same step."""
    if module.trainer.world_size == 1:
        return []
    bad = (~torch.stack(window.losses).isfinite()).any().long()
    every = [torch.empty_like(bad) for _ in range(module.trainer.world_size)]
    dist.all_gather(every, bad)
    return [] if bad else [rank for rank, found in enumerate(every) if found]


def bad_states(loader, index: int) -> list[str]:
    """Which of a document's states hold something that is no finite number."""
    states = loader.source.states([index])
    return not_finite((name, getattr(states, name)) for name in ("aux_BTAD", "last_PD", "lse_P"))


def some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def save_reproducer(path: Path, module, window: Window, what: str, seeds: Sequence[int], precision: str) -> Path:
    """Everything that the step was computed from, the verifier aside; returns the path."""
    batches = []
    for place, seed, loss in zip(window.places, seeds, window.losses, strict=True):
        indices = documents_before(module.loader, place)
        states = module.loader.source.states(indices)
        batches.append(
            {
                "documents": indices,
                "ids": [module.loader.source.documents[index].id for index in indices],
                "states": {item.name: getattr(states, item.name).cpu() for item in fields(VerifierStates)},
                "seed": seed,
                "loss": float(loss),
            }
        )
    values: dict[str, Any] = {
        "format": FORMAT,
        "step": module.global_step + 1,
        "what": what,
        "place": window.places[-1],
        "precision": precision,
        "kind": module.head.config.kind,
        "config": module.head.config.to_dict(),
        "d2t": module.head.vocab.d2t,
        "weights": {name: tensor.detach().cpu() for name, tensor in module.head.state_dict().items()},
        "weight": float(torch.stack(window.weights).sum()),
        "objective": asdict(module.settings.objective),
        "verifier": {"name": module.verifier.name, "weights_hash": module.verifier.weights_hash},
        "batches": batches,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("wb") as stream:
        torch.save(values, stream)
    return path
