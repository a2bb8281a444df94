"""Any smaller transformers model of the verifier's tokenizer as a draft, without training (2211.17192)."""

from __future__ import annotations

import torch
from torch import Tensor

from conf.errors import UserError
from models.cache import KVCache
from models.verifier import Verifier


class DraftModel:
    """What a drafter asks of a model that reads tokens alone, over a model loaded as a verifier is.

    ids_R: the token ids that both vocabularies have. Raises UserError when the two tokenizers differ.
    """

    def __init__(self, model: Verifier, verifier: Verifier):
        check_tokenizers(model, verifier)
        self.model = model
        self.ids_R = torch.arange(min(model.vocab_size, verifier.vocab_size), device=verifier.device)

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for one sequence of up to `capacity` tokens."""
        return self.model.new_cache(1, capacity)

    def extend(self, cache: KVCache, tokens_1T: Tensor) -> Tensor:
        """Append T tokens to the one sequence in the cache; draft logits [R] after the last of them."""
        decoded = self.model.decode(cache, tokens_1T, logits="last", capture=False)
        return decoded.logits[0, : len(self.ids_R)]


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
