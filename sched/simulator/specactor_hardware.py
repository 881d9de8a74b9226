"""The requests and the devices of a rollout with a drafter beside the model, and their seconds.

R = requests, M = methods of drafting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from sched.policies.specactor import LinearTime
from sched.simulator.roofline import Instance


@dataclasses.dataclass(frozen=True)
class RequestTrace:
    """The length of each response, and the acceptance of each method's draft tokens for it.

    Acceptance decides what rounds bring, and no decision: `profiled_M` is what earlier steps have
    shown of each method. Responses have at most `limit_tokens`.
    """

    lengths_R: np.ndarray
    acceptance_RM: np.ndarray
    profiled_M: np.ndarray
    prompt_tokens: int
    limit_tokens: int

    @property
    def mean_positions(self) -> float:
        """The positions that a request holds, averaged over its life and over all requests."""
        return self.prompt_tokens + float(self.lengths_R.mean()) / 2


@dataclasses.dataclass(frozen=True)
class Hardware:
    """`num_devices`, of which `verifier` takes several, and each method's drafter.

    None is a method on the host that takes no time: n-grams. Each device sends
    `network_bytes_per_s` to other workers.
    """

    num_devices: int
    verifier: Instance
    drafters: Mapping[str, Instance | None]
    network_bytes_per_s: float = math.inf

    def draft_line(
        self, method: str, devices: int, most_batch: int, positions: float
    ) -> LinearTime:
        """Return the seconds of a draft token, on `devices` that share the requests."""
        drafter = self.drafters[method]
        if drafter is None:
            return LinearTime(0.0, 0.0)

        def seconds(batch: float) -> float:
            each = batch / devices
            return drafter.round_seconds(each, each * positions)

        return _line(seconds, most_batch)

    def verify_line(
        self, devices: int, window: int, most_batch: int, positions: float
    ) -> LinearTime:
        """Return the seconds of a verification; each request holds `positions`."""
        instance = dataclasses.replace(self.verifier, num_devices=devices)
        return _line(lambda b: instance.round_seconds(b, b * positions, window + 1), most_batch)

    def load_seconds(self, method: str) -> float:
        """Return the seconds until each device of a unit has the drafter's weights (4.3: scale).

        They come from its host; the verifier's are there already.
        """
        drafter = self.drafters[method]
        if drafter is None:
            return 0.0
        return drafter.model.weight_bytes / drafter.device.host_bytes_per_s

    def kv_seconds(self, method: str, positions: float) -> float:
        """Return the seconds until a helper holds a request's keys and values (4.3: KVCache).

        Those of the verifier are copied from the request's own unit or recomputed, whichever
        takes less (the paper does both at once); the drafter, which is new to the request,
        recomputes its own.
        """
        verifier, drafter, tokens = self.verifier, self.drafters[method], math.ceil(positions)
        sent = tokens * verifier.model.kv_bytes
        sent_s = sent / (verifier.num_devices * self.network_bytes_per_s)
        copy_s = max(verifier.copy_seconds(tokens), sent_s)
        draft_s = 0.0 if drafter is None else drafter.prefill_seconds(tokens)
        return min(copy_s, verifier.prefill_seconds(tokens)) + draft_s

    def helper_tokens(self, method: str) -> int:
        """Return the positions that fit on a unit that helps by this method, with its drafter.

        Each device has the drafter's weights, and its keys and values of the requests it serves.
        """
        verifier, drafter = self.verifier, self.drafters[method]
        if drafter is None:
            return verifier.kv_tokens
        kv_bytes = verifier.model.kv_bytes
        room = verifier.kv_tokens * kv_bytes - verifier.num_devices * drafter.model.weight_bytes
        return max(0, int(room / (kv_bytes + drafter.model.kv_bytes)))


def _line(seconds: Callable[[float], float], most_batch: int) -> LinearTime:
    """Return the line through a batch of 1 and the largest one."""
    first_s, last_s = seconds(1), seconds(most_batch)
    slope = (last_s - first_s) / max(most_batch - 1, 1)
    return LinearTime(slope, max(first_s - slope, 0.0))
