"""Rows of a draft tree over a cached prefix: which nodes each row sees. For the verifier and for draft models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TreeRows:
    """N nodes hang below the cached prefix of each sequence; the T rows of a forward are the last T of them.

    seen_BTN: bool, the nodes that each row sees beside the prefix: its ancestors and itself.
    depth_BN: int64, 0 for a child of the prefix. The row's position is the prefix's length + its depth.
    Batch may be 1 for all sequences.
    """

    seen_BTN: Tensor
    depth_BN: Tensor

    @classmethod
    def of(cls, parents_BN: Tensor, levels: int | None = None) -> TreeRows:
        """All nodes at once, from the parent's index of each (an earlier node), -1 for the prefix.

        levels: a bound on the depth; without one it is looked up, for which the device is waited for.
        """
        B, N = parents_BN.shape
        seen_BNN = torch.eye(N, dtype=torch.bool, device=parents_BN.device).repeat(B, 1, 1)
        depth_BN, at_BN = torch.zeros_like(parents_BN), parents_BN
        for _ in range(N if levels is None else levels):
            real_BN, at = at_BN >= 0, at_BN.clamp_min(0)
            if levels is None and not bool(real_BN.any()):
                break
            seen_BNN.scatter_(2, at[..., None], real_BN[..., None] | seen_BNN.gather(2, at[..., None]))
            depth_BN = depth_BN + real_BN
            at_BN = torch.where(real_BN, parents_BN.gather(1, at), -1)
        return cls(seen_BNN, depth_BN)

    @property
    def earlier(self) -> int:
        """Nodes that earlier forwards put into the cache."""
        return self.seen_BTN.shape[2] - self.seen_BTN.shape[1]

    def rows(self, batch: int, device: torch.device) -> TreeRows:
        """The same for `batch` sequences on `device`."""
        seen = self.seen_BTN.to(device, non_blocking=True).expand(batch, -1, -1)
        return TreeRows(seen, self.depth_BN.to(device, non_blocking=True).expand(batch, -1))


class GrowingTree:
    """A tree that a draft model grows level by level; `extend` gives the rows of the next forward."""

    def __init__(self) -> None:
        self.chain = 0  # nodes so far, while each level had one: then the rows are a chain's
        self.rows: TreeRows | None = None  # all nodes so far

    def extend(self, parents_BK: Tensor) -> TreeRows | None:
        """K new nodes a sequence, one level, below nodes that were added before (by index), or -1, the prefix.

        None while every level had one node.
        """
        B, K = parents_BK.shape
        if K == 1 and self.rows is None:
            self.chain += 1
            return None
        if self.rows is None:
            seen_BNN = torch.ones(self.chain, self.chain, dtype=torch.bool, device=parents_BK.device).tril()
            depth_BN = torch.arange(self.chain, device=parents_BK.device)
            self.rows = TreeRows(seen_BNN.expand(B, -1, -1), depth_BN.expand(B, -1))
        before, N = self.rows, self.rows.depth_BN.shape[1]
        own_BKK = torch.eye(K, dtype=torch.bool, device=parents_BK.device).expand(B, K, K)
        seen_BKN, depth_BK = own_BKK, torch.zeros_like(parents_BK)
        if N:
            below_BK, parent = parents_BK >= 0, parents_BK.clamp_min(0)
            inherited_BKN = before.seen_BTN.gather(1, parent[..., None].expand(-1, -1, N)) & below_BK[..., None]
            seen_BKN = torch.cat([inherited_BKN, own_BKK], 2)
            depth_BK = torch.where(below_BK, before.depth_BN.gather(1, parent) + 1, 0)
        depth_BN = torch.cat([before.depth_BN, depth_BK], 1)
        wider_BNN = torch.cat([before.seen_BTN, before.seen_BTN.new_zeros(B, N, K)], 2)
        self.rows = TreeRows(torch.cat([wider_BNN, seen_BKN], 1), depth_BN)
        return TreeRows(seen_BKN, depth_BN)
