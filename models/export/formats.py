"""Which serving layouts there are for which kind of head."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from conf.errors import UserError
from models.export import eagle1, gguf, medusa, openvino, safeai, speculators, trtllm
from models.export.native import StoredHead
from models.loading import FILE_DTYPES
from models.verifier import Verifier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Format:
    """write(stored, out, dtype, verifier) -> out.  needs_verifier: for its embedding or its tokenizer."""

    write: Callable[[StoredHead, Path, torch.dtype, Verifier | None], Path]
    needs_verifier: bool = False


FORMATS: dict[str, dict[str, Format]] = {
    "eagle3": {
        **{name: Format(safeai.write) for name in ("safeai", "vllm")},
        "sglang": Format(safeai.write_sglang),
        "speculators": Format(speculators.write, needs_verifier=True),
        "gguf": Format(gguf.write, needs_verifier=True),
        "openvino": Format(openvino.write, needs_verifier=True),
        "trtllm": Format(trtllm.write_eagle3),
    },
    "eagle1": {
        "safeai": Format(eagle1.write_vllm),
        "vllm": Format(eagle1.write_vllm),
        "sglang": Format(eagle1.write_sglang),
    },
    "medusa": {
        **{name: Format(medusa.write) for name in ("medusa", "vllm")},
        "trtllm": Format(trtllm.write_medusa),
    },
}


def names() -> list[str]:
    """Every format's name, of whichever kind of head."""
    return list(dict.fromkeys(name for formats in FORMATS.values() for name in formats))


def write_export(
    stored: StoredHead,
    out: Path,
    name: str = "safeai",
    dtype: torch.dtype | None = None,
    verifier: Verifier | None = None,
) -> Path:
    """Writes the folder and returns it. Raises UserError when this kind of head has no such layout.

    dtype: None is the verifier's own.  verifier: the head's; its embedding is written as well, also where the layout
    can do without. UserError for a place in the verifier's own folder.
    """
    for source in {stored.verifier.name, *([verifier.name] if verifier else [])}:
        folder = Path(source).expanduser().resolve()
        if folder.is_dir() and Path(out).resolve().is_relative_to(folder):
            raise UserError(
                f"expected a place outside the verifier's folder {folder}, found {out}: give another out=DIR"
            )
    return format_of(stored, name).write(stored, out, dtype or own_dtype(stored), verifier)


def own_dtype(stored: StoredHead) -> torch.dtype:
    """The verifier's, as it is stored; float32 where the head doesn't know it, or files of heads can't have it."""
    return FILE_DTYPES.get(stored.verifier.dtype, torch.float32)


def format_of(stored: StoredHead, name: str) -> Format:
    """The layout of that name for this kind of head; UserError when there is none."""
    formats = FORMATS.get(stored.config.kind, {})
    if name not in formats:
        there = f"there are: {', '.join(formats)}" if formats else "no engine that we know loads one"
        raise UserError(f"no format '{name}' for {stored.config.kind} heads; {there}")
    return formats[name]


def exported(stored: StoredHead, out: Path) -> Path | None:
    """The default layout of this kind of head; None, with a log line, where it has none that holds this head."""
    if stored.config.kind not in FORMATS:
        log.info(f"no serving layout for {stored.config.kind} heads yet: the native head/ is all that is written")
        return None
    try:
        return write_export(stored, out, next(iter(FORMATS[stored.config.kind])))
    except UserError as error:  # a head that was published with biases: the run goes on without an export
        log.warning(f"no export: {error}")
        return None
