"""python -m eval run=DIR [decode.depth=N] [temperature=T] [prompts=FILE]"""

from conf.cli import main
from eval.command import evaluate_run

if __name__ == "__main__":
    main("eval")(evaluate_run)()
