"""Which (anchor, TTT step) pairs are trained, and how anchors lie in their documents (MATH: supervised set)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.states import VerifierStates


def supervised(states: VerifierStates, steps: int) -> Tensor:
    """bool [K, P]: does (anchor p, step k) count? Its label row is p + k of the same list of label rows.

    True exactly when label rows p and p + k lie in the same span, and the anchor in the span's document
    (a span that opens a document has no anchor for its second token).
    """
    P = len(states.last_index_P)
    span_P = states.span_BT.flatten()[states.last_index_P]
    counted_KP = torch.zeros(steps, P, dtype=torch.bool, device=span_P.device)
    anchored_P = states.position_BT.flatten()[states.last_index_P] > 0
    for k in range(min(steps, P)):
        counted_KP[k, : P - k] = anchored_P[: P - k] & (span_P[: P - k] == span_P[k:])
    return counted_KP


@dataclass(frozen=True)
class AnchorPlan:
    """Where the anchors of a batch lie: worked out once, used by every step of the unroll.

    anchor_P:   flat row of each anchor (label row - 1), ascending.
    position_P: position inside its document.
    lengths:    rows of each run of equal document index, in flat order (pads are a run too).
    anchors:    number of anchors in each run.
    masks:      per run, additive [anchors, length]: 0 for rows up to the anchor, -inf after it.
    """

    anchor_P: Tensor
    position_P: Tensor
    lengths: list[int]
    anchors: list[int]
    masks: list[Tensor]


def anchor_rows(states: VerifierStates) -> Tensor:
    """int64 [P]: flat row of each anchor. Label row 0 of a document has none; its slot is another, never counted."""
    return (states.last_index_P - 1).clamp_min(0)


def anchor_plan(states: VerifierStates, dtype: torch.dtype) -> AnchorPlan:
    """Documents' extents must be known to the host, so on an accelerator this waits for it, once a batch."""
    document_N = states.document_BT.flatten()
    anchor_P = anchor_rows(states)
    _, run_N, length_S = document_N.unique_consecutive(return_inverse=True, return_counts=True)
    anchors_S = torch.bincount(run_N[anchor_P], minlength=len(length_S))
    lengths, anchors = torch.stack([length_S, anchors_S]).tolist()
    masks, row, first = [], 0, 0
    for length, count in zip(lengths, anchors, strict=True):
        last = anchor_P[first : first + count] - row
        later = torch.arange(length, device=last.device) > last[:, None]
        masks.append(torch.zeros(count, length, dtype=dtype, device=last.device).masked_fill_(later, -torch.inf))
        row, first = row + length, first + count
    return AnchorPlan(anchor_P, states.position_BT.flatten()[anchor_P], lengths, anchors, masks)
