"""python -m eval.tuner"""

from conf.cli import main
from eval.tuner.command import run

main("tuner")(run)()
