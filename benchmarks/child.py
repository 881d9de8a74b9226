"""A process that answers JSON lines with JSON lines, one at a time."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Child:
    """A process in a checkout; it computes only until it has answered a command."""

    def __init__(self, name: str, command: Sequence[str], checkout: Path) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")
        env = os.environ | {"PYTHONPATH": str(checkout)}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(
            command, cwd=checkout, env=env, text=True, bufsize=1, **pipes
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
        except BrokenPipeError:
            pass  # it has ended: `answer` says why
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Raises RuntimeError with the process's last lines if it has ended."""
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._errors.seek(0)
        tail = "".join(self._errors.readlines()[-15:])
        raise RuntimeError(f"the process of {self.name} ended; its last lines:\n{tail}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
