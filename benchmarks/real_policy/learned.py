"""An EAGLE drafter trained on the policy's own responses: draft tokens accepted a round.

It learns from the responses of two epochs, and drafts for unseen questions. Its rollouts are
compared with plain ones, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.real_policy.acceptance import BUDGET_NODES, summary
from benchmarks.real_policy.ground import Ground
from rl.drafter_run import first_drafter
from rl.drafter_training.config import DrafterConfig
from rl.drafter_training.offline import OfflineConfig, OfflineTraining
from rl.engine.engine import Engine
from rl.engine.rollout_spec import DrafterContext, Drafting
from rl.packing import Response
from rl.speculation.device_drafters import LearnedDrafter
from rl.trajectory import Trajectory
from spec.drafter import Acceptance, Drafter, Drafts, LiveSlots
from spec.eagle.config import DataBufferConfig, DrafterTrainingConfig, TreeConfig
from spec.eagle.model import EagleWeights

TREE = TreeConfig(max_depth=6, top_k=4)
DRAFTER = DrafterConfig(
    draft_vocab_size=4096, max_depth=6, top_k=4, micro_batches=1, batch_rows=4, row_tokens=256
)
TRAINING = DrafterTrainingConfig(variant="eagle", learning_rate=1e-3)
STEPS = 300
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


def measure(ground: Ground) -> dict[str, Any]:
    """Train a drafter; draft with it before and after."""
    held_out = list(range(HELD_OUT - 1, len(ground.questions), HELD_OUT))
    epochs = [ground.responses(), ground.past()]
    learned = [_as_response(t) for done in epochs for t in done if t.group_id not in held_out]
    unseen = [_as_response(t) for t in epochs[0] if t.group_id in held_out]
    start = first_drafter(DRAFTER, TRAINING, ground.model, 0, (r.tokens for r in learned))
    config = OfflineConfig(DRAFTER, TRAINING, DataBufferConfig(max_bytes=2**31))
    training = OfflineTraining(
        config, ground.model, ground.params, start, seed=0, temperature=1.0, dtype=np.float32
    )
    rows = {"random weights": _drafted(ground, training.drafter, held_out)}
    before = training.evaluate(unseen)
    training.train(learned, STEPS, lambda: False, lambda step, row: None)
    after = training.evaluate(unseen)
    rows["trained"] = _drafted(ground, training.drafter, held_out)
    names = ("accuracy_top1", "accuracy_top3", "loss")
    looks = {"before": before, "after": after}
    return {
        "steps": STEPS,
        "step_tokens": config.step_tokens,
        "learned_tokens": sum(len(r.tokens) for r in learned),
        "held_out_questions": len(held_out),
        "draft_vocabulary": start.config.draft_vocab_size or ground.model.vocab_size,
        **{look: {n: round(found[n], 4) for n in names} for look, found in looks.items()},
        "rows": rows,
    }


def _drafted(ground: Ground, weights: EagleWeights, chosen: Sequence[int]) -> dict[str, Any]:
    """Draft for the responses to the chosen questions, whose plain tokens are known."""
    config = ground.engine_config(max_nodes=BUDGET_NODES + 1, slots=32, min_slots=8)
    engine = Engine(ground.model, config, feature_layers=weights.config.feature_layers)
    accepted: dict[int, list[int]] = {}
    learned = LearnedDrafter(weights, TREE)

    def drafts(context: DrafterContext) -> Drafting:
        return Counted(learned.drafter_for(context), accepted), None

    spec = ground.rollout_spec(ground.params, drafts=drafts)
    done = engine.run(spec, ground.requests(chosen=chosen))
    plain = {t.request_id: t.response_ids for t in ground.responses()}
    differ = sum(not np.array_equal(t.response_ids, plain[t.request_id]) for t in done)
    total = summary([np.asarray(counts) for counts in accepted.values()])
    return {"all": total, "responses": len(done), "responses_that_differ": differ}


def _as_response(t: Trajectory) -> Response:
    return Response(str(t.request_id), t.group_id, t.prompt_ids, t.response_ids)
