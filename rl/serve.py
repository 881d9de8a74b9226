"""`python -m rl.serve`: rl/commands/serve.py."""

from reprise.rl.commands.main import run

if __name__ == "__main__":
    run("serve")
