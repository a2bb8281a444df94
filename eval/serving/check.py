"""make serve-check: real engines with our exports, against themselves without drafts and against our own loop.

python -m eval.serving.check runs=[outputs/eagle3_llama/TIME] engines=[vllm] depths=[3]

For each engine, head and draft length: whether the text is the engine's own, tau and acceptance by position as the
engine counts them beside our loop's on the same prompts, and the replay certificate. Chain, temperature 0.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conf.cli import Outcome, main
from conf.errors import UserError
from data.files import write_json
from eval.command import shown
from eval.counts import pool
from eval.measure import EvalSettings, PromptRun, run_prompts, use_threads
from eval.prompts import Prompt, load_prompts
from eval.serving.certificate import Certificate, certify
from eval.serving.engine import EngineRun, Job, run_engine
from eval.speculative.scorers import drafter_for
from eval.speculative.shapes import FixedTree
from eval.tables import markdown_table, number
from models import embedded
from models.export.formats import write_export
from models.export.native import attach, read_head
from models.loading import FILE_DTYPES
from models.verifier import Verifier

log = logging.getLogger(__name__)
BAR = 1.0  # percent between the engine's tau and ours


@dataclass(frozen=True)
class Engine:
    """environment: the folder below `environments`. formats: the export that it loads, by kind of head."""

    environment: str
    worker: str
    formats: dict[str, str]


ENGINES = {
    "vllm": Engine("vllm", "vllm_worker.py", {"eagle3": "vllm", "eagle1": "vllm", "medusa": "medusa"}),
}


@dataclass(frozen=True)
class Row:
    """One engine with one head and draft length. same_text: prompts whose text is the engine's own without drafts.

    by_position: acceptance of draft n, the engine's and ours.
    """

    engine: str
    head: str
    kind: str
    depth: int
    prompts: int
    same_text: int
    same_as_ours: int
    tau: float | None
    our_tau: float | None
    by_position: list[float | None] | None
    our_by_position: list[float | None]
    certificate: Certificate | None
    tokens_per_second: float | None
    plain_tokens_per_second: float | None

    @property
    def percent(self) -> float | None:
        """The engine's tau over ours."""
        return 100 * (self.tau / self.our_tau - 1) if self.tau and self.our_tau else None

    @property
    def apart(self) -> float | None:
        """The largest difference of acceptance by position."""
        pairs = zip(self.by_position or [], self.our_by_position, strict=bool(self.by_position))
        return max((abs((a or 0) - (b or 0)) for a, b in pairs), default=None)

    @property
    def passes(self) -> bool:
        sure = self.certificate is None or self.certificate.holds
        return self.same_text == self.prompts and self.percent is not None and abs(self.percent) <= BAR and sure


@main("serve_check")
def check(cfg) -> Outcome:
    """cfg: conf.schema.ServeCheckCommandConf. Raises UserError, with everything written, when a row does not pass."""
    if not cfg.runs:
        raise UserError("give the heads to check: runs=[outputs/eagle3_llama/TIME, ...]")
    engines = {name: engine_of(name, Path(cfg.environments)) for name in cfg.engines}
    out = Path(cfg.out or f"outputs/serve-check/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    rows: list[Row] = []
    for run in map(Path, [cfg.runs] if isinstance(cfg.runs, str) else cfg.runs):
        rows += check_head(cfg, run, engines, out)
    file = out / "serve_check.json"
    write_json(file, {"rows": [record(row) for row in rows], "bar_percent": BAR})
    (out / "serve_check.md").write_text(markdown_table(HEADER, map(cells, rows)) + "\n")
    Console(stderr=cfg.json, width=160).print(table(rows))
    if failed := [row for row in rows if not row.passes]:
        raise UserError(f"{len(failed)} of {len(rows)} rows do not pass, {reason(failed[0])}; all of it is in {file}")
    return Outcome(file, {"rows": [record(row) for row in rows], "serve_check_json": str(file)})


def engine_of(name: str, environments: Path) -> tuple[Engine, Path]:
    """The engine and its Python. Raises UserError when there is none of that name, or it is not installed."""
    if name not in ENGINES:
        raise UserError(f"no engine '{name}'; there are: {', '.join(ENGINES)}")
    python = environments / ENGINES[name].environment / "bin" / "python"
    if not python.is_file():
        raise UserError(f"expected {name} in {python.parents[1]}, found none: make {python.parents[1]}")
    return ENGINES[name], python.absolute()


def check_head(cfg, run: Path, engines: dict[str, tuple[Engine, Path]], out: Path) -> list[Row]:
    """All engines that load this kind of head, at every draft length."""
    stored = read_head(run)
    kind, card = stored.config.kind, stored.verifier
    engines = {name: found for name, found in engines.items() if kind in found[0].formats}
    if not engines:
        raise UserError(f"none of the engines {', '.join(cfg.engines)} loads a head of kind {kind}: leave {run} out")
    verifier = Verifier.load(card.name, dtype=cfg.dtype, device="cpu", aux_layers=list(stored.config.aux_layers))
    head, prompts = attach(stored, verifier, verifier.dtype), load_prompts(verifier, cfg.prompts, cfg.limit)
    ours = {depth: our_loop(cfg, verifier, head, prompts, depth) for depth in cfg.depths}
    near = {layer + step for layer in stored.config.aux_layers for step in (-1, 0, 1)}
    layers = sorted(layer for layer in near if 0 <= layer <= card.num_layers)
    around = verifier.capturing(layers)
    job = Job(
        verifier=engine_source(card.name),
        head=None,
        method=kind,
        depth=max(cfg.depths),
        prompts=[list(prompt.input_ids) for prompt in prompts],
        max_new_tokens=cfg.max_new_tokens,
        stop_ids=list(verifier.eos_ids),
        dtype=cfg.dtype,
        threads=cfg.threads or 1,
        batch=cfg.batch,
    )
    rows = []
    for name, (engine, python) in engines.items():
        export = (out / f"{name}-{kind}" / "head").absolute()
        write_export(stored, export, engine.formats[kind], FILE_DTYPES[cfg.dtype], verifier)
        plain = run_engine([str(python)], engine.worker, job, out / f"{name}-{kind}" / "plain")
        for depth in cfg.depths:
            drafting = replace(job, head=str(export), depth=depth)
            run_of = run_engine([str(python)], engine.worker, drafting, out / f"{name}-{kind}" / f"depth-{depth}")
            certificate = certify(around, head, job.prompts, run_of) if run_of.rounds else None
            rows.append(row_of(name, shown(run), kind, depth, plain, run_of, ours[depth], certificate))
            log.info("%s", " | ".join(cells(rows[-1])))
    return rows


def our_loop(cfg, verifier, head, prompts: Sequence[Prompt], depth: int) -> list[PromptRun]:
    """The same prompts through our speculative loop."""
    settings = EvalSettings(FixedTree.chain(depth), max_new_tokens=cfg.max_new_tokens, batch=cfg.batch, baseline=False)
    drafter = drafter_for(head, settings.shape, settings.sampling)
    if drafter.depth < depth:
        raise UserError(f"expected {depth} or more heads, found {drafter.depth}: give depths=[{drafter.depth}]")
    with use_threads(cfg.threads):
        return run_prompts(verifier, drafter, prompts, settings, progress=True)


def row_of(
    name: str,
    head: str,
    kind: str,
    depth: int,
    plain: EngineRun,
    drafted: EngineRun,
    ours: Sequence[PromptRun],
    certificate: Certificate | None,
) -> Row:
    counts = pool(run.counts for run in ours)
    return Row(
        engine=f"{name} ({drafted.engine})",
        head=head,
        kind=kind,
        depth=depth,
        prompts=len(ours),
        same_text=sum(one == other for one, other in zip(drafted.texts, plain.texts, strict=True)),
        same_as_ours=sum(text == run.speculative.tokens for text, run in zip(drafted.texts, ours, strict=True)),
        tau=drafted.tau,
        our_tau=counts.tau,
        by_position=drafted.by_position,
        our_by_position=counts.accepted_by_position,
        certificate=certificate,
        tokens_per_second=drafted.tokens_per_second,
        plain_tokens_per_second=plain.tokens_per_second,
    )


def engine_source(verifier: str) -> str:
    """The verifier as an engine finds it: a folder, or a hub name."""
    folder = embedded.folder() if verifier == embedded.NAME else Path(verifier).expanduser()
    return str(folder.absolute()) if folder.is_dir() else verifier


# --- what people see ------------------------------------------------------------------------------------------

HEADER = (
    "engine",
    "head",
    "K",
    "text as without drafts",
    "text as ours",
    "engine tau",
    "our tau",
    "difference",
    "by position, engine",
    "by position, ours",
    "equal drafts",
    "passes",
)


def cells(row: Row) -> tuple[str, ...]:
    """One row of the table."""
    found = row.certificate
    ties = f", {found.ties} at ties" if found and found.ties else ""
    return (
        row.engine,
        row.kind,
        str(row.depth),
        f"{row.same_text} of {row.prompts}",
        f"{row.same_as_ours} of {row.prompts}",
        number(row.tau, 4),
        number(row.our_tau, 4),
        number(row.percent, 2) + " %",
        " ".join(number(value) for value in row.by_position) if row.by_position else "-",
        " ".join(number(value) for value in row.our_by_position),
        f"{found.equal} of {found.compared}{ties}" if found else "-",
        "yes" if row.passes else "NO",
    )


def table(rows: Sequence[Row]) -> Table:
    """All rows for the terminal."""
    shown_table = Table(title="engines with our exports, chain, temperature 0")
    for name in HEADER:
        shown_table.add_column(name)
    for row in rows:
        shown_table.add_row(*cells(row))
    return shown_table


def reason(row: Row) -> str:
    """Why a row does not pass."""
    where, found = f"{row.engine} with {row.kind} at K = {row.depth}", row.certificate
    if found and not found.holds:
        return f"{where} drafts otherwise: {found.cause or 'nothing was compared'}"
    if row.same_text < row.prompts:
        return f"{where}: {row.prompts - row.same_text} texts are other than without drafts"
    return f"{where}: tau is {number(row.percent, 2)} % from ours, and {BAR:g} % are allowed"


def record(row: Row) -> dict:
    """A row as JSON."""
    return asdict(row) | {"percent": row.percent, "apart": row.apart, "passes": row.passes}


if __name__ == "__main__":
    check()
