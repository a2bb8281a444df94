"""What a GGUF file is made of: values with types, tensors in ggml's kinds, and the verifier's tokens."""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from conf.errors import UserError
from models.verifier import Verifier

KINDS = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}
FILE_TYPES = {
    torch.float32: gguf.LlamaFileType.ALL_F32,
    torch.float16: gguf.LlamaFileType.MOSTLY_F16,
    torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
}


def add_value(writer: gguf.GGUFWriter, key: str, value) -> None:
    """A value by the type that llama.cpp expects: whole numbers as uint32, others as float32."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds[list] = writer.add_array
    kinds[type(value)](key, value)


def add_tokens(writer: gguf.GGUFWriter, verifier: Verifier) -> None:
    """The verifier's tokens, merges, special ids and template, by the keys that llama.cpp reads.

    Raises UserError for a tokenizer that is no byte-level BPE. How the engine splits text into words before BPE
    ("pre") is left at its default: a draft is only ever given token ids.
    """
    tokenizer = verifier.tokenizer
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    if spec["model"]["type"] != "BPE" or spec["model"].get("byte_fallback"):
        kind = spec["model"]["type"] + (" with byte fallback" if spec["model"].get("byte_fallback") else "")
        raise UserError(f"expected a verifier with byte-level BPE tokens, found {kind}: this is not written as GGUF")
    if spec["pre_tokenizer"] is None or "ByteLevel" not in json.dumps(spec["pre_tokenizer"]):
        raise UserError(
            "expected a verifier with byte-level BPE tokens, found another BPE: this is not written as GGUF"
        )
    if (largest := max(tokenizer.get_vocab().values())) >= verifier.vocab_size:
        raise UserError(
            f"expected a tokenizer of at most {verifier.vocab_size} tokens, the verifier's, found id {largest}"
        )
    tokens = [f"[PAD{i}]" for i in range(verifier.vocab_size)]
    types = [gguf.TokenType.UNUSED] * verifier.vocab_size
    special = {row["content"]: row["special"] for row in spec["added_tokens"]}
    added = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED}
    for text, index in tokenizer.get_vocab().items():
        tokens[index] = text
        types[index] = added[special[text]] if text in special else gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        found = gguf.SpecialVocab(folder, load_merges=True, n_vocab=verifier.vocab_size)
    found.add_special_token.setdefault("bos", bool(tokenizer("").input_ids))
    found.add_to_gguf(writer, quiet=True)


@lru_cache(maxsize=1)
def parsed(file: Path, _changed: int) -> gguf.GGUFReader:
    """Seconds for a large vocabulary, and a reader asks several times. ValueError where the file ends too early."""
    return _Reader(file)


class _Reader(gguf.GGUFReader):
    """Ends where the file does: the library reads on through any length that a damaged header claims."""

    def _get(self, offset, dtype, count=1, override_order=None):
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError(f"it ends at {len(self.data)} bytes")
        return super()._get(offset, dtype, count, override_order)


def copy_of(tensor: gguf.ReaderTensor, place: Path) -> Tensor:
    """A copy of a tensor in the file; UserError when it is quantised."""
    dtypes = {kind: dtype for dtype, kind in KINDS.items()} | {Kind.I64: torch.int64}
    if tensor.tensor_type not in dtypes:
        raise UserError(
            f"{place}: expected {tensor.name} in F32, F16 or BF16, found {tensor.tensor_type.name}: a quantised head "
            "cannot be read back; give the file that it was made from"
        )
    data = torch.from_numpy(np.array(tensor.data))
    return data.view(torch.bfloat16) if tensor.tensor_type == Kind.BF16 else data


def short(value: float) -> float:
    """The shortest number that is this one in float32."""
    return float(str(np.float32(value)))
