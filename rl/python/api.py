"""Training from Python: sample, forward_backward, optim_step, save_state.

    from reprise import Adam, Datum, Policy

    policy = Policy("policies/tiny", "Policy.lora_rank=16", "Sampling.max_new_tokens=64")
    for step in range(20):
        data = []
        for group in policy.sample(["What is 57 + 68?\\n"] * 8, n=8, seed=step):
            rewards = [float(sample.text.endswith("125")) for sample in group]
            mean = sum(rewards) / len(rewards)
            data += [Datum.of(s, r - mean) for s, r in zip(group, rewards)]
        policy.forward_backward(data, "importance_sampling")
        policy.optim_step(Adam(learning_rate=1e-3))
    policy.export("own-policy")

A policy is one object, and a program may have several, such as a teacher and a student. Sampling
uses the weights at the time of the call.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.config import LORA_TARGETS, trained_specs, with_adapters
from reprise.models.decoder.lora import cut_to, merge
from reprise.models.decoder.lora import init as new_adapter
from reprise.models.decoder.transformer import Params
from reprise.models.formats import peft_files
from reprise.rl.assembly.setup import make_learner
from reprise.rl.batches.data import Datum, Output, pack
from reprise.rl.batches.micro_batches import Packed, unpacked
from reprise.rl.checkpoint import reader
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.checkpoint.config import CheckpointConfig
from reprise.rl.engine.engine import OnRound
from reprise.rl.export import adapter_base, exports
from reprise.rl.gin.loader import load
from reprise.rl.gin.values import literal
from reprise.rl.learner import gradient_accumulation, logprobs, objectives
from reprise.rl.learner.gradient_accumulation import Accumulator, Health, all_finite
from reprise.rl.learner.objectives import (
    LOSSES,
    NETWORKS,
    Adam,
    Loss,
    LossSettings,
    check_inputs,
    complete,
    target_logprobs,
)
from reprise.rl.learner.optimizer import TrainState, init_state, make_optimizer
from reprise.rl.placement.meshes import open_mesh
from reprise.rl.python.sampler import Prompt, Rollouts, Sample, Sampler, on_mesh
from reprise.rl.python.stream import Stream
from reprise.rl.runtime.devices import in_turn
from reprise.rl.runtime.parallel_compile import keep_programs
from reprise.rl.runtime.progress import say
from reprise.rl.settings import identity
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs, open_policy
from reprise.rl.settings.unused import refuse_run_settings
from reprise.rl.settings.user_names import check_user_names
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import Drafter
from reprise.spec.round_times import RoundTimes

if TYPE_CHECKING:
    from reprise.rl.exchange.responses import Scorer
    from reprise.rl.run.evaluation import Answers
    from reprise.rl.settings.eval_sets import EvalSets

__all__ = [
    "LOSSES",
    "Adam",
    "Datum",
    "Loss",
    "LossSettings",
    "Output",
    "Policy",
    "Sample",
    "Sampler",
    "complete",
]
PLAIN = 'Speculation.budget="off"'
# entries of the host state of saved states: samples without a seed; responses to reuse
NUM_CALLS = "num_calls"
REUSE = "reuse"
CustomLoss = Callable[[list[jax.Array]], jax.Array]  # of the log-probs of each datum


class Policy:
    """A policy: its weights (all trained, or only an adapter), its tokenizer and its engine.

    A prompt and its response together have at most `config.longest_tokens` tokens (`Rollout` and
    `Sampling`), and so does a datum. Programs compile at their first call.
    """

    def __init__(
        self, directory: str, *settings: str | Mapping[str, Any], files: Sequence[str] = ()
    ) -> None:
        """Load a Hugging Face folder or a GGUF file.

        `settings` are configuration overrides, as texts such as "Engine.slots=16" or as mappings
        such as {"Engine.slots": 16}, and win over `files`.
        Without `files`, drafts are off by default. Settings that only a run reads are refused; in
        `files`, which may come from a run, such settings have no effect. Raises ConfigError,
        ValueError or FileNotFoundError.
        """
        if isinstance(files, str):
            raise ValueError(f"files: expected a list, got {files!r:.80}; fix: [{files!r:.80}]")
        texts = _as_texts(settings)
        named = f"Policy.directory={directory!r}"
        overrides = [named, *texts] if files else [PLAIN, named, *texts]
        config = load(TrainConfig, files, overrides)
        refuse_run_settings(texts)
        if not_kept := keep_programs():
            say(f"warning: {not_kept}", sys.stderr)
        policy, model, tokenizer = open_policy(directory, config.task, config.policy.lora)
        check_user_names(config, section="Speculation")
        contents = identity.policy_contents(policy)
        inputs = Inputs(policy, model, tokenizer, (), 0, contents=contents)
        self.config = config
        self.tokenizer = inputs.tokenizer
        self.model = inputs.model
        self._mesh, rounding = open_mesh(config, inputs.model)
        if rounding is not None:
            say(rounding, sys.stderr)
        self._total: Accumulator | None = None
        self._now: Sampler | None = None  # until the next optimizer step
        with on_mesh(self._mesh):
            self._learner, self._state = make_learner(config, inputs, self._mesh, any_sampling=True)
            self._rollouts = Rollouts(config, inputs, self._mesh)

    def with_new_adapter(
        self, seed: int = 0, rank: int | None = None, targets: Sequence[str] = ()
    ) -> Self:
        """Return another policy with the same frozen weights and engine, and a fresh adapter.

        With a `rank` below the policy rank, the rest of A and B is 0, and training keeps these
        zeros. If `targets` is not empty, A and B of all other weights are 0 too. Raises ValueError.
        """
        lora = self.model.lora
        assert lora is not None, "all weights of this policy are trained"
        if rank is not None and not 1 <= rank <= lora.rank:
            raise ValueError(f"expected a rank of 1 to Policy.lora_rank={lora.rank}, got {rank}")
        if isinstance(targets, str) or not set(targets) <= LORA_TARGETS.keys():
            raise ValueError(f"expected targets of {', '.join(LORA_TARGETS)}, got {targets!r:.80}")
        with on_mesh(self._mesh):
            adapter = new_adapter(self.model, jax.random.key(seed), self._mesh)
            if rank is not None or targets:
                adapter = cut_to(adapter, rank or lora.rank, targets)
            return self._with(adapter)

    def with_adapter(self, folder: str | Path, *, any_base: bool = False) -> Self:
        """Return another policy, with the adapter from a `peft` folder and a fresh optimizer.

        The adapter is plain LoRA or rsLoRA of at most the policy rank. B is rescaled so that
        scale · B · A is the same as in peft. An adapter that `export_adapter` wrote for other
        weights is refused, unless `any_base`; a different base name prints a warning to stderr.
        Raises FileNotFoundError, or ValueError for another kind or shape.
        """
        inputs = self._rollouts.inputs
        adapter = Path(folder)
        with on_mesh(self._mesh):
            twin = self._with(peft_files.read(adapter, self.model, self._mesh))
        remark = adapter_base.check_base(adapter, inputs.policy, inputs.contents, any_base=any_base)
        if remark:
            say(remark, sys.stderr)
        return twin

    def _with(self, adapter: Params) -> Self:
        """Return another policy with this adapter. Raises ValueError with a `Reuse.mode`."""
        if self._rollouts.reuse.mode.repeats:
            raise ValueError(
                f"Reuse.mode={self.config.reuse.mode!r}: adapters of one policy share its "
                "responses, and must not reuse those of another adapter; fix: a Policy for each"
            )
        twin = copy.copy(self)
        twin._total = twin._now = None
        twin._state = self._fresh(adapter)
        return twin

    def _fresh(self, trained: Params) -> TrainState:
        """Return a state with an optimizer that has not taken a step."""
        recipe = self._learner.recipe
        return init_state(trained, make_optimizer(recipe.optimizer, recipe.total_steps))

    @property
    def version(self) -> int:
        """The number of optimizer steps taken."""
        return int(self._state.step)

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of a datum."""
        return self._learner.shape.length

    # -- sampling -------------------------------------------------------------------------

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int = 1,
        sampling: SamplingConfig | None = None,
        seed: int | None = None,
        *,
        drafts: bool = True,
        drafter: Drafter | None = None,
        on_round: OnRound | None = None,
    ) -> list[list[Sample]]:
        """Return `n` responses to each prompt from the current policy (`Sampler.sample`)."""
        return self._current().sample(
            prompts, n, sampling, seed, drafts=drafts, drafter=drafter, on_round=on_round
        )

    def answers(self, evals: EvalSets, scorer: Scorer) -> list[Answers]:
        """Return the scored responses to the questions of evaluations (`Questions.evaluate`)."""
        return self._current().answers(evals, scorer)

    def _current(self) -> Sampler:
        """Return a sampler of the current weights."""
        if self._now is None:
            self._now = self._sampler(self._state.params)
        return self._now

    @property
    def round_times(self) -> RoundTimes | None:
        """The measured seconds of a round by its size; None before the first drafts."""
        return self._rollouts.speculation.times

    def sampler(self) -> Sampler:
        """Return a sampler with a copy of the current weights, which later steps do not change."""
        with on_mesh(self._mesh):
            return self._sampler(jax.tree.map(jnp.copy, self._state.params))

    def _sampler(self, trained: Params) -> Sampler:
        rollouts = self._rollouts
        learner = self._learner
        with on_mesh(self._mesh):
            weights = rollouts.laid_out(trained, trained_specs(self.model))
            if learner.base is not None:
                assert self.model.lora is not None
                weights = with_adapters(rollouts.frozen(learner.base), weights, self.model.lora)
        return Sampler(rollouts, learner, weights, self.version)

    def stream(self, places: int = 1, report: Callable[[str], None] = lambda line: None) -> Stream:
        """Return a rollout for requests of samplers, with up to `places` adapters at a time."""
        assert self._learner.base is not None, "all weights of this policy are trained"
        with on_mesh(self._mesh):
            base = self._rollouts.frozen(self._learner.base)
        return Stream(self._rollouts, base, places, report)

    # -- training -------------------------------------------------------------------------

    def forward(self, data: Sequence[Datum]) -> list[np.ndarray]:
        """Return the log-probs of the targets of each datum, float32 [T]. Raises ValueError."""
        with on_mesh(self._mesh):
            learner = self._learner
            drawn = self._rollouts.drawn
            params = learner.policy(self._state.params)
            return target_logprobs(params, data, drawn, learner.shape, learner.recipe)

    def evaluate(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        settings: LossSettings | None = None,
    ) -> Output:
        """Return a loss and the log-probs like `forward_backward`, without computing a gradient."""
        learner = self._learner
        passes = list[Any]()
        settings = complete(loss, settings)
        packed = self._pack(data, loss, settings)
        with on_mesh(self._mesh):
            for p in packed:
                evaluated = objectives.evaluate(
                    self._state.params,
                    logprobs.place(p.batch),
                    settings,
                    learner.base,
                    loss=loss,
                    recipe=learner.recipe,
                )
                passes.append(in_turn(evaluated))
                logprobs.keep_pace(passes, logprobs.unwatched)
            output = self._output(data, packed, jax.device_get(passes))
        objectives.check_numbers(output.logprobs)
        return output

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        settings: LossSettings | None = None,
    ) -> Output:
        """Add the gradient of a loss (`objectives.LOSSES`) to gradients since `optim_step`.

        Losses are sums over all positions; divide weights or advantages for a mean. Raises
        ValueError for data that do not fit, and for a loss or gradient that is not finite, which
        drops all gradients since the last `optim_step`.
        """
        learner = self._learner
        settings = complete(loss, settings)
        packed = self._pack(data, loss, settings)
        network = NETWORKS[loss]
        passes = list[Health]()
        with on_mesh(self._mesh):
            total = self._total
            self._total = None
            total = total or gradient_accumulation.start(network=network, recipe=learner.recipe)
            for p in packed:
                accumulated = gradient_accumulation.accumulate(
                    self._state.params,
                    total,
                    logprobs.place(p.batch),
                    settings,
                    learner.base,
                    network=network,
                    recipe=learner.recipe,
                )
                total, health = in_turn(accumulated)
                passes.append(health)
                logprobs.keep_pace(passes, logprobs.unwatched)
            fetched = jax.device_get(passes)
        _check_finite(packed, fetched)
        self._total = total
        return self._output(data, packed, [health.outputs for health in fetched])

    def _pack(self, data: Sequence[Datum], loss: str, settings: LossSettings) -> list[Packed]:
        check_inputs(loss, data)
        bounds = (settings.low, settings.high) if LOSSES[loss].has_bounds else None
        return pack(data, self.model, self._learner.shape, self._rollouts.drawn, bounds)

    def _output(
        self, data: Sequence[Datum], packed: Sequence[Packed], outputs: Sequence[Any]
    ) -> Output:
        """Return the combined output of passes, each with log-probs [E, M] and losses [E]."""
        both = zip(outputs, packed, strict=True)
        losses = [loss_E.reshape(-1)[p.places] for (_, loss_E), p in both]
        logps = unpacked(packed, [logp_EM for logp_EM, _ in outputs], list(map(len, data)))
        self._rollouts.drawn.note_scored(data, logps)
        return Output(float(sum(x.sum(dtype=np.float64) for x in losses)), logps)

    def forward_backward_custom(self, data: Sequence[Datum], loss: CustomLoss) -> Output:
        """Add the gradient of a scalar function of the log-probs, float32 [T] for each datum.

        This takes two passes: d loss / d θ = Σ_t (d loss / d log p_t) · d log p_t / d θ.
        """
        value, gradients = jax.value_and_grad(loss)([jnp.asarray(x) for x in self.forward(data)])
        linear = [
            dataclasses.replace(datum, weights=-np.asarray(gradient), low=None, high=None)
            for datum, gradient in zip(data, gradients, strict=True)
        ]
        return dataclasses.replace(self.forward_backward(linear), loss=float(value))

    @property
    def has_gradients(self) -> bool:
        return self._total is not None

    def optim_step(self, adam: Adam | None = None) -> float:
        """Apply the gradients since the last call; return their norm before clipping.

        Raises ValueError without gradients, for settings that do not fit into float32, and if the
        norm or the new weights are not finite. The weights are then unchanged.
        """
        adam = adam or Adam()
        adam.check()
        if self._total is None:
            raise ValueError("expected gradients to apply, got none: call forward_backward before")
        total = self._total
        self._total = None
        self._now = None
        with on_mesh(self._mesh):
            gradients = in_turn(gradient_accumulation.join(total)).gradients
            stepped = objectives.apply(self._state, gradients, adam, recipe=self._learner.recipe)
            self._state, *results = in_turn(stepped)
            norm, is_finite = (x.item() for x in jax.device_get(results))
        if not np.isfinite(norm):
            raise ValueError(f"the gradient is not finite (norm {norm}): nothing was applied")
        if not is_finite:
            raise ValueError(
                f"the step makes weights that are not finite (learning_rate {adam.learning_rate}): "
                "nothing was applied; fix: a lower learning_rate or weight_decay"
            )
        return norm

    # -- state ----------------------------------------------------------------------------

    def save_state(self, folder: str | Path) -> None:
        """Save weights and optimizer under the number of optimizer steps; earlier states stay.

        Raises FileExistsError if the folder has a state of this number, or OSError.
        """
        settings = CheckpointConfig(asynchronous=False)
        host = {
            "contents": dict(self._rollouts.inputs.contents),
            NUM_CALLS: self._rollouts.num_calls,
            REUSE: self._rollouts.reuse_state(),
        }
        with Checkpointer(folder, settings, keeps_all=True) as checkpoints:
            checkpoints.save(self.version, self._state, host)

    def load_state(
        self, folder: str | Path, step: int | None = None, *, with_optimizer: bool = True
    ) -> None:
        """Continue from a saved state, by default with the most steps; gradients are dropped.

        The call numbers of samples without a seed continue from the save. Without the saved
        optimizer, Adam restarts from zero. Raises NoWholeCheckpointError, StructureMismatchError
        for another policy or adapter, and ValueError for an adapter of other weights, or if weights
        or optimizer are not finite. The policy is then unchanged.
        """
        inputs = self._rollouts.inputs
        with on_mesh(self._mesh):
            restored = reader.restore(folder, self._state, step)
            if self._learner.base is not None:
                then = restored.host.get("contents", {})
                identity.refuse_other_base(then, inputs.contents, str(folder), inputs.policy)
            state = restored.arrays
            rollouts = self._rollouts
            if not with_optimizer:
                state = self._fresh(state.params)
            if not in_turn(all_finite((state.params, state.opt_state))):
                raise ValueError(
                    f"{folder}: the weights or the optimizer's state are not finite: nothing was "
                    "loaded; fix: load an earlier state"
                )
            rollouts.num_calls = max(rollouts.num_calls, restored.host.get(NUM_CALLS, 0))
            rollouts.load_reuse_state(restored.host.get(REUSE, {}))
            self._state = state
        self._total = self._now = None

    def export_adapter(self, folder: str | Path) -> None:
        """Write the adapter for `peft`, and for `with_adapter`."""
        inputs = self._rollouts.inputs
        adapter = jax.device_get(self._state.params)
        name, digest = adapter_base.describe_base(inputs.policy, inputs.contents)
        peft_files.write(Path(folder), self.model, adapter, name, digest)

    def export(self, folder: str | Path) -> None:
        """Write the policy for `transformers`, with any adapter merged into the weights."""
        target = Path(folder)
        inputs = self._rollouts.inputs
        exports.check_target(target, force=True)
        exports.check_apart(target, inputs.policy)
        params = self._learner.policy(self._state.params)
        if inputs.model.lora is not None:
            model, params = merge(inputs.model, params)
            inputs = dataclasses.replace(inputs, model=model)
        exports.write_policy(inputs, params, target, exports.Layout())


def _as_texts(settings: Sequence[Any]) -> list[str]:
    """Return overrides as texts. Raises ValueError for another type."""
    texts = list[str]()
    for one in settings:
        if isinstance(one, Mapping):
            texts += [f"{name}={literal(value)}" for name, value in one.items()]
        elif isinstance(one, str):
            texts.append(one)
        else:
            raise ValueError(
                f"expected settings as texts or mappings, got {type(one).__name__} {one!r:.60}; "
                'fix: "Policy.lora_rank=16"'
            )
    return texts


def _check_finite(packed: Sequence[Any], passes: Sequence[Health]) -> None:
    """Raise ValueError, naming the data at fault."""
    for p, health in zip(packed, passes, strict=True):
        bad = p.sample_indices[~health.loss_B.reshape(-1)[p.places]].tolist()
        if bad or not np.all(health.gradient):
            named = bad or p.sample_indices.tolist()
            what = "loss" if bad else "gradient"
            raise ValueError(
                f"the {what} of data {named[:8]} is not finite: look at their log-probs and "
                "advantages; gradients since the last optim_step are dropped"
            )
