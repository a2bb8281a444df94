"""Any smaller transformers model of the verifier's tokenizer as a draft, without training (2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from conf.errors import UserError
from models.cache import KVCache
from models.tree import TreeRows
from models.verifier import Verifier


class DraftModel:
    """What a drafter asks of a model that reads tokens alone, over a model loaded as a verifier is.

    ids_R: the token ids that both vocabularies have. Raises UserError when the two tokenizers differ.
    """

    def __init__(self, model: Verifier, verifier: Verifier):
        check_tokenizers(model, verifier)
        self.model = model
        self.ids_R = torch.arange(min(model.vocab_size, verifier.vocab_size), device=verifier.device)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens each."""
        return self.model.new_cache(batch, capacity)

    def extend(
        self,
        cache: KVCache,
        tokens_BT: Tensor,
        count_B: Sequence[int] | None = None,
        tree: TreeRows | None = None,
    ) -> Tensor:
        """Append T tokens to each sequence; draft logits [B, T, R], of a chain's last counted row alone: [B, 1, R].

        Arguments as `Verifier.decode`.
        """
        wanted = "last" if tree is None else "all"
        decoded = self.model.decode(cache, tokens_BT, count_B=count_B, tree=tree, logits=wanted, capture=False)
        logits = decoded.logits[:, None] if tree is None else decoded.logits
        return logits[..., : len(self.ids_R)]


def check_tokenizers(model: Verifier, verifier: Verifier) -> None:
    """UserError naming the first token that the two models number differently."""
    ours, theirs = (one.tokenizer.get_vocab() for one in (model, verifier))
    if ours == theirs:
        return
    different = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    token = different[0]
    raise UserError(
        f"expected a draft with the tokenizer of {verifier.name}, found {len(different)} tokens that {model.name} "
        f"numbers differently, {token!r} first ({ours.get(token)} and {theirs.get(token)}): only models of one "
        "tokenizer can check each other's tokens"
    )
