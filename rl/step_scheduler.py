"""The scheduler of a pipeline's steps, and the seconds that its second tier plans by."""

from __future__ import annotations

import statistics

from rl.engine.stats import EngineStats
from rl.rollouts import Prompts
from rl.workers.multi_engine import MultiEngine
from sched.policies.histopipe import HistoPipe, HistoPipeConfig, Pace, Tau, tau_of
from sched.policies.steps import StepOrder
from sched.protocol import Scheduler
from sched.simulator.roofline import Costs


class Pacing:
    """The τ of a ranking group by the seconds of a worker's rounds, at the pace of the last step.

    How many tokens a round brings a request, and what it verifies for them, is what the last step's
    rounds had: HistoPipe's cooperation with HistoSpec (RhymeRL, figure 12).
    """

    def __init__(self, costs: Costs) -> None:
        self._costs, self._pace, self._prompt_tokens = costs, Pace(), 0.0

    def asked(self, prompts: Prompts) -> None:
        """Note the prompts of a step that is about to be planned."""
        self._prompt_tokens = statistics.fmean(len(ids) for ids in prompts.tokens)

    def played(self, stats: EngineStats) -> None:
        """Note the rounds of a step."""
        self._pace = pace_of(stats)

    def tau(self) -> Tau:
        """Return τ as of now."""
        costs = self._costs
        return tau_of(costs.round_seconds, costs.kv_tokens, self._prompt_tokens, self._pace)


def pace_of(stats: EngineStats) -> Pace:
    """Return the mean nodes and tokens of a request's round; those of plain rounds if none was."""
    requests, tokens, slots, nodes = 0, 0, 0, 0
    for record in stats.timeline:
        rounds = int(record.rounds_A.max(initial=0))
        slots, nodes = slots + rounds * record.num_slots, nodes + rounds * record.num_nodes
        requests += int(record.rounds_A.sum())
        tokens += int(record.emitted_A.sum())
    return Pace(nodes / slots, tokens / requests) if requests and tokens else Pace()


def step_scheduler(
    workers: MultiEngine, *, num_steps: int, epoch_prompts: int, pacing: Pacing | None = None
) -> Scheduler:
    """Return the scheduler of a run's steps: HistoPipe, or another policy step by step."""
    config = workers.config
    if config.policy == "histopipe":
        return HistoPipe(
            HistoPipeConfig(
                num_steps,
                config.ranking_groups,
                last_share=config.last_share,
                growth_quantile=config.growth_quantile,
                least_growth=config.least_growth,
                epoch_prompts=epoch_prompts,
                check_tokens=config.chunk_tokens,
                tau=None if pacing is None else pacing.tau,
            )
        )
    return StepOrder(workers.make_scheduler(), "one_step_off")
