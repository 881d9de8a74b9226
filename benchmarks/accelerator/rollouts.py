"""Plain rollouts of the grown policy beside transformers and vLLM on the same device.

Both draw responses of one length to the same prompts, with log-probabilities and without end
tokens, in turns; `greedy_agreement` is the share of tokens that equal ours at temperature 0.
"""

from __future__ import annotations

import dataclasses
import subprocess
import time
from collections.abc import Iterator

import jax
import numpy as np

from benchmarks import environment
from benchmarks.accelerator.budget import Figures, Log, NotRun
from benchmarks.accelerator.sizes import Size, summary, turns_of
from benchmarks.accelerator.training import Steps
from benchmarks.baselines.reprise import Reprise
from benchmarks.compare import System, shape_of
from benchmarks.shape import Shape

VARIANTS = {
    "transformers": ("dynamic/sdpa/all cores", "static/sdpa/all cores"),
    "vllm": ("default",),
}
REPEATS = 3


def _check(package: str, python: str, *, on_gpu: bool) -> None:
    """Raise NotRun if that interpreter has no such package, or no torch for this device."""
    code = f"import {package}, torch; assert {on_gpu} <= torch.cuda.is_available(), 'torch: no GPU'"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotRun((done.stderr.splitlines() or ["it fails"])[-1])


def beside(name: str, log: Log, *, size: Size, steps: Steps, python: str) -> Iterator[Figures]:
    """Yield our speed, then that of each variant of the other sampler and its ratio to ours."""
    log.phase(f"look for {name}")
    _check(name, python, on_gpu=jax.default_backend() != "cpu")
    policy = str(steps.policy(log))
    batch = Shape(
        batch=size.slots,
        prompt=size.prompt_tokens,
        new_tokens=size.new_tokens,
        cache=size.prompt_tokens + size.new_tokens,
        dtype=size.dtype,
    )
    shape = shape_of(environment.ROOT / policy, batch)
    log.phase("load")
    ours = Reprise()
    ours.prepare(shape, policy, "pages")
    seeds = iter(range(1, 10**6))

    def own_seconds() -> float:
        began_s = time.perf_counter()
        ours.generate(next(seeds), greedy=False)
        return time.perf_counter() - began_s

    tokens = shape.total_new_tokens
    seconds_T = turns_of(log, {"reprise": own_seconds}, REPEATS)["reprise"]
    greedy = np.asarray(ours.generate(0, greedy=True)[0])
    figures: Figures = {"system": "reprise", "shape": dataclasses.asdict(shape)}
    yield figures | summary(seconds_T) | _speed(seconds_T, tokens)
    log.phase(f"start {name}")
    other = System(name, python, shape, policy)
    try:
        for variant in VARIANTS[name]:
            log.phase(f"start {name}")
            other.prepare(variant)
            same = np.asarray(other.ask(do="greedy")["tokens"]) == greedy
            kinds = {"reprise": own_seconds, name: other.seconds}
            seconds = turns_of(log, kinds, REPEATS)
            seconds_T = seconds[name]
            figures = {"system": name, "variant": variant}
            figures |= {"versions": other.hello["versions"]}
            figures |= summary(seconds_T, seconds["reprise"], "to_reprise")
            figures |= _speed(seconds_T, tokens)
            yield figures | {"greedy_agreement": round(float(same.mean()), 6)}
    finally:
        other.close()


def _speed(seconds_T: np.ndarray, tokens: int) -> Figures:
    return {"tokens_per_s": round(tokens / float(np.median(seconds_T)), 1)}
