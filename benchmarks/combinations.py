"""Every pair of settings of rollouts in a run: `python -m benchmarks.combinations --json`

A covering table: sources (alone and in pairs), budgets, modes of reuse, pages, workers (also ones
that draft for others), devices, modes of training (also HistoPipe), trained weights (all, or
adapters) and passes of dynamic sampling. Each pair of values that may be combined is in a row at
least once. A row is a run of `tests.support.tiny_run` through three epochs, with the engine's
default sizes scaled down, so that every branch of every program is traced. Its responses are those
of plain decoding on one worker with the same reuse, except for rounding. Rows that are rejected are
rejected by a sentence.

HistoPipe defers by the clock, to newer weights. Its rows have a learning rate of 0, so that all
weights draw the same, and their responses are compared in any order. With reuse or further passes
time also decides which responses are there to reuse, and how many prompts a step has: such a row
only has to run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

DEVICES_FLAG = "--xla_force_host_platform_device_count=4"
Row = Mapping[str, str]  # factor -> value
Pair = frozenset[tuple[str, str]]
Sample = tuple[str, int, str]  # example, sample of its group, response

SOURCES = ("last", "history", "histospec", "group", "own", "learned", "model")
FACTORS: dict[str, tuple[str, ...]] = {
    "sources": (*SOURCES, *("+".join(pair) for pair in itertools.combinations(SOURCES, 2))),
    "budget": ("goodput", "fixed:2", "aimd", "bandit", "off"),
    "reuse": ("off", "lenient:e^0.5", "coupled", "delayed:1.0", "random", "full"),
    "pages": ("all", "few"),
    "workers": ("one", "two", "helpers", "drafting"),
    "devices": ("1", "4"),
    "mode": ("sync", "ahead", "pipeline", "histopipe"),
    "weights": ("all", "adapters"),
    "passes": ("one", "several"),
}
# The engine's defaults over eight, with two buckets of slots.
SIZES = (
    "Engine.slots=8",
    "Engine.min_slots=4",
    "Engine.rounds_per_fetch=2",
    "Engine.max_nodes=4",
    "Engine.max_round_nodes=16",  # half of what all trees could have, as by default
    "Engine.prefill_rows=1",
    "Engine.prefill_chunk_tokens=64",
    "Engine.page_tokens=4",
    "Sampling.max_new_tokens=24",
    "Sched.chunk_tokens=8",
    "Tuner.thresholds=(1, 3, 5)",
    "Tuner.verify_tokens=(3, 1)",
    "Tuner.depths=(1, 3)",
    "Drafter.max_depth=3",
    "Drafter.top_k=2",
    "Drafter.batch_rows=1",
    "Drafter.micro_batches=1",
    "Drafter.row_tokens=64",
    "DraftModel.max_depth=3",
    "Rollout.prompts_per_step=3",  # an epoch is two steps
    "Reuse.max_age_steps=9",
    "Run.steps=5",
    "Run.hang_limit_s=120",
    "Checkpoint.every_steps=0",
)
FEW_PAGES = 24  # two of the longest requests and a half, in each of two parts at most


# Rows that cannot run, and words of the sentence that says so.
REJECTIONS: tuple[tuple[Callable[[Row], bool], str], ...] = (
    (lambda r: r["sources"] == "history+histospec", "history or histospec, not both"),
    (lambda r: r["workers"] == "helpers" and _overlaps(r), "go on to the next step"),
    (lambda r: r["workers"] == "helpers" and r["budget"] == "off", "idle workers draft for others"),
    (
        lambda r: (
            r["workers"] == "drafting"
            and ("model" not in r["sources"].split("+") or r["budget"] == "off")
        ),
        "draft by a draft model",
    ),
)


def _overlaps(row: Row) -> bool:
    """Return whether workers answer a step while the one before is learned from."""
    return row["mode"] in ("pipeline", "histopipe")


def rejection(row: Row) -> str | None:
    """Return words of the sentence that says why this row cannot run; None if it can."""
    return next((words for is_of, words in REJECTIONS if is_of(row)), None)


def pairs(row: Row) -> set[Pair]:
    """Return the pairs of values in a row."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def covering(factors: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Return rows that have every pair of values which some allowed row has.

    Greedy: each row starts from a pair that no row has yet, and takes factor by factor the value
    with the most new pairs, of equals the one that is in the fewest rows.
    """
    rows: list[dict[str, str]] = []
    used = {(name, value): 0 for name, values in factors.items() for value in values}
    left = [
        dict(pair)
        for one, other in itertools.combinations(factors, 2)
        for pair in itertools.product(
            ((one, value) for value in factors[one]), ((other, value) for value in factors[other])
        )
    ]
    covered: set[Pair] = set()
    for start in left:
        if frozenset(start.items()) in covered:
            continue
        row = _completed(start, factors, covered, used)
        if row is None:
            continue  # no allowed row has this pair
        rows.append(row)
        covered |= pairs(row)
        for item in row.items():
            used[item] += 1
    return rows


def _completed(
    start: dict[str, str],
    factors: Mapping[str, Sequence[str]],
    covered: set[Pair],
    used: Mapping[tuple[str, str], int],
) -> dict[str, str] | None:
    """Return an allowed row with the values of `start`; None if there is none."""
    name = next((name for name in factors if name not in start), None)
    if name is None:
        return start if rejection(start) is None else None

    def worth(value: str) -> tuple[int, int]:
        new = sum(frozenset({(name, value), other}) not in covered for other in start.items())
        return -new, used[name, value]

    for value in sorted(factors[name], key=worth):
        if (row := _completed(start | {name: value}, factors, covered, used)) is not None:
            return row
    return None


def rejected() -> list[dict[str, str]]:
    """Return a row for each rule of `REJECTIONS`."""

    def all_rows() -> Iterator[dict[str, str]]:
        for values in itertools.product(*FACTORS.values()):
            yield dict(zip(FACTORS, values, strict=True))

    return [next(row for row in all_rows() if rejection(row) == words) for _, words in REJECTIONS]


def overrides(row: Row, policy: Path) -> list[str]:
    """Return the settings of a row."""
    devices, workers = int(row["devices"]), row["workers"]
    sources = tuple(row["sources"].split("+"))
    given = [
        *SIZES,
        f"Speculation.sources={sources!r}",
        f"Speculation.budget={row['budget']!r}",
        f"Reuse.mode={row['reuse']!r}",
        f"Sched.mode={('pipeline' if _overlaps(row) else row['mode'])!r}",
        f"Sampling.draw={_draw(row)!r}",
        f"DraftModel.directory={str(policy)!r}",
    ]
    if row["pages"] == "few":
        given.append(f"Engine.pages={FEW_PAGES * (1 if devices == 1 else 2)}")
    beside = workers == "one" and row["mode"] != "sync"  # half of the devices are the worker's
    if devices > 1:
        given += [f"Mesh.data={1 if beside else 2}", "Mesh.tensor=2"]
    if beside or workers != "one":
        given.append(f"Sched.devices_per_worker={min(2, devices)}")
    if workers != "one":
        given.append("Sched.workers=2")
    if workers == "helpers":
        given += ["Drafting.requests_per_helper=2", "Drafting.methods=('own',)"]
    if workers == "drafting":
        given.append("Drafting.workers=1")
    if row["mode"] == "histopipe":
        given += ["Sched.policy='histopipe'", "Sched.ranking_groups=2"]
    if row["weights"] == "adapters":
        given += ["Policy.lora_rank=4", "Policy.lora_targets=('attention', 'mlp', 'head')"]
    if row["passes"] == "several":
        reward = f"{policy.parent / 'reward.py'}:lucky"
        given += ["Algorithm.name='dapo'", "Algorithm.max_extra_phases=1"]
        given.append(f"Reward.functions=({reward!r},)")
    if row.get("learns", row["mode"]) in ("no", "histopipe"):
        given.append("Optimizer.learning_rate=0.0")
    return given


def reference(row: Row) -> dict[str, str]:
    """Return the row of plain decoding whose responses these have to be."""
    plain = {"sources": "own", "budget": "off", "pages": "all", "workers": "one", "devices": "1"}
    kept = {name: row[name] for name in ("reuse", "weights", "passes")}
    learns = "no" if row["mode"] == "histopipe" else "yes"
    mode = "pipeline" if _overlaps(row) else "sync"
    return {**plain, **kept, "mode": mode, "learns": learns, "draw": _draw(row)}


def is_compared(row: Row) -> bool:
    """Return whether the responses of a row are a function of its settings."""
    return row["mode"] != "histopipe" or (row["reuse"], row["passes"]) == ("off", "one")


def _draw(row: Row) -> str:
    exact_repeats = row["reuse"] == "coupled" or row["mode"] == "ahead"
    return row.get("draw", "gumbel_blocks" if exact_repeats else "cdf")


class Runs:
    """Runs of rows in this process, and the responses of their references."""

    def __init__(self, folder: Path) -> None:
        from tests.support import tiny_run

        self._folder, self._config = folder, tiny_run.make_inputs(folder)
        self._references: dict[tuple[tuple[str, str], ...], list[Sample]] = {}

    def responses(self, row: Row) -> list[Sample]:
        """Return the responses of a row's run, in its order. Raises as the run does."""
        import jax

        from tests.support import tiny_run

        jax.clear_caches()  # thousands of programs are too many for one process
        with tempfile.TemporaryDirectory(dir=self._folder) as run:
            tiny_run.train(self._config, Path(run) / "run", *overrides(row, self._policy))
            lines = (Path(run) / "run" / "samples.jsonl").read_text("utf-8").splitlines()
        samples = map(json.loads, lines)
        return [(s["example_id"], s["sample_index"], s["completion"]) for s in samples]

    @property
    def _policy(self) -> Path:
        return self._folder / "policy"

    def differing(self, row: Row) -> tuple[int, int]:
        """Return how many responses differ from plain decoding, and how many there are."""
        if not is_compared(row):
            return 0, len(self.responses(row))
        key = tuple(sorted(reference(row).items()))
        if key not in self._references:
            self._references[key] = self.responses(dict(key))
        got, wanted = self.responses(row), self._references[key]
        if row["mode"] == "histopipe":
            got, wanted = sorted(got), sorted(wanted)
        assert len(got) == len(wanted)
        return sum(a != b for a, b in zip(got, wanted, strict=True)), len(wanted)


def played(rows: Sequence[Row], folder: Path) -> list[dict[str, Any]]:
    """Run rows in this process; return of each how many responses differ, or its error."""
    import jax

    from tests.support import tiny_run

    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))  # rows share most
    found = list[dict[str, Any]]()
    with tiny_run.keep_every_program(), tempfile.TemporaryDirectory(dir=folder) as own:
        runs = Runs(Path(own))
        for row in rows:
            outcome: dict[str, Any]
            try:
                if rejection(row) is not None:
                    outcome = {"rejected": is_rejected(row, runs)}
                else:
                    differing, responses = runs.differing(row)
                    outcome = {"differing": differing, "responses": responses}
            except Exception as error:
                outcome = {"error": "".join(traceback.format_exception_only(error)).strip()}
            found.append({"row": dict(row), **outcome})
            print(found[-1], file=sys.stderr, flush=True)
    return found


def figures(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what rows came to, and those that failed."""
    run = [f for f in found if "rejected" not in f]
    errors = [f["error"] for f in run if "error" in f]
    hangs = sum("Hang: " in error for error in errors)
    return {
        "rows": len(run),
        "pairs": len(set().union(*(pairs(f["row"]) for f in run))),
        "crashes": len(errors) - hangs,
        "hangs": hangs,
        "responses": sum(f.get("responses", 0) for f in run),
        "responses_that_differ": sum(f.get("differing", 0) for f in run),
        "not_rejected": sum(not f.get("rejected", True) for f in found),
        "failed": [f for f in found if "error" in f or f.get("differing")],
    }


def is_rejected(row: Row, runs: Runs) -> bool:
    """Return whether a row that cannot run ends with its sentence before any device work."""
    words = rejection(row)
    assert words is not None
    try:
        runs.responses(row)
    except ValueError as error:
        return words in " ".join(str(error).split())
    return False


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    rows, P = [*covering(FACTORS)[: arguments.first], *rejected()], arguments.processes
    fresh = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(P, fresh) as pool:
        parts = pool.map(played, [rows[p::P] for p in range(P)], [Path(folder)] * P)
        return figures([row for part in parts for row in part])


if __name__ == "__main__":
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} {DEVICES_FLAG}".strip()  # before jax starts
    from benchmarks import environment

    processes, packages = os.cpu_count() or 1, (*environment.JAX, "optax")
    environment.run(__doc__, measure, packages, first=int, processes=processes)
