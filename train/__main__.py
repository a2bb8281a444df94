"""python -m train experiment=NAME [overrides]"""

from train.main import train

if __name__ == "__main__":
    train()
