"""Compilation and timing of the programs of a run before its first step, on engine devices.

The bounds on rollouts (`rollout_reach`) determine the programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from reprise.models.config import ModelConfig
from reprise.models.decoder.transformer import Params
from reprise.rl.cluster.processes import Processes
from reprise.rl.engine.engine import Engine, RolloutEngine
from reprise.rl.exchange.responses import WHOLE, Partition
from reprise.rl.runtime.parallel_compile import OnCompiled
from reprise.rl.runtime.run_files import MOVES_FILE, ROUNDS_FILE
from reprise.rl.sessions.multi_engine import MultiEngine
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs
from reprise.rl.speculation.config import USER
from reprise.rl.speculation.device_drafters import DeviceDrafters
from reprise.rl.warm_up import compile_buckets, kept_rounds, transfer_times
from reprise.rl.warm_up.rollout_programs import Decisions, NodeSizes, Reach
from reprise.rl.warm_up.round_times import load_or_measure
from reprise.sched.simulator.measured_costs import MeasuredCosts
from reprise.sched.simulator.roofline import Costs
from reprise.spec.budget.budget import DraftDecision, best_trees, equal_trees
from reprise.spec.budget.config import BANDIT, LEARNED, MODEL
from reprise.spec.config import SamplingConfig
from reprise.spec.round_times import RoundTimes
from reprise.spec.verification.sampling import step_key

if TYPE_CHECKING:
    from reprise.rl.drafting.workers import DraftingWorkers


def _node_sizes(config: TrainConfig) -> NodeSizes | None:
    """Return a function from slots to possible node counts of rounds; None allows all counts."""
    budget, fixed = config.speculation.budget_kind
    if budget == BANDIT:
        return _nodes_of_bandit(config)
    if budget == "fixed" and not _verifies_responses(config):
        return partial(_nodes_of_trees, config, fixed)
    return None


def _nodes_of_bandit(config: TrainConfig) -> NodeSizes:
    """Return the node counts of a bandit, which has one for each range of batch sizes."""
    from reprise.spec.budget.bandit import node_counts

    engine = config.engine
    tuner = config.tuner

    def nodes(num_slots: int) -> set[int]:
        sizes = engine.node_sizes(num_slots)
        wanted = node_counts(tuner, num_slots)
        return {next((m for m in sizes if m >= count), sizes[-1]) for count in wanted if sizes}

    return nodes


def _nodes_of_trees(config: TrainConfig, max_tokens: int, num_slots: int) -> set[int]:
    """Return the node counts up to the first that holds `max_tokens` draft tokens for all slots."""
    sizes = config.engine.node_sizes(num_slots)
    wanted = num_slots * (max_tokens + 1)
    num_smaller = sum(size < wanted for size in sizes)
    return set(sizes[: num_smaller + 1])


def _verifies_responses(config: TrainConfig) -> bool:
    """Return whether rounds also verify cached responses, whose length no budget limits."""
    return config.reuse.enabled or config.sched.mode == "ahead"


def _no_nodes(num_slots: int) -> set[int]:
    """Return no node counts, so that only rounds without drafts remain."""
    return set()


def drafted_alone(config: TrainConfig) -> dict[str, Decisions]:
    """Return, by drafter name, the decisions for rounds that use only one on-device drafter."""
    max_tokens = config.engine.max_nodes - 1
    requested = {LEARNED: max_tokens, MODEL: min(config.draft_model.max_depth, max_tokens)}
    sources = config.speculation.sources
    budget, fixed = config.speculation.budget_kind
    nodes = _nodes_of_bandit(config) if budget == BANDIT else None

    def decisions(most: int, num_slots: int) -> list[DraftDecision]:
        sizes = config.engine.node_sizes(num_slots)
        if nodes is not None:
            wanted = [m // num_slots - 1 for m in nodes(num_slots)]
        elif budget == "fixed":
            wanted = [min(most, fixed)]
        else:
            return [best_trees(m, num_slots, most) for m in sizes]
        result = (equal_trees(tokens, sizes, num_slots) for tokens in wanted)
        return [decision for decision in result if decision is not None]

    can = {name for name in requested if name in sources and (nodes or len(sources) == 1)}
    if config.drafting.workers:
        can -= {MODEL}
    return {
        name: partial(decisions, requested[name])
        for name in can
        if budget not in ("off", "aimd", USER)
    }


def rollout_reach(config: TrainConfig, partition: Partition = WHOLE) -> Reach:
    """Return the bounds on rollouts of one process, except for on-device drafters."""
    beside = config.sched.beside_training
    turn_tokens = config.sampling.max_any_new_tokens
    return Reach(
        partition.max_groups(config.rollout.prompts_per_step) * config.rollout.group_size,
        # the prompt of a later turn has all tokens before the turn
        max(config.rollout.max_prompt_tokens, config.longest_tokens - turn_tokens),
        speculative=config.speculation.enabled,
        reuse=_verifies_responses(config),
        moves=config.sched.workers > 1 or beside,
        nodes=_node_sizes(config),
        alone=drafted_alone(config),
    )


def num_whole_model(config: TrainConfig, model: ModelConfig, *, is_cpu: bool) -> int:
    """Return the number of rollout programs that run the whole policy, without opening devices."""
    # a set size does not open a device
    chunk_tokens = config.engine.chunk_tokens(config.longest_tokens, is_cpu=is_cpu)
    settings = dataclasses.replace(config.engine, prefill_chunk_tokens=chunk_tokens)
    runner = Engine(model, settings)
    bounds = rollout_reach(config)
    return compile_buckets.num_whole_model(runner, config.sampling, bounds)


class Kept(NamedTuple):
    """The folder with timing tables of a run, and the processes and workers that use the tables.

    `say` is called if a timing table from other runs cannot be read.
    """

    folder: Path
    processes: Processes
    drafting: DraftingWorkers | None
    say: Callable[[str], object]


def warm_up(
    config: TrainConfig,
    engine: RolloutEngine,
    weights: Params,
    drafters: DeviceDrafters,
    reach: Reach,
    kept: Kept,
    *,
    on_compiled: OnCompiled,
    training: Sequence[Any],
) -> RoundTimes | None:
    """Compile the rollout programs, and time rounds for the budget and the scheduler.

    Returns the seconds that budgets decide by; None if nothing is drafted or reused. Called by
    `engine.do`. The lowered training steps in `training` are compiled first, because timing starts
    after compilation.
    """
    sampling = config.sampling
    drafting = kept.drafting
    elsewhere = set() if drafting is None else set(drafting.sources)
    elsewhere -= set(config.drafting.methods_of_copies)  # only drafting workers use these sources
    own = {name: drafter for name, drafter in drafters.items() if name not in elsewhere}
    reach = dataclasses.replace(reach, drafters=own)
    for one in engine.engines:
        placed = one.place(weights)
        compile_buckets.warm_up(one, placed, sampling, reach, on_compiled, training)
        training = ()
    # all workers are identical, so times are measured only on the last worker
    if isinstance(engine, MultiEngine):
        path = kept.folder / MOVES_FILE
        moves = transfer_times.measure(one, placed, sampling, reach, path, processes=kept.processes)
        engine.prefer_pool = moves.prefers_copy
    is_priced = reach.speculative or reach.reuse
    if is_priced or config.sched.measures_rounds:
        path = kept.folder / ROUNDS_FILE
        timed = reach if is_priced else dataclasses.replace(reach, nodes=_no_nodes)
        beside = [other for other in engine.engines if other is not one]
        times = load_or_measure(
            path,
            one,
            placed,
            sampling,
            timed,
            speculation=config.speculation,
            beside=beside,
            processes=kept.processes,
            shared_folder=kept_rounds.folder(),
            say=kept.say,
        )
    if isinstance(engine, MultiEngine) and config.sched.measures_rounds:
        engine.costs = MeasuredCosts(times.rounds, moves.seconds)
    if reach.speculative:
        if drafting is not None:
            costs = MeasuredCosts(times.rounds, moves.seconds)
            times = warm_up_drafting(sampling, engine, drafting, times, costs, on_compiled)
            one = engine.engines[-1]  # the last worker may draft now
            placed = one.place(weights)
        compile_buckets.compile_host_kernels(
            config.speculation,
            times,
            one,
            placed,
            sampling,
            drafters,
            config.tuner,
            {} if drafting is None else drafting.sources,
        )
        if drafting is not None:
            drafting.planner.forget_profile()
    jax.block_until_ready(step_key(0, 0))
    return times if is_priced else None


def warm_up_drafting(
    sampling: SamplingConfig,
    engine: RolloutEngine,
    drafting: DraftingWorkers,
    times: RoundTimes,
    costs: Costs,
    on_compiled: OnCompiled,
) -> RoundTimes:
    """Plan the number of drafting workers unless it is set; compile and time their programs.

    Returns `times`, without drafts on verifying workers if the plan has drafting workers.
    """
    from reprise.rl.drafting.plans import MeasuredSeconds

    planner = drafting.planner
    assert isinstance(engine, MultiEngine), "workers that draft"
    seconds = MeasuredSeconds(costs, times, drafting.longest_tokens / 2)
    planner.seconds = seconds
    if not drafting.workers and planner.config.workers is None:
        count = planner.choose(range(planner.num_workers // 2 + 1)).drafting_workers
        if not count:
            return times
        drafting.take(engine.engines, count)
        times = times.without_drafts(MODEL)
    draft_s = 0.0
    if drafting.workers:
        planner.draft_s = drafting.prepare(sampling, on_compiled)
        draft_s = planner.draft_s[planner.method]
    model_s = drafting.model_seconds()
    planner.seconds = dataclasses.replace(seconds, times=times, draft_s=draft_s, model_s=model_s)
    return times


def warm_up_evaluation(
    config: TrainConfig,
    inputs: Inputs,
    engine: RolloutEngine,
    weights: Params,
    *,
    on_compiled: OnCompiled,
    partition: Partition = WHOLE,
) -> None:
    """Compile the evaluation programs that rollouts of the engine do not need."""
    num_requests = partition.max_groups(inputs.evals.num_questions) * config.eval.samples
    slots = engine.engines[0].config.slot_bucket
    reached = partition.max_groups(config.rollout.prompts_per_step) * config.rollout.group_size
    reached = reached if engine.engines[0].longest_tokens else 0
    if not num_requests or (reached and slots(num_requests) <= slots(reached)):
        return
    bounds = Reach(
        num_requests, config.rollout.max_prompt_tokens, moves=isinstance(engine, MultiEngine)
    )

    def compile_here() -> None:
        for one in engine.engines:
            compile_buckets.warm_up(one, one.place(weights), config.sampling, bounds, on_compiled)

    engine.do(compile_here)
