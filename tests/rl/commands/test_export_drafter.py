"""A run's drafter out of its checkpoints: which of them, with what of the policy, bit for bit."""

from __future__ import annotations

import dataclasses
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reprise.models.decoder import transformer
from reprise.models.formats import hf, hf_files
from reprise.models.text import tokenizer
from reprise.rl.assembly.drafter_run import open_drafter
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.commands import export, train
from reprise.rl.drafter_training.export import SGLANG, VLLM, engines
from reprise.rl.gin.loader import dump, load
from reprise.rl.learner.optimizer import SavedArrays
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle_training import training as drafter_training
from tests.support import tiny_run

LEARNS = (
    "Speculation.budget='fixed:1'",
    "Speculation.sources=('learned',)",
    "Drafter.draft_vocab_size=9",
    "DrafterTraining.variant='hass'",
)


class Run:
    """A run folder whose checkpoints hold what a test wants."""

    def __init__(self, folder, tiny, *overrides):
        self.folder, self.out = folder, folder.parent / "out"
        self.config = load(TrainConfig, [tiny], overrides or LEARNS)
        self.inputs = open_inputs(self.config)
        folder.mkdir()
        (folder / "config.gin").write_text(dump(self.config))

    def state(self, seed, num_steps):
        """A drafter in training, norms and all at random."""
        start = open_drafter(self.config, self.inputs)
        params = eagle.init(start.config, jax.random.key(seed))
        state = drafter_training.state_of(self.config.drafter_training, params)
        return dataclasses.replace(state, step=jnp.asarray(num_steps, jnp.int32))

    def save_own(self, seed, num_steps):
        state = self.state(seed, num_steps)
        with Checkpointer(self.folder / "drafter") as checkpoints:
            checkpoints.save(num_steps, state, {"step": num_steps})
        return state.params

    def save_both(self, seed, num_steps):
        """The run's own checkpoint; also the policy that it holds."""
        state = self.state(seed, num_steps)
        policy = transformer.init(tiny_run.MODEL, jax.random.key(seed + 100))
        whole = SavedArrays(jnp.zeros((), jnp.int32), policy, {"m": jnp.ones(3)}, drafter=state)
        with Checkpointer(self.folder / "checkpoints") as checkpoints:
            checkpoints.save(1, whole, {"num_tokens": 0})
        return state.params, policy

    def export(self, *arguments):
        return export.main([str(self.folder), "--drafter", "--output", str(self.out), *arguments])

    def assert_exported(self, params):
        got = eagle_files.load(self.out, tiny_run.MODEL)
        assert [x.tobytes() for x in leaves(got.params)] == [x.tobytes() for x in leaves(params)]
        wanted = open_drafter(self.config, self.inputs)
        assert got.config == wanted.config
        np.testing.assert_array_equal(got.draft_ids_U, wanted.draft_ids_U)

    def beside(self, name):
        """A tensor beside the drafter's own weights, None where there is none."""
        stored = hf_files.headers(self.out).get(name)
        return None if stored is None else hf_files.read_tensor(stored)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.fixture
def run(tiny, tmp_path):
    return Run(tmp_path / "run", tiny)


def test_the_newest_of_its_own_checkpoints_comes_back_bit_for_bit(run, capsys):
    run.save_own(1, 64)
    params = run.save_own(2, 128)
    assert run.export() == 0
    run.assert_exported(params)
    out = capsys.readouterr().out
    assert "eagle, " in out and "9 of 24 tokens" in out and "128 steps" in out
    count = sum(x.size for x in leaves(params))
    assert f"{count:,} parameters" in out
    assert run.beside(eagle_files.EMBEDDING) is None  # there is no policy to be had
    words = tokenizer.load(run.out)
    assert words.decode(words.encode("1+1=")) == "1+1="


def test_the_output_names_the_engines_and_their_versions(run, capsys):
    run.save_own(1, 64)
    assert run.export() == 0
    assert f"for {SGLANG} (for {VLLM}: --engine=vllm)" in capsys.readouterr().out
    assert run.beside("fc.bias") is not None
    assert run.export("--engine=vllm") == 0
    assert "vLLM refuses a draft vocabulary" in capsys.readouterr().out
    assert run.beside("fc.bias") is None
    policy = tiny_run.MODEL
    for num_layers, text in ((1, "fewer than four layers"), (4, f"for {SGLANG} and {VLLM}")):
        shape = eagle.config_for(dataclasses.replace(policy, num_layers=num_layers), "eagle3")
        assert text in engines(shape, "sglang")


def test_the_finished_policy_lends_its_embedding_where_there_is_no_checkpoint(run):
    run.save_own(1, 64)
    policy = transformer.init(tiny_run.MODEL, jax.random.key(7))
    hf.save_pretrained(run.folder / "policy", tiny_run.MODEL, policy)
    assert run.export() == 0
    np.testing.assert_array_equal(run.beside(eagle_files.EMBEDDING), policy.embedding_VD)


@pytest.mark.parametrize(("own_steps", "both_steps"), [(64, 80), (80, 64), (64, 64), (None, 5)])
def test_the_drafter_that_was_trained_for_longest_counts(run, own_steps, both_steps):
    own = None if own_steps is None else run.save_own(1, own_steps)
    both, policy = run.save_both(2, both_steps)
    assert run.export() == 0
    run.assert_exported(both if own is None or both_steps > own_steps else own)
    # the policy is the run's newest either way
    np.testing.assert_array_equal(run.beside(eagle_files.EMBEDDING), policy.embedding_VD)


def test_a_damaged_checkpoint_is_said_and_the_one_before_taken(run, capsys):
    params = run.save_own(1, 64)
    run.save_own(2, 128)
    (run.folder / "drafter" / "step_00000128" / "manifest.json").unlink()
    assert run.export() == 0
    run.assert_exported(params)
    captured = capsys.readouterr()
    assert "warning: skipped a damaged checkpoint" in captured.err and "64 steps" in captured.out


def test_a_run_starts_from_it_by_the_command_that_is_printed(run, capsys):
    run.save_own(1, 64)
    assert run.export() == 0
    [command] = [x for x in capsys.readouterr().out.splitlines() if "rl.train" in x]
    words = shlex.split(command)
    assert train.main([*words[words.index("rl.train") + 1 :], "--dry_run", "--show_config"]) == 0
    plan = capsys.readouterr().out
    assert f'Drafter.directory = "{run.out}"' in plan.replace("'", '"')


def test_a_drafter_is_written_over_and_nothing_else(run, tiny, capsys):
    run.save_own(1, 64)
    assert run.export() == 0
    params = run.save_own(2, 128)
    assert run.export() == 0
    run.assert_exported(params)
    for folder in (tiny.parent / "policy", run.folder, tiny):
        before = sorted(folder.parent.rglob("*"))
        assert export.main([str(run.folder), "--drafter", "--output", str(folder)]) == 2
        assert "expected a" in capsys.readouterr().err
        assert sorted(folder.parent.rglob("*")) == before


def test_a_drafter_of_another_program_is_not_written_over(run, capsys):
    run.save_own(1, 64)
    assert run.export() == 0
    config = run.out / "config.json"
    config.write_text(config.read_text().replace(f'"{eagle_files.OURS}"', '"theirs"'))
    before = config.read_text()
    assert run.export() == 2
    assert "holds something else" in capsys.readouterr().err
    assert config.read_text() == before


def test_no_such_run(tmp_path, capsys):
    assert (
        export.main([str(tmp_path / "none"), "--drafter", "--output", str(tmp_path / "out")]) == 2
    )
    assert "found no config.gin" in capsys.readouterr().err


def test_a_run_without_a_learned_drafter(tiny, tmp_path, capsys):
    run = Run(tmp_path / "run", tiny, "Speculation.sources=('own', 'group')")
    assert run.export() == 2
    assert "has no learned drafter" in capsys.readouterr().err
    assert not run.out.exists()


def test_a_run_without_a_whole_checkpoint(run, capsys):
    assert run.export() == 2
    error = capsys.readouterr().err
    for name in ("drafter", "checkpoints"):
        assert f"expected a checkpoint in {run.folder / name}, found none" in error
    assert not run.out.exists()


def test_checkpoints_of_another_drafter(run, capsys):
    run.save_own(1, 64)
    text = (run.folder / "config.gin").read_text()
    larger = text.replace("draft_vocab_size = 9", "draft_vocab_size = 0")
    (run.folder / "config.gin").write_text(larger.replace("'hass'", "'eagle3'"))
    assert run.export() == 2
    assert "holds another model" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--step=2", "--dtype=float32", "--policy=x", "--force"])
def test_options_of_policies_are_refused(run, capsys, option):
    assert run.export(option) == 2
    assert f"{option.partition('=')[0]} is of policies" in capsys.readouterr().err
