"""EAGLE-3's training step written down plainly: the reference for values, and the slow side of the bench.

Every row of the batch at every draft step, dense masks over all keys, whole logits, the whole teacher. Only the
parameters, norms and the MLP are the head's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import rotate
from models.states import VerifierStates


def naive_unroll(head, states: VerifierStates, steps: int) -> Iterator[Tensor]:
    """out_ND of draft steps 0.. at all N rows of the batch: row t reads token x_{t+1+k}, at position t + k.

    Keys: step 0's of its document up to itself, and of later steps its own alone (2503.01840, section 3).
    """
    layer, attention, size = head.midlayer, head.midlayer.self_attn, head.config.head_dim
    groups = head.config.num_attention_heads // head.config.num_key_value_heads
    ids_N, document_N = states.input_ids_BT.flatten(), states.document_BT.flatten()
    row_N = torch.arange(len(ids_N), device=ids_N.device)
    causal_NN = (document_N[:, None] == document_N) & (row_N[:, None] >= row_N)
    own_NN = torch.eye(len(ids_N), dtype=torch.bool, device=ids_N.device)
    hidden_ND = head.fuse(states.aux_BTAD.flatten(0, 1))
    keys, values = [], []
    for k in range(steps):
        embedded = head.embedding_VD[ids_N.roll(-1 - k)].to(head.fc.weight.dtype)
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden_ND)], dim=-1)
        q, key, value = (part(both).unflatten(-1, (-1, size)) for part in attention.projections)
        angles = head.rotary(states.position_BT.flatten() + k, q.dtype)
        keys.append(rotate(key, *angles))
        values.append(value)
        every_k, every_v = (torch.cat(x).transpose(0, 1).repeat_interleave(groups, 0) for x in (keys, values))
        mask = torch.cat([causal_NN, *[own_NN] * k], dim=1)
        query = rotate(q, *angles).transpose(0, 1)
        attended = F.scaled_dot_product_attention(query[None], every_k[None], every_v[None], mask)[0]
        out_ND = hidden_ND + attention.o_proj(attended.transpose(0, 1).flatten(-2))
        out_ND = out_ND + layer.mlp(layer.post_attention_layernorm(out_ND))
        yield out_ND
        hidden_ND = head.feedback(out_ND)


@torch.no_grad()
def naive_teacher(head, last_ND: Tensor, lm_VD: Tensor) -> tuple[Tensor, Tensor]:
    """The verifier's law over the draft columns [N, R], and whether its best token of all is one of them [N]."""
    logits_NV = F.linear(last_ND, lm_VD).float()
    inside_N = head.inverse_V[logits_NV.argmax(-1)] >= 0
    return logits_NV[:, head.vocab.ids_R].softmax(-1), inside_N


def naive_pairs(states: VerifierStates, steps: int) -> Tensor:
    """bool [K, N]: rows t whose x_{t+1}..x_{t+2+k} lie in one answer of t's document (MATH: supervised set)."""
    span_N, document_N = states.span_BT.flatten(), states.document_BT.flatten()
    counted_KN = torch.zeros(steps, len(span_N), dtype=torch.bool, device=span_N.device)
    for k in range(min(steps, len(span_N) - 2)):
        ahead = len(span_N) - 2 - k
        first, label = span_N[1 : 1 + ahead], span_N[2 + k :]
        counted_KN[k, :ahead] = (first >= 0) & (first == label) & (document_N[:ahead] == document_N[1 : 1 + ahead])
    return counted_KN


def naive_losses(
    head, states: VerifierStates, teacher: tuple[Tensor, Tensor], steps: int, divergence: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each draft step the sum of soft cross-entropy over its counted rows, and their number.

    teacher: of every row (`naive_teacher`); the law at row t + 1 + k is for x_{t+2+k}. divergence: KL, which is less by
    the teacher's entropy and has the same gradient.
    """
    target_NR, inside_N = teacher
    counted_KN = naive_pairs(states, steps)
    for k, out_ND in enumerate(naive_unroll(head, states, steps)):
        log_q = head.logits(out_ND)[: -1 - k].log_softmax(-1, dtype=target_NR.dtype)
        counted = counted_KN[k, : -1 - k] & inside_N[1 + k :]
        target = target_NR[1 + k :]
        loss = -(target * log_q).sum(-1)
        if divergence:
            loss = loss + torch.special.xlogy(target, target).sum(-1)
        yield (loss * counted).sum(), counted.sum()
