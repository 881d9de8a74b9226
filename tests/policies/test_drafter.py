"""The drafter of the policy that searches: its recipe, its questions, and the folder that ships."""

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policies.make import countdown, drafter
from reprise.models.formats import hf
from reprise.models.text import tokenizer
from reprise.rl.drafter_training.config import DrafterConfig
from reprise.rl.drafter_training.offline import OfflineConfig, OfflineTraining
from reprise.rl.records.packing import Response
from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle.config import DataBufferConfig, DrafterTrainingConfig

POLICY = Path(__file__).parents[2] / "policies" / "countdown"
SHIPPED = POLICY.parent / "countdown_drafter"
TINY = drafter.Settings(
    responses=2,
    max_new_tokens=6,
    variant="hass",
    steps=3,
    averaged_steps=2,
    batch_rows=1,
    row_tokens=32,
    d_ff=32,
    max_depth=2,
    measured_responses=2,
)


@pytest.mark.soak  # compiles much
def test_the_recipe_writes_a_folder_that_loads(tmp_path):
    drafter.make(POLICY, tmp_path / "drafter", TINY)
    model = hf.check(POLICY)
    loaded = eagle_files.load(tmp_path / "drafter", model)
    assert loaded.config.layer.d_ff == 32 and loaded.config.layer.d_model == model.d_model
    report = json.loads((tmp_path / "drafter" / "trained.json").read_text())
    assert 2 <= report["response_tokens"] <= 12 and 0 < report["last_steps"]["loss"] < 10
    by_depth = report["accepted_by_depth"]
    assert set(by_depth) == {"likeliest", "shared_noise"}
    assert all(len(shares) == 2 for shares in by_depth.values())


def test_weights_are_the_mean_over_the_last_steps(monkeypatch):
    model = hf.check(POLICY)
    start, steps = drafter.first(model, TINY), iter(range(10))

    class Trainer:
        def __init__(self, *args, **options):
            self.state = None

        def context(self, runner, params):
            return None

        def run_steps(self, count, context):
            self.value = float(next(steps))
            params = jax.tree.map(lambda x: np.full(x.shape, self.value), start.params)
            self.state = SimpleNamespace(params=params)

        def take_history(self):
            return [{"loss": self.value}]

    monkeypatch.setattr(drafter, "DrafterTrainer", Trainer)
    settings = dataclasses.replace(TINY, steps=7, averaged_steps=5)
    trained, rows = drafter.train((model, None), start, None, settings)
    assert [row["loss"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert {float(x.mean()) for x in jax.tree.leaves(trained.params)} == {4.0}


def test_it_learns_from_questions_that_no_run_trains_on_or_is_tested_with(monkeypatch):
    asked: list[str] = []

    def respond(engine, params, tok, prompts, key, max_new_tokens):
        asked.extend(prompts)
        return []

    monkeypatch.setattr(drafter, "respond", respond)
    model = hf.check(POLICY)
    drafter.sampled((model, None), tokenizer.load(POLICY), drafter.Settings())
    others = [POLICY / f"{name}.jsonl" for name in ("few", "test")]
    rows = [json.loads(line) for path in others for line in path.read_text().splitlines()]
    assert len(set(asked)) == drafter.Settings().responses
    assert not {row["prompt"] for row in rows} & set(asked)


@pytest.fixture(scope="module")
def texts() -> list[Response]:
    """Random tries at test questions, as the policy was taught to write them."""
    tok, rng, (_, test) = tokenizer.load(POLICY), random.Random(0), countdown.questions()
    pairs = [(tok.encode(q.prompt), tok.encode(countdown.response(q, rng))) for q in test[:8]]
    arrays = [tuple(np.asarray(ids, np.int32) for ids in pair) for pair in pairs]
    return [Response(str(i), i, prompt, text[:400]) for i, (prompt, text) in enumerate(arrays)]


def test_the_shipped_drafter_is_small_and_agrees_with_the_policy(texts):
    model, params = hf.load_pretrained(POLICY)
    shipped = eagle_files.load(SHIPPED, model)
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 2_000_000
    assert (SHIPPED / "tokenizer.json").read_bytes() == (POLICY / "tokenizer.json").read_bytes()
    report = json.loads((SHIPPED / "trained.json").read_text())
    sections = DrafterConfig(batch_rows=1), DrafterTrainingConfig(), DataBufferConfig()
    options = {"seed": 0, "temperature": 1.0, "dtype": jnp.float32}

    def agreement(weights) -> float:
        training = OfflineTraining(OfflineConfig(*sections), model, params, weights, **options)
        return training.evaluate(texts)["agreement"]

    assert agreement(shipped) > report["last_steps"]["agreement"] - 0.1 > 0.5
    assert agreement(drafter.first(model, drafter.Settings())) < 0.2
