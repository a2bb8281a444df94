"""The matrix products that a training step can't do without: useful FLOPs, and how fast this machine does them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from eval.training_bench.setting import Setting
from models.heads.eagle3 import Eagle3Config

SQUARE = 2048


@dataclass(frozen=True)
class Product:
    """[m, k] @ [k, n], `times` times a step."""

    m: int
    k: int
    n: int
    times: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n * self.times


def pairs_of(setting: Setting) -> list[int]:
    """Counted (anchor, step k) pairs of each step."""
    opening = setting.answer_first or setting.answer == setting.length  # then x_1 of the answer has no anchor
    anchors = setting.answer - 1 - opening
    return [setting.documents * max(anchors - k, 0) for k in range(setting.steps)]


def products(config: Eagle3Config, setting: Setting, lm_head: bool = True) -> list[Product]:
    """Of forward, backward and the teacher's draft columns, at rows that count. lm_head: is it trained?

    fc and step 0's keys and values at every row, the rest at counted pairs, of which each step has the mean number.
    Attention itself is `attention_flops`.
    """
    D, wide, R, K = config.hidden_size, config.intermediate_size, config.draft_vocab_size, setting.steps
    query = config.num_attention_heads * config.head_dim
    key_value = 2 * config.num_key_value_heads * config.head_dim
    T, P = setting.length * setting.documents, round(sum(pairs_of(setting)) / K)

    def linear(rows: int, inputs: int, outputs: int, times: int = 1, learns=True, passes=True) -> list[Product]:
        """Forward, the gradient of the weight, the gradient of the input."""
        parts = [Product(rows, inputs, outputs, times)]
        parts += [Product(inputs, rows, outputs, times)] if learns else []
        return parts + ([Product(rows, outputs, inputs, times)] if passes else [])

    found = linear(T, len(config.aux_layers) * D, D, passes=False)
    found += linear(T, D, key_value, passes=False) + linear(P, D, query, passes=False)  # of the embeddings
    found += linear(T, D, key_value) + linear(P, D, query) + linear(P, D, query + key_value, K - 1)
    found += linear(P, query, D, K) + linear(P, D, 2 * wide, K) + linear(P, wide, D, K)
    found += [Product(P, D, R)] + linear(P, D, R, K, learns=lm_head)
    return [product for product in found if product.flops]


def attention_flops(config: Eagle3Config, setting: Setting) -> int:
    """Scores and sums over the keys that each counted pair sees, forward and backward."""
    first = 0 if setting.answer_first else max(setting.length - setting.answer - 1, 0)
    keys = sum(first + i + 1 + k for k, n in enumerate(pairs_of(setting)) for i in range(n // setting.documents))
    return 12 * config.num_attention_heads * config.head_dim * keys * setting.documents


def rates(wanted: Iterable[Product], dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of bare matrix products in `dtype`: `shapes`, these products together; `square`, 2048-square ones."""
    wanted = list(wanted)
    seconds = sum(product.times * _seconds(product, dtype) for product in wanted)
    square = Product(SQUARE, SQUARE, SQUARE)
    return {
        "shapes": sum(product.flops for product in wanted) / seconds,
        "square": square.flops / _seconds(square, dtype),
    }


def _seconds(product: Product, dtype: torch.dtype) -> float:
    """Of one such product: the second of two runs."""
    a, b = torch.randn(product.m, product.k).to(dtype), torch.randn(product.k, product.n).to(dtype)
    out = torch.empty(product.m, product.n, dtype=dtype)
    torch.mm(a, b, out=out)
    begun = time.perf_counter()
    torch.mm(a, b, out=out)
    return time.perf_counter() - begun
