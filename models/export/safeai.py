"""The SafeAI / SpecForge EAGLE-3 layout, which vLLM and SGLang serve: `model.safetensors` and `config.json`.

Both engines are silent about missing tensors and about a missing map, so everything is checked here, on
writing and on reading: names, shapes and dtypes, exactly.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import UserError
from models.export.native import StoredHead, VerifierCard, read_config, read_tensors
from models.heads.eagle3 import Eagle3Config
from models.introspect import default_layers
from models.vocab import DraftVocab

log = logging.getLogger(__name__)

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MAPS = {"d2t": torch.int64, "t2d": torch.bool}


def expected_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Every tensor that the layout demands, maps included when R < V; `embed_tokens.weight` may come on top."""
    D, MLP, F = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    R, V, T = config.draft_vocab_size, config.vocab_size, config.verifier_hidden_size
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    shapes = {
        "fc.weight": (D, len(config.aux_layers) * T),
        "midlayer.hidden_norm.weight": (D,),
        "midlayer.input_layernorm.weight": (D,),
        "midlayer.post_attention_layernorm.weight": (D,),
        f"{attention}.q_proj.weight": (heads * F, 2 * D),
        f"{attention}.k_proj.weight": (kv_heads * F, 2 * D),
        f"{attention}.v_proj.weight": (kv_heads * F, 2 * D),
        f"{attention}.o_proj.weight": (D, heads * F),
        f"{mlp}.gate_proj.weight": (MLP, D),
        f"{mlp}.up_proj.weight": (MLP, D),
        f"{mlp}.down_proj.weight": (D, MLP),
        "norm.weight": (D,),
        "lm_head.weight": (R, D),
    }
    if config.fc_norm:
        shapes |= {f"fc_norm.{layer}.weight": (T,) for layer in range(len(config.aux_layers))}
    if R < V:  # with R = V vLLM refuses a map
        shapes |= {"d2t": (R,), "t2d": (V,)}
    return shapes


def check(tensors: dict[str, Tensor], config: Eagle3Config, place: str) -> None:
    """UserError on an unknown or missing name, a wrong shape, or a wrong or mixed dtype."""
    shapes = expected_shapes(config)
    optional = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise UserError(f"{place}: missing tensors {', '.join(missing)}; engines would serve noise without a word")
    if unknown := sorted(tensors.keys() - shapes.keys() - optional.keys()):
        raise UserError(f"{place}: unknown tensors {', '.join(unknown)}; expected {len(shapes)} EAGLE-3 names")
    for name, tensor in tensors.items():
        shape = (shapes | optional)[name]
        if tuple(tensor.shape) != shape:
            raise UserError(f"{place}: expected {name} of shape {shape}, found {tuple(tensor.shape)}")
        if tensor.dtype != MAPS.get(name, tensors["fc.weight"].dtype):
            expected = MAPS.get(name, tensors["fc.weight"].dtype)
            raise UserError(f"{place}: expected {name} in {expected}, found {tensor.dtype}")
    if not tensors["fc.weight"].is_floating_point():
        raise UserError(f"{place}: expected floating-point weights, found {tensors['fc.weight'].dtype}")


def write(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, embedding_VD: Tensor | None = None
) -> Path:
    """Write the folder and return it. embedding_VD: the verifier's, when a reader wants its own copy."""
    out = Path(out)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in stored.tensors.items()}
    if not stored.vocab.is_identity:
        tensors |= {"d2t": stored.vocab.d2t.clone(), "t2d": stored.vocab.t2d.clone()}
    if embedding_VD is not None:
        tensors["embed_tokens.weight"] = embedding_VD.detach().to("cpu", dtype).contiguous().clone()
    check(tensors, stored.config, "export")
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    (out / CONFIG).write_text(json.dumps(config_json(stored, dtype), indent=2) + "\n")
    return out


def config_json(stored: StoredHead, dtype: torch.dtype) -> dict:
    """config.json as both engines read it. With the default captured layers it names none: each engine's own
    default is then right, while their conventions for written ids differ by one."""
    config, card = stored.config, stored.verifier
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.verifier_hidden_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": scaling if rope.get("rope_type", "default") != "default" else None,
        "rope_parameters": rope,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "attention_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": card.bos_token_id,
        "eos_token_id": card.eos_token_ids[0] if len(card.eos_token_ids) == 1 else list(card.eos_token_ids),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eyrie": {"verifier": asdict(card), "vocab_hash": stored.vocab.hash, "training": stored.training},
    }
    if config.aux_layers != default_layers(card.num_layers):
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
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"expected {WEIGHTS} and {CONFIG} in {folder}, found no {name}")
    values = read_config(folder / CONFIG)
    notes = values.get("eyrie", {})
    card = verifier or (VerifierCard.from_dict(notes["verifier"]) if "verifier" in notes else None)
    if card is None:
        raise UserError(f"{folder} does not name its verifier; pass the verifier it was trained for")
    config = _config(values, card, folder)
    tensors = read_tensors(folder / WEIGHTS)
    check(tensors, config, str(folder))
    if "embed_tokens.weight" in tensors:
        _check_embedding(tensors["embed_tokens.weight"], embedding_VD, folder)
    identity = config.draft_vocab_size == config.vocab_size
    V = config.vocab_size
    vocab = DraftVocab.identity(V) if identity else DraftVocab.from_d2t(tensors["d2t"], V)
    if not identity and not torch.equal(tensors["t2d"], vocab.t2d):
        raise UserError(f"{folder}: t2d marks other tokens than d2t names; write the head again")
    weights = {name: tensor for name, tensor in tensors.items() if name not in MAPS and name != "embed_tokens.weight"}
    return StoredHead(config, vocab, weights, card, notes.get("training", {}))


def _check_embedding(shipped_VD: Tensor, embedding_VD: Tensor | None, folder: Path) -> None:
    """UserError when the two differ by more than the coarser one's rounding."""
    if embedding_VD is None:
        log.info(f"{folder} ships an embedding, which was not compared with the verifier's; the verifier's is used")
        return
    if shipped_VD.shape != embedding_VD.shape:
        raise UserError(
            f"{folder}: expected the verifier's embedding of shape {tuple(embedding_VD.shape)}, "
            f"found {tuple(shipped_VD.shape)}: the head is for another verifier"
        )
    eps = max(torch.finfo(shipped_VD.dtype).eps, torch.finfo(embedding_VD.dtype).eps)
    for ours, theirs in zip(embedding_VD.split(8192), shipped_VD.split(8192), strict=True):  # float32 copies of a part
        if not torch.allclose(ours.detach().cpu().float(), theirs.float(), rtol=eps, atol=1e-7):
            raise UserError(f"{folder} ships an embedding of its own, not the verifier's: such a head is not supported")


def _config(values: dict, card: VerifierCard, folder: Path) -> Eagle3Config:
    plain = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"]
    plain += ["hidden_act", "max_position_embeddings", "vocab_size", "draft_vocab_size"]
    if missing := [key for key in plain if key not in values]:
        raise UserError(f"{folder / CONFIG}: missing {', '.join(missing)}")
    if values.get("bias") or values.get("attention_bias") or values.get("num_hidden_layers", 1) != 1:
        raise UserError(f"{folder / CONFIG}: expected one layer without biases; such a head is not portable")
    for switch in ("norm_before_residual", "norm_before_fc"):
        if values.get(switch):
            raise UserError(f"{folder / CONFIG}: expected {switch} false, found {values[switch]}: another computation")
    rope = values.get("rope_parameters") or {
        "rope_type": "default",
        **(values.get("rope_scaling") or {}),
        "rope_theta": values.get("rope_theta", 10000.0),
    }
    layers = values.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        nested = (values.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        layers = [layer + 1 for layer in nested] if nested else default_layers(card.num_layers)
    return Eagle3Config(
        **{key: values[key] for key in plain},
        head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        rope_parameters=rope,
        aux_layers=tuple(layers),
        verifier_hidden_size=values.get("target_hidden_size", values["hidden_size"]),
        fc_norm=values.get("fc_norm", False),
        norm_output=values.get("norm_output", False),
    )
