"""Fresh noise for a part of each group, and for groups with responses that taught nothing.

Reuse repeats the responses of the last epoch, so an unsolved prompt gets the same responses again
and stays unsolved until the policy changes. Two remedies give up some reuse:

    sample ≥ size − fresh samples     noise of the step; nothing is reused
    group without reward difference   noise of the group, renewed once more; nothing is reused
    otherwise                         noise of the group as in the last epoch

The noise depends only on the step and on the last group of the prompt (in the rollout cache).
"""

from __future__ import annotations

import dataclasses
import math

from reprise.spec.reuse.rollout_cache import CachedGroup
from reprise.spec.verification.sampling import NOISE_NAMES

_MIXERS = ((0x2545F491, 15), (0x1B873593, 13), (0x5851F42D, 16))  # odd factors, shifts


@dataclasses.dataclass(frozen=True)
class Renewal:
    """The choice of samples that get fresh noise instead of repeating the last epoch.

    A share `fresh_share` of each group is fresh, rounded up, but never a whole group. With
    `renews_groups`, all samples of a prompt are fresh if its last group had equal rewards.
    """

    fresh_share: float
    renews_groups: bool

    def is_fresh(self, sample: int, size: int) -> bool:
        """Return whether this sample of a group draws new noise each time."""
        num_fresh = min(math.ceil(self.fresh_share * size), size - 1)
        return sample >= size - num_fresh

    def is_due(self, last: CachedGroup | None) -> bool:
        """Return whether the last group of the prompt taught nothing, so that noise is renewed."""
        return self.renews_groups and last is not None and not last.taught

    def renewals(self, last: CachedGroup | None) -> int:
        """Return the number of noise renewals of a prompt, for its next group."""
        return 0 if last is None else last.renewals + self.is_due(last)


def renewed_name(name: int, renewals: int) -> int:
    """Return the noise name that replaces `name`, both below 2³¹; 0 renewals: `name`.

    Each number of renewals permutes the names, so that samples of one step keep distinct names.
    """
    if not renewals:
        return name
    for factor, shift in _MIXERS:
        name = (name ^ renewals) * factor % NOISE_NAMES
        name ^= name >> shift
    return name
