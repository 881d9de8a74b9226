"""An EAGLE drafter trained on the policy's own responses: draft tokens accepted a round.

It learns from the responses of two epochs, and drafts for questions that it has
not seen. Rollouts with it are compared with the plain ones, token by token.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.drafts import BUDGET_NODES
from benchmarks.real_policy.acceptance import summary
from benchmarks.real_policy.ground import Ground
from rl.drafter_training.config import DrafterConfig
from rl.drafter_training.offline import OfflineConfig, OfflineTraining
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext, Drafting
from rl.loop.drafter_run import first_drafter
from rl.packing import Response
from rl.speculation.learned_drafter import LearnedDrafter
from rl.trajectory import Trajectory
from spec.drafter import Acceptance, Drafter, Drafts, LiveSlots
from spec.eagle.config import DataBufferConfig, DrafterTrainingConfig, TreeConfig
from spec.eagle.model import EagleWeights

TREE = TreeConfig(max_depth=6, top_k=4)
DRAFTER = DrafterConfig(
    draft_vocab_size=4096, max_depth=6, top_k=4, micro_batches=1, batch_rows=4, row_tokens=256
)
TRAINING = DrafterTrainingConfig(variant="eagle", learning_rate=1e-3)
HELD_OUT = 4  # one question of so many


class Counted(Drafter):
    """A drafter whose accepted draft tokens are counted by question and round."""

    def __init__(self, drafter: Drafter, accepted: dict[int, list[int]]) -> None:
        self._drafter, self._accepted = drafter, accepted
        self._groups_A = np.zeros(0, np.int64)

    def propose(self, live: LiveSlots, max_nodes_A: np.ndarray, max_nodes: int) -> Drafts:
        self._groups_A = live.group_ids_A
        return self._drafter.propose(live, max_nodes_A, max_nodes)

    def observe(self, drafts: Drafts, acceptance: Acceptance) -> None:
        counts_A = acceptance.accepted_AN.sum(axis=1)
        for group, count in zip(self._groups_A.tolist(), counts_A.tolist(), strict=True):
            self._accepted.setdefault(group, []).append(count)
        self._drafter.observe(drafts, acceptance)

    def committed(self, live: LiveSlots) -> None:
        self._drafter.committed(live)

    def finished(self, live: LiveSlots) -> None:
        self._drafter.finished(live)


def measure(ground: Ground, steps: int) -> dict[str, Any]:
    """Train a drafter, and draft with it before and after."""
    held_out = list(range(HELD_OUT - 1, len(ground.questions), HELD_OUT))
    texts = [ground.responses(), ground.past()]
    learned = [_as_response(t) for done in texts for t in done if t.group_id not in held_out]
    unseen = [_as_response(t) for t in texts[0] if t.group_id in held_out]
    options, words = DRAFTER, (r.tokens for r in learned)
    start = first_drafter(options, TRAINING, ground.model, 0, words)
    config = OfflineConfig(options, TRAINING, DataBufferConfig(max_bytes=2**31))
    training = OfflineTraining(
        config, ground.model, ground.params, start, seed=0, temperature=1.0, dtype=np.float32
    )
    rows = {"random weights": _drafted(ground, training.drafter, held_out)}
    before, began_s = training.evaluate(unseen), time.perf_counter()

    def told(step: int, row: dict[str, float]) -> None:
        if step % 20 == 0:
            seconds = time.perf_counter() - began_s
            print(f"drafter step {step}, {seconds:.0f} s: {row}", file=sys.stderr, flush=True)

    training.train(learned, steps, lambda: False, told)
    after = training.evaluate(unseen)
    rows["trained"] = _drafted(ground, training.drafter, held_out)
    names = ("accuracy_top1", "accuracy_top3", "loss")
    return {
        "steps": steps,
        "step_tokens": config.step_tokens,
        "learned_tokens": sum(len(r.tokens) for r in learned),
        "held_out_questions": len(held_out),
        "draft_vocabulary": start.config.draft_vocab_size or ground.model.vocab_size,
        "before": {n: round(before[n], 4) for n in names},
        "after": {n: round(after[n], 4) for n in names},
        "rows": rows,
    }


def _drafted(ground: Ground, drafter: EagleWeights, chosen: Sequence[int]) -> dict[str, Any]:
    """Draft for the responses to the chosen questions, whose plain tokens are known."""
    nodes = BUDGET_NODES + 1  # the root is one of them
    config = ground.engine_config(max_nodes=nodes, slots=32, min_slots=8)
    layers = drafter.config.feature_layers
    engine = Engine(ground.model, config, feature_layers=layers)
    accepted: dict[int, list[int]] = {}
    learned = LearnedDrafter(drafter, TREE)

    def drafts(context: DrafterContext) -> Drafting:
        return Counted(learned.drafter_for(context), accepted), None

    spec = ground.rollout_spec(ground.params, drafts=drafts)
    done = engine.run(spec, ground.requests(chosen=chosen))
    plain = {t.request_id: t for t in ground.responses()}
    differ = sum(not np.array_equal(t.response_ids, plain[t.request_id].response_ids) for t in done)
    rows: dict[str, Any] = {"all": summary([np.asarray(a) for a in accepted.values()])}
    rows |= _by_set(ground, accepted)
    return rows | {"responses": len(done), "responses_that_differ": differ}


def _by_set(ground: Ground, accepted: dict[int, list[int]]) -> dict[str, Any]:
    found: dict[str, list[np.ndarray]] = {}
    for group, counts in sorted(accepted.items()):
        found.setdefault(ground.questions[group].of.name, []).append(np.asarray(counts))
    return {name: summary(counts) for name, counts in found.items()}


def _as_response(t: Trajectory) -> Response:
    return Response(str(t.request_id), t.group_id, t.prompt_ids, t.response_ids)


def named(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that people read."""
    rows = found["rows"]
    return {f"accepted a round, EAGLE, {name}": row["all"]["value"] for name, row in rows.items()}
