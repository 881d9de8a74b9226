"""`python -m rl.preflight`: rl/commands/preflight.py."""

from reprise.rl.commands.main import run

if __name__ == "__main__":
    run("preflight")
