"""Simulations with known answers.

python -m eval.simulate name=chi_square
python -m eval.simulate name=all json=true
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from conf.cli import Outcome
from conf.errors import UserError
from conf.terminal import TextConsole
from data.files import write_json
from eval.simulate import chi_square, draft_quality, n_sweep, rollback, tree
from eval.simulate.finding import verdict

SIMULATIONS = {
    "chi_square": chi_square.simulate,
    "n_sweep": n_sweep.simulate,
    "tree": tree.simulate,
    "rollback": rollback.simulate,
    "draft_quality": draft_quality.simulate,
}


def run(cfg) -> Outcome:
    """cfg: conf.schema.SimulateCommandConf. Tables, simulate.json and a PNG a simulation."""
    if cfg.name not in (*SIMULATIONS, "all"):
        raise UserError(f"expected name to be one of {', '.join(SIMULATIONS)} or all, found {cfg.name}")
    if cfg.rounds is not None and cfg.rounds < 1:
        raise UserError(f"rounds must be 1 or more, found {cfg.rounds}")
    names = list(SIMULATIONS) if cfg.name == "all" else [cfg.name]
    folder = Path(cfg.out) if cfg.out else Path("outputs", f"simulate-{datetime.now():%Y-%m-%d_%H-%M-%S}")
    console = TextConsole(stderr=cfg.json)
    values = {}
    for name in names:
        finding = SIMULATIONS[name](cfg)
        values[name] = finding.to_dict()
        console.print(*finding.shown, *verdict(finding.checks), sep="\n")
        finding.draw(folder / f"{name}.png")
    values["agrees"] = all(values[name]["agrees"] for name in names)
    write_json(folder / "simulate.json", values)
    return Outcome(folder / "simulate.json", values)
