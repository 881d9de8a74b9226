"""`python -m rl.demo`: rl/commands/demo.py."""

from reprise.rl.commands.main import run

if __name__ == "__main__":
    run("demo")
