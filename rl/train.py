"""`python -m rl.train`: rl/commands/train.py."""

from reprise.rl.commands.main import run

if __name__ == "__main__":
    run("train")
