"""How a measured system is driven: one process each, JSON lines over its pipes.

The process waits for commands, so that only one system runs at a time. Commands:
`{"do": "prepare", "shape": {…}, "policy": DIR, "variant": NAME}` builds and warms
up, `{"do": "run", "seed": i}` generates the batch once with log-probabilities,
`{"do": "greedy"}` generates it at temperature 0 and answers with the tokens.
Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from benchmarks.shape import Shape


class System(Protocol):
    """A way of generating. `generate` returns (tokens, log-probs or None), a row each."""

    name: str
    variants: tuple[str, ...]
    packages: tuple[str, ...]

    def prepare(self, shape: Shape, policy: str, variant: str) -> None: ...

    def generate(
        self, seed: int, greedy: bool
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[float]] | None]: ...


def serve(system: System) -> None:
    """Answer commands until the input ends; what libraries print goes to stderr."""
    from benchmarks.environment import versions

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(
        json.dumps({"variants": system.variants, "versions": versions(system.packages)}),
        file=answers,
    )
    shape = Shape()
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "prepare":
            shape = Shape(**command["shape"])
            answer = _prepare(system, shape, command)
        elif command["do"] == "greedy":
            tokens, _ = system.generate(0, greedy=True)
            answer = {"tokens": [[int(t) for t in row] for row in tokens]}
        else:
            answer = {"seconds": _timed(system, shape, command["seed"])}
        print(json.dumps(answer), file=answers)


def _prepare(system: System, shape: Shape, command: dict[str, Any]) -> dict[str, float]:
    system.prepare(shape, command["policy"], command["variant"])
    first_s, warm_s = _timed(system, shape, 0), _timed(system, shape, 1)
    return {"warm_call_s": warm_s, "compile_s": round(max(first_s - warm_s, 0.0), 2)}


def _timed(system: System, shape: Shape, seed: int) -> float:
    """Seconds of one batch; refuses one that did less than was asked for."""
    start = time.perf_counter()
    tokens, logprobs = system.generate(seed, greedy=False)
    seconds = time.perf_counter() - start
    assert logprobs is not None, f"{system.name} returned no log-probabilities"
    expected = [shape.new_tokens] * shape.batch
    for what, rows in (("tokens", tokens), ("log-probabilities", logprobs)):
        got = [len(row) for row in rows]
        if got != expected:
            raise RuntimeError(
                f"{system.name}: expected {shape.batch} rows of {shape.new_tokens} {what}, "
                f"got {got}"
            )
    return seconds
