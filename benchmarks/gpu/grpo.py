"""GRPO with and without drafts: `python -m rl.train` on a policy grown from `policies/tiny`.

A grown policy has the logits of the small one, up to rounding, and the cost of its own size: drafts
from the epoch before and from siblings are accepted as in a real run. Both runs start from the same
weights and seed. In bfloat16 a round of another shape may draw another token, hence rewards are
compared, and tokens counted.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.workloads import BASE_POLICY, PROMPTS
from reprise.models.config import num_params
from reprise.models.formats import hf
from reprise.models.text import tokenizer
from reprise.rl.metrics.writer import read_metrics, step_rows
from reprise.rl.runtime.run_files import METRICS_FILE

Row = dict[str, Any]
EPOCHS = 3
PER_STEP = 16  # questions
# width, layers and width of heads of the policy, beside those of policies/tiny; group; most tokens
SIZES = {"real": (24, 4, 2, 16, 256), "tiny": (1, 4, 1, 4, 64)}
DRAFTS = ("Speculation.sources=('last', 'history', 'group', 'own')", "Speculation.budget='goodput'")
PLAIN = ("Speculation.sources=()", "Speculation.budget='off'")
KINDS: Mapping[str, Sequence[str]] = {"drafts": DRAFTS, "plain": PLAIN}
NAMED = {  # figures of a step, summed over steps or averaged
    "rollout_s": ("time/rollout", np.median),
    "update_s": ("time/update", np.median),
    "step_s": ("step_time", np.median),
    "tokens": ("rollout/generated_tokens", np.sum),
    "rounds": ("rollout/rounds", np.sum),
    "accept_rate": ("spec/accept_rate", np.mean),
    "drafted_tokens": ("spec/speculated_fraction", np.mean),
    "tokens_per_round": ("spec/tokens_per_round", np.mean),
    "draft_s": ("spec/draft_seconds", np.median),
    "longest_tokens": ("completions/max_length", np.max),
    "mean_tokens": ("completions/mean_length", np.mean),
    "entropy": ("entropy", np.mean),
    "reward": ("reward", np.mean),
    "logprob_difference": ("sampling/sampling_logp_difference/mean", np.mean),
}


def grpo(size: str) -> Iterator[Row]:
    """Yield a row for each epoch of each run, drafts first: the longer compilation."""
    width, layers, head_width, group, new_tokens = SIZES[size]
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        policy, steps = folder / "policy", EPOCHS * _write_task(folder / "task.jsonl") // PER_STEP
        shape = {"--width": width, "--layers": layers, "--head_width": head_width}
        grow = [str(BASE_POLICY), *(f"{name}={n}" for name, n in shape.items())]
        on_cpu = {"JAX_PLATFORMS": "cpu"}  # the device is for the runs
        environment.call("policies.make.grow", *grow, f"--output={policy}", env=on_cpu)
        settings = (
            f"Policy.directory='{policy}'",
            f"Task.specs=('jsonl:{folder / 'task.jsonl'}',)",
            f"Run.steps={steps}",
            f"Rollout.prompts_per_step={PER_STEP}",
            f"Rollout.group_size={group}",
            f"Sampling.max_new_tokens={new_tokens}",
            f"Optimizer.learning_rate={1.2e-4 / width}",
            f"Trainer.micro_batch_tokens={768 * width}",
            "Engine.min_slots=64",
            "Engine.max_round_nodes=512",
            "Eval.every_steps=0",
            "Metrics.tensorboard=False",
        )
        for kind, changes in KINDS.items():
            run = folder / kind
            changes = (*settings, *changes, f"Run.directory='{run}'")
            file = "--gin_file=configs/tiny_cpu.gin"
            environment.call("rl.train", file, *(f"--gin.{x}" for x in changes))
            rows = step_rows(read_metrics(run / METRICS_FILE))
            of_run = {"run": kind, "parameters": num_params(hf.shape(policy)), "group": group}
            num = len(rows) // EPOCHS
            for epoch in range(EPOCHS):
                yield of_run | {"epoch": epoch + 1} | figures(rows[epoch * num :][:num])


def figures(rows: Sequence[Mapping[str, Any]]) -> Row:
    found = {}
    for name, (key, of_steps) in NAMED.items():
        # a step has no rate of drafts once they are turned off
        if values := [row[key] for row in rows if key in row]:
            found[name] = float(f"{of_steps(values):.4g}")
    return {"steps": len(rows)} | found


def _write_task(path: Path) -> int:
    """Write the questions of `benchmarks.workloads` as JSON lines; return their number."""
    decode = tokenizer.load(BASE_POLICY).decode
    rows = [
        {
            "prompt": decode(one["prompt_ids"]).strip(),
            "answer": decode(one["answer_ids"]).strip(),
        }
        for one in json.loads(PROMPTS.read_text(encoding="utf-8"))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return len(rows)
