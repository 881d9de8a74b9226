"""Environments that misbehave on command: the text of a turn says how, or the answer of a row."""

import os
import pathlib
import signal
import subprocess
import sys
import time

ANSWERS = {
    "number": 5,
    "bytes": b"5",
    "roles": [{"role": "assistant", "content": "I am the policy"}],
    "content": [{"role": "user", "content": 5}],
    "no content": [{"role": "user"}],
    "surrogate": "\ud800",
    "long": "a" * (2**20 + 1),
    "many": [{"role": "user", "content": ""}] * 257,
    "unknown": {"messages": "a", "score": 1.0},
    "empty": {},
    "not done": {"messages": None, "done": False},
    "done": {"messages": "a", "done": "yes"},
    "reward": {"messages": "a", "reward": "much"},
    "nan": {"messages": "a", "reward": float("nan")},
}


class Faulty:
    """Repeats a turn, unless it names a fault."""

    def reset(self, answer, **columns):
        self.answer = answer
        self._fail(answer)

    def step(self, completion):
        self._fail(completion)
        if completion in ANSWERS:
            return ANSWERS[completion]
        return None if completion == "end" else completion

    def get_reward(self):
        self._fail(self.answer.removeprefix("later: "))
        if self.answer == "later: text reward":
            return "much"
        return 1.0

    @staticmethod
    def _fail(text):
        if text == "raise":
            raise RuntimeError("environment bug")
        if text == "sys_exit":
            sys.exit(3)
        if text == "os_exit":
            os._exit(7)
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "kill server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        if text == "hang":
            time.sleep(60)
        if text == "print":
            for _ in range(1000):
                print("a" * 10_000)
        if text == "scribble":
            for number in range(3, 30):
                try:
                    os.write(number, b'{"ticket": "1-0", "answer": {}}\n')
                except OSError:
                    continue
        if text == "fork":
            os.fork()
        if text == "memory":
            bytearray(8 << 30)
        if text.startswith("child "):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            pathlib.Path(text.removeprefix("child ")).write_text(f"{child.pid}")
            time.sleep(60)


class NoReset:
    def step(self, completion):
        return None


class NoStep:
    def reset(self, **columns):
        return None


class Untyped:
    def reset(self, **columns):
        return None

    def add(self, a, b):
        """Add."""
        return a + b


not_callable = 5
