"""What a configuration names in user files is checked when its inputs are opened."""

from __future__ import annotations

import sys

import pytest
from command_runs import call_main

from reprise.rl.commands import train
from reprise.rl.gin.loader import ConfigError, dump, load
from reprise.rl.losses.algorithms import AlgorithmConfig
from reprise.rl.settings import identity
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.workers.config import SchedConfig

DRAFTER = """
from reprise.spec.drafter import Drafter, no_drafts

class Mine(Drafter):
    def propose(self, live, max_nodes_A, max_nodes):
        return no_drafts(len(live), max_nodes)
"""
BUDGET = """
from reprise.spec.budget.budget import FixedBudget

class Mine(FixedBudget):
    def __init__(self, times):
        super().__init__(1)
"""
SCHEDULER = """
from reprise.sched.policies.group_fifo import GroupFifo

def Mine(*, seed, chunk_tokens, prefer_pool):
    return GroupFifo(seed=seed)
"""
LOSS = "def Mine(algorithm, new, old, advantages, mask):\n    return -new * advantages, old\n"
ADVANTAGES = "def Mine(rewards, group_ids):\n    return [r or 0 for r in rewards]\n"
FILES = {
    "Speculation.sources": DRAFTER,
    "Speculation.budget": BUDGET,
    "Sched.policy": SCHEDULER,
    "Algorithm.policy_loss": LOSS,
    "Algorithm.advantages": ADVANTAGES,
}


@pytest.fixture(autouse=True)
def imports(monkeypatch):
    """Takes back the folders that user files add to the path."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def named(setting, folder, text, name="Mine") -> str:
    path = folder / "mine.py"
    path.write_text(text)
    value = f"{path}:{name}"
    return f"{setting}={('own', value) if setting == 'Speculation.sources' else value!r}"


@pytest.mark.parametrize("setting", FILES)
def test_a_file_that_fits_is_opened_and_has_a_digest(tiny, tmp_path, setting):
    config = load(TrainConfig, [tiny], [named(setting, tmp_path, FILES[setting])])
    inputs = open_inputs(config)
    assert len(inputs.contents[f"{setting}/mine.py"]) == 32
    saved = tmp_path / "config.gin"
    saved.write_text(dump(config))
    assert load(TrainConfig, [saved]) == config
    (tmp_path / "mine.py").write_text(FILES[setting] + "\n")
    now = identity.contents(config, inputs.policy)
    (change,) = identity.changes(inputs.contents, now)
    assert change.field == f"{setting}/mine.py"
    assert change.of_experiment == setting.startswith("Algorithm."), "what a run learns from"


@pytest.mark.parametrize("setting", FILES)
def test_another_name_of_the_file_is_the_nearest(tiny, tmp_path, setting):
    config = load(TrainConfig, [tiny], [named(setting, tmp_path, FILES[setting], "Mime")])
    with pytest.raises(ValueError, match=rf"^{setting}: .*did you mean 'Mine'"):
        open_inputs(config)


@pytest.mark.parametrize(
    ("setting", "text", "message"),
    [
        ("Speculation.sources", "class Mine: pass", "expected .* of reprise.spec.drafter.Drafter"),
        ("Speculation.sources", "def Mine(context): pass", r"parameters \(\), got \(context\)"),
        (
            "Speculation.sources",
            DRAFTER.replace(", max_nodes)", ")"),
            r"Mine\.propose: expected the parameters \(live, max_nodes_A, max_nodes\), got",
        ),
        (
            "Speculation.sources",
            "from reprise.spec.drafter import Drafter\nclass Mine(Drafter): pass",
            "abstract class Mine .*propose",
        ),
        (
            "Speculation.budget",
            BUDGET.replace(", times", ""),
            r"parameters \(\*, times\), got \(\)",
        ),
        (
            "Speculation.budget",
            "class Mine:\n    def __init__(self, times): pass",
            "expected skips",
        ),
        ("Sched.policy", "def Mine(seed): pass", r"\(\*, seed, chunk_tokens, prefer_pool\)"),
        (
            "Sched.policy",
            "def Mine(seed, chunk_tokens, prefer_pool): pass",
            "expected handle of reprise.sched.protocol.Scheduler, got a NoneType without it",
        ),
        ("Algorithm.policy_loss", "def Mine(logprobs, advantages): pass", "algorithm, logprobs_BT"),
        ("Algorithm.advantages", "def Mine(rewards): pass", r"\(rewards, group_ids\), got \(rew"),
        ("Algorithm.advantages", "def Mine(r, g): return 3", r"3 rewards, got shape \(\)"),
        ("Algorithm.advantages", "def Mine(r, g): return r[0] / 0", "raised ZeroDivisionError"),
        (
            "Algorithm.advantages",
            "def Mine(r, g): return [float('nan') for _ in r]",
            "with 0 finite numbers",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tiny, tmp_path, setting, text, message):
    config = load(TrainConfig, [tiny], [named(setting, tmp_path, text)])
    with pytest.raises(ValueError, match=rf"^{setting}: .*{message}"):
        open_inputs(config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "Speculation.sources=('own', 'histori')",
            "one of 'last', .* or PATH.py:name, .*Did you mean history",
        ),
        ("Speculation.budget='godput'", "budget of off, fixed:K, .*did you mean 'goodput'"),
        ("Speculation.budget='fixed:x'", "budget must be one of off, fixed:K"),
        ("Sched.policy='ser'", "one of 'group_fifo', .* or PATH.py:name, .*Did you mean seer"),
        (
            "Algorithm.policy_loss='clip'",
            "one of 'clipped', .* or PATH.py:name .*Did you mean clipped",
        ),
        (
            "Algorithm.advantages='groups'",
            "one of 'group', .* or PATH.py:name .*Did you mean group",
        ),
        ("Algorithm.advantages='gae.py'", "or PATH.py:name .*got str 'gae.py'"),
    ],
)
def test_a_wrong_short_name_is_refused_with_the_nearest(tiny, override, message):
    with pytest.raises(ConfigError, match=message):
        load(TrainConfig, [tiny], [override])


def test_a_wrong_short_name_is_refused_from_python():
    for make, message in (
        (lambda: SchedConfig(policy="ser"), "policy of group_fifo, .*did you mean 'seer'"),
        (lambda: SpeculationConfig(sources=("ow",)), "sources of last, .*did you mean 'own'"),
        (lambda: AlgorithmConfig(advantages="groop"), "advantages of .*did you mean 'group'"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_a_dry_run_says_it_in_one_line(tiny, tmp_path, capsys):
    flag = f"--gin.{named('Speculation.sources', tmp_path, 'import nosuch')}"
    arguments = (f"--gin_file={tiny}", flag, f"--gin.Run.directory={str(tmp_path / 'run')!r}")
    assert call_main(train.main, *arguments, "--dry_run") == 2
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("error: Speculation.sources: ModuleNotFoundError: No module")
    assert not (tmp_path / "run").exists()


def test_a_file_is_not_opened_where_it_has_no_use(tiny, tmp_path):
    """An evaluation, an export or a report of a run needs no file but the rewards'."""
    config = load(TrainConfig, [tiny], ["Speculation.sources=('gone.py:Mine',)"])
    assert identity.user_contents(config, "Reward.functions").keys() == {
        "Reward.functions/reward.py"
    }
    with pytest.raises(FileNotFoundError, match="Speculation.sources: there is no file .*gone.py"):
        open_inputs(config)
