"""Linear layers of a frozen model with weights laid out for oneDNN: on a CPU, a few rows cost little more than one.

`F.linear` repacks its weight on every call with more than one row, which a verify of a few rows feels most. A frozen
weight can be packed once instead. Measured with SmolLM2's layers in float32, weights cold, on one AVX2 thread
(ms per forward without the LM head, F.linear / packed): 1 row 37/40, 6 rows 73/52, 16 rows 105/104, 64 rows 266/255;
the LM head alone: 11/11, 28/15, 41/23, 89/57. In bfloat16 on a CPU that multiplies it, packed is faster for one row too
(the LM head on two AMX threads: 1.95/1.24, and 2.19/1.29 for 17 rows). Fusing q/k/v and gate/up gained nothing more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The raw weights stay beside the packed ones (hashing, `lm_head_rows`, starting a head), so memory doubles.
MAX_BYTES = 4 << 30
ROWS_HINT = 8  # the layout that oneDNN picks for a few rows; it is valid for any number (a hint of 1 is slow)


class PackedLinear(nn.Linear):
    """An `nn.Linear` whose weight is frozen. Parameter names and values are those of the layer it replaces."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        # Not a buffer: it is a copy of `weight` in an opaque layout, and no state dict may hold it.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS_HINT)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; gradients do not pass (the verifier is frozen)."""
        assert not (torch.is_grad_enabled() and x.requires_grad), "a frozen layer was asked for a gradient"
        if x.numel() == self.in_features and x.dtype == torch.float32:  # one row: the plain product is the faster one
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can run this weight's dtype natively on this CPU."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return native_bfloat16()
    return weight.dtype == torch.float32


def native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware (emulation is hundreds of times slower)."""
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if hasattr(torch.cpu, probe) and getattr(torch.cpu, probe)():
            return True
    # On x86 oneDNN also answers yes where it would emulate, so it is only asked on other processors.
    x86 = torch.backends.cpu.get_cpu_capability().startswith(("AVX", "DEFAULT"))
    return not x86 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(model: nn.Module) -> int:
    """Replace every plain `nn.Linear` of a frozen CPU model; returns how many. Models over MAX_BYTES are left alone."""
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear and can_pack(m.weight)}
    if sum(m.weight.nbytes for m in linears.values()) > MAX_BYTES:
        return 0
    for name, linear in linears.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear(linear))
    return len(linears)
