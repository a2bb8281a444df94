"""In which numbers verifier states lie on the disk: floats as they are, or eight bits with a scale for each row.

A row is one token's state of one captured layer. Its scale is a float32 that maps its largest magnitude to the largest
code, so nothing is clipped: 4 bytes beside D, where a float16 scale would overflow on the huge states that first tokens
have, and a bfloat16 one would have to be rounded up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from conf.errors import UserError
from models.loading import DTYPES

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # code of a row's largest magnitude
STORE_DTYPES = DTYPES | {"int8": torch.int8, "float8": torch.float8_e4m3fn}
LABEL_BYTES = 12  # beside a label row's state: argmax (int64) and log-sum-exp (float32)


def store_dtype(name: str, computed: torch.dtype) -> str:
    """The dtype's name; "auto" is the one that the verifier computes in. UserError for an unknown one."""
    if name == "auto":
        return str(computed).removeprefix("torch.")
    if name not in STORE_DTYPES:
        raise UserError(f"expected data.store_dtype in {['auto', *STORE_DTYPES]}, found {name!r}")
    return name


def quantize(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(values [.., D], scale [..] in float32, or None for floats) of states [.., D].

    Raises UserError when a state is not finite, or is not in `dtype` (float16 ends at 65504).
    """
    if dtype not in LARGEST:
        values, scale = rows.to(dtype), None
        finite = values
    else:
        wide = finite = rows.float()
        scale = (wide.abs().amax(-1) / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)
        codes = wide / scale[..., None]
        values = (codes.round() if dtype == torch.int8 else codes).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    if not finite.isfinite().all():
        name = str(dtype).removeprefix("torch.")
        raise UserError(
            f"expected finite verifier states, found NaN or inf to be stored as {name}: set verifier.dtype=float32 "
            "and data.store_dtype=auto; if they stay, the verifier's weights are at fault"
        )
    return values, scale


def dequantize(values: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """States [.., D] in `dtype`, from what `quantize` gave."""
    return values.to(dtype) if scale is None else (values.float() * scale[..., None]).to(dtype)


def states_bytes(dtype: str, hidden: int, layers: int, tokens: int, labels: int) -> int:
    """What the states of so many tokens and label rows take, file headers aside. dtype: of STORE_DTYPES."""
    kind = STORE_DTYPES[dtype]
    row = hidden * kind.itemsize + (4 if kind in LARGEST else 0)
    return tokens * layers * row + labels * (row + LABEL_BYTES)
