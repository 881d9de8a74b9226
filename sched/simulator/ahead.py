"""Training steps whose next one is begun while devices would idle (`sched.policies.ahead`).

The scheduler is that of real runs. How many of the begun tokens the new weights draw as well is not
simulated but given: `stands`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from sched.protocol import Recalled, Submitted, Trained
from sched.request import RequestSpec
from sched.simulator.cluster import Record, Simulation
from sched.simulator.worker import RunningStart

AHEAD = 2**40  # added to the numbers of requests that run ahead
Stands = Callable[[int, int], int]  # (request, begun tokens) → how many are drawn again


class AheadSimulation(Simulation):
    """A run of steps under `sched.policies.ahead.Ahead`.

    `begun_tokens` are those that were begun ahead of their step, `kept_tokens` those that stood.
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
        self._generated[request_id], self._verified[request_id] = kept, begun - kept
        return dataclasses.replace(spec, prefix_tokens=kept)

    def _end_update(self, now_s: float) -> None:
        self._training = False
        self._trained_s.append(now_s)
        step = len(self._trained_s) - 1
        self._tell(Trained(step, self._train_s[step]), now_s)
        if step + 1 < len(self._all):
            self._tell(Recalled(), now_s)
            self._submit(step + 1, now_s)

    def _finished(self, job: RunningStart, now_s: float) -> None:
        if job.request_id < AHEAD:
            super()._finished(job, now_s)

    def _returned(self, request_id: int) -> None:
        """Its tokens are in `_generated` until its step is submitted."""
