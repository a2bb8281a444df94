"""Token ids of texts that begin with one another, for the price of the longest."""

from __future__ import annotations

from functools import lru_cache


class Prefixes:
    """Encodes texts that carry every special token that they need.

    The ids of a text that a longer one begins with are read off the longer one's where that is certain: no tokenizer
    merges over an added token, so up to the last of these they are the same whatever follows; what stands after it is
    encoded by itself (as a rule a header, the same in every row). Where it is not certain the text is encoded.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.added = _added(tokenizer)
        self.known = []  # (text, its encoding)

    def __call__(self, text: str) -> list[int]:
        for longer, encoding in self.known:
            if longer.startswith(text) and (ids := self._read(encoding, text, len(longer))) is not None:
                return ids
        encoding = self.tokenizer(text, add_special_tokens=False, return_attention_mask=False)
        self.known.append((text, encoding))
        return list(encoding["input_ids"])

    def _read(self, encoding, text: str, whole: int) -> list[int] | None:
        ids = encoding["input_ids"]
        if len(text) == whole:
            return list(ids)
        if not text or not encoding.is_fast:
            return None
        end = encoding.char_to_token(len(text))
        if end is None:  # within white space that the offsets leave out
            return None
        last = next((index for index in range(end - 1, -1, -1) if ids[index] in self.added), None)
        if last is None:
            return None
        tail = text[encoding.token_to_chars(last).start :]
        return ids[:end] if _tail(self.tokenizer, tail) == ids[last:end] else None


@lru_cache(maxsize=16)
def _added(tokenizer) -> frozenset[int]:
    return frozenset(tokenizer.added_tokens_decoder)


@lru_cache(maxsize=256)
def _tail(tokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
