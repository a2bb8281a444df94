"""python -m eval.theory"""

from conf.cli import main
from eval.theory.command import run

main("theory")(run)()
