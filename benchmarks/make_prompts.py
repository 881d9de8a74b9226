"""Write the questions of `benchmarks.speculation`: `python -m benchmarks.make_prompts`.

The default tasks' questions as `configs/tiny_cpu.gin` has them in its first steps, so
that the benchmark itself needs neither reasoning-gym nor a tokenizer's library.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.environment import ROOT

OUTPUT = ROOT / "benchmarks" / "data" / "tiny_prompts.json"


def main() -> int:
    from rl.config.loader import load
    from rl.data.prompts import DataOrder, prompts_for_step
    from rl.loop.experiment import TrainConfig, open_inputs

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num", type=int, default=64)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    config = load(TrainConfig, [ROOT / "configs" / "tiny_cpu.gin"])
    inputs = open_inputs(config)
    order = DataOrder(len(inputs.task), config.run.seed)
    rows = [
        {
            "id": example.example_id,
            "prompt_ids": inputs.encode(example, config.task),
            "answer_ids": inputs.tokenizer.encode(str(example.answer)),
        }
        for example in prompts_for_step(inputs.task, order, 0, arguments.num)
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
