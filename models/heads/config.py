"""What every head's configuration has in common: plain values, bound to the verifier's geometry."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Self

from conf.errors import UserError


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """kind: the head's name in settings and files.

    aux_layers: captured states that it reads, as indices of transformers' `hidden_states`, ascending (the last index,
    L, is the verifier's post-norm last hidden state).
    """

    kind: ClassVar[str]

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "aux_layers", tuple(self.aux_layers))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**asdict(self), "aux_layers": list(self.aux_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Raises UserError on unknown or missing keys."""
        known = {f.name for f in fields(cls)}
        needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
        if unknown := sorted(set(values) - known):
            raise UserError(f"unknown keys in the head's config: {', '.join(unknown)}")
        if missing := sorted(needed - set(values)):
            raise UserError(f"missing keys in the head's config: {', '.join(missing)}")
        return cls(**values)

    @classmethod
    def from_verifier(
        cls, geometry: dict[str, Any], aux_layers: tuple[int, ...], draft_vocab_size: int, **switches: Any
    ) -> Self:
        """`geometry`: Verifier.head_geometry, of which the head takes what it has; `switches`: its own fields."""
        known = {f.name for f in fields(cls)}
        taken = {name: value for name, value in geometry.items() if name in known}
        return cls(**taken, aux_layers=aux_layers, draft_vocab_size=draft_vocab_size, **switches)


@dataclass(frozen=True, kw_only=True)
class LayerConfig(HeadConfig):
    """A head with decoder layers: everything here is the verifier's own, positions and RoPE included."""

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    rope_parameters: dict

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rope_parameters", dict(self.rope_parameters))
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"found {self.num_attention_heads} and {self.num_key_value_heads}"
            )
