"""The one record that passes from a frozen verifier to every head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from models.layout import Layout


@dataclass(frozen=True)
class VerifierStates:
    """Packed rows of whole documents with what a head may see of the verifier.

    Online and stored states are both this record. Pads, if any, sit at the end of a row.

    input_ids_BT:  token ids.
    document_BT:   index of the document that a token belongs to, unique within the batch; -1 on pads.
    position_BT:   position inside the document (restarts at 0 for each).
    span_BT:       index of the answer span that a token belongs to, unique within the batch; -1 outside.
                   A span is an assistant answer with its end-of-turn token (MATH: supervised set).
    aux_BTAD:      residual stream entering each captured decoder layer, ascending.
    last_PD:       the verifier's post-norm last hidden state, at the label rows only.
    last_index_P:  flat index b * T + t of each label row, ascending. See `label_rows`.
    top_P:         the verifier's argmax over the full vocabulary at each label row.
    lse_P:         log-sum-exp of the verifier's full-vocabulary logits at each label row, float32.
    """

    input_ids_BT: Tensor
    document_BT: Tensor
    position_BT: Tensor
    span_BT: Tensor
    aux_BTAD: Tensor
    last_PD: Tensor
    last_index_P: Tensor
    top_P: Tensor
    lse_P: Tensor

    @cached_property
    def layout(self) -> Layout:
        """Where documents and anchors lie. Asked for before `to`, it is worked out on the host and comes along."""
        return Layout.of(self.document_BT, self.position_BT, self.last_index_P)

    def to(self, device: torch.device | str) -> VerifierStates:
        """The same record with every tensor on `device`; nothing waits for it."""
        moved = replace(self, **{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})
        moved.__dict__["layout"] = self.layout.to(device)
        return moved

    def with_aux(self, aux_BTAD: Tensor) -> VerifierStates:
        """The same record with other captured states; its layout comes along."""
        changed = replace(self, aux_BTAD=aux_BTAD)
        changed.__dict__["layout"] = self.layout
        return changed


@dataclass(frozen=True)
class DocumentStates:
    """What the verifier computes for one document, at all T of its tokens (the record keeps the label rows' laws).

    Of a document left behind by generation, the last row is zero everywhere: the verifier never read that token, and
    nothing depends on it (the last label row is the one before, the last anchor two before).
    """

    aux_TAD: Tensor
    last_TD: Tensor
    top_T: Tensor
    lse_T: Tensor

    @classmethod
    def of(cls, pieces: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> DocumentStates:
        """From (aux [n, A, D], last [n, D], top [n], lse [n]) of all tokens but the last, in order."""
        return cls(*(torch.cat([*parts, torch.zeros_like(parts[0][:1])]) for parts in zip(*pieces, strict=True)))

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, f.name).nbytes for f in fields(self))


def label_rows(span_BT: Tensor) -> Tensor:
    """Flat indices of the rows whose verifier law labels something: x_s and x_{s+1} lie in the same span.

    The law at row s is for x_{s+1}. The head drafts x_{t+2+k} at anchor t, step k, so its label is row
    s = t + 1 + k: anchor t and label row t + 1 pair up at k = 0, and (anchor p, step k) is supervised
    exactly when label rows p and p + k belong to one span. So `anchors = label_rows - 1`.
    Returns int64 [P], ascending.
    """
    inside_BT = torch.zeros_like(span_BT, dtype=torch.bool)
    inside_BT[:, :-1] = (span_BT[:, :-1] >= 0) & (span_BT[:, :-1] == span_BT[:, 1:])
    return inside_BT.flatten().nonzero().squeeze(-1)
