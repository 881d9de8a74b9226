"""Any checkpoint of a run as a Hugging Face folder: weights, settings, card, and refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil

import gguf_by_hand as by_hand
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.formats import hf, hf_files
from reprise.models.text import tokenizer
from reprise.rl.checkpoint.checkpointer import Checkpointer
from reprise.rl.commands import export
from reprise.rl.gin.loader import dump, load
from reprise.rl.learner.optimizer import SavedArrays
from reprise.rl.run import evaluation
from reprise.rl.settings.config import TrainConfig
from tests.support import tiny_run

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


class Run:
    """A run folder with checkpoints of random weights at steps 2 and 4, and rows of metrics."""

    def __init__(self, folder, config):
        self.folder, self.out, self.config = folder, folder.parent / "out", config
        folder.mkdir()
        (folder / "config.gin").write_text(dump(config))
        rows = [{"step": i, "reward": i / 10, "step_time": 900.0} for i in range(1, 5)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.params = {step: self.save(step) for step in (2, 4)}

    def save(self, step):
        params = transformer.init(tiny_run.MODEL, jax.random.key(step))
        whole = SavedArrays(jnp.zeros((), jnp.int32), params, {"m": jnp.ones(3)})
        with Checkpointer(self.folder / "checkpoints") as checkpoints:
            checkpoints.save(step, whole, {"num_tokens": 0})
        return params

    def export(self, *arguments, out=None):
        return export.main([str(self.folder), "--output", str(out or self.out), *arguments])

    def damage(self, step):
        (self.folder / "checkpoints" / f"step_{step:08d}" / "manifest.json").unlink()


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    (tiny.parent / "policy" / "chat_template.jinja").write_text(TEMPLATE)
    config = load(TrainConfig, [tiny], ("Sampling.temperature=0.5", "Sampling.stop_ids=(5,)"))
    return Run(tmp_path_factory.mktemp("made") / "run", config)


@pytest.fixture
def run(made, tmp_path):
    """The same run, for a test that changes something, and a place of its own to export to."""
    copied = Run.__new__(Run)
    vars(copied).update(vars(made))
    copied.folder = shutil.copytree(made.folder, tmp_path / "run", copy_function=shutil.copy)
    copied.out = tmp_path / "out"
    return copied


def assert_holds(folder, params, dtype):
    _, got = hf.load_pretrained(folder)
    for ours, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(wanted).astype(dtype))


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


# --- what is written --------------------------------------------------------------------


def test_the_newest_checkpoint_rounded_to_bfloat16(run, capsys):
    assert run.export() == 0
    assert_holds(run.out, run.params[4], ml_dtypes.bfloat16)
    config, _ = hf.load_pretrained(run.out)
    assert config == dataclasses.replace(tiny_run.MODEL, eos_token_ids=(1, 5))
    assert json.loads((run.out / "config.json").read_text())["dtype"] == "bfloat16"
    out = capsys.readouterr().out
    assert f"{run.folder}, step 4" in out and "bytes of bfloat16 in 1 file\n" in out
    assert entries(run.folder.parent) == ["out", "run"]  # nothing else was written


def test_a_step_by_its_number_as_it_is(run):
    assert run.export("--step", "2", "--dtype", "float32") == 0
    assert_holds(run.out, run.params[2], np.float32)
    card = (run.out / "README.md").read_text()
    assert "step 2" in card and "(step 1), last 0.2 (step 2)\n" in card  # none of later steps


def test_the_best_step_by_the_runs_evaluations(run):
    best = {"step": 2, "metric": "eval/mean_reward", "value": 0.5}
    (run.folder / "evaluation.json").write_text(json.dumps({"asked": "it", "best": best}))
    assert run.export("--step", "best") == 0
    assert_holds(run.out, run.params[2], ml_dtypes.bfloat16)


def test_shards_and_their_index(run, capsys):
    assert run.export("--max_shard_bytes", "2000") == 0
    files = sorted(run.out.glob("*.safetensors"))
    assert len(files) > 1 and f"in {len(files)} files" in capsys.readouterr().out
    index = json.loads((run.out / hf_files.INDEX).read_text())
    weights = jax.tree.leaves(run.params[4])
    assert index["metadata"]["total_size"] == 2 * sum(x.size for x in weights)
    assert_holds(run.out, run.params[4], ml_dtypes.bfloat16)


def test_transformers_reads_its_settings_tokenizer_and_template(run):
    import transformers

    assert run.export() == 0
    config = transformers.AutoConfig.from_pretrained(run.out)
    assert (config.model_type, config.hidden_size, config.dtype) == ("qwen3", 16, "bfloat16")
    words = transformers.AutoTokenizer.from_pretrained(run.out)
    assert words.chat_template == TEMPLATE
    assert words("1+1=")["input_ids"] == tokenizer.load(run.out).encode("1+1=")
    settings = transformers.GenerationConfig.from_pretrained(run.out)
    assert (settings.do_sample, settings.temperature, settings.top_k) == (True, 0.5, 0)
    assert (settings.top_p, settings.eos_token_id, settings.pad_token_id) == (1.0, [1, 5], 0)
    assert hf.check(run.out).eos_token_ids == (1, 5)  # the run's stop_ids end responses too


def test_the_template_of_the_run_goes_along(run):
    other = run.folder.parent / "other.jinja"
    other.write_text("Q: {{ messages[0].content }}")
    text = (run.folder / "config.gin").read_text()
    named = f"Task.chat_template = {str(other)!r}"
    (run.folder / "config.gin").write_text(text.replace("Task.chat_template = ''", named))
    assert run.export() == 0
    assert tokenizer.load(run.out).chat_template == other.read_text()
    assert "apply_chat_template(messages" in (run.out / "README.md").read_text()


def test_a_policy_as_it_is(tiny, tmp_path, capsys):
    policy, out = tiny.parent / "policy", tmp_path / "out"
    assert export.main([str(policy), "--output", str(out)]) == 0
    _, params = hf.load_pretrained(policy)
    assert_holds(out, params, ml_dtypes.bfloat16)
    assert "It was not trained further." in (out / "README.md").read_text()
    assert f"{policy}, as they are" in capsys.readouterr().out


def test_a_gguf_file_and_the_folder_made_of_it(tmp_path):
    shape = ModelConfig("llama", 300, 4, 1, 2, 1, 2, 4, tied_embeddings=True)
    words = by_hand.byte_vocabulary(300) | {"general.license": "apache-2.0"}
    by_hand.write(tmp_path / "a.gguf", shape, by_hand.random_weights(shape), metadata=words)
    _, params = hf.load_pretrained(tmp_path / "a.gguf")
    folder = tmp_path / "out-a.gguf"
    for source in (tmp_path / "a.gguf", folder):
        out = tmp_path / f"out-{source.name}"
        assert export.main([str(source), "--output", str(out)]) == 0
        assert_holds(out, params, ml_dtypes.bfloat16)
        assert tokenizer.load(out).has_chat_template
        assert "Its own card says `apache-2.0`" in (out / "README.md").read_text()


def test_the_policy_has_moved(run, tiny, tmp_path, capsys):
    text = (run.folder / "config.gin").read_text()
    (run.folder / "config.gin").write_text(text.replace(str(tiny.parent), str(tmp_path / "old")))
    assert run.export() == 2
    err = capsys.readouterr().err
    assert "expected a local Hugging Face folder" in err and "name it with --policy" in err
    assert run.export("--policy", str(tiny.parent / "policy")) == 0
    assert_holds(run.out, run.params[4], ml_dtypes.bfloat16)


def test_a_policy_is_replaced_when_told_and_other_files_stay(run, capsys):
    assert run.export("--step", "2") == 0
    (run.out / "notes.md").write_text("mine")
    (run.out / "vocab.txt").write_text("of another tokenizer")
    before = (run.out / "model.safetensors").read_bytes()
    assert run.export() == 2
    assert "or replace it with --force" in capsys.readouterr().err
    assert (run.out / "model.safetensors").read_bytes() == before
    assert run.export("--force", "--max_shard_bytes", "2000") == 0
    assert_holds(run.out, run.params[4], ml_dtypes.bfloat16)
    assert (run.out / "notes.md").read_text() == "mine"
    assert not {"model.safetensors", "vocab.txt"} & set(entries(run.out))


def test_nothing_is_left_of_an_export_that_fails(run, monkeypatch, capsys):
    def full_disk(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_files, "write_json", full_disk)
    assert run.export() == 2
    assert "No space left" in capsys.readouterr().err
    assert entries(run.folder.parent) == ["run"]


# --- what is refused --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("3", "has no checkpoint of step 3: expected one of [4, 2]"),
        ("last", "expected a step, newest or best, got 'last'"),
        ("best", "records no best step"),
    ],
)
def test_a_step_that_is_not_there(run, capsys, step, message):
    assert run.export("--step", step) == 2
    assert message in capsys.readouterr().err
    assert not run.out.exists()


def test_a_damaged_checkpoint(run, capsys):
    run.damage(4)
    assert run.export("--step", "4") == 2
    err = capsys.readouterr().err
    assert "expected a whole checkpoint" in err and "other steps that are there: [2]" in err
    assert not run.out.exists()
    assert run.export() == 0  # the newest one that is whole
    captured = capsys.readouterr()
    assert "warning: skipped a damaged checkpoint" in captured.err
    assert f"{run.folder}, step 2" in captured.out
    assert_holds(run.out, run.params[2], ml_dtypes.bfloat16)
    run.damage(2)
    assert run.export("--force") == 2
    assert "expected a whole checkpoint" in capsys.readouterr().err
    assert_holds(run.out, run.params[2], ml_dtypes.bfloat16)


def test_a_checkpoint_that_the_run_removes_meanwhile(run, monkeypatch, capsys):
    def read(*args, **options):
        shutil.rmtree(run.folder / "checkpoints" / "step_00000004")
        raise ValueError("NOT_FOUND: d/7")

    monkeypatch.setattr(evaluation, "load_checkpoint", read)
    assert run.export() == 2
    assert "removed its checkpoint of step 4 while it was read" in capsys.readouterr().err
    assert not run.out.exists()


def test_a_run_without_a_checkpoint(run, capsys):
    shutil.rmtree(run.folder / "checkpoints")
    assert run.export() == 2
    assert "expected a checkpoint in" in capsys.readouterr().err
    assert run.export("--step", "2") == 2
    assert "none is kept" in capsys.readouterr().err


def test_a_folder_of_something_else_is_never_replaced(run, tiny, capsys):
    policy = tiny.parent / "policy"
    inside = run.folder / "checkpoints" / "out"
    file = run.folder / "metrics.jsonl"
    link = run.folder.parent / "link"
    link.symlink_to(policy)
    for place, message in (
        (run.folder, "holds something other than a policy"),
        (policy, "is the policy that is read"),
        (inside, "is among the run's checkpoints"),
        (file, "got the file"),
        (link, "got the link"),
    ):
        before = sorted(run.folder.rglob("*")), sorted(policy.rglob("*"))
        assert run.export("--force", out=place) == 2
        assert message in capsys.readouterr().err
        assert (sorted(run.folder.rglob("*")), sorted(policy.rglob("*"))) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such", "--output", "out"], "expected a local Hugging Face folder, got 'no/such'"),
        (["policies/tiny", "--output", "out", "--step", "3"], "--step and --policy are of runs"),
    ],
)
def test_a_source_that_is_none(arguments, message, capsys):
    assert export.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--max_shard_bytes", "0"], ["--dtype", "float16"], []])
def test_the_command_line_is_checked(wrong, capsys):
    source = ["runs/x", "--output", "out"] if wrong else []
    with pytest.raises(SystemExit) as left:
        export.main([*source, *wrong])
    assert left.value.code == 2
