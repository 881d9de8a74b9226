"""Runs of several processes, as users start them, against one process with as many devices.

What one process does is done in this one, where programs are kept.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from command_runs import call_main
from held_runs import held, make_held_inputs
from processes import child_environment, descendants, free_port, run_commands, runs
from run_settings import DAPO, PIPELINE
from safetensors.numpy import load_file

from reprise.rl.commands import train as train_command
from reprise.rl.metrics.writer import read_metrics, read_samples, step_rows
from reprise.rl.runtime import devices
from reprise.rl.runtime.exit_codes import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE
from reprise.rl.runtime.run_files import NEWEST_FILE
from tests.support import tiny_run

DEVICES = 4
STEPS = 12
SHAPE = (f"Mesh.data={DEVICES}", f"Run.steps={STEPS}")
DEADLINE_S = 30.0  # of a process that is killed
LIMIT_S = 900.0  # what hangs fails; how long it takes fails nothing
# tokens do not depend on who draws them, but log-probs of other batches are rounded otherwise
ROUNDING = 2e-6
# rounds that verify drafts round otherwise as well: the trainer's own log-probs are learnt from
OWN_LOGPROBS = "Algorithm.old_logprobs='recomputed'"
# of drafters on the device; rollouts without any have the same tokens
LEARNED = (
    *("Speculation.budget='fixed:1'", "Drafter.max_depth=1", "Drafter.top_k=1"),
    *("Drafter.micro_batches=1", "Drafter.batch_rows=1", "Drafter.row_tokens=32"),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_held_inputs(tmp_path_factory.mktemp("several_processes"))


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Path:
    """The run of one process."""
    folder = tiny.parent / "alone"
    here(DEVICES, tiny, folder, *SHAPE, OWN_LOGPROBS)
    return folder


def train(config: Path, run: Path, *arguments: str) -> list[str]:
    shape = (f"--gin.{setting}" for setting in SHAPE)
    return tiny_run.command(config, run, *shape, *arguments)


def together(config: Path, run: Path, count: int, *arguments: str) -> list[list[str]]:
    """The commands of `count` processes of one run."""
    port = free_port()
    cluster = [
        "--gin.Cluster.kind='spmd'",
        f"--gin.Cluster.coordinator='127.0.0.1:{port}'",
        f"--gin.Cluster.num_processes={count}",
    ]
    return [
        train(config, run, *cluster, f"--gin.Cluster.process_id={i}", *arguments)
        for i in range(count)
    ]


def here(count: int, config: Path, run: Path, *settings: str) -> None:
    """Run or resume in this process, with so many devices."""
    given = (*settings, f"Run.directory={str(run)!r}")
    resumed = ["--resume"] if (run / "config.gin").exists() else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "found", lambda: jax.devices()[:count])
        flags = [f"--gin.{setting}" for setting in given]
        assert call_main(train_command.main, f"--gin_file={config}", *flags, *resumed) == 0


class Started:
    """Processes side by side, whose outputs are kept; all are dead after `wait`."""

    def __init__(self, commands: Sequence[Sequence[str]], devices: int) -> None:
        environment = child_environment(devices // len(commands))
        self.processes = [
            subprocess.Popen(
                command,
                cwd=tiny_run.ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for command in commands
        ]

    def when(self, happens: Callable[[], bool]) -> None:
        """Wait until something happens."""
        until_s = time.monotonic() + LIMIT_S
        while not happens():
            ended = [p.returncode for p in self.processes if p.poll() is not None]
            if ended or time.monotonic() > until_s:
                statuses, outputs = self.wait()
                pytest.fail("\n".join([f"ended with {statuses}", *outputs]))
            time.sleep(0.02)

    def wait(self) -> tuple[list[int], list[str]]:
        """Exit statuses and outputs, once all have ended."""
        try:
            outputs = [p.communicate(timeout=LIMIT_S)[0] for p in self.processes]
        finally:
            for p in self.processes:
                p.kill()
        return [p.returncode for p in self.processes], outputs


def start(commands: Sequence[Sequence[str]], devices: int) -> Started:
    return Started(commands, devices)


def has_step(folder: Path, step: int) -> Callable[[], bool]:
    path = folder / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= step


def learnt_from(folder: Path) -> list[tuple[object, ...]]:
    """What each step learnt from: prompts in order, texts, lengths and rewards."""
    names = ("step", "example_id", "sample_index", "completion", "num_tokens", "reward")
    return [tuple(row[name] for name in names) for row in read_samples(folder)]


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "policy" / "model.safetensors")


def lines(output: str) -> list[str]:
    """What a process says, without what jax's libraries do, and what its crude reward pays."""
    own = [x for x in output.splitlines() if x.startswith(("error", "stopp", "warning"))]
    return [x for x in own if ": the rewards pay {'digits'" not in x]


def assert_equals(run: Path, alone: Path) -> None:
    """Each step has learnt from what one process learns from, and the weights are the same."""
    assert [row["step"] for row in read_metrics(run)] == list(range(1, STEPS + 1))
    assert learnt_from(run) == learnt_from(alone)
    for name, expected in weights(alone).items():
        np.testing.assert_allclose(weights(run)[name], expected, atol=ROUNDING, err_msg=name)


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize(
    ("killed", "what"),
    [
        (1, "process 1 is lost: no sign of life"),
        (0, "process 0, which holds the run together, is lost: it has ended"),
    ],
)
def test_a_run_of_two_processes_of_which_one_is_killed_goes_on_with_one(
    tiny: Path, alone: Path, killed: int, what: str
) -> None:
    run, other = tiny.parent / f"legs_{killed}", 1 - killed
    deadline = f"--gin.Cluster.deadline_s={DEADLINE_S}"
    with held(tiny, run, 2):
        two = start(together(tiny, run, 2, deadline, f"--gin.{OWN_LOGPROBS}"), DEVICES)
        two.when(has_step(run, 2))
        two.when((run / NEWEST_FILE).exists)  # a checkpoint may take longer than a step
        os.kill(two.processes[killed].pid, signal.SIGKILL)
    statuses, outputs = two.wait()
    assert statuses[killed] == -signal.SIGKILL and statuses[other] == EXIT_FAILED, outputs
    [line] = lines(outputs[other])
    assert line.startswith(f"error: process {other} ends: {what}"), line
    assert "--resume" in line and "stack trace" not in outputs[other]
    assert 2 <= len(read_metrics(run)) < STEPS
    here(DEVICES, tiny, run, *SHAPE, OWN_LOGPROBS, "Cluster.kind='local'")
    assert_equals(run, alone)
    assert not list(run.glob("*_1")), "what the other process has spilled is its own"


@pytest.mark.slow
@pytest.mark.parity
def test_a_pipeline_of_two_processes_goes_on_with_one(tiny: Path) -> None:
    """With further sampling passes, and after a signal to one of them.

    Each has a device that trains and one with a worker; one process has two of each.
    """
    settings = [*DAPO, *PIPELINE, tiny_run.rewarded(tiny, "lucky"), "Mesh.data=2", "Run.steps=10"]
    run, whole = tiny.parent / "pipeline", tiny.parent / "pipeline-alone"
    flags = [f"--gin.{setting}" for setting in (*settings, "Sched.workers=1")]
    with held(tiny, run, 2):
        two = start(together(tiny, run, 2, *flags), 4)
        two.when(has_step(run, 2))
        os.kill(two.processes[1].pid, signal.SIGTERM)
    statuses, outputs = two.wait()
    assert statuses == [EXIT_STOPPED] * 2, outputs
    left = len(read_metrics(run))
    assert 2 <= left < 10
    expected, found = (tiny_run.train(tiny, folder, *settings) for folder in (whole, run))
    assert learnt_from(run) == learnt_from(whole)
    rows = read_metrics(run)
    assert len({row["dynamic_sampling/phases"] for row in rows}) > 1
    assert [row["rollout/off_policyness/max"] for row in rows][:3] == [0, 1, 1]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=ROUNDING)


@pytest.mark.slow
@pytest.mark.parity
def test_the_readme_example_of_several_hosts_gives_the_bits_of_one(tiny: Path) -> None:
    """As slurm would start it, with one engine over both: all else is found by jax.

    With another folder, and a smaller policy and task.
    """
    readme = (tiny_run.ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    [shown] = [block for block in blocks if "Cluster.kind=spmd" in block]
    one, two = (tiny.parent / f"readme-{count}" for count in ("one", "two"))
    line = shown.replace("\\\n", "").replace("/mnt/shared/runs/first", str(two))
    python, *words = shlex.split(line)
    assert python == "python" and f"--gin.Run.directory={two}" in words
    [shipped] = [word.partition("=")[2] for word in words if word.startswith("--gin_file")]
    smaller = ("Run.steps=3", "Mesh.data=1", "Mesh.fsdp=2", "Task.prompt_suffix=''")
    smaller += ("Engine.max_round_nodes=16", "Sampling.draw='cdf'")
    given = [f"--gin.{setting}" for setting in (*smaller, "Cluster.rollouts='mesh'")]
    by_srun = {"SLURM_JOB_ID": 7, "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": 2}
    commands = []
    for i in range(2):
        told = by_srun | {"SLURM_PROCID": i, "SLURM_LOCALID": i}
        variables = [f"{name}={value}" for name, value in told.items()]
        command = [sys.executable, *words, f"--gin_file={tiny}", *given]
        commands.append(["env", *variables, *command])
    port = {"JAX_COORDINATOR_PORT": str(free_port())}
    outputs = tiny.parent / "readme-outputs"
    outputs.mkdir()
    outcomes = run_commands(commands, outputs, limit_s=LIMIT_S, environment=port)
    assert "× 2 of 2 processes" in outcomes[0].output

    both = tiny.parent / "readme.gin"
    both.write_text(f"include '{tiny_run.ROOT / shipped}'\ninclude '{tiny}'\n")
    here(2, both, one, *smaller)
    assert (one / "samples.jsonl").read_bytes() == (two / "samples.jsonl").read_bytes()
    for key, expected in weights(one).items():
        assert weights(two)[key].tobytes() == expected.tobytes(), key


def trainer_processes(launcher: int) -> list[int]:
    """The trainer processes on the Ray that a command has started."""
    found = []
    for pid in descendants(launcher):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [pid] * (b"rl.run.launch" in command)
    return found


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parity
def test_trainers_on_ray_learn_what_one_process_learns_though_one_is_killed(
    tiny: Path, alone: Path
) -> None:
    """Two of them and two rollout workers; the run goes on with one process.

    Workers draft with a draft model and a learned one, which idle workers train and process 0. Idle
    workers answer the others' last requests again, too.
    """
    run = tiny.parent / "trainers"
    on_ray = ["--gin.Cluster.kind='ray'", "--gin.Cluster.num_processes=2", "--gin.Sched.workers=2"]
    on_ray += ["--gin.Sched.policy='divided_fifo'", "--gin.Engine.min_slots=8"]
    on_ray += ["--gin.Drafting.requests_per_helper=4", "--gin.Drafting.methods=('model','own')"]
    drafts = "Speculation.sources=('learned', 'model')", "Drafter.steps_after_rollout=1"
    model = f"DraftModel.directory={str(tiny.parent / 'policy')!r}"
    drafting = (*LEARNED, *drafts, model, OWN_LOGPROBS)

    flags = (f"--gin.{setting}" for setting in drafting)
    with held(tiny, run, 2):
        first = start([train(tiny, run, *on_ray, *flags)], DEVICES // 2)
        first.when(has_step(run, 2))
        pids = trainer_processes(first.processes[0].pid)
        assert len(pids) == 2
        os.kill(pids[1], signal.SIGKILL)
    [status], [output] = first.wait()
    assert status == EXIT_FAILED, output
    [line] = lines(output)
    assert re.match(r"error: trainer process [01] of 2 is lost: killed by SIGKILL; step \d", line)
    assert not any(runs(pid) for pid in pids)
    assert 2 <= len(read_metrics(run)) < STEPS
    back = "Cluster.kind='local'", "Cluster.num_processes=None", "Sched.workers=1"
    here(DEVICES, tiny, run, *SHAPE, *drafting, *back, "Drafting.requests_per_helper=0")
    assert_equals(run, alone)
    rows = read_metrics(run)
    assert any(row.get("spec/learned/speculated_fraction") for row in rows)
    assert any(row.get("spec/model/speculated_fraction") for row in rows)
    assert rows[-1]["drafter/total_steps"] >= STEPS


@pytest.mark.slow
@pytest.mark.parity
def test_a_pipeline_of_trainers_on_ray_goes_on_with_as_many(tiny: Path) -> None:
    """Each has half of the weights; what the workers draft with is trained after each rollout.

    One process without a drafter learns from the same responses.
    """
    plain = [
        *DAPO,
        *PIPELINE,
        tiny_run.rewarded(tiny, "lucky"),
        "Mesh.data=1",
        "Mesh.fsdp=2",
        "Run.steps=8",
    ]
    plain += ["Eval.every_steps=3", "Eval.num_prompts=3", OWN_LOGPROBS]
    # weights of 0 or 1 move no bit
    plain += ["Algorithm.correction='token_mask:0.01:100'", "Eval.correct_by='lucky'"]
    plain += [f"Eval.sets=('own=jsonl:{tiny.parent / 'task.jsonl'}',)"]
    after = "Drafter.spot=False", "Drafter.steps_after_rollout=2"
    settings = [*plain, *LEARNED, *after, "Speculation.sources=('own', 'learned')"]
    on_ray = "Cluster.kind='ray'", "Cluster.num_processes=2"
    run, whole = tiny.parent / "ahead", tiny.parent / "ahead-alone"
    command = train(tiny, run, *(f"--gin.{setting}" for setting in (*settings, *on_ray)))
    with held(tiny, run, 4):  # one row is of the evaluation before the first step
        first = start([command], 1)
        first.when(has_step(run, 4))
        first.processes[0].terminate()
    [status], [output] = first.wait()
    assert status == EXIT_STOPPED, output
    assert 3 <= len(step_rows(read_metrics(run))) < 8

    [status], [output] = start([[*command, "--resume"]], 1).wait()
    assert status == 0, output
    here(2, tiny, whole, *plain)
    for name, expected in weights(whole).items():
        np.testing.assert_allclose(weights(run)[name], expected, atol=ROUNDING, err_msg=name)
    rows = step_rows(read_metrics(whole))
    assert len({row["dynamic_sampling/phases"] for row in rows}) > 1
    assert learnt_from(run) == learnt_from(whole)
    same = "rollout/off_policyness/max", "dynamic_sampling/phases", "eval/mean_reward"
    for row, other in zip(step_rows(read_metrics(run)), rows, strict=True):
        assert [row.get(name) for name in same] == [other.get(name) for name in same]
        assert row["drafter/total_steps"] == 2 * row["step"]


def test_processes_of_different_settings_do_not_start(tiny: Path, tmp_path: Path) -> None:
    run = tiny.parent / "different"
    first, second = together(tiny, run, 2)
    second.append("--gin.Optimizer.learning_rate=0.5")
    outcomes = run_commands([first, second], tmp_path, limit_s=LIMIT_S, stop_at_failure=False)
    assert [o.returncode for o in outcomes] == [EXIT_USAGE] * 2
    for outcome in outcomes:
        [line] = lines(outcome.output)
        assert line.startswith(
            "error: expected the same configuration in all processes, got "
            "Optimizer.learning_rate = 0.5 in process 1 and Optimizer.learning_rate = 0.01"
        )
    assert not run.exists()
