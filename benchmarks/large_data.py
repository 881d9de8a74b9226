"""What large data sets cost: seconds and memory to a run's first prompts, and to a later step's.

    python -m benchmarks.large_data --json --output benchmarks/results/large_data.json

A million questions are written as JSON lines, as parquet and as `datasets.save_to_disk` does (for
which the package datasets is needed). Each form is opened by a process of its own as `rl.train`
opens it, with the policy that ships: files found and indexed, prompts taken in the seeded order and
tokenized. Memory is what the process grows by at its peak, after it has opened ten questions; pages
of mapped files count while they are in memory. The page cache is warm: the files are just written.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import environment

FORMS = ("jsonl", "parquet", "datasets")
STEP_PROMPTS = 64
STEPS = 20
_GROUP_ROWS = 1000  # of a parquet row group, as the hub writes them


def question(i: int) -> dict[str, Any]:
    words = " and ".join(f"{(i * k) % 9973} apples" for k in range(3, 8))
    return {
        "prompt": f"Question {i}: how many are {words}, taken together?",
        "answer": str(i),
        "extra_info": {"index": i, "split": "train"},
    }


def write(form: str, path: Path, rows: int) -> str:
    """Write `rows` questions; returns the spec that reads them."""
    if form == "jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(question(i)) + "\n" for i in range(rows))
    elif form == "parquet":
        from pyarrow import RecordBatch, parquet

        schema = RecordBatch.from_pylist([question(0)]).schema
        with parquet.ParquetWriter(path, schema) as writer:
            for start in range(0, rows, _GROUP_ROWS):
                part = [question(i) for i in range(start, min(start + _GROUP_ROWS, rows))]
                writer.write_batch(RecordBatch.from_pylist(part, schema))
    else:
        import datasets

        def questions() -> Iterator[dict[str, Any]]:
            return map(question, range(rows))

        cache = str(path.with_suffix(".cache"))
        datasets.Dataset.from_generator(questions, cache_dir=cache).save_to_disk(path)
    return f"{form}:{path}"


def resident_mib(name: str) -> float:
    """Memory of this process as Linux counts it: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def measure(few: str, spec: str) -> dict[str, float]:
    """Open a task and take its first steps; `few` is a small one, to load everything once."""
    from rl.config import TrainConfig
    from rl.data.prompts import DataOrder, prompts_for_step
    from rl.gin.loader import load
    from rl.inputs import Inputs, open_inputs

    def opened(task: str) -> tuple[Inputs, TrainConfig]:
        config = load(TrainConfig, [environment.ROOT / "configs/tiny_cpu.gin"])
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, specs=(task,)))
        return open_inputs(config), config

    inputs, config = opened(few)
    inputs.encode(inputs.task[0], config.task)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before_mib, began_s = resident_mib("VmRSS"), time.perf_counter()
    inputs, config = opened(spec)
    order, steps_s = DataOrder(len(inputs.task), 0), [time.perf_counter()]
    for step in range(STEPS):
        for example in prompts_for_step(inputs.task, order, step * STEP_PROMPTS, STEP_PROMPTS):
            inputs.encode(example, config.task)
        steps_s.append(time.perf_counter())
    later = sorted(b - a for a, b in itertools.pairwise(steps_s[1:]))
    return {
        "first_prompts_s": steps_s[1] - began_s,
        "opened_s": steps_s[0] - began_s,
        "step_s": later[len(later) // 2],
        "peak_mib": resident_mib("VmHWM") - before_mib,
    }


def measure_forms(arguments: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"rows": arguments.rows, "step_prompts": STEP_PROMPTS}
    for form in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            few = write("jsonl", Path(folder) / "few.jsonl", 10)
            path = Path(folder) / form
            spec = write(form, path, arguments.rows)
            files = [path] if path.is_file() else path.glob("*.arrow")
            figures[form] = {"file_mib": sum(f.stat().st_size for f in files) / 2**20}
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                figures[form] |= pool.apply(measure, (few, spec))
    return figures


if __name__ == "__main__":
    packages = ("numpy", "pyarrow", "datasets", "transformers")
    environment.run(__doc__, measure_forms, packages, rows=1_000_000)
