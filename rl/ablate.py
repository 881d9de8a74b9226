"""`python -m rl.ablate`: rl/commands/ablate.py."""

from reprise.rl.commands.main import run

if __name__ == "__main__":
    run("ablate")
