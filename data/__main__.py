"""python -m data task=synthesize|regenerate|tokenize|vocab|capture|inspect [data.path=FILE] [budget=demo]"""

from conf.cli import main
from data.command import run

if __name__ == "__main__":
    main("data")(run)()
