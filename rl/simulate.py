"""`python -m rl.simulate`: rl/commands/simulate.py."""

from reprise.rl.commands.main import run

if __name__ == "__main__":
    run("simulate")
