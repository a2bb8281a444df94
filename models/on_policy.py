"""On-policy training: later draft steps read the head's own drafts, and the verifier labels exactly those prefixes.

Own tokens against labels of the text would be inconsistent: the label of a draft's continuation is the verifier's law
after that draft, which only a pass over the drafted prefixes gives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.objectives import Labels, Logits, law_of
from models.states import VerifierStates
from models.supervision import supervised
from models.token_loss import choices
from models.tree import TreeRows


@torch.no_grad()
def own_labels(head, verifier, states: VerifierStates, logits: Logits, steps: int) -> Labels:
    """Labels of greedy drafts: (p, k) reads draft k of anchor p, and learns the verifier's law after it.

    logits: the verifier's, of the draft columns (`Verifier.draft_logits`).

    A pair counts where its anchor does at step 0 and no draft before it ended the turn. Costs a pass of the verifier
    over steps - 1 more tokens for each anchor.
    """
    counted_P, P = supervised(states, 1)[0], len(states.last_index_P)
    tokens_KP = own_drafts(head, states, steps)
    with torch.autocast(states.last_PD.device.type, enabled=False):  # the verifier computes in its own dtype
        last_KPD = torch.cat([states.last_PD[None], drafted_states(verifier, states, tokens_KP, counted_P)])
        top_N, lse_N = verifier.top_and_lse(last_KPD[1:].flatten(0, 1))
    stop_KP = torch.isin(tokens_KP, torch.tensor(verifier.eos_ids, device=tokens_KP.device))
    stop_KP[0] = False
    row_KP = torch.arange(steps * P, device=tokens_KP.device).view(steps, P)
    last_MD = last_KPD.flatten(0, 1)
    return Labels(
        law=law_of(logits, last_MD, torch.cat([states.lse_P, lse_N])),
        top_M=torch.cat([states.top_P, top_N]),
        last_MD=last_MD,
        row_KP=row_KP,
        counted_KP=counted_P & ~stop_KP.long().cumsum(0).bool(),
        pair_MU=row_KP.view(-1, 1),
        tokens_KP=tokens_KP,
    )


def own_drafts(head, states: VerifierStates, steps: int) -> Tensor:
    """int64 [K, P]: the token that each anchor's greedy draft reads at step k; row 0 is not used."""
    ids_R = head.vocab.ids_R.to(states.input_ids_BT.device)
    tokens_KP = states.last_index_P.new_zeros(steps, len(states.last_index_P))
    for k, out_PD in enumerate(head.unroll(states, steps - 1, tokens_KP)):  # step k + 1 reads its row after we fill it
        tokens_KP[k + 1] = ids_R[choices(head.final(out_PD), head.lm_weight)]
    return tokens_KP


def drafted_states(verifier, states: VerifierStates, tokens_KP: Tensor, counted_P: Tensor) -> Tensor:
    """The verifier's post-norm last hidden [K-1, P, D] after drafts 1..k of each counted anchor; zeros elsewhere.

    Each document is one tree: its own tokens in a chain, and from the token after each anchor a chain of drafts.
    """
    K, P = tokens_KP.shape
    out_KPD = states.last_PD.new_zeros(K - 1, P, states.last_PD.shape[1])
    if K == 1 or not bool(counted_P.any()):
        return out_KPD
    anchor_P, document_N = states.layout.anchor_P, states.document_BT.flatten()
    for document in document_N[anchor_P[counted_P]].unique().tolist():
        row_T = (document_N == document).nonzero().squeeze(1)
        chosen_P = (counted_P & (document_N[anchor_P] == document)).nonzero().squeeze(1)
        begin = (anchor_P[chosen_P] - row_T[0] + 1).tolist()  # the token that the first draft follows
        T, chains = len(row_T), len(begin)
        parents = list(range(-1, T - 1))
        for first in begin:
            parents += [first, *range(len(parents), len(parents) + K - 2)]
        tokens = torch.cat([states.input_ids_BT.flatten()[row_T], tokens_KP[1:, chosen_P].T.flatten()])[None]
        cache = verifier.new_cache(1, tokens.shape[1])
        decoded = verifier.decode(
            cache, tokens, tree=TreeRows.of(torch.tensor([parents])), logits="none", capture=False
        )
        out_KPD[:, chosen_P] = decoded.last_BTD[0, T:].view(chains, K - 1, -1).transpose(0, 1).to(out_KPD.dtype)
    return out_KPD
