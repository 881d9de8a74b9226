"""Sizes that a configuration leaves open ("auto"), found by what its programs need of a device.

    pages = (SHARE · a device's memory − the peak with hardly any) / bytes of a page

Micro-batches have `MICRO_BATCH_TOKENS` on each device, or one of the longest rows there; half as
many rows while training does not fit. There are slots for all requests of a step, `MOST_SLOTS` at
most; half as many while rollouts do not fit, or while the pages that fit would hold less than
`FILLED` of the longest request in each slot: responses end early, and where all are long at once
the newest requests wait.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import cached_property
from typing import Literal

from models.config import ModelConfig
from models.layout import axis_ways
from rl import packing
from rl.loop.experiment import SIZES, TrainConfig
from rl.loop.first_programs import rollout_reach
from rl.loop.memory_estimate import devices_of
from rl.runtime import devices
from rl.runtime.progress import say
from rl.targets.fitting import BOTH, Fit, Fitting
from rl.targets.run_shapes import ROLLOUTS, TRAINING
from rl.targets.topologies import attached
from spec.buckets import bucket

SHARE = 0.9  # of a device's memory: figures are extrapolated, and allocators leave gaps
MICRO_BATCH_TOKENS = (
    8192  # by a roofline products with the weights are bound by compute long before
)
MOST_SLOTS = 256
FILLED = 0.5
SLOTS, PAGES, MICRO_BATCH = SIZES


def find_here(config: TrainConfig, model: ModelConfig) -> dict[str, int]:
    """Return numbers for `config.open_sizes` on the devices of this process, which it opens.

    Raises ValueError for a configuration that cannot run on them.
    """
    found = devices.found()
    there = devices_of(found)
    if there.limit_bytes is None:
        raise ValueError(
            f"{', '.join(config.open_sizes)}: expected devices that say what memory they have, got "
            f"{found[0].device_kind}, which does not: write the numbers that rl.preflight finds"
        )
    target = attached(found, there.limit_bytes // (len(found) if there.shared else 1))

    def told(name: str, done: int, total: int) -> None:
        say(f"sizes of 'auto': {done} of {total} compiled: {name}", sys.stderr)

    return find(Fitting(target, found, told=told), config, model)


def find(fitting: Fitting, config: TrainConfig, model: ModelConfig) -> dict[str, int]:
    """Return numbers for `config.open_sizes`: the least ones where nothing fits.

    Raises ValueError for a configuration that cannot run on the target.
    """
    found = _Search(fitting, config, model).run()
    return {name: found[name] for name in config.open_sizes}


class _Search:
    """Numbers for the open sizes, from the largest to those that fit."""

    def __init__(self, fitting: Fitting, config: TrainConfig, model: ModelConfig) -> None:
        self._fitting, self._config, self._model = fitting, config, model
        self._open = set(config.open_sizes)
        self._room = SHARE * fitting.target.device_bytes
        least = config.engine.min_slots
        small = {SLOTS: least, PAGES: 0, MICRO_BATCH: 1}
        run = fitting.shapes(config.with_sizes({n: small[n] for n in self._open}), model)
        list(run.of_rollouts())  # the engine is told of the longest request
        engine = run.engine
        self._paged, self._longest_tokens = engine.is_paged, engine.longest_tokens
        self._ways, self._row_ways = engine.batch_ways, axis_ways(run.mesh.shape, "batch")
        requests = -(-rollout_reach(config).max_requests // config.sched.workers)
        shape = packing.batch_shape(1, config.longest_tokens)
        most = -(-config.rollout.num_requests // self._row_ways)
        self._row_tokens = self._row_ways * shape.length
        self._sizes = {
            SLOTS: bucket(requests, least, max(MOST_SLOTS, least)),
            PAGES: self._ways * 2 * (engine.config.slot_pages(self._longest_tokens) + 1),
            MICRO_BATCH: self._row_tokens * max(1, min(most, MICRO_BATCH_TOKENS // shape.length)),
        }
        if not self._paged:
            self._sizes[PAGES] = 0

    def run(self) -> dict[str, int]:
        fit = self._fitting.fit(self._trial, self._model)
        while fit.peak_bytes > self._room and self._shrink(fit.peak[2].program.part):
            fit = self._fit_again(fit)
        while self._paged and not self._filled(fit) and self._halve(SLOTS, self._least_slots):
            fit = self._fit_again(fit)
        if self._paged and PAGES in self._open:
            self._sizes[PAGES] = self._pages_that_fit(fit)
        return self._sizes

    @property
    def _trial(self) -> TrainConfig:
        return self._config.with_sizes({name: self._sizes[name] for name in self._open})

    @property
    def _least_slots(self) -> int:
        return self._config.engine.min_slots

    def _fit_again(self, fit: Fit) -> Fit:
        """Return the fit of the sizes as they are: what is at its peak has been compiled for them.

        Sizes only fall, so that other programs count too much at worst.
        """
        compiled = set[str]()
        while (kind := fit.peak[2].program.kind) not in compiled:
            fit = self._fitting.again(fit, self._trial, self._model)
            compiled.add(kind)
        return fit

    def _shrink(self, part: str) -> bool:
        """Halve what the programs of this part, or what stays beside them, may need less of."""
        if part == TRAINING and self._halve(MICRO_BATCH, self._row_tokens, self._row_tokens):
            return True
        return (part == ROLLOUTS or not self._paged) and self._halve(SLOTS, self._least_slots)

    def _halve(self, name: str, least: int, multiple: int = 1) -> bool:
        """Halve a size, if it is open and not the least yet."""
        size = self._sizes[name]
        if name not in self._open or size <= least:
            return False
        self._sizes[name] = max(least, size // 2 // multiple * multiple)
        return True

    def _filled(self, fit: Fit) -> bool:
        """Return whether the pages hold `FILLED` of the longest request in each slot."""
        engine = self._trial.engine
        pages = self._pages_that_fit(fit) if PAGES in self._open else self._pages_of(engine.pages)
        wanted_tokens = FILLED * engine.max_slots * self._longest_tokens
        return pages * engine.page_tokens >= wanted_tokens

    def _pages_that_fit(self, fit: Fit) -> int:
        """Return how many pages the rest of a device's memory holds, at most what slots can need.

        The programs of rollouts need as much beside a cache however many pages it has.
        """
        stays, one = fit.groups.get(ROLLOUTS) or fit.groups[BOTH]
        left_bytes = self._room - stays - max(0, one.beyond_held_bytes)
        more = max(0, int(left_bytes // self._step_bytes))
        return min(self._sizes[PAGES] + more * self._ways, self._pages_of(0))

    @cached_property
    def _step_bytes(self) -> int:
        """The bytes of a device that a page more in each of the cache's parts takes."""
        least, trial = self._sizes[PAGES], self._trial
        few, more = (
            sum(self._fitting.shapes(one, self._model).held()[ROLLOUTS].values())
            for one in (trial, trial.with_sizes({PAGES: least + self._ways}))
        )
        return more - few

    def _pages_of(self, pages: int | Literal["auto"]) -> int:
        """Return the pages of a cache that is told of so many; 0: what all slots can need."""
        engine = dataclasses.replace(self._trial.engine, pages=pages)
        slots = engine.over(self._ways).slot_bucket(self._trial.engine.max_slots)
        return engine.num_pages(slots, self._longest_tokens, self._ways)
