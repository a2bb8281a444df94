"""A tiny verifier that writes: mostly printable text, with end-of-turn tokens now and then."""

import json

import torch

from data.answers import Sampling
from data.convert import Conversion, Converter, reasons, refuse
from data.log import CLOSES
from models.verifier import Verifier
from tiny import tiny_model, tiny_tokenizer

SMALL = Sampling(max_new_tokens=12, max_length=256, batch_size=4, seed=3)


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


def step_sizes(verifier, monkeypatch) -> list[int]:
    """Grows by the rows of every decode of one token per row from now on."""
    sizes, decode = [], type(verifier).decode

    def recorded(self, cache, tokens_BT, **options):
        if tokens_BT.shape[1] == 1:
            sizes.append(len(tokens_BT))
        return decode(self, cache, tokens_BT, **options)

    monkeypatch.setattr(type(verifier), "decode", recorded)
    return sizes


def tokenize(dialogues, verifier, max_length, counts):
    """Documents of dialogues one by one; what is left out is counted, and when all is, that is an error."""
    converter = Converter(verifier, Conversion(max_length))
    for dialogue in dialogues:
        yield from (document for documents, _ in converter.convert([dialogue]) for document in documents)
    counts.update(converter.changed + (dropped := reasons(converter.dropped)))
    if not converter.documents:
        refuse(dropped, verifier)


def content(rows):
    return [{name: value for name, value in row.items() if name != CLOSES} for row in json.loads(json.dumps(rows))]


def turns(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


class Dying:
    """Verifier.decode is cut short by Ctrl-C after so many calls, once for each number; then it lives."""

    def __init__(self, monkeypatch, verifier, *lives: int):
        self.lives, self.left, decode = list(lives), lives[0], type(verifier).decode

        def dying(own, *args, **options):
            self.left -= 1
            if self.lives and self.left < 0:
                self.lives.pop(0)
                self.left = self.lives[0] if self.lives else 0
                raise KeyboardInterrupt
            return decode(own, *args, **options)

        monkeypatch.setattr(type(verifier), "decode", dying)

    def through(self, write, path, whole) -> None:
        """Call `write` until it is through; meanwhile `path` is a beginning of `whole`."""
        sizes = []
        while True:
            try:
                write()
                break
            except KeyboardInterrupt:
                assert whole.read_bytes().startswith(path.read_bytes())
                sizes.append(path.stat().st_size)
        assert path.read_bytes() == whole.read_bytes()
        assert len(sizes) > 1 and sizes[-1] > 0, "it should have been cut short, and in a later round too"
