"""The GGUF file that llama.cpp serves an EAGLE-3 head from, tensor for tensor what its own converter makes.

The engine checks no value that it needs not: three captured layers, one RoPE, no norm but the usual ones. So whatever
it would compute otherwise than the head was trained is refused here. The draft file names the verifier's tokens, but
no text is ever split with it; the embedding is the served verifier's own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from conf.errors import UserError
from models.export import safeai
from models.export.folder import (
    EMBEDDING,
    GGUF,
    NOTES,
    Shapes,
    bind,
    card_of,
    check_embedding,
    check_tensors,
    head_tensors,
    new_export,
    notes_in,
    notes_of,
)
from models.export.gguf_file import FILE_TYPES, KINDS, add_tokens, add_value, copy_of, parsed, short
from models.export.native import StoredHead, VerifierCard, check_same, config_of
from models.heads.eagle3 import Eagle3Config
from models.verifier import Verifier
from models.vocab import DraftVocab

ARCHITECTURE = "eagle3"
NOTES_KEY = f"{NOTES}.notes"  # a JSON string
FREQUENCIES = "rope_freqs.weight"
NAMES = {
    "fc.weight": "fc.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    EMBEDDING: "token_embd.weight",
}
ROTATED = {"blk.0.attn_q.weight": "num_attention_heads", "blk.0.attn_k.weight": "num_key_value_heads"}
# Keys that name a whole number of the config, and those that older files leave out.
SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
    "target_hidden_size": "verifier_hidden_size",
}
OPTIONAL = ("norm_before_residual", "norm_before_fc", "attention.value_length", "rope.dimension_count")


def write(
    stored: StoredHead, out: Path | str, dtype: torch.dtype = torch.float32, verifier: Verifier | None = None
) -> Path:
    """Write `head.gguf` into the folder and return the folder. UserError without the verifier, for its tokens.

    Matrices are in `dtype`; norms in float32, after rounding to `dtype`. The embedding is never written.
    """
    if verifier is None or verifier.tokenizer is None:
        raise UserError("expected the verifier with its tokenizer, whose tokens the GGUF file names: pass it")
    check_same(stored.verifier, VerifierCard.of(verifier))
    if dtype not in KINDS:
        raise UserError(f"expected float32, float16 or bfloat16 for a GGUF file, found {dtype}")
    config = _servable(stored)
    tensors = head_tensors(stored, dtype, None)
    safeai.check(tensors | safeai.maps_of(stored.vocab), config, "export")  # by the head's own names
    tensors = {NAMES.get(name, name): tensor for name, tensor in tensors.items()}
    tensors = {name: _interleaved(name, t, config) if name in ROTATED else t for name, t in tensors.items()}
    tensors = {name: tensor.float() if tensor.dim() == 1 else tensor for name, tensor in tensors.items()}
    if not stored.vocab.is_identity:
        tensors["d2t"] = stored.vocab.ids_R.clone()
    if (factors := rope_factors(config)) is not None:
        tensors[FREQUENCIES] = factors
    _check(tensors, config, "export")
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"EAGLE-3 head for {Path(stored.verifier.name).name}")
    for key, value in keys_of(config).items():
        add_value(writer, f"{ARCHITECTURE}.{key}", value)
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_string(NOTES_KEY, json.dumps(notes_of(stored) | {"config": config.to_dict()}))
    add_tokens(writer, verifier)
    for name, tensor in tensors.items():
        kind = Kind.I64 if name == "d2t" else KINDS[tensor.dtype]
        bits = tensor.contiguous().view(torch.uint8) if kind == Kind.BF16 else tensor.contiguous()
        writer.add_tensor(name, bits.numpy(), raw_dtype=kind)
    with new_export(out, GGUF) as (file,):
        writer.write_header_to_file(file)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return Path(out)


def expected_shapes(config: Eagle3Config) -> Shapes:
    """Every tensor that the file holds; `token_embd.weight` may come on top."""
    shapes = {NAMES[name]: shape for name, shape in safeai.expected_shapes(config).items() if name in NAMES}
    if config.draft_vocab_size < config.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    if config.rope_parameters.get("rope_type") == "llama3":
        shapes[FREQUENCIES] = (config.head_dim // 2,)
    return shapes


def keys_of(config: Eagle3Config) -> dict[str, object]:
    """What the file says of the head under `eagle3.`: its captured layers as indices of `hidden_states`, as here."""
    rope = config.rope_parameters
    values: dict[str, object] = {"target_layers": list(config.aux_layers), "block_count": 1}
    values |= {key: getattr(config, name) for key, name in SIZES.items()}
    values |= {"norm_before_residual": False, "norm_before_fc": False}
    values |= {"attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim}
    values |= {"attention.layer_norm_rms_epsilon": float(config.rms_norm_eps)}
    values |= {"rope.freq_base": float(rope["rope_theta"])}
    if rope.get("rope_type") == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return values


def rope_factors(config: Eagle3Config) -> Tensor | None:
    """What Llama 3's RoPE divides each frequency by [head_dim / 2]; None for other kinds, which need no factors."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    wavelength = 2 * torch.pi / (1 / rope["rope_theta"] ** exponent)  # rounded as the converter's, to the last bit
    turns = rope["original_max_position_embeddings"] / wavelength
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - kept) / rope["factor"] + kept)


def gguf_file(source: Path | str) -> Path | None:
    """The head's file in a folder, `head.gguf` or the only .gguf file; None where there is none or a choice."""
    source = Path(source).expanduser()
    files = [source / GGUF] if (source / GGUF).is_file() else list(source.glob("*.gguf"))
    return files[0] if len(files) == 1 else None


def kind(source: Path | str) -> str:
    """The kind of head in the file, which can be one only: "eagle3". UserError for another model."""
    _open(source)
    return Eagle3Config.kind


def read_notes(source: Path | str) -> dict:
    """Our own notes in the file; empty in one from elsewhere."""
    return _notes(_open(source))


def named_layers(source: Path | str) -> list[int]:
    """The captured layers that the file names."""
    return list(_keys(_open(source)).get("target_layers", []))


def read(source: Path | str, verifier: VerifierCard | None = None, embedding_VD: Tensor | None = None) -> StoredHead:
    """Read the file in such a folder and check it all; arguments as in safeai.read.

    Raises UserError for another architecture or computation, quantised tensors, and keys that our notes contradict.
    """
    place = gguf_file(source)
    reader = _open(source)
    notes, keys = _notes(reader), _keys(reader)
    card = card_of({NOTES: notes}, verifier, place)
    tensors = {tensor.name: copy_of(tensor, place) for tensor in reader.tensors}
    config = config_of(Eagle3Config, notes["config"], place) if "config" in notes else _config(keys, tensors, place)
    _check_keys(keys, keys_of(config), place)
    _check(tensors, config, str(place))
    factors = rope_factors(config)
    if factors is not None and not torch.allclose(tensors[FREQUENCIES], factors, rtol=1e-5):
        raise UserError(f"{place}: expected the RoPE factors of {config.rope_parameters}, found others; export again")
    if (embedding := tensors.get(NAMES[EMBEDDING])) is not None:
        check_embedding(embedding, embedding_VD, place)
    vocab = (
        DraftVocab(tensors["d2t"], config.vocab_size) if "d2t" in tensors else DraftVocab.identity(config.vocab_size)
    )
    weights, dtype = {}, tensors["fc.weight"].dtype
    for name, theirs in NAMES.items():
        if theirs in tensors and name != EMBEDDING:
            tensor = tensors[theirs].to(dtype)
            weights[name] = _halved(theirs, tensor, config) if theirs in ROTATED else tensor
    return bind(StoredHead(config, vocab, weights, card, notes.get("training", {})), notes, place)


def _servable(stored: StoredHead) -> Eagle3Config:
    """The config as the file can say it. UserError for a head that the engine would compute otherwise."""
    config = stored.config
    if config.fc_norm or config.norm_output:
        on = ", ".join(name for name in ("fc_norm", "norm_output") if getattr(config, name))
        raise UserError(f"expected a plain EAGLE-3 head, found one with {on}: llama.cpp has no such switch")
    layers = config.aux_layers
    if len(layers) != 3 or layers[0] < 1 or layers[-1] >= stored.verifier.num_layers:
        raise UserError(
            f"expected three captured layers below {stored.verifier.num_layers}, found {list(layers)}: llama.cpp reads "
            "three, no embedding, and the last state before the final norm"
        )
    if config.hidden_act != "silu":
        raise UserError(f"expected hidden_act silu, which llama.cpp computes, found {config.hidden_act}")
    rope = config.rope_parameters
    kind, part = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    if kind not in ("default", "linear", "llama3") or part != 1.0:
        found = f"{kind} over {part:g} of each head" if part != 1.0 else kind
        raise UserError(f"expected a RoPE of kind default, linear or llama3 over whole heads, found {found}")
    return replace(config, survival=False)


def _config(keys: dict, tensors: dict[str, Tensor], place: Path) -> Eagle3Config:
    """From the keys of a file written elsewhere, which say nothing of Llama 3's RoPE but its factors."""
    if missing := sorted(keys_needed() - keys.keys()):
        raise UserError(f"{place}: missing {', '.join(f'{ARCHITECTURE}.{key}' for key in missing)}")
    if FREQUENCIES in tensors:
        raise UserError(f"{place}: expected a RoPE without factors, found {FREQUENCIES} and nothing that explains them")
    rope = {"rope_type": keys.get("rope.scaling.type", "default"), "rope_theta": short(keys["rope.freq_base"])}
    if rope["rope_type"] == "none":
        rope["rope_type"] = "default"
    if "rope.scaling.factor" in keys:
        rope["factor"] = short(keys["rope.scaling.factor"])
    values = {name: keys[key] for key, name in SIZES.items()} | {
        "draft_vocab_size": len(tensors["d2t"]) if "d2t" in tensors else keys["vocab_size"],
        "aux_layers": keys["target_layers"],
        "rms_norm_eps": short(keys["attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "rope_parameters": rope,
    }
    return config_of(Eagle3Config, values, place)


def keys_needed() -> set[str]:
    """The keys without which a head can't be read."""
    return {*SIZES, "target_layers", "rope.freq_base", "attention.layer_norm_rms_epsilon"}


def _check_keys(found: dict, expected: dict, place: Path) -> None:
    """UserError for a key that says otherwise, is unknown, or is missing."""
    for key in sorted(found.keys() | expected.keys()):
        if key in OPTIONAL and key not in found:
            continue
        ours, theirs = expected.get(key, "none"), found.get(key, "none")
        if isinstance(ours, float) and not isinstance(theirs, str):
            ours, theirs = float(np.float32(ours)), float(theirs)
        if ours != theirs:
            raise UserError(f"{place}: expected {ARCHITECTURE}.{key} {ours}, found {theirs}: another computation")


def _check(tensors: dict[str, Tensor], config: Eagle3Config, place: str) -> None:
    """UserError on an unknown or missing name, a wrong shape or dtype: matrices have one, vectors are float32."""
    shapes = expected_shapes(config)
    optional = {NAMES[EMBEDDING]: (config.vocab_size, config.hidden_size)}
    vectors = {name: torch.float32 for name, shape in shapes.items() if len(shape) == 1}
    check_tensors(tensors, shapes, optional, place, vectors | {"d2t": torch.int64})


def _interleaved(name: str, weight: Tensor, config: Eagle3Config) -> Tensor:
    """Rows of q or k from halves (i, i + F/2), which are rotated together here, to the neighbours of llama.cpp."""
    return weight.unflatten(0, (getattr(config, ROTATED[name]), 2, -1)).transpose(1, 2).flatten(0, 2)


def _halved(name: str, weight: Tensor, config: Eagle3Config) -> Tensor:
    """The inverse of `_interleaved`."""
    return weight.unflatten(0, (getattr(config, ROTATED[name]), -1, 2)).transpose(1, 2).flatten(0, 2)


def _open(source: Path | str) -> gguf.GGUFReader:
    """UserError when there is no such file, it is damaged, or it holds another model."""
    if (file := gguf_file(source)) is None:
        raise UserError(f"expected a folder with one .gguf file, found none at {source}")
    try:
        reader = parsed(file, file.stat().st_mtime_ns)
        architecture = reader.fields["general.architecture"].contents()
    except (ValueError, KeyError, IndexError) as error:
        raise UserError(f"{file} is damaged ({error}); write it again") from error
    if architecture != ARCHITECTURE:
        raise UserError(f"expected the architecture {ARCHITECTURE} in {file}, found {architecture}")
    return reader


def _keys(reader: gguf.GGUFReader) -> dict:
    start = f"{ARCHITECTURE}."
    return {key.removeprefix(start): f.contents() for key, f in reader.fields.items() if key.startswith(start)}


def _notes(reader: gguf.GGUFReader) -> dict:
    """Our own notes; UserError when they are damaged."""
    try:
        notes = json.loads(reader.fields[NOTES_KEY].contents()) if NOTES_KEY in reader.fields else {}
    except ValueError as error:
        raise UserError(f"{NOTES_KEY} in the GGUF file is damaged ({error}); write it again") from error
    return notes_in({NOTES: notes}, "the GGUF file")
