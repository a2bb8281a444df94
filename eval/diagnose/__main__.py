"""python -m eval.diagnose"""

from conf.cli import main
from eval.diagnose.command import run

if __name__ == "__main__":
    main("diagnose")(run)()
