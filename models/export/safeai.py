"""The SafeAI / SpecForge EAGLE-3 layout, which vLLM and SGLang serve: `model.safetensors` and `config.json`.

Both engines are also silent about a missing vocabulary map, so the map is part of what is checked.
"""

from __future__ import annotations

import logging
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
from models.heads.eagle3 import Eagle3Config
from models.introspect import default_layers
from models.verifier import Verifier
from models.vocab import DraftVocab

log = logging.getLogger(__name__)

MAPS = {"d2t": torch.int64, "t2d": torch.bool}
# Norm switches of published configs that this head can follow; the last two are on in every EAGLE-3 head.
NORMS = {"fc_norm", "norm_output", "use_input_layernorm_in_first_layer", "use_last_layernorm"}
OFF = {"norm_before_residual", "norm_before_fc"}  # that it can't
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def expected_shapes(config: Eagle3Config) -> Shapes:
    """Every tensor that the layout demands, maps included when R < V; `embed_tokens.weight` may come on top."""
    D, R, V, T = config.hidden_size, config.draft_vocab_size, config.vocab_size, config.verifier_hidden_size
    shapes = {
        "fc.weight": (D, len(config.aux_layers) * T),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.input_layernorm.weight": (D,),
        **layer_shapes(config, "midlayer", 2 * D),
        "norm.weight": (D,),
        "lm_head.weight": (R, D),
    }
    if config.fc_norm:
        shapes |= {f"fc_norm.{layer}.weight": (T,) for layer in range(len(config.aux_layers))}
    if R < V:  # with R = V vLLM refuses a map
        shapes |= {"d2t": (R,), "t2d": (V,)}
    return shapes


def maps_of(vocab: DraftVocab) -> dict[str, Tensor]:
    """d2t and t2d; nothing where R = V."""
    return {} if vocab.is_identity else {"d2t": vocab.d2t.clone(), "t2d": vocab.t2d.clone()}


def check(tensors: dict[str, Tensor], config: Eagle3Config, place: str) -> None:
    """UserError on an unknown or missing name, a wrong shape, or a wrong or mixed dtype."""
    optional = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    shapes = expected_shapes(config)
    if "t2d" in shapes:  # follows from d2t, and no engine reads it
        optional["t2d"] = shapes.pop("t2d")
    check_tensors(tensors, shapes, optional, place, MAPS)


def write(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, verifier: Verifier | None = None
) -> Path:
    """Write the folder and return it. verifier: its embedding is written as well."""
    tensors = head_tensors(stored, dtype, verifier)
    tensors |= maps_of(stored.vocab)
    check(tensors, stored.config, "export")
    return write_folder(out, tensors, config_json(stored, dtype))


def write_sglang(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, verifier: Verifier | None = None
) -> Path:
    """For SGLang, whose loader reads past tensors that it doesn't know. UserError for a head with some of those."""
    config = stored.config
    if on := [switch for switch in ("fc_norm", "norm_output") if getattr(config, switch)]:
        raise UserError(f"expected a plain EAGLE-3 head, found one with {', '.join(on)}: SGLang computes without")
    if len(config.aux_layers) != 3:
        raise UserError(f"expected three captured layers, found {list(config.aux_layers)}: SGLang's fc reads three")
    return write(stored, out, dtype, verifier)


def config_json(stored: StoredHead, dtype: torch.dtype) -> dict:
    """config.json as both engines read it. With the default captured layers it names none: each engine's own
    default is then right, while their conventions for written ids differ by one."""
    config = stored.config
    if config.aux_layers[0] < 1:
        raise UserError(
            f"expected captured layers from 1 up, found {list(config.aux_layers)}: 0 is the embedding, which engines "
            "that count outputs of layers can't name"
        )
    if stored.verifier.num_layers in config.aux_layers:
        raise UserError(
            f"expected captured layers below {stored.verifier.num_layers}, found {list(config.aux_layers)}: the last "
            "is the state after the final norm here, and before it in the engines"
        )
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **llama_values(stored, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.verifier_hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }
    if config.aux_layers != default_layers(stored.verifier.num_layers):
        values["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layers)
        values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layers]}
    return values


def read(folder: Path | str, verifier: VerifierCard | None = None, embedding_VD: Tensor | None = None) -> StoredHead:
    """Read such a folder, our own or another trainer's, and check it all.

    verifier: needed for folders written elsewhere, which say nothing about theirs.
    embedding_VD: the verifier's, which a running head reads. A folder that ships another one is refused; without it
    the shipped one can't be compared, which is logged.
    """
    folder = Path(folder)
    values, tensors = read_folder(folder)
    card = card_of(values, verifier, folder)
    config = _config(values, card, folder)
    check(tensors, config, str(folder))
    if EMBEDDING in tensors:
        check_embedding(tensors[EMBEDDING], embedding_VD, folder)
    identity = config.draft_vocab_size == config.vocab_size
    V = config.vocab_size
    vocab = DraftVocab.identity(V) if identity else DraftVocab.from_d2t(tensors["d2t"], V)
    if not identity and "t2d" in tensors and not torch.equal(tensors["t2d"], vocab.t2d):
        raise UserError(f"{folder}: t2d marks other tokens than d2t names; write the head again")
    weights = {name: tensor for name, tensor in tensors.items() if name not in MAPS and name != EMBEDDING}
    notes = values.get(NOTES) or {}
    return bind(StoredHead(config, vocab, weights, card, notes.get("training", {})), notes, folder)


def layers_of(values: dict, num_layers: int) -> tuple[int, ...]:
    """The captured layers that a config.json means, as indices of `hidden_states`."""
    layers = named_layers(values)
    return default_layers(num_layers) if layers is None else layers


def named_layers(values: dict) -> tuple[int, ...] | None:
    """The captured layers that a config.json names, None when it names none.

    Ids at the top are of the stream that enters a layer, nested ones of a layer's output, so one lower.
    """
    nested = values.get("eagle_config") or {}
    top, nested = values.get(LAYER_IDS), nested.get(LAYER_IDS) if isinstance(nested, dict) else nested
    for ids in (top, nested):
        if ids is not None and not (isinstance(ids, list) and all(type(layer) is int for layer in ids)):
            raise UserError(f"{CONFIG}: expected {LAYER_IDS} to be a list of whole numbers, found {ids!r}")
    lifted = tuple(layer + 1 for layer in nested) if nested else None
    if top and lifted and tuple(top) != lifted:
        log.warning(
            f"the config names layers {list(top)}, and in eagle_config {list(nested)}, which means {list(lifted)}: "
            f"{list(top)} are taken"
        )
    return tuple(top) if top else lifted


def _config(values: dict, card: VerifierCard, folder: Path) -> Eagle3Config:
    geometry = layer_values(values, folder)
    if "draft_vocab_size" not in values:
        raise UserError(f"{folder / CONFIG}: missing draft_vocab_size")
    if values.get("bias") or values.get("attention_bias"):
        raise UserError(f"{folder / CONFIG}: expected a layer without biases; such a head is not portable")
    layers = layers_of(values, card.num_layers)
    check_norms(values | (values.get("eagle_config") or {}), folder / CONFIG)
    fields = geometry | {
        "draft_vocab_size": values["draft_vocab_size"],
        "aux_layers": layers,
        "verifier_hidden_size": values.get("target_hidden_size") or geometry["hidden_size"],
        "fc_norm": values.get("fc_norm") or False,
        "norm_output": values.get("norm_output") or False,
    }
    return config_of(Eagle3Config, fields, folder / CONFIG)


def check_norms(values: dict, place: Path) -> None:
    """UserError for a norm switch that is on and that this head can't follow, or a known one that is no boolean."""
    for switch, value in values.items():
        if switch in NORMS | OFF and not (value is None or type(value) is bool):
            raise UserError(f"{place}: expected {switch} true or false, found {value!r}")
        if "norm" in switch and value is True and switch not in NORMS:
            raise UserError(f"{place}: expected {switch} false, found {value}: another computation")
