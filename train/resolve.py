"""What a command line leaves open, filled in before anything runs: the budget, and a resumed run's settings."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.cli import with_budget
from conf.errors import UserError
from conf.explain import explain, groups
from conf.parse import yaml_file
from conf.schema import TrainConf
from data.files import replacing

CONFIG = "config.yaml"
# What may differ from the run that is continued: how long, where, and what is looked at. Never what is learnt from.
RESUMABLE = ("trainer.", "evaluation.", "decode.", "logger.", "json", "resume", "plan", "threads")
FIXED = ("trainer.tokens_per_step", "trainer.accumulate")


def with_defaults(overrides: list[str]) -> list[str]:
    """Adds `budget=hour` (CPU) or `budget=full` (GPU) where none is named, and a resumed run's folder.

    resume=outputs/NAME is the newest run in it.
    """
    parsed = OverridesParser.create().parse_overrides(overrides)
    resumed = next((item.value() for item in parsed if item.key_or_group == "resume"), None)
    if resumed:
        folder = run_in(Path(str(resumed)))
        others = [item.input_line for item in parsed if item.key_or_group != "resume"]
        return [*others, f"resume='{folder}'", f"hydra.run.dir='{folder}'"]
    return with_budget("train", overrides)


def run_in(folder: Path) -> Path:
    """`folder` itself when it is a run's, else the newest run in it, by the time in its name. UserError without one."""
    runs = [folder] if (folder / CONFIG).is_file() else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if not runs:
        raise UserError(f"expected a run folder with {CONFIG} to resume, found none at {folder}")
    return runs[-1]


def resumed_config(folder: Path, overrides: list[str]) -> TrainConf:
    """The settings that `folder` was started with, and of `overrides` those that a resumed run may change."""
    kept = []
    for item in OverridesParser.create().parse_overrides(overrides):
        name = item.key_or_group
        if name in groups("train") or name.startswith(FIXED) or not name.startswith(RESUMABLE):
            raise UserError(
                f"{name} cannot change when a run is resumed; what can: {', '.join(RESUMABLE)} "
                f"(single settings, without {', '.join(FIXED)})"
            )
        kept.append(item.input_line)
    parts = OmegaConf.structured(TrainConf), yaml_file(folder / CONFIG), OmegaConf.from_dotlist(kept)
    try:
        cfg = OmegaConf.to_object(OmegaConf.merge(*parts))
        OmegaConf.structured(cfg)  # merging lets any value into a list
    except (OmegaConfBaseException, OverflowError) as error:
        raise UserError(f"{folder / CONFIG} is not of this version: {explain(error)}") from error
    cfg.resume = str(folder)
    return cfg


def write_config(cfg: TrainConf, folder: Path) -> None:
    """config.yaml: every setting with the value that was used."""
    values = OmegaConf.structured(cfg)
    for once in ("resume", "json", "plan"):  # of the command, not of the run
        values[once] = next(f.default for f in fields(TrainConf) if f.name == once)
    with replacing(folder / CONFIG) as temporary:
        OmegaConf.save(values, temporary)
