"""What `make serve-check` finds of one engine, head and draft length, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from conf.errors import UserError
from eval.serving.certificate import Certificate
from eval.serving.engine import EngineRun, Job
from eval.serving.metrics import Tally
from eval.tables import number

BAR = 1.0  # percent between the engine's tau and ours
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


@dataclass(frozen=True)
class Row:
    """One engine with one head and draft length. same_text: prompts whose text is the engine's own without drafts;
    None of a server, which is not started twice: its texts are held to the verifier's own.  agrees: what
    `python -m eval serve=URL` found of a server.

    by_position: acceptance of draft n, the engine's and ours.
    """

    engine: str
    head: str
    kind: str
    depth: int
    prompts: int
    same_text: int | None
    same_as_ours: int
    tau: float | None
    our_tau: float | None
    by_position: list[float | None] | None
    our_by_position: list[float | None]
    certificate: Certificate | None
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    agrees: bool = True

    def __post_init__(self) -> None:
        if self.by_position and len(self.by_position) != len(self.our_by_position):
            raise UserError(
                f"expected acceptance of {len(self.our_by_position)} positions from {self.engine}, found "
                f"{len(self.by_position)}: it drafts another length than K = {self.depth}"
            )

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
        sure = self.agrees and (self.certificate is None or self.certificate.holds)
        same = self.same_as_ours if self.same_text is None else self.same_text
        return same == self.prompts and self.percent is not None and abs(self.percent) <= BAR and sure


def row_of(
    name: str,
    head: str,
    job: Job,
    plain: EngineRun,
    drafted: EngineRun,
    ours: Tally,
    our_texts: Sequence[list[int]],
    certificate: Certificate | None,
) -> Row:
    """job: what `drafted` was asked. ours: our loop's counts, by the engine's rule."""
    return Row(
        engine=f"{name} ({drafted.engine})",
        head=head,
        kind=job.method,
        depth=job.depth,
        prompts=len(job.prompts),
        same_text=sum(one == other for one, other in zip(drafted.texts, plain.texts, strict=True)),
        same_as_ours=sum(one == other for one, other in zip(drafted.texts, our_texts, strict=True)),
        tau=drafted.tau,
        our_tau=ours.tau,
        by_position=drafted.by_position,
        our_by_position=ours.rates,
        certificate=certificate,
        tokens_per_second=drafted.tokens_per_second,
        plain_tokens_per_second=plain.tokens_per_second,
    )


def row_of_server(name: str, head: str, kind: str, values: dict) -> Row:
    """From the values of a serve.json. Its texts are compared with the verifier's own, and its drafts can't be seen."""
    theirs, ours = values["server_counts"], values["our_counts"]
    return Row(
        engine=f"{name} ({values['fingerprint'] or values['engine']})",
        head=head,
        kind=kind,
        depth=values["depth"],
        prompts=len(values["prompts"]),
        same_text=None,
        same_as_ours=values["identical_texts"],
        tau=theirs["tau"],
        our_tau=ours["tau"],
        by_position=theirs["accepted_by_position"],
        our_by_position=ours["accepted_by_position"],
        certificate=None,
        tokens_per_second=values["tokens_per_second"]["server"],
        plain_tokens_per_second=None,
        agrees=values["verdict"]["same"],
    )


def cells(row: Row) -> tuple[str, ...]:
    """One row of the table."""
    found = row.certificate
    ties = f", {found.ties} at ties" if found and found.ties else ""
    return (
        row.engine,
        f"{row.kind} {row.head}",
        str(row.depth),
        "-" if row.same_text is None else f"{row.same_text} of {row.prompts}",
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
    if row.same_text is None and (row.same_as_ours < row.prompts or not row.agrees):
        return f"{where}: see the verdict in its serve.json"
    if row.same_text is not None and row.same_text < row.prompts:
        return f"{where}: {row.prompts - row.same_text} texts are other than without drafts"
    return f"{where}: tau is {number(row.percent, 2)} % from ours, and {BAR:g} % are allowed"


def record(row: Row) -> dict:
    """A row as JSON."""
    return asdict(row) | {"percent": row.percent, "apart": row.apart, "passes": row.passes}
