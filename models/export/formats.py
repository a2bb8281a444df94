"""Which serving layouts there are for which kind of head."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import UserError
from models.export import eagle1, safeai
from models.export.native import StoredHead

log = logging.getLogger(__name__)

FORMATS = {
    "eagle3": {"safeai": safeai.write, "vllm": safeai.write, "sglang": safeai.write},
    "eagle1": {"safeai": eagle1.write_vllm, "vllm": eagle1.write_vllm, "sglang": eagle1.write_sglang},
}


def names() -> list[str]:
    """Every format's name, of whichever kind of head."""
    return list(dict.fromkeys(name for formats in FORMATS.values() for name in formats))


def write_export(
    stored: StoredHead,
    out: Path,
    name: str = "safeai",
    dtype: torch.dtype = torch.float32,
    embedding_VD: Tensor | None = None,
) -> Path:
    """Writes the folder and returns it. Raises UserError when this kind of head has no such layout."""
    formats = FORMATS.get(stored.config.kind, {})
    if name not in formats:
        there = f"there are: {', '.join(formats)}" if formats else "there are none for it yet"
        raise UserError(f"no format '{name}' for {stored.config.kind} heads; {there}")
    return formats[name](stored, out, dtype, embedding_VD)


def exported(stored: StoredHead, out: Path) -> Path | None:
    """The default layout of this kind of head; None, with a log line, where it has none that holds this head."""
    if stored.config.kind not in FORMATS:
        log.info(f"no serving layout for {stored.config.kind} heads yet: the native head/ is all that is written")
        return None
    try:
        return write_export(stored, out)
    except UserError as error:  # a head that was published with biases: the run goes on without an export
        log.warning(f"no export: {error}")
        return None
