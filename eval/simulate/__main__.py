"""python -m eval.simulate"""

from conf.cli import main
from eval.simulate.command import run

main("simulate")(run)()
