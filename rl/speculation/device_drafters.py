"""The draft model and the learned drafter of a run, and their weights on worker devices."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.models.text import tokenizer
from reprise.models.text.tokenizer import Tokenizer
from reprise.rl.engine.rollout_spec import DrafterContext
from reprise.rl.runtime.run_files import resolve_path
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.speculation.config import DraftModelConfig
from reprise.spec.config import ChainConfig
from reprise.spec.draft_model.drafter import DraftModelDrafter
from reprise.spec.drafter import Drafter
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import TreeConfig
from reprise.spec.eagle.drafter import EagleDrafter
from reprise.spec.eagle.model import DeviceWeights, EagleParams, EagleWeights

T = TypeVar("T")
MIN_PROB = 0.05  # of a chain that the draft model continues


class DrafterSource(Protocol):
    """A maker of drafters for the workers of a run."""

    def drafter_for(self, context: DrafterContext) -> Drafter:
        """Return the drafter of one worker for one rollout."""
        ...


class PerRunner(Generic[T]):
    """One value per model runner, safe from any thread; shapes (`shapes_only`) are not kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[object, T]] = {}

    def get(self, runner: ModelRunner, make: Callable[[], T], version: object = None) -> T:
        """Return the value of a runner; call `make` if no value of this `version` is kept."""
        with self._lock:
            held = self._held.get(id(runner))
        if held is None or held[0] != version:
            held = version, make()
            if runner.makes_shapes:
                return held[1]
            with self._lock:
                self._held[id(runner)] = held
        return held[1]

    def clear(self) -> None:
        with self._lock:
            self._held.clear()


def check_draft_model(
    config: DraftModelConfig, policy: ModelConfig, words: Tokenizer, max_total_tokens: int
) -> tuple[Path, ModelConfig]:
    """Return folder and shape of the draft model; raise unless it is set and fits the policy."""
    if config.directory is None:
        raise ValueError(
            "Speculation.sources names model, and DraftModel.directory is not set: name the folder "
            "of a draft model with the policy's tokenizer"
        )
    folder = resolve_path(config.directory)
    model = hf.check(folder)
    if model.vocab_size != policy.vocab_size:
        raise ValueError(
            f"{folder}: expected the policy's vocabulary of {policy.vocab_size}, got "
            f"{model.vocab_size}: take a model of the same tokenizer, its embedding cut or padded"
        )
    if tokenizer.load(folder).vocabulary != words.vocabulary:
        raise ValueError(
            f"{folder}: expected the policy's tokenizer, got one of other words: take a model of "
            "the same family"
        )
    if model.max_positions < max_total_tokens:
        raise ValueError(
            f"{folder} has {model.max_positions} positions, and Rollout.max_prompt_tokens and "
            f"Sampling.max_new_tokens make {max_total_tokens}: lower one of them"
        )
    return folder, model


Kind = TypeVar("Kind", bound=DraftModelDrafter)


class DraftModel:
    """The draft model that all workers of a run share. Any thread may call it."""

    def __init__(
        self,
        model: ModelConfig,
        params: transformer.Params | None,
        config: DraftModelConfig,
        others: Sequence[DraftModel] = (),
    ) -> None:
        self.model = model
        self.config = config
        self.models = (self, *others)  # with `config.directories`, for drafting workers
        self._params = params
        self._on_devices = PerRunner[transformer.Params]()

    @staticmethod
    def load(config: DraftModelConfig) -> DraftModel:
        """Read the models from their folders, after `check_draft_model`."""
        first, *others = (
            (*hf.load_pretrained(resolve_path(str(one.directory)), dtype=jnp.float32), one)
            for one in config.each
        )
        return DraftModel(*first, [DraftModel(*other) for other in others])

    @staticmethod
    def elsewhere(config: DraftModelConfig) -> DraftModel:
        """Return the model without weights, for a run with workers that read the weights."""
        assert config.directory is not None
        return DraftModel(hf.check(resolve_path(config.directory)), None, config)

    @property
    def made_for(self) -> str:
        """Cache key for compiled programs and their timings."""
        return repr((self.model, self.config.each[0]))

    @property
    def max_depth(self) -> int:
        """The maximum number of draft tokens in a chain."""
        return self.config.max_depth

    def drafter_for(self, context: DrafterContext) -> DraftModelDrafter:
        """Return the drafter of one worker for one rollout."""
        return self.make_drafter(DraftModelDrafter, context, self.config.max_depth)

    def make_drafter(self, kind: type[Kind], context: DrafterContext, max_depth: int) -> Kind:
        """Return a drafter of this kind for one worker and rollout, with chains of `max_depth`."""
        runner = context.runner
        config = self.config
        return kind(
            dataclasses.replace(self.model, unused_ids=runner.model.unused_ids),
            self._params_on(runner),
            ChainConfig(
                max_draft_tokens=max_depth,
                min_prob=MIN_PROB,
            ),
            runner=runner,
            sampling=context.spec.sampling,
            key=runner.put(context.spec.key),
            proposal=config.proposal,
        )

    def seconds_to_place(self, clock: Callable[[], float]) -> float:
        """Measure the seconds to copy the weights from host memory to a device."""
        host = jax.tree.map(np.asarray, self._params)
        start_s = clock()
        jax.block_until_ready(jax.device_put(host))
        return clock() - start_s

    def _params_on(self, runner: ModelRunner) -> transformer.Params:
        def placed() -> transformer.Params:
            assert self._params is not None, "workers of other programs have read them"
            return runner.place(jax.tree.map(runner.cast, self._params), self.model)

        return self._on_devices.get(runner, placed)


class LearnedDrafter:
    """The drafter that all workers share, safe from any thread; `swap` replaces its weights."""

    def __init__(self, drafter: EagleWeights, tree: TreeConfig) -> None:
        self.config = drafter.config
        self.draft_ids_U = drafter.draft_ids_U
        self.tree = tree
        self._lock = threading.Lock()
        self._params = drafter.params
        self._version = 0
        self._on_devices = PerRunner[EagleParams]()

    @property
    def version(self) -> int:
        """The number of times that weights have been swapped."""
        return self._version

    @property
    def newest(self) -> tuple[int, EagleParams]:
        """The current version and the weights of this version."""
        with self._lock:
            return self._version, self._params

    @property
    def made_for(self) -> str:
        """Cache key for compiled programs and their timings."""
        return repr((self.config, self.tree))

    @property
    def max_depth(self) -> int:
        """The maximum number of draft tokens on a path."""
        return self.tree.max_depth

    @property
    def drafter(self) -> EagleWeights:
        """The drafter with its newest weights."""
        return EagleWeights(self.config, self._params, self.draft_ids_U)

    def swap(self, params: EagleParams) -> None:
        """Replace the weights by arrays that no step donates."""
        with self._lock:
            self._params = params
            self._version = self._version + 1

    def drafter_for(self, context: DrafterContext) -> EagleDrafter:
        """Return the drafter of one worker for one rollout."""
        runner = context.runner
        spec = context.spec
        ids_U = None if self.draft_ids_U is None else runner.put(self.draft_ids_U)
        shared = eagle.frozen(spec.params, ids_U, runner.made)
        return EagleDrafter(
            self.config,
            lambda: DeviceWeights(self._params_on(runner), shared),
            self.tree,
            spec.sampling,
            runner.put(spec.key),
            states=context.states,
            runner=runner,
            num_draft_tokens=runner.config.max_nodes - 1,
        )

    def _params_on(self, runner: ModelRunner) -> EagleParams:
        version, params = self.newest

        def placed() -> EagleParams:
            if runner.makes_shapes:
                return jax.tree.map(lambda x: runner.put(runner.cast(x)), params)
            return jax.tree.map(lambda x: runner.put(runner.cast(np.asarray(x))), params)

        return self._on_devices.get(runner, placed, version)


DeviceDrafterSource = DraftModel | LearnedDrafter  # one drafter of a run, shared by all workers
DeviceDrafters = Mapping[str, DeviceDrafterSource]  # by source name
NO_DRAFTERS: DeviceDrafters = {}
