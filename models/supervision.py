"""Which (anchor, TTT step) pairs are trained (MATH: supervised set)."""

from __future__ import annotations

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
