"""A few modules of a large model: read from its safetensors files by name, while the rest takes no memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from conf.errors import UserError

# What a weight may be cast from; the packed numbers of a quantised model mean nothing without their scales.
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def outline(config, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> nn.Module:
    """The model of a transformers config with every tensor on torch's "meta" device: shapes and names alone."""
    kind = model_kind(config)
    more = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return kind.from_config(config, trust_remote_code=trust_remote_code, **more).eval().requires_grad_(False)


def model_kind(config):
    """The transformers class that loads it: a causal language model, or one with a text half, which is then driven."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    texts, images = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if type(config) not in texts and type(config) in images else AutoModelForCausalLM


@torch.no_grad()
def fill(
    model: nn.Module, modules: Iterable[nn.Module], files: Sequence[Path], device: torch.device, dtype: torch.dtype
) -> None:
    """Read the parameters of these modules of `model` from the files, whatever they hold now. Tied ones stay tied.

    Raises UserError where the files are not safetensors, have no such name, or hold a quantised weight.
    """
    where = _names(files)
    prefixes = {module: name for name, module in model.named_modules()}
    for module in modules:
        for name, old in list(module.named_parameters()):
            full = f"{prefixes[module]}.{name}"
            tensor = _read(where, full, tuple(old.shape)) if full in where else _tied(model, full)
            if tensor is None:
                raise UserError(
                    f"expected {full} in {files[0].parent if files else 'safetensors files'}, found none by this name: "
                    "this model cannot be read in parts; load it whole (verifier.whole=true, no device_map)"
                )
            owner, _, leaf = name.rpartition(".")
            value = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
            setattr(module.get_submodule(owner), leaf, value)


def read_layer(
    model: nn.Module, layers: nn.ModuleList, index: int, files: Sequence[Path], device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """One decoder layer of `model` with its weights, whose own copy has them elsewhere or not at all."""
    stack = next(name for name, module in model.named_modules() if module is layers)
    fresh = outline(model.config, dtype, trust_remote_code=True)  # its code runs already
    layer = fresh.get_submodule(stack)[index]
    fill(fresh, [layer], files, device, dtype)
    return layer


def absent(module: nn.Module) -> bool:
    """Whether any of its weights is not in memory."""
    return any(parameter.is_meta for parameter in module.parameters())


def _names(files: Sequence[Path]) -> dict[str, Path]:
    from safetensors import safe_open

    where: dict[str, Path] = {}
    for file in files:
        if file.suffix != ".safetensors":
            raise UserError(f"expected safetensors files to read parts of, found {file.name}: save the model as such")
        with safe_open(file, "pt") as handle:
            where |= dict.fromkeys(handle.keys(), file)
    return where


def _read(where: dict[str, Path], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(where[name], "pt") as handle:
        tensor = handle.get_tensor(name)
    if tensor.dtype not in PLAIN or tuple(tensor.shape) != shape:
        found = f"{str(tensor.dtype).removeprefix('torch.')} of {tuple(tensor.shape)}"
        raise UserError(f"expected a plain weight of {shape} at {name} in {where[name]}, found {found}")
    return tensor


def _tied(model: nn.Module, name: str) -> torch.Tensor | None:
    """An LM head that has no weights of its own in the files, because they are the embedding's."""
    embedding = model.get_input_embeddings().weight
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    is_head = model.get_output_embeddings() is not None and name == f"{_name_of(model)}.weight"
    return embedding if tied and is_head and not embedding.is_meta else None


def _name_of(model: nn.Module) -> str:
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)
