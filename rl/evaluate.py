"""`python -m rl.evaluate`: rl/commands/evaluate.py."""

from reprise.rl.commands.main import run

if __name__ == "__main__":
    run("evaluate")
