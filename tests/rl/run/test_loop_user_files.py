"""The examples of docs/add_a_….md in the training loop: a file and a flag, as on the page."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loop_runs import assert_same_run, finish, texts
from run_settings import DRAFTS, WORKERS

from reprise.rl.commands import simulate
from reprise.rl.losses.algorithms import AlgorithmConfig
from reprise.rl.losses.policy_losses import policy_loss
from reprise.rl.runtime.user_files import load_user_name

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\n```\n(python -m rl\.train .*?)\n```$", re.S | re.M)


def examples(page: str) -> dict[str, tuple[str, list[str]]]:
    """The examples of a page by name of the file: its text, and the settings of the command."""
    found = {}
    for text, command in EXAMPLE.findall((DOCS / page).read_text(encoding="utf-8")):
        (name,) = set(re.findall(r"(\w+\.py):", command))
        flags = [word for word in shlex.split(command) if word.startswith("--gin.")]
        found[name] = text, [flag.removeprefix("--gin.") for flag in flags]
    return found


@pytest.fixture
def settings_of(tmp_path, monkeypatch):
    """Writes the file of an example into a new folder, goes there, and returns the settings."""

    def made(page: str, name: str) -> list[str]:
        folder = tmp_path / "mine"
        folder.mkdir()
        text, settings = examples(page)[name]
        (folder / name).write_text(text)
        monkeypatch.chdir(folder)
        return settings

    return made


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory):
    return finish(tiny, tmp_path_factory.mktemp("plain"))


def test_every_example_is_tested():
    pages = {page.name: list(examples(page.name)) for page in sorted(DOCS.glob("add_a*.md"))}
    assert pages == {
        "add_a_drafter.md": ["repeat.py", "few.py"],
        "add_a_model.md": [],
        "add_a_scheduler.md": ["shortest.py"],
        "add_an_algorithm.md": ["cispo.py", "whole_batch.py"],
    }


@pytest.mark.parametrize("name", ["cispo.py", "whole_batch.py"])
def test_the_file_of_a_shipped_configuration_is_that_of_the_page(name):
    text, _ = examples("add_an_algorithm.md")[name]
    assert (DOCS.parent / "configs" / "losses" / name).read_text(encoding="utf-8") == text


@pytest.mark.parity
@pytest.mark.parametrize("budget", ["fixed:3", "goodput", "bandit"])
def test_a_drafter_drafts_and_changes_no_token(tiny, plain, settings_of, tmp_path, budget):
    arms = ("Tuner.thresholds=(1, 5)", "Tuner.verify_tokens=(3, 1)") if budget == "bandit" else ()
    given = settings_of("add_a_drafter.md", "repeat.py")
    settings = (*DRAFTS, f"Speculation.budget='{budget}'", *given, *arms)
    done = finish(tiny, tmp_path / "run", *settings)
    assert texts(done) == texts(plain)
    assert given == ['Speculation.sources=("repeat.py:Repeat", "group", "own")']
    if budget == "fixed:3":
        assert sum(row["spec/other/speculated_fraction"] for row in done.rows) > 0
    if budget == "bandit":
        names = {name for row in done.show.rows for name in row}
        assert "bandit/Repeat_×_1/share" in names and not any(".py" in name for name in names)


@pytest.mark.parity
def test_a_budget_decides_and_changes_no_token(tiny, plain, settings_of, tmp_path):
    settings = (*settings_of("add_a_drafter.md", "few.py"), "Engine.max_nodes=8")
    done = finish(tiny, tmp_path / "run", *settings)
    assert texts(done) == texts(plain)
    drafted = [row.get("spec/drafted_per_round", 0) for row in done.rows]
    assert 0 < max(drafted) <= 2


@pytest.mark.parity
@pytest.mark.parametrize("mode", ["sync", "ahead", "pipeline"])
def test_a_scheduler_orders_and_changes_no_token(
    tiny, plain, settings_of, tmp_path, monkeypatch, mode
):
    settings = (*settings_of("add_a_scheduler.md", "shortest.py"), *WORKERS)
    order, popped = load_user_name("shortest.py:ShortestLimit"), []
    pop = order.pop
    monkeypatch.setattr(order, "pop", lambda self: popped.append(pop(self)) or popped[-1])
    done = finish(tiny, tmp_path / "run", *settings, f"Sched.mode='{mode}'")
    assert len({r.request_id for r in popped if r is not None}) >= 8
    if mode != "pipeline":  # whose weights are one update old
        assert_same_run(plain, done)


def test_a_scheduler_is_simulated(settings_of, tmp_path, capsys):
    (setting,) = settings_of("add_a_scheduler.md", "shortest.py")
    name = setting.partition("=")[2].strip('"')
    page = (DOCS / "add_a_scheduler.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python -m rl\.simulate .*$", page, re.M)
    flags = [word for word in shlex.split(command) if word.startswith("--gin.")]
    small = ["--gin.Workload.num_groups=4", f"--gin.Simulate.directory={str(tmp_path)!r}"]
    assert simulate.main([*flags, *small]) == 0
    out = capsys.readouterr().out
    assert name in out and "seer" in out


def test_a_loss_is_that_of_the_page_and_trains(tiny, settings_of, tmp_path):
    settings = settings_of("add_an_algorithm.md", "cispo.py")
    assert settings[1:] == ["Algorithm.clip_low=1.0", "Algorithm.clip_high=0.28"]
    cispo = AlgorithmConfig(policy_loss="cispo.py:cispo", clip_low=1.0, clip_high=0.28).resolved
    old, advantages, mask = jnp.zeros((1, 1)), jnp.ones((1, 1)), jnp.ones((1, 1), bool)

    def loss(logprob):
        return policy_loss(cispo, jnp.full((1, 1), logprob), old, advantages, mask)[0].sum()

    # the ratio is e; its weight is clipped at 1.28, and the gradient is that weight
    assert float(jax.grad(loss)(1.0)) == pytest.approx(-1.28)
    twice = ("Trainer.inner_updates=2", "Run.steps=2", "Optimizer.learning_rate=0.1")
    grpo = finish(tiny, tmp_path / "grpo", *twice)
    done = finish(tiny, tmp_path / "run", *settings, *twice)
    assert texts(done)[:8] == texts(grpo)[:8], "of the first step"
    assert done.rows[0]["loss"] != grpo.rows[0]["loss"]
    assert any((x != y).any() for x, y in zip(done.leaves, grpo.leaves, strict=True))


def test_advantages_are_those_of_the_page(tiny, settings_of, tmp_path):
    settings = settings_of("add_an_algorithm.md", "whole_batch.py")
    done = finish(tiny, tmp_path / "run", *settings, "Run.steps=1")
    rows = [json.loads(line) for line in done.samples.splitlines()]
    rewards = np.array([row["reward"] for row in rows])
    wanted = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert [row["advantage"] for row in rows] == pytest.approx(wanted.tolist(), abs=1e-5)
    assert done.rows[0]["batch/optimizer_steps"] == 1
