"""The EAGLE-1/2 layout: `fc`, one layer without an input norm, and neither norm nor LM head, which are the verifier's.

vLLM refuses `fc.bias`, SGLang demands it: two ways of writing. Published heads have either.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from models.export.folder import (
    CONFIG,
    EMBEDDING,
    NOTES,
    Shapes,
    bind,
    card_of,
    check_embedding,
    check_tensors,
    head_tensors,
    layer_shapes,
    layer_values,
    llama_values,
    read_folder,
    write_folder,
)
from models.export.native import StoredHead, VerifierCard, config_of
from models.heads.eagle1 import Eagle1Config
from models.verifier import Verifier
from models.vocab import DraftVocab


def expected_shapes(config: Eagle1Config) -> Shapes:
    """Every tensor that the layout demands; `embed_tokens.weight` may come on top."""
    D = config.hidden_size
    bias = {"fc.bias": (D,)} if config.fc_bias else {}
    return {"fc.weight": (D, 2 * D), **bias, **layer_shapes(config, "layers.0", D, config.attention_bias)}


def write_vllm(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, verifier: Verifier | None = None
) -> Path:
    """For vLLM, and what the authors publish: no biases. UserError for a head that has some."""
    _portable(stored, fc_bias=False)
    tensors = head_tensors(stored, dtype, verifier)
    tensors.pop("fc.bias", None)  # zero
    values = {"architectures": ["LlamaForCausalLM"], **llama_values(stored, dtype)}
    return _write(out, tensors, stored, values, fc_bias=False)


def write_sglang(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, verifier: Verifier | None = None
) -> Path:
    """For SGLang: fc has a bias, zero when the head has none."""
    _portable(stored, fc_bias=True)
    tensors = head_tensors(stored, dtype, verifier)
    tensors.setdefault("fc.bias", torch.zeros(stored.config.hidden_size, dtype=dtype))
    values = {"architectures": ["LlamaForCausalLMEagle"], **llama_values(stored, dtype), "bias": True}
    return _write(out, tensors, stored, values, fc_bias=True)


def read(folder: Path | str, verifier: VerifierCard | None = None, embedding_VD: Tensor | None = None) -> StoredHead:
    """Read such a folder and check it all; arguments as in safeai.read. A zero fc.bias is dropped."""
    folder = Path(folder)
    values, tensors = read_folder(folder)
    card = card_of(values, verifier, folder)
    geometry = layer_values(values, folder)
    fields = geometry | {
        "draft_vocab_size": geometry["vocab_size"],
        "aux_layers": (card.num_layers,),
        "fc_bias": "fc.bias" in tensors and bool(tensors["fc.bias"].any()),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in tensors,
        "final_logit_softcapping": values.get("final_logit_softcapping"),
    }
    config = config_of(Eagle1Config, fields, folder / CONFIG)
    optional = {EMBEDDING: (config.vocab_size, config.hidden_size), "fc.bias": (config.hidden_size,)}
    check_tensors(tensors, expected_shapes(config), optional, str(folder), {})
    if not config.fc_bias:
        tensors.pop("fc.bias", None)
    if EMBEDDING in tensors:
        check_embedding(tensors[EMBEDDING], embedding_VD, folder)
    weights = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    notes = values.get(NOTES) or {}
    vocab = DraftVocab.identity(config.vocab_size)
    return bind(StoredHead(config, vocab, weights, card, notes.get("training", {})), notes, folder)


def _portable(stored: StoredHead, fc_bias: bool) -> None:
    """UserError for biases that an engine doesn't read; a zero one in fc is no matter."""
    if stored.config.attention_bias:
        raise UserError("expected an EAGLE-1 head without attention biases, found one with: no engine reads them")
    if not fc_bias and "fc.bias" in stored.tensors and stored.tensors["fc.bias"].any():
        raise UserError("expected an EAGLE-1 head without a bias in fc, found one with: vLLM refuses it; format=sglang")


def _write(out, tensors: dict[str, Tensor], stored: StoredHead, values: dict, fc_bias: bool) -> Path:
    config = Eagle1Config.from_dict({**stored.config.to_dict(), "fc_bias": fc_bias})
    optional = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    check_tensors(tensors, expected_shapes(config), optional, "export", {})
    if config.final_logit_softcapping is not None:
        values["final_logit_softcapping"] = config.final_logit_softcapping
    return write_folder(out, tensors, values)
