"""Long-lived parts of a run, policy weights for its rollouts, and checks for stop requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from reprise.models.decoder.lora import trained_part
from reprise.models.decoder.transformer import Params, param_specs
from reprise.models.sharding import put
from reprise.rl.assembly.listeners import StepListener
from reprise.rl.cluster.processes import Processes
from reprise.rl.data.prompts import DataOrder
from reprise.rl.engine.engine import RolloutEngine
from reprise.rl.exchange.responses import Partition, Scorer
from reprise.rl.learner import trainer
from reprise.rl.learner.trainer import Learner
from reprise.rl.rewards.scores import Rewards
from reprise.rl.runtime.progress import Progress
from reprise.rl.runtime.signals import Stopped, Watch
from reprise.rl.sessions.ahead_engine import AheadEngine
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs
from reprise.rl.speculation.reuse import Reuse
from reprise.rl.speculation.sources import Speculation
from reprise.rl.weights.gathering import (
    from_shards,
    host_copy,
    laid_out,
    local_weights,
    on_host,
    own_devices,
    own_part,
    own_shards,
)
from reprise.spec.reuse.rollout_cache import RolloutCache

if TYPE_CHECKING:
    from reprise.rl.assembly.drafter_run import AnyDrafter


@dataclasses.dataclass(frozen=True, eq=False)
class System:
    """The parts of a run.

    `eval_engine` is `engine` unless workers run during training on separate devices. `new_scorer`
    is the class of scorers. `listeners` are the features that take part in each step.
    """

    config: TrainConfig
    inputs: Inputs
    learner: Learner
    engine: RolloutEngine
    eval_engine: RolloutEngine
    cache: RolloutCache
    speculation: Speculation
    reuse: Reuse
    rewards: Rewards
    new_scorer: Callable[..., Scorer]
    order: DataOrder
    drafter: AnyDrafter | None
    partition: Partition
    listeners: tuple[StepListener, ...]
    show: Progress
    watch: Watch

    @property
    def processes(self) -> Processes:
        return self.partition.processes

    def scorer(self, group_size: int) -> Scorer:
        """Return a scorer for responses of a rollout; a stop request interrupts its waits."""
        return self.new_scorer(
            self.inputs.tokenizer,
            self.rewards,
            check=self.leave_if_stopped,
            group_size=group_size,
            partition=self.partition,
        )

    # -- weights ------------------------------------------------------------------------

    def weights(self, params: Params) -> Params:
        """Return the policy for rollouts (`rollout_weights`)."""
        return rollout_weights(params, self.learner, self.engine, self.partition)

    def evaluated(self, params: Params) -> Params:
        """Return the policy for evaluations, on the devices of an engine that only evaluates."""
        if self.eval_engine is self.engine:
            return self.weights(params)
        return evaluation_weights(params, self.learner, self.eval_engine, self.partition)

    def host_weights(self, params: Params) -> HostWeights:
        """Return a host copy of the policy; all processes of a run must call this together."""
        partition = self.partition
        if partition.processes.alone or not partition.is_central:
            return HostWeights(on_host(self.weights(params)))
        dtype = self.engine.dtype
        keep = self.processes.is_first
        rounded = trainer.cast_params(self.learner.policy(params, dtype), dtype)

        def one(x: jax.Array) -> np.ndarray | None:
            copy = host_copy(x, keep=keep)
            return None if copy is None else np.array(copy)

        return HostWeights(jax.tree.map(one, rounded), None if keep else own_shards(rounded))

    # -- stops --------------------------------------------------------------------------

    def is_stop_requested(self) -> bool:
        """Return whether any process of the run has requested a stop; also a heartbeat."""
        is_requested = self.watch.asked()
        if is_requested:
            self.processes.request_stop()
        return is_requested or self.processes.stop_requested

    def leave_if_stopped(self, may_leave: bool = True) -> None:
        """Send a heartbeat. Raises Stopped if a stop is requested and the step can be discarded.

        A step cannot be discarded once the drafter has trained on it, or by a single process
        during joint work of several processes.
        """
        trained = self.drafter is not None and self.drafter.trained_this_step
        together = not (self.processes.alone or self.partition.splits)
        if self.is_stop_requested() and may_leave and not (trained or together):
            raise Stopped

    def leave_rollout_if_stopped(self) -> None:
        """Call `leave_if_stopped` in a rollout; processes that share an engine agree first."""
        if self.processes.alone or self.partition.splits:
            return self.leave_if_stopped()
        if self.partition.agrees_now() and self.processes.any("stop", self.is_stop_requested()):
            raise Stopped

    def leave_update_if_stopped(self, may_leave: bool) -> None:
        """Call `leave_if_stopped` in an update; several processes leave together after it."""
        self.leave_if_stopped(may_leave and self.processes.alone)


def rollout_weights(
    trained: Params, learner: Learner, engine: RolloutEngine, partition: Partition
) -> Params:
    """Return the trained policy in the engine dtype, laid out for an engine on the trainer devices.

    Weights are rounded before they move. If each process has an engine, the weights are on the
    devices of this process in the trainer mesh. If process 0 has all workers, the weights are on
    its host, and other processes get a tree of None. They are also on the host if workers use them
    while an update donates the device copy. All processes must call this together.
    """
    params = learner.policy(trained, engine.dtype)
    one, *more = engine.engines
    weights: Params
    if partition.processes.alone or not partition.splits:
        weights = trainer.cast_params(params, engine.dtype)
        if one.mesh is not None:
            weights = laid_out(weights, param_specs(one.model), one.mesh)
    elif partition.is_central:
        rounded = trainer.cast_params(params, engine.dtype)
        weights = host_copy(rounded, keep=partition.processes.is_first)
    else:
        place = one.mesh or one.device
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        theirs = [one.device] if one.mesh is None else one.mesh.devices.flat
        if more or not set(theirs) <= set(own_devices(mesh)):
            place = own_part(mesh)  # each engine copies the weights from there
        weights = local_weights(params, one.model, place, engine.dtype)
    return on_host(weights) if isinstance(engine, AheadEngine) else weights


def evaluation_weights(
    trained: Params, learner: Learner, engine: RolloutEngine, partition: Partition
) -> Params:
    """Return the trained policy on the devices of an engine that only evaluates."""
    weights = rollout_weights(trained, learner, engine, partition)
    return engine.do(lambda: engine.engines[0].place(weights))


@dataclasses.dataclass(frozen=True, eq=False)
class HostWeights:
    """A host copy of one policy version, in the engine dtype; updates donate the device buffers.

    `whole` is for workers of this process. If process 0 has all workers, `whole` is a tree of None
    on other processes, and `shards` holds the parts on the local devices.
    """

    whole: Params
    shards: Any = None

    def put_as(self, params: Params) -> Params:
        """Return the trained weights on devices, with the layout of `params`."""
        if self.shards is None:
            return jax.tree.map(lambda x, p: put(x, p.sharding), trained_part(self.whole), params)
        return from_shards(trained_part(self.shards), params)
