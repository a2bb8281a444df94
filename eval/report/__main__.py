"""python -m eval.report runs=outputs/A/TIME"""

from conf.cli import main
from eval.report.command import report

if __name__ == "__main__":
    main("report")(report)()
