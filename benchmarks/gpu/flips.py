"""Tokens that verified rounds draw otherwise than plain ones: `benchmarks.bf16_flips`, shortened.

The shipped policy in float32 and in bfloat16; a random one at the tiny size.
"""

from __future__ import annotations

from benchmarks import bf16_flips, workloads
from benchmarks.gpu.sizes import Rows, Size, random_weights
from rl.engine.config import EngineConfig

PROMPTS, GROUP = 16, 4


def rows(size: Size) -> Rows:
    sizes = bf16_flips.Sizes(size.flip_seeds, size.flip_tokens, ("cdf",), (size.node_count,))
    if size.name == "real":
        model, master = workloads.policy(workloads.BASE_POLICY)
        asked = workloads.questions(PROMPTS)
    else:
        model, master = size.model, random_weights(size.model, "float32")
        asked = [{"prompt_ids": [1, 2, 3]}, {"prompt_ids": [4, 5]}]
    requests = workloads.group_requests(asked, GROUP if size.name == "real" else 2)
    config = EngineConfig(
        slots=len(requests), min_slots=len(requests), max_nodes=size.node_count, cache="pages"
    )
    found = bf16_flips.of_policy(model, master, requests, config, sizes)
    yield from found["rows"]
