"""What `python -m eval.report` does.

python -m eval.report runs=outputs/a/TIME
python -m eval.report runs=[outputs/a/TIME,outputs/b/TIME] out=compare.html
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from conf.cli import Outcome
from conf.errors import UserError
from eval.report.comparison import write_comparison
from eval.report.run import write_report


def report(cfg) -> Outcome:
    """cfg: conf.schema.ReportCommandConf. One run gets its own page again, several get a comparison."""
    runs = [cfg.runs] if isinstance(cfg.runs, str) else list(cfg.runs or [])
    if not runs:
        raise UserError("give the runs to show: python -m eval.report runs=[outputs/NAME/TIME,...] out=FILE")
    runs = [Path(str(run)) for run in runs]
    out = Path(cfg.out) if cfg.out else None
    if len(runs) == 1:
        return Outcome(write_report(runs[0], out=out))
    return Outcome(write_comparison(runs, out or Path("outputs", f"comparison-{_now()}", "comparison.html")))


def _now() -> str:
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
