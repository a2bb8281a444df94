"""python -m models.export run=DIR format=vllm out=DIR"""

from __future__ import annotations

from pathlib import Path

import torch

from conf.cli import Outcome, main
from conf.errors import UserError
from conf.schema import ExportCommandConf
from models.export.formats import names, write_export
from models.export.native import head_folder, read_head
from models.loading import FILE_DTYPES


@main("export")
def export(cfg: ExportCommandConf) -> Outcome:
    """Writes the head of a run in a foreign layout; default place: `export-FORMAT/` beside the head."""
    if cfg.run is None:
        raise UserError("give the run to export: python -m models.export run=outputs/NAME/TIME format=vllm out=DIR")
    if cfg.format not in names():
        raise UserError(f"no format '{cfg.format}'; there are: {', '.join(names())}")
    if cfg.dtype not in FILE_DTYPES:
        raise UserError(f"no dtype '{cfg.dtype}'; there are: {', '.join(FILE_DTYPES)}")
    stored = read_head(cfg.run)
    embedding_VD = _embedding(stored.verifier) if cfg.embedding else None
    out = Path(cfg.out) if cfg.out else head_folder(cfg.run).parent / f"export-{cfg.format}"
    write_export(stored, out, cfg.format, FILE_DTYPES[cfg.dtype], embedding_VD)
    return Outcome(out, {"format": cfg.format, "dtype": cfg.dtype, "verifier": stored.verifier.name})


def _embedding(card) -> torch.Tensor:
    from models.verifier import Verifier

    verifier = Verifier.load(card.name, dtype="float32")
    if verifier.weights_hash != card.weights_hash:
        raise UserError(
            f"the head's verifier has weights {card.weights_hash[:12]}, {card.name} here has "
            f"{verifier.weights_hash[:12]}; its embedding would be the wrong one"
        )
    return verifier.embedding_VD


if __name__ == "__main__":
    export()
