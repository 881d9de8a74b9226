"""The check of the objects that a configuration names in user files, before any device work."""

from __future__ import annotations

from collections.abc import Callable

from reprise.rl.losses.advantages import user_advantages
from reprise.rl.losses.policy_losses import open_policy_loss
from reprise.rl.settings.config import TrainConfig
from reprise.rl.speculation.user_drafts import check_budget, check_drafter
from reprise.rl.workers.schedulers import check_scheduler


def _check_advantages(name: str) -> None:
    user_advantages(name, [1.0, 0.0, None], [0, 0, 1])


CHECKS: dict[str, Callable[[str], object]] = {  # by setting; rewards run in other processes
    "Speculation.sources": check_drafter,
    "Speculation.budget": check_budget,
    "Sched.policy": check_scheduler,
    "Algorithm.policy_loss": open_policy_loss,
    "Algorithm.advantages": _check_advantages,
}


def check_user_names(config: TrainConfig, section: str = "") -> None:
    """Import the user files of a configuration, and check the objects that it names.

    With `section`, only its settings are checked. Raises ValueError or FileNotFoundError with the
    setting.
    """
    for setting, names in config.user_names.items():
        if setting in CHECKS and setting.startswith(section):
            for name in names:
                CHECKS[setting](name)
