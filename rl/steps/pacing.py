"""The pace of the last step, for HistoPipe to plan its ranking groups."""

from __future__ import annotations

import statistics

from reprise.rl.records.stats import EngineStats
from reprise.rl.steps.rollouts import Prompts
from reprise.sched.policies.histopipe import Pace, Tau, tau_of
from reprise.sched.simulator.roofline import Costs


class Pacing:
    """The τ of a ranking group from the round seconds of workers, at the pace of the last step.

    The tokens that a round gains per request, and the nodes that it verifies for them, are taken
    from the last step: HistoPipe's cooperation with HistoSpec (RhymeRL, figure 12).
    """

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._pace = Pace()
        self._prompt_tokens = 0.0

    def plans(self, prompts: Prompts) -> None:
        """Record the prompts of the next step to plan."""
        self._prompt_tokens = statistics.fmean(len(ids) for ids in prompts.tokens)

    def played(self, stats: EngineStats) -> None:
        """Record the rounds of a step."""
        self._pace = pace_of(stats)

    def tau(self) -> Tau:
        """Return the current τ."""
        costs = self._costs
        return tau_of(costs.round_seconds, costs.kv_tokens, self._prompt_tokens, self._pace)


def pace_of(stats: EngineStats) -> Pace:
    """Return mean nodes and tokens per request in a round, or the plain pace without rounds."""
    requests = 0
    tokens = 0
    slots = 0
    nodes = 0
    for record in stats.timeline:
        rounds = int(record.rounds_A.max(initial=0))
        slots = slots + rounds * record.num_slots
        nodes = nodes + rounds * record.num_nodes
        requests += int(record.rounds_A.sum())
        tokens += int(record.emitted_A.sum())
    return Pace(nodes / slots, tokens / requests) if requests and tokens else Pace()
