"""Drafters of a run that draft on the workers' devices, and what they cache per device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeVar

from rl.engine.model_runner import ModelRunner
from rl.engine.rollout_spec import DrafterContext
from spec.budget.device_gate import DeviceDrafter
from spec.drafter import Drafter

T = TypeVar("T")


class DrafterSource(Protocol):
    """Makes the drafters of a run's workers."""

    def drafter_for(self, context: DrafterContext) -> Drafter:
        """Return the drafter of one worker for one rollout."""
        ...


class DeviceDrafterSource(Protocol):
    """One drafter of a run, shared by all workers."""

    @property
    def made_for(self) -> str:
        """A text that changes with its programs and their times."""
        ...

    @property
    def max_depth(self) -> int:
        """The most draft tokens on a path."""
        ...

    def drafter_for(self, context: DrafterContext) -> DeviceDrafter:
        """Return the drafter of one worker for one rollout."""
        ...


DeviceDrafters = Mapping[str, DeviceDrafterSource]  # by their names among the sources
NO_DRAFTERS: DeviceDrafters = {}


class PerRunner(Generic[T]):
    """One value per model runner, such as weights on its devices. Any thread may use it.

    Shapes, which a runner makes inside of its `shapes_only`, are not kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[object, T]] = {}

    def get(self, runner: ModelRunner, make: Callable[[], T], version: object = None) -> T:
        """Return the runner's value; `make` it if there is none of this `version` yet."""
        with self._lock:
            held = self._held.get(id(runner))
        if held is None or held[0] != version:
            held = version, make()
            if runner.makes_shapes:
                return held[1]
            with self._lock:
                self._held[id(runner)] = held
        return held[1]

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
