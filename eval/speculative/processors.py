"""From logits to the law that is sampled: temperature, top-k, top-p. One definition for test, residual and bonus."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conf.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 (greedy) or more, found {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or more, found {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1] (1 = off), found {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def to_law(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """The sampled law of each row, [N, V] in float32 or better.

    The order is that of the serving engines: temperature, then top-k, then top-p on what is left, then
    renormalised. Top-p keeps the fewest tokens whose mass reaches it, the best token always among them.
    Equal logits are ranked by token id, so exactly k tokens are kept. Greedy gives point masses.
    """
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    if sampling.greedy:
        return torch.zeros_like(logits_NV).scatter_(-1, logits_NV.argmax(-1, keepdim=True), 1.0)
    p_NV = torch.softmax(logits_NV / sampling.temperature, -1)
    top_k = sampling.top_k if 0 < sampling.top_k < p_NV.shape[-1] else 0
    if not top_k and sampling.top_p == 1:
        return p_NV
    ranked_NV, order_NV = p_NV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        ranked_NV[..., top_k:] = 0
        ranked_NV = ranked_NV / ranked_NV.sum(-1, keepdim=True)
    if sampling.top_p < 1:
        before_NV = ranked_NV.double().cumsum(-1) - ranked_NV.double()  # mass of the better tokens
        ranked_NV = ranked_NV.masked_fill(before_NV >= sampling.top_p, 0)
        ranked_NV = ranked_NV / ranked_NV.sum(-1, keepdim=True)
    return torch.zeros_like(p_NV).scatter_(-1, order_NV, ranked_NV)
