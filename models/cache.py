"""A preallocated key/value cache with a logical length per sequence, kept on the CPU so that nothing waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from conf.errors import UserError


class KVCache(Cache):
    """Keys and values [B, kv, C, F] per layer; row b has `length_B[b]` valid slots, and slot = position.

    Storage is made at the first forward, when the layers' shapes are known, for `batch` rows and `capacity` slots.
    Slots past a row's length hold finite junk and are never visible. `truncate` is the rollback: it only sets lengths.
    """

    def __init__(self, batch: int, capacity: int):
        super().__init__(layers=[])
        self.rows, self.capacity = batch, capacity
        self.length_B: list[int] = [0] * batch
        self.base_B: list[int] = [0] * batch  # lengths before the last decode
        self.keys: list[Tensor | None] = []
        self.values: list[Tensor | None] = []
        self._slots: tuple[Tensor, Tensor] | slice = slice(0, 0)
        self._visible = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.length_B, default=0)

    def stage(self, tokens: int, count_B: Sequence[int], device) -> int:
        """Make ready for a forward of `tokens` new rows per sequence; returns the number of visible slots."""
        for length, count in zip(self.length_B, count_B, strict=True):
            if length + count > self.capacity:
                raise UserError(
                    f"expected at most {self.capacity} tokens in the cache, found {length} + {count} new ones: "
                    "make it with a larger capacity, or use shorter prompts or fewer new tokens"
                )
        self.base_B = list(self.length_B)
        longest = max(self.length_B)
        self._visible = min(longest + tokens, self.capacity)
        if min(self.length_B) == longest and longest + tokens <= self.capacity:
            self._slots = slice(longest, longest + tokens)
        else:
            # Junk rows may point past the end; one spare slot that is never visible takes them.
            slot_BT = (torch.tensor(self.length_B)[:, None] + torch.arange(tokens)).clamp_max_(self.capacity)
            row_B1 = torch.arange(len(self.length_B))[:, None]
            self._slots = (row_B1.to(device, non_blocking=True), slot_BT.to(device, non_blocking=True))
        return self._visible

    def update(self, key_states, value_states, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the new rows [B, kv, T, F] in place; returns views [B, kv, visible, F]."""
        while len(self.keys) <= layer_idx:
            self.keys.append(None)
            self.values.append(None)
        views = []
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            if store[layer_idx] is None:
                shape = (self.rows, new.shape[1], self.capacity + 1, new.shape[3])
                store[layer_idx] = new.new_zeros(shape)
            live = store[layer_idx][: len(self.length_B)]
            if isinstance(self._slots, slice):
                live[:, :, self._slots] = new
            else:
                row_B1, slot_BT = (x.to(new.device) for x in self._slots)  # layers may lie on several devices
                live[row_B1, :, slot_BT] = new.transpose(1, 2)
            views.append(live[:, :, : self._visible])
        return views[0], views[1]

    def advance(self, count_B: Sequence[int]) -> None:
        """Count the rows just written."""
        self.length_B = [n + c for n, c in zip(self.length_B, count_B, strict=True)]

    def truncate(self, length_B: int | Sequence[int]) -> None:
        """Roll back to these lengths (none may grow)."""
        wanted = [length_B] * len(self.length_B) if isinstance(length_B, int) else [int(n) for n in length_B]
        for old, new in zip(self.length_B, wanted, strict=True):
            assert 0 <= new <= old, f"cannot truncate {old} slots to {new}"
        self.length_B = wanted

    def _stores(self) -> list[Tensor]:
        return [t for t in (*self.keys, *self.values) if t is not None]

    def _indices(self, moves: list[tuple[int, ...]]) -> list[Tensor]:
        """The columns of these rows of numbers, on the cache's device."""
        device = next((t.device for t in self._stores()), None)
        return [torch.tensor(column, device=device) for column in zip(*moves, strict=True)]

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Row i becomes old row rows[i]; the others leave the batch. Only rows that move are copied."""
        assert len(set(rows)) == len(rows), "a row can be kept once"
        moved = [(i, r) for i, r in enumerate(rows) if i != r]
        if moved:
            longest = max(self.length_B[r] for _, r in moved)
            target, source = self._indices(moved)
            for store in self._stores():
                to, of = target.to(store.device), source.to(store.device)
                store[to, :, :longest] = store[of, :, :longest]
        self.length_B = [self.length_B[r] for r in rows]

    def place(self, row: int, other: KVCache, other_row: int = 0) -> None:
        """Overwrite `row` with a row of another cache; row == current batch adds one, up to the rows allocated."""
        length = other.length_B[other_row]
        if length > self.capacity:
            raise UserError(f"expected at most {self.capacity} tokens in the cache, found a prefix of {length}")
        assert row <= len(self.length_B) and row < self.rows, f"no row {row} in a cache of {self.rows} rows"
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, source in enumerate(theirs):
                if layer == len(mine):
                    mine.append(None)
                if mine[layer] is None:
                    mine[layer] = source.new_zeros((self.rows, source.shape[1], self.capacity + 1, source.shape[3]))
                mine[layer][row, :, :length] = source[other_row, :, :length]
        self.length_B[row : row + 1] = [length]

    def accept_paths(self, nodes_B: Sequence[Sequence[int]]) -> None:
        """After a decode: of its new rows keep these of each sequence (a path from the prefix down), contiguous.

        Only rows that are not in place are moved, so a chain's accepted rows cost nothing.
        """
        moves = []
        for b, (base, nodes) in enumerate(zip(self.base_B, nodes_B, strict=True)):
            assert list(nodes) == sorted(set(nodes)), f"{list(nodes)} is no path: a parent comes before its child"
            assert not nodes or base + nodes[-1] < self.length_B[b], "more nodes than the last decode counted"
            moves += [(b, base + i, base + n) for i, n in enumerate(nodes) if i != n]
        if moves:
            row, target, source = self._indices(moves)
            for store in self._stores():
                at, to, of = (x.to(store.device) for x in (row, target, source))
                store[at, :, to] = store[at, :, of]
        self.length_B = [base + len(nodes) for base, nodes in zip(self.base_B, nodes_B, strict=True)]
