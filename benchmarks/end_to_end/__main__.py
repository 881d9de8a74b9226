"""A whole GRPO step beside TRL's and google-tunix's, on this machine.

    python -m benchmarks.end_to_end --json --trl_python PATH --tunix_python PATH

Each system is a process of its own python environment. It has the same policy, prompts, reward,
sizes, learning rate and optimizer steps, and does one step of its own training loop on command:
responses, rewards, and updates. The systems take turns, so that only one computes at a time. Each
first tries its variants; the fastest counts, and the seconds of all are recorded.

`steps` are seconds of a step after two that warm up. A ratio is a peer's seconds over ours in one
turn; the median counts. `rest` is neither responses nor updates: rewards and the loop around them.
`--chosen FILE`, an earlier result of this policy, has the peers' fastest variants: they are not
tried again.
`learning` has, for each of `--seeds`, the seconds of steps until the mean reward on unseen
questions has risen by `--gain`: every `--eval_every` steps the weights are saved and evaluated by
our engine, the same for all, and these seconds do not count. `start_s` is before the first step:
loading, and of ours the compilation, which the others' first steps have. `learning_ratios` are the
peers' seconds over ours, least to most. `--seeds` without values leaves it out.
`--work calculator` times episodes of several turns with a calculator, TRL's with its
`environment_factory`: give `--seeds` without values, and no tunix, which has none of these.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.child import Child
from benchmarks.end_to_end.tasks import WORK, Judge, Work, write_questions, write_unseen
from benchmarks.turns import WARM_TURNS, in_turns

OURS, PEERS = "reprise", ("trl", "tunix")
PARTS = "step", "rollout", "update", "rest"
COMPARED = PARTS[:3]
SIZES = "prompts_per_step", "group_size", "max_new_tokens"
Answer = dict[str, Any]


class System(Child):
    """A system's process, prepared; `answers` are of its steps, with `step_s` and `rest_s`."""

    def __init__(self, name: str, python: str, given: Mapping[str, Any], scratch: Path) -> None:
        scratch.mkdir(parents=True)
        command = [python, "-m", f"benchmarks.baselines.{name}_grpo"]
        super().__init__(name, command, environment.ROOT)
        self.hello, self.answers = self.answer(), list[Answer]()
        variant = given.get("variant") or self.hello["variants"][0]
        began_s = time.perf_counter()
        self.ask(do="prepare", **{**given, "variant": variant, "scratch": str(scratch)})
        self.start_s = round(time.perf_counter() - began_s, 2)

    def step(self) -> float:
        """Return the seconds of a step."""
        began_s = time.perf_counter()
        answer = self.ask(do="step")
        step_s = time.perf_counter() - began_s
        rest_s = step_s - answer["rollout_s"] - answer["update_s"]
        self.answers.append(answer | {"step_s": step_s, "rest_s": rest_s})
        return step_s

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, and said why
            super().close()


class Bench:
    """One policy's work and the pythons of the systems that do it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.folder, self.policy = folder, environment.ROOT / arguments.policy
        changed = {name: x for name in SIZES if (x := getattr(arguments, name))}
        self.work: Work = dataclasses.replace(
            WORK[arguments.work or str(arguments.policy)], **changed
        )
        self.pythons = {OURS: sys.executable}
        for name in PEERS:
            if python := getattr(arguments, f"{name}_python"):
                self.pythons[name] = str(python)
            else:
                environment.progress(f"{name} is left out: give --{name}_python for it")
        self.variants: dict[str, str] = {}
        self._started, self._earlier = 0, dict[str, Any]()
        if arguments.chosen is not None:
            self._earlier = json.loads(arguments.chosen.read_text("utf-8"))
            if self._earlier["policy"] != str(arguments.policy):
                raise SystemExit(f"--chosen: expected a result of {arguments.policy}")

    def given(self, seed: int) -> dict[str, Any]:
        """Return the work of a seed, and write its questions."""
        task = self.folder / f"train_{seed}.jsonl"
        if not task.exists():
            write_questions(self.work, seed, task)
        fields = dataclasses.asdict(self.work)
        return {**fields, "policy": str(self.policy), "task": str(task), "seed": seed}

    def start(self, name: str, seed: int, variant: str = "") -> System:
        """Start a system in its fastest variant, or in this one."""
        self._started += 1
        given = self.given(seed) | {"variant": variant or self.variants.get(name, "")}
        scratch = self.folder / f"{name}_{self._started}"
        return System(name, self.pythons[name], given, scratch)

    def chosen(self, name: str) -> dict[str, Any] | None:
        """Return the choice that an earlier result made for a peer, if it is given."""
        if name == OURS or not self._earlier:
            return None
        row = self._earlier["steps"]["systems"][name]
        if row["variant"] is not None:
            self.variants[name] = row["variant"]
        return {key: row[key] for key in ("variant", "variants_s", "cannot", "versions")}

    def choose(self, name: str) -> dict[str, Any]:
        """Time a system's variants, remember the fastest, and say what does not run."""
        seconds, cannot, pending = dict[str, float](), dict[str, str](), [""]
        versions: dict[str, str] = {}
        while pending:
            variant = pending.pop(0)
            try:
                with contextlib.closing(self.start(name, 0, variant)) as system:
                    versions = system.hello["versions"]
                    if not variant:  # the first one: it has told the others
                        variant, *pending = system.hello["variants"]
                    system.step()  # compiles
                    taken_s = system.step()
                    if taken_s < 2 * min(seconds.values(), default=math.inf):
                        taken_s = min(taken_s, system.step())
                    seconds[variant] = round(taken_s, 3)
            except RuntimeError as error:
                cannot[variant or "start"] = reason(error)
            environment.progress(name, variant, seconds.get(variant) or cannot)
        if seconds:
            self.variants[name] = min(seconds, key=lambda v: seconds[v])
        return {
            "variant": self.variants.get(name),
            "variants_s": seconds,
            "cannot": cannot,
            "versions": versions,
        }


def reason(error: RuntimeError) -> str:
    """Return the line of a process's last ones that names its error."""
    lines = str(error).splitlines()
    return next((x for x in reversed(lines) if "Error" in x), lines[-1])[:300]


def steps(bench: Bench, turns: int) -> dict[str, Any]:
    """Return the row of step seconds: the systems that run, in turns."""
    rows = {name: bench.chosen(name) or bench.choose(name) for name in bench.pythons}
    with contextlib.ExitStack() as stack:
        systems = {
            name: stack.enter_context(contextlib.closing(bench.start(name, 0)))
            for name in bench.variants
        }
        in_turns({name: system.step for name, system in systems.items()}, turns)
        for name, system in systems.items():
            rows[name] |= figures(system.answers[WARM_TURNS:]) | system.ask(do="memory")
    answers = {name: system.answers[WARM_TURNS:] for name, system in systems.items()}
    return {"turns": turns, "systems": rows, "ratios": ratios(answers)}


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return medians of a system's steps."""
    seconds = {
        f"{part}_s": round(statistics.median(a[f"{part}_s"] for a in answers), 4) for part in PARTS
    }
    return {
        **seconds,
        "step_s_all": [round(a["step_s"], 3) for a in answers],
        "response_tokens": round(statistics.median(a["tokens"] for a in answers)),
        "tokens_per_s": round(statistics.median(a["tokens"] / a["step_s"] for a in answers), 1),
        "updates": round(statistics.mean(a["updates"] for a in answers), 2),
        "mean_reward": round(statistics.mean(a["reward"] for a in answers), 4),
    }


def ratios(answers: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """Return each peer's seconds over ours, turn by turn, for the step and its large parts.

    `per_token` compares the step's seconds for a response token: responses differ in length.
    """
    found: dict[str, Any] = {}
    for peer in answers.keys() - {OURS}:
        pairs = list(zip(answers[peer], answers[OURS], strict=True))
        of = {part: [p[f"{part}_s"] / o[f"{part}_s"] for p, o in pairs] for part in COMPARED}
        of["per_token"] = [
            (p["step_s"] / p["tokens"]) / (o["step_s"] / o["tokens"]) for p, o in pairs
        ]
        found[peer] = {
            part: {
                "median": round(float(np.median(x)), 3),
                "least": round(min(x), 3),
                "most": round(max(x), 3),
            }
            for part, x in of.items()
        }
    return dict(sorted(found.items()))


class Trained:
    """A system that trains until its reward on unseen questions reaches the target."""

    def __init__(self, system: System, target: float) -> None:
        self.system, self.target = system, target
        self.curve: list[dict[str, float]] = []

    @property
    def is_done(self) -> bool:
        return any(point["reward"] >= self.target for point in self.curve)

    def evaluate(self, judge: Judge, folder: Path) -> None:
        self.system.ask(do="save", folder=str(folder))
        judge.complete(folder)
        taken_s = [answer["step_s"] for answer in self.system.answers]
        reward = round(judge.reward(folder), 4)
        self.curve.append({"step": len(taken_s), "s": round(sum(taken_s), 2), "reward": reward})
        environment.progress(self.system.name, self.curve[-1])

    def row(self, seed: int) -> dict[str, Any]:
        first_s = round(self.system.answers[0]["step_s"], 2)
        start = {"start_s": self.system.start_s, "first_step_s": first_s}
        of_run = {"seed": seed, "system": self.system.name} | start
        return of_run | reached(self.curve, self.target)


def reached(curve: Sequence[Mapping[str, float]], target: float) -> dict[str, Any]:
    """Return the first evaluation that reaches the target, if any, and the best reward."""
    first = next((point for point in curve if point["reward"] >= target), None)
    return {
        "seconds": None if first is None else first["s"],
        "step": None if first is None else first["step"],
        "best_reward": max(point["reward"] for point in curve),
        "curve": list(curve),
    }


def learning(bench: Bench, judge: Judge, seed: int, arguments: Any, target: float) -> list[Any]:
    """Return a row for each system: it trains with this seed up to the target."""
    folder = bench.folder / f"saved_{seed}"
    with contextlib.ExitStack() as stack:
        runs = [
            Trained(stack.enter_context(contextlib.closing(bench.start(name, seed))), target)
            for name in bench.pythons
            if name in bench.variants
        ]
        for step in range(1, arguments.max_steps + 1):
            for run in runs:
                if not run.is_done:
                    run.system.step()
                    if step % arguments.eval_every == 0:
                        run.evaluate(judge, folder / f"{run.system.name}_{step}")
        return [run.row(seed) for run in runs]


def learning_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each peer's seconds to the target over ours, seed by seed.

    `steps` are seconds of steps alone, with the peers' compilation; `all` has `start_s` too, with
    ours. A system that did not reach the target in its steps has no ratio in that seed.
    """
    found: dict[str, Any] = {}
    ours = {row["seed"]: row for row in rows if row["system"] == OURS and row["seconds"]}
    for peer in dict.fromkeys(row["system"] for row in rows if row["system"] != OURS):
        pairs = [
            (row, ours[row["seed"]])
            for row in rows
            if row["system"] == peer and row["seconds"] and row["seed"] in ours
        ]
        of = {
            "steps": [p["seconds"] / o["seconds"] for p, o in pairs],
            "all": [
                (p["start_s"] + p["seconds"]) / (o["start_s"] + o["seconds"]) for p, o in pairs
            ],
        }
        found[peer] = {name: [round(x, 2) for x in sorted(ratios)] for name, ratios in of.items()}
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments, Path(folder))
        result = {"policy": str(arguments.policy), **dataclasses.asdict(bench.work)}
        write = partial(_write, arguments)
        result["steps"] = steps(bench, arguments.turns)
        write(result)
        if not arguments.seeds:
            return result
        unseen = bench.folder / "unseen.jsonl"
        write_unseen(bench.work, arguments.seeds, unseen)
        judge = Judge(bench.policy, bench.work, unseen, arguments.samples)
        base = judge.reward(bench.policy)
        target = round(base + arguments.gain, 4)
        result |= {"base_reward": round(base, 4), "target_reward": target, "learning": list[Any]()}
        for seed in arguments.seeds:
            result["learning"] += learning(bench, judge, seed, arguments, target)
            result["learning_ratios"] = learning_ratios(result["learning"])
            write(result)
    return result


def _write(arguments: argparse.Namespace, result: Mapping[str, Any]) -> None:
    environment.write({**result, **arguments.record()}, arguments)


if __name__ == "__main__":
    environment.run(
        __doc__,
        measure,
        environment.TRAINING,
        policy="policies/tiny",
        work="",
        trl_python=Path,
        tunix_python=Path,
        chosen=Path,
        turns=5,
        seeds=(0, 1, 2),
        gain=0.1,
        max_steps=80,
        eval_every=5,
        samples=2,
        **dict.fromkeys(SIZES, int),
    )
