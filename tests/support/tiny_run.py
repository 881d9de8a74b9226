"""The smallest run there is: a one-layer policy, six prompts, a step in milliseconds.

What `benchmarks.soak` and the tests of the training loop stop, damage and
resume. It measures nothing by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from policies.make.characters import save_character_tokenizer
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.rl.assembly import setup as run_setup
from reprise.rl.assembly.system import System
from reprise.rl.gin.loader import load
from reprise.rl.learner.optimizer import TrainState
from reprise.rl.run import loop
from reprise.rl.runtime.signals import Watch
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs, open_inputs

ROOT = Path(__file__).parents[2]
CHARACTERS = "0123456789+=abc"
MODEL = ModelConfig(
    architecture="qwen3",
    vocab_size=3 + len(CHARACTERS) + 6,  # padded, as published policies are
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    d_ff=32,
    tied_embeddings=True,
    qk_norm=True,
    max_positions=64,
    eos_token_ids=(1,),
    pad_token_id=0,
)
PROMPTS = ("1+1=", "2+3=", "10+4=", "7=", "5+5+5=", "0+8=")
REWARD = '''"""Rewards of the smallest run: dense, and every fault that a scorer can have."""

import math
import os


def digits(completions, **columns):
    """The share of a completion that is digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def lucky(completions, **columns):
    """1 for an even digit at the start, which most groups of four have none or all of."""
    return [float(text[:1] in ("0", "2", "4")) for text in completions]


def equal(completions, **columns):
    return [0.25 for _ in completions]


def fails(completions):
    """All but one fail on completions that begin with 0 to 4, and on empty ones."""
    return completions[0][:1] in "01234"


def always(completions, **columns):
    raise KeyError("no such column")


def raises(completions, **columns):
    if fails(completions):
        raise KeyError("no such column")
    return [1.0]


def dies(completions, **columns):
    if fails(completions):
        os._exit(3)
    return [1.0]


def none(completions, **columns):
    return [None for _ in completions]


def nan(completions, **columns):
    return [math.nan if fails(completions) else 1.0]


def two(completions, **columns):
    return [1.0, 1.0] if fails(completions) else [1.0]
'''


def make_inputs(folder: Path, seed: int = 0, model: ModelConfig = MODEL) -> Path:
    """Write policy, task, reward file and configuration; returns the configuration's path."""
    policy = folder / "policy"
    hf.save_pretrained(policy, model, transformer.init(model, jax.random.key(seed), jnp.float32))
    save_character_tokenizer(policy, CHARACTERS)
    rows = [{"prompt": p, "answer": str(i)} for i, p in enumerate(PROMPTS)]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    config = folder / "tiny_run.gin"
    config.write_text(_config(folder))
    return config


def _config(folder: Path) -> str:
    return f"""# The smallest run there is (tests/support/tiny_run.py).
Policy.directory = "{folder / "policy"}"
Task.specs = ("jsonl:{folder / "task.jsonl"}",)
Reward.functions = ("{folder / "reward.py"}:digits",)
Reward.extract = "whole"
Reward.workers = 1
Run.steps = 3
Rollout.prompts_per_step = 2
Rollout.group_size = 4
Rollout.max_prompt_tokens = 8
Sampling.max_new_tokens = 8
Sampling.draw = "cdf"
Engine.slots = 8
Engine.min_slots = 8
Engine.page_tokens = 16
Engine.prefill_chunk_tokens = 8
Engine.max_nodes = 2
Engine.rounds_per_fetch = 4
Speculation.budget = "off"
Trainer.micro_batch_tokens = 128
Trainer.logprob_chunk_tokens = 64
Optimizer.learning_rate = 0.01
Mesh.data = 1
Checkpoint.every_steps = 1
Eval.num_prompts = 0
Metrics.samples_per_step = -1
"""


def rewarded(config: Path, name: str) -> str:
    """The setting that rewards by this function of REWARD."""
    return f"Reward.functions=('{config.parent / 'reward.py'}:{name}',)"


def train(
    config: Path,
    run: Path,
    *overrides: str,
    show: Recorder | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrainState:
    """Run or resume `config` in this process, in the folder `run`; returns the last state."""
    resolved = load(TrainConfig, [config], [*overrides, f"Run.directory={str(run)!r}"])
    return loop.train(
        resolved,
        open_inputs(resolved),
        run,
        show=show or Recorder(),
        watch=Watch(should_stop=should_stop),
        clock=time.perf_counter,
    )


@contextlib.contextmanager
def opened(config: TrainConfig, inputs: Inputs) -> Iterator[tuple[System, TrainState]]:
    """The parts of a run of any configuration, in a folder that does not outlive it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        run_setup.build(
            config,
            inputs,
            Path(folder),
            show=Recorder(),
            watch=Watch(),
            clock=time.perf_counter,
        ) as (system, state),
    ):
        yield system, state


@contextlib.contextmanager
def keep_every_program() -> Iterator[None]:
    """Let the compilation cache hold programs that compile in no time: most here do."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@dataclasses.dataclass
class Recorder:
    """A progress display that keeps what it is told."""

    messages: list[str] = dataclasses.field(default_factory=list)
    rows: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    fetches: int = 0

    def message(self, text: str) -> None:
        self.messages.append(text)

    def step(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def part(self, step: int, name: str) -> None:
        """Rows hold the seconds of every part."""

    def rollout(self, done: int, total: int, tokens: int) -> None:
        self.fetches += 1

    def compiling(self, what: str, done: int, total: int) -> None:
        """Not kept."""

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def command(config: Path, run: Path, *arguments: str) -> list[str]:
    """`python -m rl.train` on `config`, in the folder `run`."""
    return [
        sys.executable,
        *("-m", "rl.train"),
        f"--gin_file={config}",
        f"--gin.Run.directory={str(run)!r}",
        *arguments,
    ]


def environment(cache: Path | None = None) -> dict[str, str]:
    """This process's, on CPU; every compiled program is kept in `cache`, small as it is."""
    kept = {"JAX_PLATFORMS": "cpu"} | dict(os.environ)
    if cache is not None:
        kept["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    return kept | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def call(
    arguments: Sequence[str], env: Mapping[str, str], timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, from the checkout's root."""
    return subprocess.run(
        arguments, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s
    )
