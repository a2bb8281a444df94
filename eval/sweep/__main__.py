"""python -m eval.sweep"""

from conf.cli import main
from eval.sweep.command import run

if __name__ == "__main__":
    main("sweep")(run)()
