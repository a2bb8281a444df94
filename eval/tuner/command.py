"""Reads what was measured and what is served, decides, and writes tuner.md and tuner.json.

python -m eval.tuner run=outputs/eagle3_llama/TIME
python -m eval.tuner workload=chat_8b_h100
python -m eval.tuner metrics=[before.txt,after.txt] family=eagle3 workload=chat_8b_h100
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from rich.markdown import Markdown

from conf.cli import Outcome
from conf.terminal import TextConsole
from data.files import replacing, write_json
from eval.tuner.evidence import evidence_of
from eval.tuner.page import page
from eval.tuner.record import record
from eval.tuner.rules import recommend


def run(cfg) -> Outcome:
    """cfg: conf.schema.TunerCommandConf. A refusal is an answer too. Raises UserError for mistakes."""
    values = record(recommend(cfg.workload, evidence_of(cfg)))
    text, folder = page(values), _folder(cfg)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "tuner.json", values)
    with replacing(folder / "tuner.md") as part:
        part.write_text(text)
    TextConsole(stderr=cfg.json).print(Markdown(text))
    return Outcome(folder / "tuner.md", values)


def _folder(cfg) -> Path:
    if cfg.out is not None:
        return Path(cfg.out)
    if cfg.run is not None:
        run = Path(cfg.run)
        return run if run.is_dir() else run.parent
    return Path("outputs") / f"tuner-{datetime.now():%Y-%m-%d_%H-%M-%S}"
