"""Trainer processes that do as the name of their "configuration" says: no training, no jax."""

import contextlib
import json
import signal
import sys
import time

COMMAND = (sys.executable, __file__)


def main():
    start = json.loads(sys.stdin.readline())
    number, play = start["process_id"], start["config"]
    print(f"number {number} at {start['coordinator']}")
    if not play.startswith("one fails"):
        print("error: all say so", file=sys.stderr)
    print(f"only {number} says so", file=sys.stderr, flush=True)
    if play == "ends":
        sys.exit(0)
    if play == "stops":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print("ready", flush=True)
        time.sleep(60)
    if play == "stops at the start":
        print("ready", flush=True)
        time.sleep(60)
    if play == "one is killed" and number == 1:
        signal.raise_signal(signal.SIGKILL)
    if play.startswith("one fails") and number == 1:
        sys.exit(1)
    if play == "one fails, the other ends":
        sys.exit(0)
    with contextlib.suppress(KeyboardInterrupt):
        time.sleep(60)


if __name__ == "__main__":
    main()
