"""Where documents and anchors lie in a packed batch: known to the host before a step, which need not wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """Neighbouring anchors of one document: rows first..stop-1 of the flat batch, which are anchors anchor..

    begin: the document's first row, so that anchor row t attends to rows begin..t.
    """

    begin: int
    first: int
    stop: int
    anchor: int

    @property
    def count(self) -> int:
        return self.stop - self.first


@dataclass(frozen=True)
class Layout:
    """anchor_P: flat row of each anchor.  position_P: its position in its document.  runs: all anchors, in order.

    documents: (row b, start, stop) of each.
    """

    anchor_P: Tensor
    position_P: Tensor
    runs: tuple[Run, ...]
    documents: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, document_BT: Tensor, position_BT: Tensor, last_index_P: Tensor) -> Layout:
        """From a batch's index tensors, best on the host: elsewhere this waits for the device."""
        anchor_P = anchor_rows(last_index_P)
        position_P, document_P = position_BT.flatten()[anchor_P], document_BT.flatten()[anchor_P]
        new_P = torch.ones_like(anchor_P, dtype=torch.bool)
        new_P[1:] = (anchor_P.diff() != 1) | (document_P.diff() != 0)
        anchors = new_P.nonzero().flatten().tolist()
        rows, positions = anchor_P[new_P].tolist(), position_P[new_P].tolist()
        ends = [*anchors, len(anchor_P)][1:]
        runs = (
            Run(max(row - position, 0), row, row + end - anchor, anchor)
            for row, position, anchor, end in zip(rows, positions, anchors, ends, strict=True)
        )
        return cls(anchor_P, position_P, tuple(runs), document_runs(document_BT))

    def to(self, device: torch.device | str) -> Layout:
        """The same with its tensors on `device`."""
        moved = (x.to(device, non_blocking=True) for x in (self.anchor_P, self.position_P))
        return Layout(*moved, self.runs, self.documents)


def document_runs(document_BT: Tensor) -> tuple[tuple[int, int, int], ...]:
    """(row b, start, stop) of each document; -1 marks pads. A document is one unbroken run of its index in a row."""
    T = document_BT.shape[1]
    new_BT = torch.ones_like(document_BT, dtype=torch.bool)
    new_BT[:, 1:] = document_BT.diff(dim=1) != 0
    starts, numbers = new_BT.flatten().nonzero().flatten().tolist(), document_BT[new_BT].tolist()
    stops = [*starts, document_BT.numel()][1:]
    found = zip(starts, stops, numbers, strict=True)
    return tuple((start // T, start % T, start % T + stop - start) for start, stop, number in found if number >= 0)


def anchor_rows(last_index_P: Tensor) -> Tensor:
    """int64 [P]: flat row of each anchor. Label row 0 of a document has none; its slot is another, never counted."""
    return (last_index_P - 1).clamp_min(0)
