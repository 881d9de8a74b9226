"""Messages about drafters on a worker's devices: what they are, their weights, how they learn.

run's program → worker    Drafters (in Hello), DrafterWeights, Gradient
worker → run's program    Caught (in Report), Gradients
both                      Tuner (in Begin and Report)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from rl.remote.records import expect
from rl.remote.wire import ArraySpec
from rl.speculation.config import DraftModelConfig
from spec.eagle import model as eagle
from spec.eagle.batch import DrafterBatch
from spec.eagle.config import DrafterTrainingConfig, EagleConfig, TreeConfig
from spec.eagle.model import EagleParams

_BATCH_FIELDS = dataclasses.fields(DrafterBatch)


@dataclasses.dataclass(frozen=True, eq=False)
class Learned:
    """A learned drafter but for its weights, and how it is trained: on draws at `temperature`."""

    config: EagleConfig
    tree: TreeConfig
    training: DrafterTrainingConfig
    draft_ids_U: np.ndarray | None
    temperature: float


@dataclasses.dataclass(frozen=True, eq=False)
class Drafters:
    """The drafters on the device that the sources name. A draft model is read from its folder.

    `apart`: it is read by drafting programs, and drafts on their devices. `copies`: it drafts for
    copies of requests, on the devices of the workers that have them.
    """

    model: DraftModelConfig | None = None
    learned: Learned | None = None
    apart: bool = False
    copies: bool = False


NO_DRAFTERS = Drafters()


@dataclasses.dataclass(frozen=True, eq=False)
class DrafterWeights:
    """A learned drafter's arrays, in the order of its tree: `drafts` are drafted with from now on,
    gradients are those of `training`. The version of the latter is the step that they are before.
    """

    use: Literal["drafts", "training"]
    version: int
    arrays: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient:
    """Asks for the gradient of a micro-batch (`rl.drafter_training.trainer`): of the drafter's
    weights before a step, and the policy's of a version.
    """

    step: int
    policy: int
    tokens_BT: np.ndarray
    hidden_BTW: np.ndarray
    positions_BT: np.ndarray
    sequence_BT: np.ndarray
    counts_BT: np.ndarray

    @property
    def batch(self) -> DrafterBatch:
        return DrafterBatch(**{f.name: getattr(self, f.name) for f in _BATCH_FIELDS})


@dataclasses.dataclass(frozen=True, eq=False)
class Gradients:
    """The gradient's arrays, in the order of the drafter's tree, and the metrics of the batch."""

    arrays: tuple[np.ndarray, ...]
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, eq=False)
class Caught:
    """The hidden states of a response (`spec.eagle.batch.HiddenStates`)."""

    request_id: int
    tokens_T: np.ndarray
    prompt_tokens: int
    hidden_TW: np.ndarray
    policy_version: int


@dataclasses.dataclass(frozen=True)
class Window:
    """The rewards of one arm in one range of batch sizes."""

    bucket: int
    strategy: str
    rewards: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Tuner:
    """The state of a worker's bandit (`spec.budget.bandit.BegMab.state`)."""

    seed: int
    draws: int
    windows: tuple[Window, ...]


_INTEGERS = "tokens_BT", "positions_BT", "sequence_BT"
ARRAYS: dict[type, dict[str, ArraySpec]] = {
    Caught: {"tokens_T": ("int32", 1)},
    Gradient: {**{name: ("int32", 2) for name in _INTEGERS}, "counts_BT": ("bool", 2)},
}


def _check_learned(record: Learned) -> None:
    ids_U, config = record.draft_ids_U, record.config
    expect((ids_U is None) == (config.draft_vocab_size == 0), "a map of a reduced vocabulary")
    if ids_U is not None:
        same = (ids_U.dtype.name, ids_U.shape) == ("int32", (config.draft_vocab_size,))
        expect(same, f"{config.draft_vocab_size} draft tokens of int32")
        inside = 0 <= int(ids_U.min()) <= int(ids_U.max()) < config.layer.vocab_size
        expect(inside, "draft tokens of the vocabulary")


def _check_gradient(record: Gradient) -> None:
    shape = record.tokens_BT.shape
    same = all(getattr(record, n).shape == shape for n in (*_INTEGERS, "counts_BT"))
    expect(same and record.hidden_BTW.shape[:-1] == shape, "rows of as many tokens everywhere")


def _check_caught(record: Caught) -> None:
    n, states = len(record.tokens_T), record.hidden_TW
    expect(states.ndim == 2 and len(states) == n - 1 > 0, "states of all tokens but the last")
    expect(0 < record.prompt_tokens < n, "a prompt, and a response behind it")


def _check_gradients(record: Gradients) -> None:
    expect(record.metrics.get("num_entries", -1.0) >= 0, "the number of entries")


def _check_tuner(record: Tuner) -> None:
    expect(record.draws >= 0, "draws of 0 or more")
    rewards = [x for window in record.windows for x in window.rewards]
    expect(all(math.isfinite(x) and x >= 0 for x in rewards), "rewards of 0 or more")


CHECKS: dict[type, Callable[[Any], None]] = {
    Learned: _check_learned,
    Gradient: _check_gradient,
    Caught: _check_caught,
    Gradients: _check_gradients,
    Tuner: _check_tuner,
}


def of_tuner(state: Mapping[str, Any]) -> Tuner:
    """Return a bandit's state as a message."""
    windows = (Window(w["bucket"], w["strategy"], tuple(w["rewards"])) for w in state["windows"])
    return Tuner(state["seed"], state["draws"], tuple(windows))


def tuner_state(told: Tuner) -> dict[str, Any]:
    """Return the state that a message has."""
    windows = [
        {"bucket": w.bucket, "strategy": w.strategy, "rewards": list(w.rewards)}
        for w in told.windows
    ]
    return {"seed": told.seed, "draws": told.draws, "windows": windows}


def arrays_of(params: EagleParams) -> tuple[np.ndarray, ...]:
    """Return a drafter's arrays, or a gradient's, as messages have them."""
    return tuple(np.asarray(x, np.float32) for x in jax.device_get(jax.tree.leaves(params)))


def params_of(config: EagleConfig, arrays: tuple[np.ndarray, ...]) -> EagleParams:
    """Return the tree of arrays. Raises ValueError where they are not those of this drafter."""
    specs, tree = jax.tree.flatten(eagle.param_specs(config))
    wanted = [tuple(spec.shape) for spec in specs]
    found = [x.shape for x in arrays if x.dtype == np.float32]
    if found != wanted:
        raise ValueError(
            f"expected {len(wanted)} arrays of float32 of the drafter's shapes, got {len(arrays)}: "
            f"{[(x.dtype.name, x.shape) for x in arrays][:20]}"
        )
    return jax.tree.unflatten(tree, arrays)
