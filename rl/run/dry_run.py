"""The plan that `python -m rl.train --dry_run` prints; no device is opened."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from reprise.models.config import ModelConfig, num_params
from reprise.rl.assembly.first_programs import num_whole_model
from reprise.rl.learner.config import why_other_bits
from reprise.rl.metrics.run_summary import duration
from reprise.rl.preflight.memory import estimate, unopened_devices
from reprise.rl.run.disk_plan import disk_plan
from reprise.rl.runtime.exit_codes import EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs, remarks

_SHOWN_CHARACTERS = 3000  # of the first prompt
FEWER_PROGRAMS = (
    "fewer with a larger Engine.min_slots, a smaller Engine.max_round_nodes or "
    "Sampling.max_new_tokens"
)


def print_plan(config: TrainConfig, inputs: Inputs, folder: Path) -> int:
    """Print the plan of `--dry_run`, and the memory that the run needs; return the exit code."""
    model = inputs.model
    devices_here = unopened_devices()
    if devices_here.is_cpu and config.numerics.same_bits is True:
        if reason := why_other_bits(model, config.mesh.tensor):
            say(f"error: Numerics.same_bits=True: {reason}", sys.stderr)
            return EXIT_USAGE
    say(f"# run folder    {folder}")
    say(f"# policy        {inputs.policy}: {model.architecture}, {num_params(model):,} parameters")
    say(f"# examples      {len(inputs.task)}")
    _print_prompt(config, inputs)
    for one in inputs.evals.sets:
        say(f"# evaluation    {one.name}: {len(one.examples)} questions of {one.spec}")
    say(f"# per step      {config.rollout.num_requests} responses")
    room = disk_plan(config, inputs, folder)
    say(f"# disk          {room}")
    for field, value in vars(config.algorithm.resolved).items():
        say(f"# algorithm     {field:24s} {value}")
    if config.open_sizes:
        say(f"# open          {', '.join(config.open_sizes)}: found when it runs, by what fits")
        say("# ok            everything is checked except mesh and memory: these are, at the start")
        return 0
    compiled = num_whole_model(config, model, is_cpu=devices_here.is_cpu)
    shown = _compile_time(model, compiled) if devices_here.is_cpu else ""
    say(f"# programs      {compiled} large ones of rollouts{shown}")
    say(f"# {'':13} {FEWER_PROGRAMS}")
    try:
        needed = estimate(config, model, devices_here)
        for part, arrays in needed.parts.items():
            for name, size in arrays.items():
                say(f"# memory        {part}: {name:36s} {size / 2**20:10.1f} MiB")
        total = "total of one device, without activations"
        say(f"# memory        {total:46s} {needed.total_bytes / 2**20:10.1f} MiB")
        warning = needed.check(devices_here)
    except ValueError as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    if devices_here.bytes_each is None:
        say("# memory        the size of a device is unknown: compared when it runs")
    for remark in [*filter(None, [warning, room.warning]), *remarks(config, inputs)]:
        say(f"# note          {remark}")
    say("# ok            everything is checked except the device mesh, which is checked at start")
    return 0


def _compile_time(model: ModelConfig, num_programs: int) -> str:
    """Return text on the estimated compile time on CPUs, fitted to runs on two cores."""
    cores = os.cpu_count() or 1
    seconds = (3 + model.num_layers) * (6 + 1.3 * num_programs) / cores
    return f"; without kept ones a run compiles for about {duration(seconds)} on {cores} cores"


def _print_prompt(config: TrainConfig, inputs: Inputs) -> None:
    """Print the first prompt as the policy reads it, special tokens included."""
    first = inputs.task[0]
    ids = inputs.encode(first, config.task)
    say(f"# first prompt  {len(ids)} tokens, answer {str(first.answer)[-100:]!r}; its text:")
    text = inputs.tokenizer.decode(ids, skip_ends=False)
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        text = f"{text[:half]} … {text[-half:]}"
    for line in text.split("\n"):
        say(f"#   {line}")
