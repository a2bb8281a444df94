"""Pieces of a decoder layer that heads share: RMSNorm, rotary positions, gated MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from conf.errors import UserError

# Length-dependent kinds (longrope) would give a packed row other frequencies than the same document alone.
# "dynamic" only differs from "default" past max_position_embeddings, where a head is never trained.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; statistics in float32 or better, output in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (F.rms_norm(wide, wide.shape[-1:], None, self.eps) * self.weight).to(x.dtype)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, act: str) -> None:
        super().__init__()
        if act not in ACT2FN:
            raise UserError(f"hidden_act must be an activation that transformers knows, found {act!r}")
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        if act not in ACT2FN:
            raise UserError(f"expected hidden_act to be an activation that transformers knows, found {act!r}")
        self.act = ACT2FN[act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Rotary:
    """Cosines and sines of rotary positions, frequencies as the verifier's `rope_parameters` say.

    Not a module: a cast of the head to bfloat16 must leave the frequencies in float32.
    Raises UserError for a kind of RoPE whose frequencies depend on the length of the sequence.
    """

    def __init__(self, rope_parameters: dict, head_dim: int, max_position_embeddings: int) -> None:
        kind = rope_parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise UserError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, found {kind!r}")
        if "rope_theta" not in rope_parameters:
            raise UserError(f"rope_parameters needs rope_theta, found {sorted(rope_parameters)}")
        theta, part = rope_parameters["rope_theta"], rope_parameters.get("partial_rotary_factor", 1.0)
        if not all(type(value) in (int, float) and 0 < value < 1e30 for value in (theta, part)) or part > 1:
            raise UserError(f"expected rope_theta above 0 and a part of each head in (0, 1], found {theta!r}, {part!r}")
        if kind == "default":
            size = int(head_dim * part)
            exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
            self.inv_freq, self.scale = 1.0 / theta**exponent, 1.0
            return
        try:
            config = LlamaConfig(
                head_dim=head_dim,
                max_position_embeddings=max_position_embeddings,
                rope_parameters=dict(rope_parameters),
            )
            self.inv_freq, self.scale = ROPE_INIT_FUNCTIONS[kind](config, None)
        except Exception as error:  # transformers' own, of any type, for parameters that make no sense
            raise UserError(f"expected rope_parameters of kind {kind}, found {rope_parameters} ({error})") from error

    def __call__(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Integer positions [...] -> cos, sin [..., F/2] (or less, for a partial rotary factor)."""
        if self.inv_freq.device != position.device:
            self.inv_freq = self.inv_freq.to(position.device)
        angle = position[..., None].float() * self.inv_freq
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of x [..., H, F] by the angles of cos, sin [..., f], 2f <= F; dimensions past 2f stay."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
