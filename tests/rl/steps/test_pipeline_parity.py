"""A pipeline with reuse and dynamic sampling against one engine that answers each step when due."""

from __future__ import annotations

import json

import one_behind
import pytest
from loop_runs import finish, stop_after
from run_settings import DAPO, PIPELINE, SETTINGS

from tests.support.tiny_run import rewarded

pytestmark = pytest.mark.usefixtures("one_device")

MODES = {
    "coupled": (*DAPO, "Reuse.mode='coupled'"),
    "lenient": (
        *(*DAPO, "Reuse.mode='lenient:e^0.5'", "Reuse.schedule='clip_fraction:0.2'"),
        *("Reuse.max_age_steps=20", "Run.steps=8"),
    ),
    "delayed": ("Reuse.mode='delayed:2'", "Reuse.max_age_steps=20", "Run.steps=8"),
}


@pytest.fixture(scope="module", params=MODES)
def settings(request, tiny):
    return (
        *SETTINGS,
        *MODES[request.param],
        rewarded(tiny, "lucky"),
    )


@pytest.fixture(scope="module")
def ahead(tiny, settings, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("ahead"), *settings, *PIPELINE)


def by_step(done, name):
    samples = [json.loads(line) for line in done.samples.splitlines()]
    steps = sorted({s["step"] for s in samples})
    return [[s[name] for s in samples if s["step"] == step] for step in steps]


@pytest.mark.parity
def test_a_pipeline_answers_as_one_engine_one_update_behind(tiny, settings, ahead):
    want = one_behind.run(tiny, *settings)
    assert by_step(ahead, "example_id") == want.examples
    assert by_step(ahead, "completion") == want.texts
    assert by_step(ahead, "reward") == want.rewards
    for one, other in zip(ahead.leaves, want.leaves, strict=True):
        assert one.tobytes() == other.tobytes()
    assert sum(want.reused) > 0, "something is to be reused"
    if "Algorithm.name='dapo'" in settings:
        phases = [row["dynamic_sampling/phases"] for row in ahead.rows]
        assert len(set(phases)) > 1, "some steps are to ask further prompts"
        assert [row["dynamic_sampling/used_groups"] for row in ahead.rows] == want.used


def test_stopped_and_resumed_it_goes_on_alike(tiny, settings, ahead, tmp_path):
    """With the cursor, the lenience and the cached responses that the next step was asked with.

    It is stopped before a step that asks again what the step before has asked.
    """
    asked = [set(examples) for examples in by_step(ahead, "example_id")]
    stop = next(s for s in range(2, len(asked)) if asked[s - 1] & asked[s])
    stop_after(tiny, tmp_path, stop, *(*settings, *PIPELINE, "Checkpoint.every_steps=0"))
    resumed = finish(tiny, tmp_path, *settings, *PIPELINE)
    assert f"resuming after step {stop}" in resumed.show.messages
    for name in ("example_id", "completion", "reward"):
        assert by_step(resumed, name) == by_step(ahead, name)
    lenience = [[row.get("spec/lenience") for row in d.rows] for d in (resumed, ahead)]
    assert lenience[0] == lenience[1]
    for one, other in zip(resumed.leaves, ahead.leaves, strict=True):
        assert one.tobytes() == other.tobytes()


def test_histopipe_reuses_and_replaces_groups_and_loses_none(tiny, tmp_path):
    """Who is deferred depends on time; every sample is answered in its step or in the next."""
    histopipe = ("Sched.policy='histopipe'", "Sched.ranking_groups=2", "Sched.chunk_tokens=1")
    settings = (*SETTINGS, *MODES["lenient"], rewarded(tiny, "lucky"), *PIPELINE, *histopipe)
    done = finish(tiny, tmp_path, *settings, "Run.steps=8")
    asked = sum(row["dynamic_sampling/generated_groups"] for row in done.rows)
    assert sum(row["completions/count"] for row in done.rows) == 4 * asked > 4 * 8 * 2
    assert sum(row["spec/cached_responses"] for row in done.rows) > 0
    assert not any("generated afresh" in message for message in done.show.messages)
