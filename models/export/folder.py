"""What the serving layouts share: a folder with `model.safetensors` and a Llama-like `config.json`.

Engines are silent about missing tensors, so everything is checked here, on writing and on reading: names, shapes and
dtypes, exactly.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.disk import FULL
from conf.errors import UserError
from models.export.native import WEIGHTS as NATIVE_WEIGHTS
from models.export.native import StoredHead, VerifierCard, check_same, check_types, read_config, read_tensors, whole
from models.heads.config import LayerConfig
from models.heads.start import check_vocab
from models.verifier import Verifier

log = logging.getLogger(__name__)

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MEDUSA_WEIGHTS = "medusa_lm_head.safetensors"  # FasterDecoding's name for them, and TensorRT-LLM's
GGUF, IR = "head.gguf", "ir"  # llama.cpp's, and the folder that OpenVINO's converter makes
EMBEDDING = "embed_tokens.weight"
NOTES = "eyrie"  # the key of config.json that is ours
# Of a head's config, as the verifier has it.
GEOMETRY = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps")
GEOMETRY += ("max_position_embeddings", "rope_parameters")
Shapes = dict[str, tuple[int, ...]]


def check_tensors(tensors: dict[str, Tensor], shapes: Shapes, optional: Shapes, place: str, dtypes: dict) -> None:
    """UserError on an unknown or missing name, a wrong shape, a wrong or mixed dtype, or values that are not finite.

    dtypes: of the tensors that are no weights; the weights have that of the first in `shapes`.
    """
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise UserError(f"{place}: missing tensors {', '.join(missing)}; engines would serve noise without a word")
    if unknown := sorted(tensors.keys() - shapes.keys() - optional.keys()):
        raise UserError(
            f"{place}: unknown tensors {', '.join(unknown)}; expected the {len(shapes)} names of the layout"
        )
    weights = tensors[next(iter(shapes))].dtype
    if not weights.is_floating_point:
        raise UserError(f"{place}: expected floating-point weights, found {weights}")
    for name, tensor in tensors.items():
        shape = (shapes | optional)[name]
        if tuple(tensor.shape) != shape:
            raise UserError(f"{place}: expected {name} of shape {shape}, found {tuple(tensor.shape)}")
        if tensor.dtype != dtypes.get(name, weights):
            raise UserError(f"{place}: expected {name} in {dtypes.get(name, weights)}, found {tensor.dtype}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            raise UserError(f"{place}: {name}: expected finite values in {tensor.dtype}, found {count} others")


def layer_shapes(config: LayerConfig, layer: str, inputs: int, biases: bool = False) -> Shapes:
    """Attention and MLP of a layer whose q/k/v read `inputs` values."""
    D, MLP, F = config.hidden_size, config.intermediate_size, config.head_dim
    wide, narrow = config.num_attention_heads * F, config.num_key_value_heads * F
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    shapes = {
        f"{attention}.q_proj.weight": (wide, inputs),
        f"{attention}.k_proj.weight": (narrow, inputs),
        f"{attention}.v_proj.weight": (narrow, inputs),
        f"{attention}.o_proj.weight": (D, wide),
        f"{mlp}.gate_proj.weight": (MLP, D),
        f"{mlp}.up_proj.weight": (MLP, D),
        f"{mlp}.down_proj.weight": (D, MLP),
        f"{layer}.post_attention_layernorm.weight": (D,),
    }
    if biases:
        shapes |= {f"{attention}.{x}_proj.bias": (size,) for x, size in zip("qkv", (wide, narrow, narrow), strict=True)}
    return shapes


def head_tensors(stored: StoredHead, dtype: torch.dtype, verifier: Verifier | None) -> dict[str, Tensor]:
    """The head's weights in `dtype`; given the verifier also its embedding, for readers that want their own copy.

    UserError for another verifier than the head's, a map of other sizes, and weights that are no floating-point ones.
    """
    check_vocab(stored.config, stored.vocab)
    for name, tensor in stored.tensors.items():
        if not tensor.is_floating_point():
            raise UserError(f"{name}: expected floating-point weights, found {tensor.dtype}: the head is broken")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in stored.tensors.items()}
    if extra := [name for name in tensors if name.startswith("survival.")]:
        log.info("the survival output is left out of the export: no engine reads it")
        tensors = {name: tensor for name, tensor in tensors.items() if name not in extra}
    if verifier is not None:
        check_same(stored.verifier, VerifierCard.of(verifier))
        tensors[EMBEDDING] = verifier.embedding_VD.detach().to("cpu", dtype).contiguous().clone()
    return tensors


def write_folder(
    out: Path | str, tensors: dict[str, Tensor], values: dict, weights: str = WEIGHTS, keep_ir: bool = False
) -> Path:
    """The two files, in place of an earlier export's; config.json last: a folder without one was not finished.

    weights: the name of the file that holds them.  Returns the folder.
    """
    with new_export(out, weights, CONFIG, keep_ir=keep_ir) as (file, config):
        save_file(tensors, file, metadata={"format": "pt"})
        config.write_text(json.dumps(values, indent=2) + "\n")
    return Path(out)


@contextmanager
def new_export(out: Path | str, *names: str, keep_ir: bool = False) -> Iterator[list[Path]]:
    """Yields places to write files of these names, which then replace all files of an earlier export in `out`.

    After an error the earlier ones are as they were.  keep_ir: `ir/` may stay.
    Raises UserError, before anything is touched, for a folder that can't be written into, that holds a head of our
    own, or other files than an earlier export's; OSError where the disk is full.
    """
    out = Path(out)
    if (out / NATIVE_WEIGHTS).is_file():
        raise UserError(f"expected a folder for the export alone, found the head itself in {out}: give out=DIR")
    try:
        found = sorted(path.name for path in out.iterdir() if path.suffix != ".part") if out.exists() else []
        if found and not is_ours(out):
            raise UserError(
                f"expected a new folder or an earlier export of ours, found {', '.join(found[:3])} in {out}, which "
                "would be overwritten: give another out=DIR"
            )
        if IR in found and not keep_ir:
            raise UserError(f"expected no {IR}/ in {out}, found that of an OpenVINO export: delete it or give out=DIR")
        out.mkdir(parents=True, exist_ok=True)
        with whole(*(out / name for name in names)) as parts:
            yield parts
            for name in (CONFIG, WEIGHTS, MEDUSA_WEIGHTS, GGUF):
                (out / name).unlink(missing_ok=True)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(f"expected a folder to write into, found {out} ({error.strerror}): give out=DIR") from error


def is_ours(out: Path) -> bool:
    """Whether a folder holds an export with our notes, in config.json or `head.gguf`."""
    if (out / CONFIG).is_file():
        return NOTES in read_config(out / CONFIG)
    if not (out / GGUF).is_file():
        return False
    with (out / GGUF).open("rb") as file:  # the notes stand before the tokens
        return f"{NOTES}.notes".encode() in file.read(1 << 16)


def llama_values(stored: StoredHead, dtype: torch.dtype) -> dict:
    """The part of config.json that describes one Llama-like layer, and whose head it is."""
    config, card = stored.config, stored.verifier
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
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
        NOTES: notes_of(stored),
    }


def notes_of(stored: StoredHead) -> dict:
    """What binds an export to its verifier: hashes of weights, tokenizer, template and map, and the captured layers.

    Engines read past it; `bind` holds a reader to it.
    """
    return {
        "verifier": asdict(stored.verifier),
        "vocab_hash": stored.vocab.hash,
        "aux_layers": list(stored.config.aux_layers),
        "geometry": geometry_of(stored),
        "training": stored.training,
    }


def geometry_of(stored: StoredHead) -> dict:
    """What the head's layers take from the verifier, positions and RoPE included; empty for Medusa, which has none."""
    values = stored.config.to_dict()
    return {name: values[name] for name in GEOMETRY if name in values}


def bind(stored: StoredHead, notes: dict, place: Path | str) -> StoredHead:
    """`stored` as it is, where the map, the captured layers and the geometry are those that `notes` were written with.

    Raises UserError naming both sides.
    """
    sides = {
        "vocabulary map": (notes.get("vocab_hash"), stored.vocab.hash),
        "captured layers": (notes.get("aux_layers"), list(stored.config.aux_layers)),
    }
    geometry = notes.get("geometry") or {}
    sides |= {name: (geometry.get(name), value) for name, value in geometry_of(stored).items()}
    for what, (written, found) in sides.items():
        if written is not None and written != found:
            written, found = (side[:12] if isinstance(side, str) else side for side in (written, found))
            raise UserError(
                f"{place}: exported with {what} {written}, found {found}: files of different heads; export again"
            )
    return stored


def read_folder(folder: Path | str) -> tuple[dict, dict[str, Tensor]]:
    """(config.json, tensors); UserError when a file is absent or damaged."""
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            pickled = name == WEIGHTS and (folder / "pytorch_model.bin").is_file()
            how = "; its pytorch_model.bin is a pickle, which is not read: convert it to safetensors" if pickled else ""
            raise UserError(f"expected {WEIGHTS} and {CONFIG} in {folder}, found no {name}{how}")
    return read_config(folder / CONFIG), read_tensors(folder / WEIGHTS)


def notes_in(values: dict, place: Path | str) -> dict:
    """Our own notes in a config.json, empty in one from elsewhere; UserError where they are of another shape."""
    notes = values.get(NOTES) or {}
    parts = ("verifier", "geometry", "training")
    if not isinstance(notes, dict) or not all(isinstance(notes.get(part, {}), dict) for part in parts):
        raise UserError(f"{place}: expected our notes, found {str(notes)[:80]!r}; export again")
    return notes


def card_of(values: dict, verifier: VerifierCard | None, folder: Path) -> VerifierCard:
    """The verifier that the folder's head is for: as our own notes in it say, else as given. UserError where both
    are there and differ, or neither is."""
    notes = notes_in(values, folder)
    written = VerifierCard.from_dict(notes["verifier"]) if "verifier" in notes else None
    if written and verifier:
        check_same(written, verifier)
    if not (card := written or verifier):
        raise UserError(f"{folder} does not name its verifier; pass the verifier it was trained for")
    return card


def layer_values(values: dict, folder: Path) -> dict:
    """The fields of a LayerConfig, layers and draft vocabulary aside. UserError where one is missing."""
    values = {"num_key_value_heads": values.get("num_attention_heads"), **values}  # as transformers reads old folders
    plain = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"]
    plain += ["hidden_act", "max_position_embeddings", "vocab_size"]
    if missing := [key for key in plain if key not in values]:
        raise UserError(f"{folder / CONFIG}: missing {', '.join(missing)}")
    if values.get("num_hidden_layers", 1) != 1:
        raise UserError(f"{folder / CONFIG}: expected one layer, found {values['num_hidden_layers']}")
    place = folder / CONFIG
    check_types(LayerConfig, {key: x for key, x in values.items() if key in plain or x is not None}, place)
    if not isinstance(values.get("rope_scaling") or {}, dict):
        raise UserError(f"{place}: expected rope_scaling to be an object, found {values['rope_scaling']!r}")
    scaling = dict(values.get("rope_scaling") or {})
    kind = scaling.pop("type", "default")  # its name before it was rope_type
    theta = values.get("rope_theta", 10000.0)
    rope = values.get("rope_parameters") or {"rope_type": kind, **scaling, "rope_theta": theta}
    if type(theta := rope.get("rope_theta", 1.0)) not in (int, float) or theta <= 0:
        raise UserError(f"{place}: expected rope_theta to be a number above 0, found {theta!r}")
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return {key: values[key] for key in plain} | {"head_dim": head_dim, "rope_parameters": rope}


def check_embedding(shipped_VD: Tensor, embedding_VD: Tensor | None, folder: Path) -> None:
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
