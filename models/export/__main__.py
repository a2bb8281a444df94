"""python -m models.export run=DIR format=vllm out=DIR"""

from __future__ import annotations

from pathlib import Path

from conf.cli import Outcome, main
from conf.errors import UserError
from conf.schema import ExportCommandConf
from models.export.formats import format_of, names, own_dtype, write_export
from models.export.native import head_folder, read_head
from models.loading import FILE_DTYPES
from models.verifier import Verifier


@main("export")
def export(cfg: ExportCommandConf) -> Outcome:
    """Writes the head of a run in a foreign layout; default place: `export-FORMAT/` beside the head."""
    if not cfg.run:
        raise UserError("give the run to export: python -m models.export run=outputs/NAME/TIME format=vllm out=DIR")
    if cfg.format not in names():
        raise UserError(f"no format '{cfg.format}'; there are: {', '.join(names())}")
    if cfg.dtype not in ("auto", *FILE_DTYPES):
        raise UserError(f"no dtype '{cfg.dtype}'; there are: auto, {', '.join(FILE_DTYPES)}")
    if cfg.out == "":
        raise UserError("expected out=DIR, found no name: leave it out for export-FORMAT/ beside the head")
    stored = read_head(cfg.run)
    verifier = None
    if cfg.embedding or cfg.verifier_source or format_of(stored, cfg.format).needs_verifier:
        verifier = Verifier.load(
            cfg.verifier_source or stored.verifier.name, dtype="float32", device="cpu", aux_layers=[]
        )
    out = Path(cfg.out) if cfg.out else head_folder(cfg.run).parent / f"export-{cfg.format}"
    dtype = FILE_DTYPES.get(cfg.dtype, own_dtype(stored))
    write_export(stored, out, cfg.format, dtype, verifier)
    name = str(dtype).removeprefix("torch.")
    return Outcome(out, {"format": cfg.format, "dtype": name, "verifier": stored.verifier.name})


if __name__ == "__main__":
    export()
