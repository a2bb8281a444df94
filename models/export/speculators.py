"""The layout of the `speculators` library for EAGLE-3 heads, which vLLM serves as well.

The tensors are the SafeAI layout's with `layers.0.*` for `midlayer.*`, and the verifier's embedding is part of them.
config.json keeps the decoder layer, the head's switches and what it is served with apart.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from models.export import safeai
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
    layer_values,
    llama_values,
    read_folder,
    write_folder,
)
from models.export.native import StoredHead, VerifierCard, config_of
from models.export.safeai import LAYER_IDS, MAPS
from models.heads.eagle3 import Eagle3Config
from models.verifier import Verifier
from models.vocab import DraftVocab

VERSION = "0.9.0"  # of the library whose layout this is
TYPE, LAYER = "speculators_model_type", "transformer_layer_config"
OWN, THEIRS = "midlayer.", "layers.0."
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DEPTH = 5  # drafts a round, where nothing says what the head was trained for; a reader may choose another


def expected_shapes(config: Eagle3Config) -> Shapes:
    """Every tensor that the layout demands, maps included when R < V; `embed_tokens.weight` comes on top."""
    return _renamed(safeai.expected_shapes(config), OWN, THEIRS)


def write(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, verifier: Verifier | None = None
) -> Path:
    """Write the folder and return it. UserError without the verifier, whose embedding the layout holds."""
    if verifier is None:
        raise UserError("expected the verifier, whose embedding is part of this layout, found none: pass it")
    tensors = _renamed(head_tensors(stored, dtype, verifier), OWN, THEIRS)
    tensors |= safeai.maps_of(stored.vocab)
    embedding = {EMBEDDING: (stored.config.vocab_size, stored.config.hidden_size)}
    check_tensors(tensors, expected_shapes(stored.config) | embedding, {}, "export", MAPS)
    return write_folder(out, tensors, config_json(stored, dtype, verifier))


def config_json(stored: StoredHead, dtype: torch.dtype, verifier: Verifier) -> dict:
    """config.json as the library and vLLM read it.

    Captured layers are always named, as indices of the stream that enters a layer: both readers count them so.
    UserError for the last state, which isn't portable.
    """
    config, card = stored.config, stored.verifier
    flat = safeai.config_json(stored, dtype)
    layer = {key: value for key, value in llama_values(stored, dtype).items() if key != NOTES}
    if (states := len(config.aux_layers)) != 3:
        layer["num_aux_hidden_states"] = states  # vLLM doesn't count the named layers
    depth = stored.training.get("ttt_steps", DEPTH)
    proposal = {"proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    architecture = card.architecture or type(verifier.model).__name__
    return {
        TYPE: "eagle3",
        "speculators_version": VERSION,
        "architectures": ["Eagle3Speculator"],
        **{key: flat[key] for key in ("draft_vocab_size", "target_hidden_size", *SWITCHES, "tie_word_embeddings")},
        LAYER_IDS: list(config.aux_layers),
        "torch_dtype": flat["torch_dtype"],
        LAYER: layer | {"mlp_bias": False},
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": card.name, "architectures": [architecture]},
        },
        NOTES: flat[NOTES],
    }


def read(folder: Path | str, verifier: VerifierCard | None = None, embedding_VD: Tensor | None = None) -> StoredHead:
    """Read such a folder, our own or one that the library wrote, and check it all; arguments as in safeai.read."""
    folder = Path(folder)
    values, tensors = read_folder(folder)
    check_type(values, folder)
    card = card_of(values, verifier, folder)
    config = _config(values, card, folder)
    optional = {EMBEDDING: (config.vocab_size, config.hidden_size)}  # the library takes the verifier's when absent
    check_tensors(tensors, expected_shapes(config), optional, str(folder), MAPS)
    if EMBEDDING in tensors:
        check_embedding(tensors[EMBEDDING], embedding_VD, folder)
    V = config.vocab_size
    vocab = DraftVocab.from_d2t(tensors["d2t"], V) if "d2t" in tensors else DraftVocab.identity(V)
    if "t2d" in tensors and not torch.equal(tensors["t2d"], vocab.t2d):
        raise UserError(f"{folder}: t2d marks other tokens than d2t names; write the head again")
    weights = {name: tensor for name, tensor in tensors.items() if name not in MAPS and name != EMBEDDING}
    notes = values.get(NOTES) or {}
    stored = StoredHead(config, vocab, _renamed(weights, THEIRS, OWN), card, notes.get("training", {}))
    return bind(stored, notes, folder)


def check_type(values: dict, folder: Path) -> None:
    """UserError when a config.json of this layout is of another algorithm than EAGLE-3."""
    if values.get(TYPE) != "eagle3":
        raise UserError(f"{folder / CONFIG}: expected {TYPE} eagle3, found {values.get(TYPE)}: no head of ours")


def _config(values: dict, card: VerifierCard, folder: Path) -> Eagle3Config:
    place = folder / CONFIG
    layer = values.get(LAYER)
    if not isinstance(layer, dict):
        raise UserError(f"{place}: expected {LAYER} to describe the decoder layer, found {layer!r}")
    if "draft_vocab_size" not in values:
        raise UserError(f"{place}: missing draft_vocab_size")
    if layer.get("model_type") != "llama":
        found = layer.get("model_type")
        raise UserError(f"{place}: expected a layer of model_type llama, found {found}: another computation")
    if layer.get("attention_bias") or layer.get("mlp_bias"):
        raise UserError(f"{place}: expected a layer without biases; such a head is not portable")
    if kinds := set(layer.get("layer_types") or ()) - {"full_attention"}:
        raise UserError(f"{place}: expected full attention, found {', '.join(sorted(kinds))}: another computation")
    geometry = layer_values({"num_hidden_layers": None, **layer}, folder)
    if values.get("norm_before_residual") is None:
        raise UserError(f"{place}: missing norm_before_residual: the library then takes false, vLLM true; write it")
    safeai.check_norms(values, place)
    fields = geometry | {
        "draft_vocab_size": values["draft_vocab_size"],
        "aux_layers": safeai.layers_of(values, card.num_layers),
        "verifier_hidden_size": values.get("target_hidden_size") or geometry["hidden_size"],
        "fc_norm": values.get("fc_norm") or False,
        "norm_output": values.get("norm_output") or False,
    }
    return config_of(Eagle3Config, fields, place)


def _renamed(named: dict, old: str, new: str) -> dict:
    """`named` with the prefix `new` where a name begins with `old`."""
    return {new + name.removeprefix(old) if name.startswith(old) else name: value for name, value in named.items()}
