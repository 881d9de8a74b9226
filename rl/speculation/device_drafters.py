"""The drafters of a run that draft on the workers' devices."""

from __future__ import annotations

import dataclasses

from rl.speculation.draft_model import DraftModel
from rl.speculation.learned_drafter import LearnedDrafter
from spec.budget.config import LEARNED, MODEL


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceDrafters:
    """Those that there are, for all workers."""

    learned: LearnedDrafter | None = None
    model: DraftModel | None = None

    @property
    def by_name(self) -> dict[str, LearnedDrafter | DraftModel]:
        named: dict[str, LearnedDrafter | DraftModel | None]
        named = {LEARNED: self.learned, MODEL: self.model}
        return {name: drafter for name, drafter in named.items() if drafter is not None}


NO_DRAFTERS = DeviceDrafters()
