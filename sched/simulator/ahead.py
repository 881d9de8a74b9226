"""Training steps whose next one is begun while devices would idle (`sched.policies.ahead`).

The scheduler is that of real runs. How many of the begun tokens the new weights draw as well is not
simulated but given: `stands`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from sched.protocol import Recalled, Start, Submitted, Trained
from sched.request import RequestSpec
from sched.simulator.cluster import Record, Simulation
from sched.simulator.roofline import Costs
from sched.simulator.worker import RoundModel, RoundPlan, RunningStart

AHEAD = 2**40  # added to the numbers of requests that run ahead
Stands = Callable[[int, int], int]  # (request, begun tokens) → how many are drawn again


@dataclasses.dataclass(frozen=True, slots=True)
class BegunStart:
    """Tokens `first` to `end` of a response that was begun, and a worker's seconds for them."""

    first: int
    end: int
    device_s: float

    def dropped_s(self, kept_tokens: int) -> float:
        """Return the seconds for tokens that are not kept: all, where none came."""
        tokens = self.end - self.first
        kept = min(max(0, kept_tokens - self.first), tokens)
        return self.device_s * (1 - kept / tokens) if tokens else self.device_s


class BegunDrafts(RoundModel):
    """Rounds in which a response may draft from what was begun of it, behind the first difference.

    It drafts `num_drafts` tokens a round, each of which is accepted with the probability `accepted`
    if those before it were; 0 of both: plain rounds.
    """

    num_lanes = 2

    def __init__(self, instance: Costs, num_drafts: int = 0, accepted: float = 0.0) -> None:
        super().__init__(instance)
        self._num_drafts = num_drafts
        self._tokens = sum(accepted**n for n in range(num_drafts + 1))
        self.drafting: set[int] = set()  # requests that have begun tokens left

    def lane(self, request_id: int, finished_siblings: int) -> int:
        return int(request_id in self.drafting)

    def plan(self, worker_id: int, counts: tuple[int, ...], positions: float) -> RoundPlan:
        plain, drafting = counts
        nodes = (plain + drafting * (1 + self._num_drafts)) / (plain + drafting)
        cost = self._instance.round_cost(plain + drafting, nodes, self.others(worker_id))
        return RoundPlan(cost, (1.0, self._tokens))


class AheadSimulation(Simulation):
    """A run of steps under `sched.policies.ahead.Ahead`.

    With `BegunDrafts` for a round model, what does not stand drafts. `begun_tokens` are those that
    were begun ahead of their step, `kept_tokens` those that stood. `begun_s` and `dropped_s` are,
    by step, the workers' seconds for what was begun of it, and for what of that did not stand.
    """

    def run_ahead(
        self, steps: Sequence[Sequence[RequestSpec]], train_s: Sequence[float], stands: Stands
    ) -> Record:
        """Play training steps: rollouts, then an update elsewhere, then the next rollouts.

        What is begun of a step is verified in one pass with its prompt, and goes on behind the last
        token that stands.
        """
        self._all, self._stands = steps, stands
        self._begin([spec for requests in steps for spec in requests])
        self._lengths = {
            **self._lengths,
            **{
                spec.request_id + AHEAD: self._lengths[spec.request_id] for s in steps for spec in s
            },
        }
        self._train_s, self._left = train_s, [len(requests) for requests in steps]
        self._step_of = {spec.request_id: spec.step for requests in steps for spec in requests}
        self.begun_tokens = self.kept_tokens = 0
        self.begun_s, self.dropped_s = [0.0] * len(steps), [0.0] * len(steps)
        self._begun_starts: dict[int, list[BegunStart]] = collections.defaultdict(list)
        self._drafts_until: dict[int, int] = {}  # the begun tokens of requests that draft from them
        self._submit(0, 0.0)
        return self._to_the_end()

    def _submit(self, step: int, now_s: float) -> None:
        """Submit a step, as far as it stands, and the one after it ahead of its weights."""
        specs = [self._resumed(spec) for spec in self._all[step]]
        self._tell(Submitted(tuple(specs)), now_s)
        if step + 1 < len(self._all):
            ahead = [
                dataclasses.replace(spec, request_id=spec.request_id + AHEAD, ahead=True)
                for spec in self._all[step + 1]
            ]
            self._requests.update({spec.request_id: spec for spec in ahead})
            self._tell(Submitted(tuple(ahead)), now_s)

    def _resumed(self, spec: RequestSpec) -> RequestSpec:
        request_id = spec.request_id
        begun = self._generated.pop(request_id + AHEAD, 0)
        kept = min(begun, self._stands(request_id, begun), self._lengths[request_id] - 1)
        self.begun_tokens += begun
        self.kept_tokens += kept
        for start in self._begun_starts.pop(request_id + AHEAD, ()):
            self.begun_s[spec.step] += start.device_s
            self.dropped_s[spec.step] += start.dropped_s(kept)
        self._generated[request_id], self._verified[request_id] = kept, begun - kept
        if isinstance(self._round_model, BegunDrafts) and begun > kept + 1:
            self._round_model.drafting.add(request_id)
            self._drafts_until[request_id] = begun
        return dataclasses.replace(spec, prefix_tokens=kept)

    def _end_update(self, now_s: float) -> None:
        self._training = False
        self._trained_s.append(now_s)
        step = len(self._trained_s) - 1
        self._tell(Trained(step, self._train_s[step]), now_s)
        if step + 1 < len(self._all):
            self._tell(Recalled(), now_s)
            self._submit(step + 1, now_s)

    def _start(self, action: Start, now_s: float) -> int:
        request_id = action.request_id
        if self._generated.get(request_id, 0) >= self._drafts_until.get(request_id, 2**62):
            assert isinstance(self._round_model, BegunDrafts)
            self._round_model.drafting.discard(request_id)
        return super()._start(action, now_s)

    def _ran(self, job: RunningStart) -> None:
        if job.request_id >= AHEAD:
            first = self._generated.get(job.request_id, 0)
            start = BegunStart(first, job.generated_tokens, job.device_s)
            self._begun_starts[job.request_id].append(start)
        super()._ran(job)

    def _finished(self, job: RunningStart, now_s: float) -> None:
        if job.request_id < AHEAD:
            super()._finished(job, now_s)

    def _returned(self, request_id: int) -> None:
        """Its tokens are in `_generated` until its step is submitted."""
