"""Tiny training runs in this process: what they leave, and what they compile."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import pytest

from reprise.rl.assembly import setup as run_setup
from reprise.rl.drafter_training.spot_trainer import SpotTrainer
from reprise.rl.engine.engine import Engine
from reprise.rl.exchange.responses import Scorer
from reprise.rl.metrics.writer import deterministic_view, read_metrics, step_rows
from reprise.rl.runtime.signals import COMPILING, Stopped, Watch
from tests.support import tiny_run


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a run has left."""

    leaves: list[np.ndarray]
    rows: list[dict]
    samples: bytes
    show: tiny_run.Recorder
    folder: Path


def finish(tiny, folder, *overrides) -> Finished:
    """Go to the end of a run; it saves there alone, unless `overrides` say otherwise."""
    overrides = ("Checkpoint.every_steps=0", *overrides)
    show = tiny_run.Recorder()
    state = tiny_run.train(tiny, folder, *overrides, show=show)
    rows = [deterministic_view(row) for row in read_metrics(folder)]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    return Finished(leaves, rows, (folder / "samples.jsonl").read_bytes(), show, folder)


def stop_after(tiny, folder, steps, *overrides) -> None:
    """Stop a run after so many steps: the last one is saved."""
    show = tiny_run.Recorder()
    with pytest.raises(Stopped):
        should_stop = lambda: len(show.rows) == steps  # noqa: E731
        tiny_run.train(tiny, folder, *overrides, show=show, should_stop=should_stop)


def assert_same_bits(ours: Finished, theirs: Finished):
    assert ours.rows == theirs.rows
    assert ours.samples == theirs.samples
    for one, other in zip(ours.leaves, theirs.leaves, strict=True):
        assert one.tobytes() == other.tobytes()


def assert_resumes_to_the_bit(tiny, folder, settings, whole):
    """A run that is stopped two steps before its end and resumed gives what `whole` gave."""
    stop = len(step_rows(whole.rows)) - 2
    stop_after(tiny, folder / "cut", stop, *settings)
    resumed = finish(tiny, folder / "cut", *settings)
    assert f"resuming after step {stop}" in resumed.show.messages
    assert_same_bits(resumed, whole)


def texts(done):
    return [json.loads(line)["completion"] for line in done.samples.splitlines()]


def assert_same_run(one, other):
    """The same tokens, and metrics of training that differ by rounding alone."""
    assert texts(one) == texts(other)
    for ours, theirs in zip(one.rows, other.rows, strict=True):
        assert learnt(ours) == pytest.approx(learnt(theirs), rel=1e-3, abs=1e-5)


@contextlib.contextmanager
def unpriced():
    """Cached tokens are verified in chunks at any price: rounds of two runs are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_chunk_price", lambda engine, spec: None)
        patch.setattr(Engine, "_verifies_in_chunks", lambda engine, spec, num_slots: True)
        yield


@contextlib.contextmanager
def few_devices(count=1):
    """Workers have so many devices; with one they share it, as on a user's CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: jax.devices()[:count])
        yield


def learnt(row):
    """What training knows of a step: all but how its tokens were come by."""
    ours = ("spec/", "rollout/", "emission_kl/", "drafter/")
    return {k: v for k, v in deterministic_view(row).items() if not k.startswith(ours)}


@contextlib.contextmanager
def spare_time():
    """In the third rollout of eight responses, one worker waits until an idle one has trained.

    The driver gives idle workers their work, so it must not wait itself.
    """
    spare, score, step = SpotTrainer.spare, Scorer.__call__, Engine.step
    scored, trained = itertools.count(1), threading.Event()
    begun, waiting = threading.Event(), list[Engine]()

    def noted(self, *args):
        worked = spare(self, *args)
        if self.trainer.step:
            trained.set()
        return worked

    def counted(self, t):
        score(self, t)
        if next(scored) == 2 * 8:
            begun.set()

    def stepped(self):
        if begun.is_set() and self.has_work:
            waiting.append(self)
            if self is waiting[0]:
                assert trained.wait(120)
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpotTrainer, "spare", noted)
        patch.setattr(Scorer, "__call__", counted)
        patch.setattr(Engine, "step", stepped)
        yield


@contextlib.contextmanager
def counted_compilations():
    """A list that grows by one at every request to XLA for a program, cached on disk or not."""
    found: list[str] = []
    active = True

    def listen(event: str, duration_s: float, **details: object) -> None:
        if active and event.endswith("backend_compile_duration"):
            found.append(str(details.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        active = False  # jax offers no public way to take a listener away


def compilations(tiny, folder, *overrides) -> tuple[Finished, list[str], list[str]]:
    """A run from empty caches: what it left, and what it compiled in its warm-up and outside it.

    The part of the warm-up that follows the first step is the run's part `compiling`.
    Runs that follow compile again what they share with runs before it, so let one run serve
    several tests.
    """
    jax.clear_caches()  # or earlier runs would have warmed up for us
    warm: set[int] = set()
    build, within = run_setup.build, Watch.within

    @contextlib.contextmanager
    def counting_build(*args, **options):
        with build(*args, **options) as built:
            warm.update(range(len(found)))
            yield built

    @contextlib.contextmanager
    def counting_within(watch, part):
        first = len(found)
        with within(watch, part):
            yield
        assert part == COMPILING
        warm.update(range(first, len(found)))

    with pytest.MonkeyPatch.context() as patch, counted_compilations() as found:
        patch.setattr(run_setup, "build", counting_build)
        patch.setattr(Watch, "within", counting_within)
        done = finish(tiny, folder, "Checkpoint.every_steps=1", *overrides)
    later = [name for i, name in enumerate(found) if i not in warm]
    return done, [found[i] for i in sorted(warm)], later


def compiles_nothing_late(tiny, folder, *overrides, but=()) -> Finished:
    """A run from empty caches whose warm-up compiles all that it needs, except what `but` names."""
    done, before, after = compilations(tiny, folder, *overrides)
    assert len(before) > 10, "the listener must hear of compilations"
    assert [name for name in after if name not in but] == []
    return done
