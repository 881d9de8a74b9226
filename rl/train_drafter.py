"""`python -m rl.train_drafter`: rl/commands/train_drafter.py."""

from reprise.rl.commands.main import run

if __name__ == "__main__":
    run("train_drafter")
