"""`python -m rl.export`: rl/commands/export.py."""

from reprise.rl.commands.main import run

if __name__ == "__main__":
    run("export")
