"""`python -m rl.report`: rl/commands/report.py."""

from reprise.rl.commands.main import run

if __name__ == "__main__":
    run("report")
