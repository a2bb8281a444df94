"""A tiny verifier that writes: mostly printable text, with end-of-turn tokens now and then."""

import torch

from models.verifier import Verifier
from tiny import tiny_model, tiny_tokenizer


def tiny_writer(end: float = 4.0, layers: int = 7, hidden: int = 32, **config) -> Verifier:
    """Random weights whose LM head prefers printable tokens; a larger `end` makes texts shorter."""
    model, tokenizer = tiny_model(layers=layers, hidden=hidden, **config), tiny_tokenizer()
    printable = [i for i in range(3, len(tokenizer)) if tokenizer.decode([i]).strip().isascii()]
    words = torch.tensor([i for i in printable if tokenizer.decode([i]).isprintable()])
    with torch.no_grad():
        model.lm_head.weight[words] *= 4
        model.lm_head.weight[tokenizer.eos_token_id] *= end
    return Verifier(model, tokenizer, "tiny-writer")


def plain_argmax(verifier, ids, limit):
    """No cache, no batch: the whole prefix anew for each token."""
    ids, count = list(ids), len(ids)
    while len(ids) - count < limit:
        row = torch.tensor([ids])
        last = verifier.capture(row, torch.zeros_like(row), torch.arange(len(ids))[None]).last_BTD[:, -1]
        ids.append(int(verifier.logits(last).argmax()))
        if ids[-1] in verifier.eos_ids:
            break
    return ids[count:]
