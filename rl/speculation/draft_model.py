"""The draft model of a run: its folder, checked, and its weights on the workers' devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from models import hf, tokenizer, transformer
from models.config import ModelConfig
from models.tokenizer import Tokenizer
from rl.engine.model_runner import ModelRunner
from rl.engine.rollout_spec import DrafterContext
from rl.gin.loader import resolve_path
from rl.speculation.config import DraftModelConfig
from rl.speculation.device_drafters import PerRunner
from spec.draft_model.config import ChainConfig
from spec.draft_model.drafter import DraftModelDrafter


def check(
    config: DraftModelConfig, policy: ModelConfig, words: Tokenizer, longest_tokens: int
) -> tuple[Path, ModelConfig]:
    """Return the model's folder and shape, without reading weights.

    Raises ValueError or FileNotFoundError if the folder holds no model or does not fit the policy.
    """
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
    if tokenizer.load(folder).backend.get_vocab() != words.backend.get_vocab():
        raise ValueError(
            f"{folder}: expected the policy's tokenizer, got one of other words: take a model of "
            "the same family"
        )
    if model.max_positions < longest_tokens:
        raise ValueError(
            f"{folder} has {model.max_positions} positions, and Rollout.max_prompt_tokens and "
            f"Sampling.max_new_tokens make {longest_tokens}: lower one of them"
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
        self.model, self.config = model, config
        self.models = (self, *others)  # of `config.directories`, by which drafting workers draft
        self._params = params
        self._on_devices = PerRunner[transformer.Params]()

    @staticmethod
    def load(config: DraftModelConfig) -> DraftModel:
        """Read the models from their folders, which `check` has passed."""
        first, *others = (
            (*hf.load_pretrained(resolve_path(str(one.directory)), dtype=jnp.float32), one)
            for one in config.each
        )
        return DraftModel(*first, [DraftModel(*other) for other in others])

    @staticmethod
    def elsewhere(config: DraftModelConfig) -> DraftModel:
        """Return the model without weights, for a run whose workers read them in their programs."""
        assert config.directory is not None
        return DraftModel(hf.check(resolve_path(config.directory)), None, config)

    @property
    def made_for(self) -> str:
        """A text that changes with its programs and their times."""
        return repr((self.model, self.config.each[0]))

    @property
    def max_depth(self) -> int:
        """The most draft tokens of a chain."""
        return self.config.max_depth

    def drafter_for(self, context: DrafterContext) -> DraftModelDrafter:
        """Return the drafter of one worker for one rollout."""
        return self.made(DraftModelDrafter, context, self.config.max_depth)

    def made(self, kind: type[Kind], context: DrafterContext, max_depth: int) -> Kind:
        """Return a drafter of this kind for one worker and rollout, of chains of `max_depth`."""
        runner, config = context.runner, self.config
        return kind(
            self.model,
            self._params_on(runner),
            ChainConfig(
                chunk_tokens=min(ChainConfig.chunk_tokens, runner.config.min_positions),
                max_draft_tokens=max_depth,
                min_prob=config.min_prob,
            ),
            runner=runner,
            sampling=context.spec.sampling,
            key=runner.put(context.spec.key),
            proposal=config.proposal,
        )

    def seconds_to_place(self, clock: Callable[[], float]) -> float:
        """Measure how long the weights take from the host's memory to a device."""
        host = jax.tree.map(np.asarray, self._params)
        began_s = clock()
        jax.block_until_ready(jax.device_put(host))
        return clock() - began_s

    def _params_on(self, runner: ModelRunner) -> transformer.Params:
        def placed() -> transformer.Params:
            assert self._params is not None, "workers of other programs have read them"
            return runner.place(jax.tree.map(runner.cast, self._params), self.model)

        return self._on_devices.get(runner, placed)
