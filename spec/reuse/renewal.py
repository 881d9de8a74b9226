"""Fresh noise for a part of each group, and for groups whose responses taught nothing.

Reuse repeats last epoch's responses, so a prompt that was not solved is tried with the same
responses again, and stays unsolved until the policy moves. Two remedies give up some reuse:

    sample ≥ size − fresh samples     noise of the step; nothing is reused
    group without reward difference   noise of the group, renewed once more; nothing is reused
    otherwise                         noise of the group as in the last epoch

All is a function of the step and of the prompt's last group, which the rollout cache keeps.
"""

from __future__ import annotations

import dataclasses
import math

from reprise.spec.reuse.rollout_cache import CachedGroup
from reprise.spec.sampling import NOISE_NAMES

_MIXERS = ((0x2545F491, 15), (0x1B873593, 13), (0x5851F42D, 16))  # odd factors, shifts


@dataclasses.dataclass(frozen=True)
class Renewal:
    """The samples that are answered with fresh noise instead of repeating the last epoch.

    A share of each group, rounded up, but never all of it; with `renews_groups` also all samples
    of a prompt whose last group had equal rewards.
    """

    fresh_share: float
    renews_groups: bool

    def is_fresh(self, sample: int, size: int) -> bool:
        """Return whether this sample of a group draws new noise each time."""
        num_fresh = min(math.ceil(self.fresh_share * size), size - 1)
        return sample >= size - num_fresh

    def is_due(self, last: CachedGroup | None) -> bool:
        """Return whether the prompt's last group taught nothing, so that its noise is renewed."""
        return self.renews_groups and last is not None and not last.taught

    def renewals(self, last: CachedGroup | None) -> int:
        """Return how often the noise of a prompt has been renewed, for its next group."""
        return 0 if last is None else last.renewals + self.is_due(last)


def renewed_name(name: int, renewals: int) -> int:
    """Return the name of the noise that replaces `name`, both below 2³¹; 0 renewals: `name`.

    Each number of renewals permutes the names, so that samples of one step stay apart.
    """
    if not renewals:
        return name
    for factor, shift in _MIXERS:
        name = (name ^ renewals) * factor % NOISE_NAMES
        name ^= name >> shift
    return name
