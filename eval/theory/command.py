"""What a draft is worth, as tables and plots.

python -m eval.theory alpha=0.8 c=0.05
python -m eval.theory run=outputs/eagle3_llama/TIME
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from rich.console import Group
from rich.table import Table

from conf.cli import Outcome
from conf.errors import UserError
from conf.terminal import TextConsole
from data.files import write_json
from eval.compare import read_alpha
from eval.plots import COLOURS, LINE, STAR, new_figure, save_figure
from eval.tables import number
from eval.theory.model import (
    Outlook,
    Times,
    Tree,
    batch_times,
    break_even,
    check_profile,
    conditional,
    equal_alpha,
    expected_tokens,
    measured_outlook,
    tree_outlook,
)

BATCHES = (1, 2, 4, 8, 16, 32, 64)
EXAMPLE = "python -m eval.theory alpha=0.8 c=0.05"


@dataclass(frozen=True)
class Draft:
    """Acceptance by depth and what it costs. c: draft step / verify. measured: alpha.json's values, if there are.

    timed: the times are measured too.
    """

    profile: list[float]
    times: Times
    c: float
    measured: dict | None = None
    timed: bool = False

    @property
    def wide(self) -> bool:
        """It is known what calls of many rows of one sequence cost."""
        return len(self.times.verify_by_width) > 1 and (self.measured is None or self.measured["batch"] == 1)


@dataclass(frozen=True)
class Batch:
    """The outlook of `size` sequences at once. known: the call at n_star is no wider than what was measured."""

    size: int
    outlook: Outlook
    known: bool


def draft_of(cfg) -> Draft:
    """cfg: conf.schema.TheoryCommandConf. Raises UserError unless it says what is accepted, once, and makes sense."""
    given = [name for name in ("alpha", "profile", "by_position", "run") if getattr(cfg, name) is not None]
    if len(given) != 1:
        raise UserError(
            f"expected one of alpha=A, profile=[a1,a2,...], by_position=[b1,b2,...] and run=DIR, found "
            f"{' and '.join(given) or 'none'}: e.g. {EXAMPLE}"
        )
    if not 1 <= cfg.max_n <= 1000:
        raise UserError(f"max_n must lie in 1..1000, found {cfg.max_n}")
    if cfg.run is not None:
        return _of_run(cfg)
    if cfg.alpha is not None:
        profile = [cfg.alpha] * cfg.max_n
    else:
        profile = list(cfg.profile) if cfg.by_position is None else conditional(cfg.by_position)
    check_profile(profile)
    c = 0.05 if cfg.c is None else cfg.c
    return Draft(profile, Times.simple(c, cfg.widths), c)


def _of_run(cfg) -> Draft:
    values = read_alpha(cfg.run)
    profile = list(takewhile(lambda a: a is not None, values["alpha_by_depth"]))
    if values["nodes"] != values["depth"] or not profile:
        found = f"a {values['decode']} of {values['nodes']} nodes" if profile else "no draft that was tested"
        raise UserError(
            f"expected a measured chain in {cfg.run}, found {found}: python -m eval run=DIR decode=chain decode.depth=N"
        )
    if cfg.c is None and cfg.widths is None and values["times"]:
        return Draft(profile, Times.of_record(values["times"]), values["cost_ratio"], values, timed=True)
    c = values["cost_ratio"] if cfg.c is None else cfg.c
    if c is None:
        raise UserError(f"{cfg.run} has no times: give the cost of a draft step over a verify call, c=C")
    return Draft(profile, Times.simple(c, cfg.widths), c, values)


def batches_of(cfg, draft: Draft) -> list[Batch]:
    """One outlook a batch size; none where the cost of wide calls isn't known. Raises UserError where asked for."""
    if cfg.batches is None and not draft.wide:
        return []
    sizes = list(BATCHES) if cfg.batches is None else cfg.batches
    if not draft.wide or not sizes or min(sizes) < 1:
        raise UserError(
            f"expected batches of 1 or more, and the cost of a verify call of one sequence by its rows (run=DIR "
            f"measured with decode.batch=1, or widths), found batches {sizes}"
        )
    found = []
    for size in sizes:
        outlook = measured_outlook(draft.profile, batch_times(draft.times, size, len(draft.profile)))
        found.append(Batch(size, outlook, size * (outlook.n_star + 1) <= draft.times.widest))
    return found


def tree_of(cfg, times: Times) -> Tree | None:
    if (cfg.shape is None) != (cfg.hits is None):
        raise UserError("a tree takes both its shape and its hit rates by level: shape=[2,2,2] hits=[.8,.8,.8]")
    return None if cfg.shape is None else tree_outlook(cfg.shape, cfg.hits, times)


def values_of(draft: Draft, outlook: Outlook, batches: list[Batch], tree: Tree | None) -> dict:
    """What json=true prints."""
    needed = {n: break_even(n, draft.times) for n in range(1, len(draft.profile) + 1)}
    values = outlook.to_dict() | {
        "c": draft.c,
        "break_even": min((a for a in needed.values() if a is not None), default=None),
        "break_even_by_n": {str(n): a for n, a in needed.items()},
    }
    if draft.measured:
        names = ("tau", "speedup", "predicted_speedup", "depth", "temperature", "verifier", "head")
        values["measured"] = {name: draft.measured[name] for name in names}
        values["equal_alpha"] = equal_alpha(outlook.expected_by_n[-1], len(draft.profile))
    if batches:
        values["batches"] = [
            {"batch": one.size, "n_star": one.outlook.n_star, "speedup": one.outlook.speedup, "known": one.known}
            | {"speedup_by_n": one.outlook.to_dict()["speedup_by_n"]}
            for one in batches
        ]
    if tree:
        values["tree"] = asdict(tree)
    return values


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def depth_table(draft: Draft, values: dict, rows: int = 16) -> Table:
    """Depths up to `rows` and the best one, which is marked."""
    heads = ("N", "tokens per verify", "drafts accepted", "speed-up", "pays from alpha")
    table = _table(f"chains, {'measured times' if draft.timed else f'c = {draft.c:g}'}", *heads)
    for n, expected in values["expected_by_n"].items():
        best = int(n) == values["n_star"]
        if int(n) <= rows or best:
            speed = f"{values['speedup_by_n'][n]:.4f}" + (" *" if best else "")
            needed = values["break_even_by_n"][n]
            pays = "never" if needed is None else f"{needed:.4f}"
            table.add_row(n, f"{expected:.4f}", f"{expected - 1:.4f}", speed, pays, style="bold" if best else "")
    return table


def batch_table(batches: list[Batch]) -> Table:
    """The best depth of each batch, and a few fixed ones beside it."""
    some = [n for n in (1, 3, 5, 7, 10) if n <= len(batches[0].outlook.speedup_by_n)]
    table = _table("sequences at once", "batch", "N*", "speed-up at N*", *(f"at N={n}" for n in some), "rows")
    for one in batches:
        fixed = (f"{one.outlook.speedup_by_n[n - 1]:.2f}" for n in some)
        rows = f"{one.size * (one.outlook.n_star + 1)}" + ("" if one.known else " ?")
        table.add_row(str(one.size), str(one.outlook.n_star), f"{one.outlook.speedup:.3f}", *fixed, rows)
    return table


def tree_table(tree: Tree, draft: Draft) -> Table:
    """The tree beside the chains of as many levels and of as many rows."""
    table = _table("tree and chains", "", "rows", "draft steps", "tokens per verify", "speed-up")
    steps = f"{tree.nodes + 1}", f"{tree.levels}"
    table.add_row(f"tree of {tree.nodes}", *steps, f"{tree.expected:.4f}", f"{tree.speedup:.4f}")
    for n in sorted({tree.levels, tree.nodes}):
        if n <= len(draft.profile):
            expected = expected_tokens(draft.profile[:n])
            speed = expected * draft.times.decode / draft.times.round(n)
            table.add_row(f"chain of {n}", f"{n + 1}", f"{n}", f"{expected:.4f}", f"{speed:.4f}")
    return table


def remarks(draft: Draft, batches: list[Batch], values: dict) -> list[str]:
    """What the tables don't say by themselves."""
    needed = values["break_even"]
    lines = [
        "no draft length pays, whatever is accepted"
        if needed is None
        else f"drafting pays where more than {needed:.4f} of the drafts are accepted at every depth"
    ]
    if draft.measured:
        measured = values["measured"]
        tau, speedup, equal = (number(x) for x in (measured["tau"], measured["speedup"], values["equal_alpha"]))
        lines.append(
            f"measured at N={measured['depth']}: tau {tau}, speed-up {speedup}; n-alpha is worth {equal} at every depth"
        )
        if values["n_star"] == len(draft.profile):
            lines.append("the best N is the deepest that was measured: measure deeper, decode.depth=N")
    if not all(one.known for one in batches):
        lines.append(f"?: more than the {draft.times.widest} rows whose cost is known; reckoned along the fitted line")
    return lines


def plot(draft: Draft, outlook: Outlook, batches: list[Batch], path: Path) -> Path:
    """Tokens and speed-up by N, a star at N*; the speed-up by N at some batch sizes."""
    figure, axes = new_figure(3 if batches else 2)
    depths = range(1, min(len(draft.profile), max(16, 2 * outlook.n_star)) + 1)
    line, shown = LINE | {"markersize": 3}, slice(len(depths))
    axes[0].plot(depths, outlook.expected_by_n[shown], color=COLOURS[0], **line)
    axes[0].set(xlabel="drafts per verify call N", ylabel="tau", title="Tokens per verify call")
    axes[1].plot(depths, outlook.speedup_by_n[shown], color=COLOURS[0], **line)
    if outlook.n_star:
        axes[1].plot([outlook.n_star], [outlook.speedup], color=COLOURS[1], **STAR)
    axes[1].set(xlabel="drafts per verify call N", title=f"Speed-up: {outlook.speedup:.2f} at N = {outlook.n_star}")
    for colour, one in zip(COLOURS, batches, strict=False):
        axes[2].plot(depths, one.outlook.speedup_by_n[shown], color=colour, label=f"{one.size}", **line)
    if batches:
        axes[2].set(xlabel="drafts per verify call N", title="Speed-up by sequences at once")
        axes[2].legend(frameon=False, ncols=2, fontsize=8)
    for one in axes[1:]:
        one.axhline(1, color="#999999", lw=1, ls="--")
    return save_figure(figure, path)


def run(cfg) -> Outcome:
    """The command: tables, and with out=DIR theory.json and theory.png."""
    draft = draft_of(cfg)
    outlook = measured_outlook(draft.profile, draft.times)
    batches, tree = batches_of(cfg, draft), tree_of(cfg, draft.times)
    values = values_of(draft, outlook, batches, tree)
    shown = [depth_table(draft, values)]
    shown += [tree_table(tree, draft)] if tree else []
    shown += [batch_table(batches)] if batches else []
    TextConsole(stderr=cfg.json).print(Group(*shown, *remarks(draft, batches, values)))
    if cfg.out is None:
        return Outcome(values=values)
    folder = Path(cfg.out)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "theory.json", values)
    return Outcome(plot(draft, outlook, batches, folder / "theory.png"), values)
