"""What the verifier adapter reads off a transformers model: its parts, its shape, its weights, their hash."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from conf.errors import UserError
from conf.paths import cache_dir
from models.attention import PackedPlan, Rule

REMEMBERED_FROM = 2**31  # bytes of weight files, from which on their hash is kept
NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "ln_f")


@dataclass(frozen=True)
class Parts:
    base: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    lm_head: nn.Module


def find_parts(model: nn.Module) -> Parts:
    """The decoder stack, its layers, the final norm and the LM head. Raises UserError where one is missing."""
    kind = type(model).__name__
    lm_head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if lm_head is None:
        raise UserError(f"expected a causal language model with an LM head, found {kind}: name another verifier")
    base = model.get_decoder() if hasattr(model, "get_decoder") else None
    count = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in (base or model).children() if isinstance(m, nn.ModuleList) and len(m) == count]
    norms = [getattr(base, n) for n in NORM_NAMES if hasattr(base, n)]
    if base is None or not stacks or not norms:
        raise UserError(
            f"expected a decoder with {count} layers and a final norm, found {kind} built otherwise: "
            "this architecture is not supported as a verifier"
        )
    return Parts(base, stacks[0], norms[0], lm_head)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """What EAGLE-3 captures when nobody names layers, and every engine when a head's files name none."""
    return (2, num_layers // 2, num_layers - 3)


def check_aux_layers(aux_layers: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Ascending distinct ids in 0..L, as transformers counts `hidden_states`; there may be none.

    i is the stream that enters layer i, L (or -1) the last hidden state after the final norm. None: 2, L//2, L-3, which
    needs L >= 7 (2503.01840). Raises UserError.
    """
    if aux_layers is None:
        if num_layers < 7:
            raise UserError(
                f"expected at least 7 layers for the default captured layers (2, L//2, L-3), found {num_layers}: "
                "name them yourself, e.g. verifier.aux_layers=[0,1,2]"
            )
        return default_layers(num_layers)
    ids = tuple(num_layers if int(i) == -1 else int(i) for i in aux_layers)
    if list(ids) != sorted(set(ids)) or (ids and not 0 <= ids[0] <= ids[-1] <= num_layers):
        raise UserError(
            f"expected verifier.aux_layers to be ascending distinct ids in 0..{num_layers} ({num_layers} or -1: the "
            f"last hidden state), found {list(aux_layers)}"
        )
    return ids


def check_layer(layer: int, num_layers: int) -> None:
    """UserError unless it is a decoder layer's number in 0..L-1, or a negative one, counted from the end."""
    if not -num_layers <= layer < num_layers:
        raise UserError(f"head.start_layer must lie in {-num_layers}..{num_layers - 1}, found {layer}")


def use_plan_attention(model: nn.Module, config, name: str) -> None:
    """Route every layer's attention through the function registered under `name`; UserError where that cannot be."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or not getattr(model, "_supports_attention_backend", False):
        what = f"layers of type {', '.join(sorted(kinds))}" if kinds else "an attention of its own"
        raise unsupported(what, model)
    model.set_attn_implementation(name)


def unsupported(found: str, model: nn.Module) -> UserError:
    return UserError(
        f"expected softmax attention that transformers can replace, found {found} in {type(model).__name__}: "
        "this architecture is not supported as a verifier"
    )


@dataclass
class TrialPlan:
    """Causal attention among the new rows alone, and a note of the window that each layer asks for."""

    windows: list[int | None] = field(default_factory=list)

    def attend(self, q_BHTF: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """Attention [B, H, T, F]; the first T keys are those of the T rows."""
        self.windows.append(rule.window)
        new = slice(0, q_BHTF.shape[2])
        return PackedPlan([], True).attend(q_BHTF, k[:, :, new], v[:, :, new], rule)


def check_trial(
    model: nn.Module, config, windows: Sequence[int | None], taps: Iterable[Tensor], own: Tensor, expected: Tensor
) -> None:
    """UserError for a model that was driven, and does what the adapter would not notice.

    windows: of the layers whose attention was replaced. taps: captured states. own: logits [B, T, V] that the adapter
    makes; expected: the model's.
    """
    wanted = (*own.shape[:2], config.hidden_size)
    for tap in taps:
        if tuple(tap.shape) != wanted:
            raise unsupported(f"states of shape {tuple(tap.shape)} between its layers instead of {wanted}", model)
    layers = config.num_hidden_layers
    if len(windows) != layers:
        raise unsupported(f"{layers} layers, and {len(windows)} that call it", model)
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    # Asked of the class: a stray value in a config.json means nothing to a model that knows no windows.
    window = config.sliding_window if hasattr(type(config), "sliding_window") else None
    windowed = window and getattr(config, "use_sliding_window", True) and "sliding_attention" in types
    if windowed and not any(windows):
        raise unsupported(f"a window of {window} tokens that its layers do not name", model)
    expected = expected.float()
    if own.shape != expected.shape or (own - expected).abs().max() > 0.02 * expected.abs().max():
        raise UserError(
            f"expected logits that are the LM head's, with a known scale or soft-cap, found others in "
            f"{type(model).__name__}: this architecture is not supported as a verifier"
        )


def geometry(config, vocab_size: int) -> dict:
    """The verifier's shape as a head's configuration names it; rope_parameters is that of the full-attention layers.

    Where layers differ in shape (Gemma 4), all of it is the first layer's.
    """
    kind = "full_attention"
    if getattr(config, "is_heterogeneous", False):
        config, kind = config.per_layer_config[0], config.layer_types[0]
    heads = config.num_attention_heads
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if isinstance(rope.get(kind), dict):
        rope = dict(rope[kind])
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    width = _first(config, "intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": width or 4 * config.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "rms_norm_eps": _first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps") or 1e-5,
        "hidden_act": _first(config, "hidden_act", "hidden_activation", "activation_function") or "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "vocab_size": vocab_size,
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }


def _first(config, *names: str):
    """The first of these values that a config has and sets."""
    return next((value for name in names if (value := getattr(config, name, None))), None)


def finish_logits(config, logits: Tensor) -> Tensor:
    """What some architectures do after the LM head: scale (Cohere), divide (Granite), soft-cap (Gemma)."""
    if getattr(config, "logit_scale", None):
        logits = logits * config.logit_scale
    if getattr(config, "logits_scaling", None):
        logits = logits / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


@torch.no_grad()
def norm_scale(norm: nn.Module, size: int) -> Tensor:
    """The scale [size] of a norm as a plain RMSNorm holds it: Gemma stores it less one, some have none.

    Seen from its effect on a vector that is already normal (mean 0, mean square 1) and its negative, so that a
    LayerNorm's bias falls out.
    """
    weight = getattr(norm, "weight", None)
    if weight is None:
        return torch.ones(size)
    unit = torch.ones_like(weight)
    unit[1::2] = -1
    seen = (norm(unit[None]) - norm(-unit[None]))[0] * unit / 2
    return weight if (seen - weight).abs().max() <= (seen - 1 - weight).abs().max() else weight + 1


def plain_layer(layer: nn.Module, shape: dict) -> dict[str, Tensor]:
    """A decoder layer's weights by Llama's names: norms as plain ones hold them, Phi-3's fused projections split.

    Gemma 2 and 3 also norm what attention and MLP give, which a Llama layer does not: those two scales are left out,
    and the norm before the MLP gets its usual name.
    """
    state = {name: value.detach() for name, value in layer.state_dict().items()}
    for name, module in layer.named_modules():
        if name.endswith("norm") and f"{name}.weight" in state:
            state[f"{name}.weight"] = norm_scale(module, shape["hidden_size"])
    if "pre_feedforward_layernorm.weight" in state:
        state["post_attention_layernorm.weight"] = state.pop("pre_feedforward_layernorm.weight")
        state.pop("post_feedforward_layernorm.weight", None)
    if "self_attn.qkv_proj.weight" in state:
        keys = shape["num_key_value_heads"] * shape["head_dim"]
        sizes = [shape["num_attention_heads"] * shape["head_dim"], keys, keys]
        parts = state.pop("self_attn.qkv_proj.weight").split(sizes)
        state |= {f"self_attn.{n}_proj.weight": p for n, p in zip("qkv", parts, strict=True)}
    if "mlp.gate_up_proj.weight" in state:
        gate, up = state.pop("mlp.gate_up_proj.weight").chunk(2)
        state |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    return state


def _feed(digest, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    digest.update(memoryview(flat.numpy()))


def hash_model(model: nn.Module) -> str:
    """sha256 over the sorted weights of a model in memory: name, dtype, shape, bytes. Tied copies count once."""
    digest = hashlib.sha256()
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for name, tensor in sorted(model.state_dict().items()):
        if name not in tied:
            _feed(digest, name, tensor)
    return digest.hexdigest()


def dtype_of_files(files: Sequence[Path]) -> str | None:
    """The floating-point dtype that safetensors files begin with, as torch calls it; None for other formats."""
    from safetensors import safe_open

    if not files or files[0].suffix != ".safetensors":
        return None
    with safe_open(files[0], "pt") as handle:
        found = handle.get_slice(next(iter(handle.keys()))).get_dtype()
    return {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(found)


def hash_files(files: Sequence[Path]) -> str:
    """The same over safetensors files, however the tensors are spread over them; of other formats, over the bytes.

    Of a large model it is kept in the cache, by the files' names, sizes and times: reading them takes minutes.
    """
    about = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(files)]
    if sum(size for _, size, _ in about) < REMEMBERED_FROM:
        return _hash_files(files)
    kept = cache_dir("hashes") / hashlib.sha256(repr(about).encode()).hexdigest()
    if not kept.is_file():
        written = kept.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")
        written.write_text(_hash_files(files))
        written.replace(kept)
    return kept.read_text()


def _hash_files(files: Sequence[Path]) -> str:
    from safetensors import safe_open

    digest = hashlib.sha256()
    if any(file.suffix != ".safetensors" for file in files):  # pickles: reading them needs trust, and names no order
        for file in sorted(files):
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()
    where: dict[str, Path] = {}
    for file in files:
        with safe_open(file, "pt") as handle:
            where |= dict.fromkeys(handle.keys(), file)
    for name in sorted(where):
        with safe_open(where[name], "pt") as handle:
            _feed(digest, name, handle.get_tensor(name))
    return digest.hexdigest()
