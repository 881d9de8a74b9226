"""After a rehearsal the host compiles nothing more; in a process of its own, which starts bare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reprise.spec.drafter import Source

ROOT = Path(__file__).parents[3]

SCRIPT = """
import gc, json
import jax, numpy as np
from numba.core.registry import CPUDispatcher
from tests.support.tiny_run import MODEL as model
from reprise.models.decoder import transformer
from reprise.rl.engine.engine import Engine
from reprise.rl.slots.config import EngineConfig
from reprise.rl.warm_up.compile_buckets import compile_host_kernels
from reprise.rl.speculation.reuse import remember
from reprise.rl.speculation.sources import Speculation, SpeculationConfig
from reprise.rl.python.generate import generate
from reprise.rl.records.trajectory import Request
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.round_times import RoundTimes
from reprise.spec.reuse.rollout_cache import RolloutCache
from reprise.spec.verification.sampling import SamplingConfig, step_key

params = transformer.init(model, jax.random.key(0))
engine = Engine(model, EngineConfig(slots=4, min_slots=4, max_nodes=4, page_tokens=64))
sampling, config = SamplingConfig(max_new_tokens=32), SpeculationConfig()
sizes = [(4, 4, 64), (4, 8, 64), (4, 16, 64)]
times = RoundTimes({s: 1.0 for s in sizes})


def compiled():
    found = [x for x in gc.get_objects() if isinstance(x, CPUDispatcher)]
    ours = [f for f in found if f.py_func.__module__.startswith(("reprise.spec.", "reprise.rl."))]
    return {(f.py_func.__module__, f.py_func.__name__, str(s)) for f in ours for s in f.signatures}


compile_host_kernels(config, times, engine, params, sampling)
before = compiled()
drafted = 0
cache, prompts = RolloutCache(), [(1, 2, 3), (2, 3)]
requests = [Request(g * 8 + i, prompts[g], g, i) for i in range(4) for g in range(2)]
with Speculation(config, cache, times=times) as speculation:
    done, last = [], {}
    for step, own in enumerate((None, None, FixedBudget(3))):
        drafter, budget = speculation.drafter_factory(["a", "b"], prompts, last)(None)
        done = generate(
            model, params, requests, sampling, key=step_key(0, step), engine=engine,
            drafter=drafter, budget=own or budget,
        )
        drafted = drafted + engine.stats.drafted_by_source
        remember(cache, ["a", "b"], done, scored=False)
        last = {t.request_id: t.response_ids for t in done}
        speculation.prepare({"a": prompts[0], "b": prompts[1]})
    speculation.settle()
late = sorted(compiled() - before)
print(json.dumps({"rehearsed": len(before), "drafted": drafted.tolist(), "late": late}))
"""


@pytest.mark.slow
def test_rollouts_compile_no_host_kernel_after_the_warm_up():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["rehearsed"] > 10
    drafted = {Source(i).name for i, count in enumerate(found["drafted"]) if count}
    assert drafted >= {"GROUP", "HISTORY"}, "the phases must draft"
    assert found["late"] == []
