"""Values for sizes set to "auto", from the memory that programs of the run need.

    pages = (USABLE_SHARE · device memory − the peak with few pages) / bytes of a page

Micro-batches start with `MICRO_BATCH_TOKENS` on each device, or one row of the maximum length, and
are halved while training does not fit. Slots start with all requests of a step, at most
`MAX_SLOTS`, and are halved while rollouts do not fit, or while the pages hold less than
`MIN_FILLED` of the longest request in each slot.
"""

from __future__ import annotations

import dataclasses
import sys
from functools import cached_property
from typing import Literal

from reprise.models.config import ModelConfig
from reprise.models.layout import axis_ways
from reprise.rl.assembly.first_programs import rollout_reach
from reprise.rl.preflight.fit import BOTH, Fit, Fitting
from reprise.rl.preflight.memory import ROLLOUTS, TRAINING, USABLE_SHARE, opened_devices
from reprise.rl.preflight.targets import attached
from reprise.rl.records import packing
from reprise.rl.runtime import devices
from reprise.rl.runtime.progress import say
from reprise.rl.settings.config import SIZES, TrainConfig
from reprise.spec.buckets import bucket

MICRO_BATCH_TOKENS = 8192  # far fewer tokens already make matrix products compute-bound
MAX_SLOTS = 256
MIN_FILLED = 0.5
SLOTS, PAGES, MICRO_BATCH = SIZES


def find_here(config: TrainConfig, model: ModelConfig) -> dict[str, int]:
    """Return values for `config.open_sizes` on the devices of this process; opens the devices."""
    opened = devices.found()
    bytes_each = opened_devices(opened).bytes_each
    if bytes_each is None:
        raise ValueError(
            f"{', '.join(config.open_sizes)}: expected devices that report their memory, got "
            f"{opened[0].device_kind}, which does not: write the numbers that rl.preflight finds"
        )

    def on_compiled(name: str, done: int, total: int) -> None:
        say(f"sizes of 'auto': {done} of {total} compiled: {name}", sys.stderr)

    fitting = Fitting(attached(opened, bytes_each), opened, on_compiled=on_compiled)
    return find(fitting, config, model)


def find(fitting: Fitting, config: TrainConfig, model: ModelConfig) -> dict[str, int]:
    """Return values for `config.open_sizes`; the minimum values if nothing fits.

    Raises ValueError for a configuration that cannot run on the target.
    """
    sizes = _Search(fitting, config, model).run()
    return {name: sizes[name] for name in config.open_sizes}


class _Search:
    """A search that lowers the open sizes until the run fits."""

    def __init__(self, fitting: Fitting, config: TrainConfig, model: ModelConfig) -> None:
        self._fitting = fitting
        self._config = config
        self._model = model
        self._open = set(config.open_sizes)
        self._limit_bytes = USABLE_SHARE * fitting.target.device_bytes
        self._min_slots = config.engine.min_slots
        small = {SLOTS: self._min_slots, PAGES: 0, MICRO_BATCH: 1}
        run = fitting.programs(config.with_sizes({n: small[n] for n in self._open}), model)
        self._ways = run.engine.batch_ways
        row_ways = axis_ways(run.mesh.shape, "batch")
        bounds = rollout_reach(config)
        self._max_tokens = bounds.max_prompt_tokens + config.sampling.max_any_new_tokens
        requests = -(-bounds.max_requests // config.sched.workers)
        row_tokens = packing.batch_shape(1, config.longest_tokens).length
        max_rows = -(-config.rollout.num_requests // row_ways)
        rows = max(1, min(max_rows, MICRO_BATCH_TOKENS // row_tokens))
        self._row_tokens = row_ways * row_tokens
        pages = self._ways * 2 * (run.engine.config.slot_pages(self._max_tokens) + 1)
        self._sizes = {
            SLOTS: bucket(requests, self._min_slots, max(MAX_SLOTS, self._min_slots)),
            PAGES: pages,
            MICRO_BATCH: self._row_tokens * rows,
        }

    def run(self) -> dict[str, int]:
        fit = self._fitting.fit(self._trial, self._model)
        while fit.peak_bytes > self._limit_bytes and self._shrink(fit.peak[2].program.part):
            fit = self._refit(fit)
        while not self._is_filled(fit) and self._halve(SLOTS, self._min_slots):
            fit = self._refit(fit)
        if PAGES in self._open:
            self._sizes[PAGES] = self._pages_that_fit(fit)
        return self._sizes

    @property
    def _trial(self) -> TrainConfig:
        return self._config.with_sizes({name: self._sizes[name] for name in self._open})

    def _refit(self, fit: Fit) -> Fit:
        """Return the fit of the current sizes, recompiling only the program at the peak.

        Sizes only fall, so the figures of other programs are upper bounds.
        """
        compiled = set[str]()
        while (kind := fit.peak[2].program.kind) not in compiled:
            fit = self._fitting.refit(fit, self._trial, self._model)
            compiled.add(kind)
        return fit

    def _shrink(self, part: str) -> bool:
        """Halve a size that affects programs of `part` or resident arrays; False if impossible."""
        if part == TRAINING and self._halve(MICRO_BATCH, self._row_tokens, self._row_tokens):
            return True
        return part == ROLLOUTS and self._halve(SLOTS, self._min_slots)

    def _halve(self, name: str, minimum: int, multiple: int = 1) -> bool:
        """Halve a size if it is open and above its minimum; return whether the size changed."""
        size = self._sizes[name]
        if name not in self._open or size <= minimum:
            return False
        self._sizes[name] = max(minimum, size // 2 // multiple * multiple)
        return True

    def _is_filled(self, fit: Fit) -> bool:
        """Return whether the pages hold `MIN_FILLED` of the longest request in each slot."""
        engine = self._trial.engine
        pages = self._pages_that_fit(fit) if PAGES in self._open else self._num_pages(engine.pages)
        min_tokens = MIN_FILLED * engine.max_slots * self._max_tokens
        return pages * engine.page_tokens >= min_tokens

    def _pages_that_fit(self, fit: Fit) -> int:
        """Return the number of pages that free device memory holds, at most enough for all slots.

        The memory that rollout programs need besides the cache does not depend on its pages.
        """
        held_bytes, one = fit.groups.get(ROLLOUTS) or fit.groups[BOTH]
        left_bytes = self._limit_bytes - held_bytes - max(0, one.extra_bytes)
        more = max(0, int(left_bytes // self._step_bytes))
        return min(self._sizes[PAGES] + more * self._ways, self._num_pages(0))

    @cached_property
    def _step_bytes(self) -> int:
        """The bytes per device for one more page in each part of the cache."""
        trial = self._trial
        larger = trial.with_sizes({PAGES: self._sizes[PAGES] + self._ways})
        few, more = (
            sum(self._fitting.programs(one, self._model).held[ROLLOUTS].values())
            for one in (trial, larger)
        )
        return more - few

    def _num_pages(self, pages: int | Literal["auto"]) -> int:
        """Return the number of cache pages for this setting; 0 means enough for all slots."""
        engine = dataclasses.replace(self._trial.engine, pages=pages)
        slots = engine.over(self._ways).slot_bucket(self._trial.engine.max_slots)
        return engine.num_pages(slots, self._max_tokens, self._ways)
