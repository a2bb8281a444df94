"""Key/value cache of a serving head, whose length is logical: rolling back is forgetting rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class HeadCache:
    """Preallocated keys and values [B, h, C, F] of a serving head; rows at and past `length` are junk."""

    k_BhCF: Tensor
    v_BhCF: Tensor
    length: int = 0

    @property
    def capacity(self) -> int:
        return self.k_BhCF.shape[2]

    def truncate(self, length: int) -> None:
        """Forget rows from `length` on (rejected drafts, or rows to be run again with true states)."""
        assert 0 <= length <= self.length, f"cannot truncate {self.length} rows to {length}"
        self.length = length

    def append(self, k_BThF: Tensor, v_BThF: Tensor) -> tuple[Tensor, Tensor]:
        """Write T rows; returns keys and values of all rows, [B, h, length, F]."""
        end = self.length + k_BThF.shape[1]
        assert end <= self.capacity, f"head cache holds {self.capacity} rows, {end} asked for"
        self.k_BhCF[:, :, self.length : end] = k_BThF.transpose(1, 2)
        self.v_BhCF[:, :, self.length : end] = v_BThF.transpose(1, 2)
        self.length = end
        return self.k_BhCF[:, :, :end], self.v_BhCF[:, :, :end]
