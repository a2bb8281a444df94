"""One self-contained page of a run, or of several side by side.

run.py and comparison.py: what stands on them; tokens.py: the texts, round by round; page.py, charts.py: what they are
made of; page.css and tokens.js go into every page whole.
"""

from eval.report.comparison import write_comparison
from eval.report.run import write_plots, write_report

__all__ = ["write_comparison", "write_plots", "write_report"]
