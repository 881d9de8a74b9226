"""`python -m rl.train` from its arguments to its run folder.

Runs in this process where it can: starting Python takes longer than training here.
"""

from __future__ import annotations

import dataclasses
import json
import shutil

import gguf_by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_runs import call_main
from run_settings import TRAINED_AFTER
from safetensors.numpy import load_file, save_file

from policies.make.characters import save_character_tokenizer
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.models.formats.hf_files import WeightsError
from reprise.models.text import tokenizer
from reprise.rl.commands import evaluate, export, report, train
from reprise.rl.data.prompts import UnreadableExample
from reprise.rl.learner.gradient_accumulation import NonFiniteWeights
from reprise.rl.metrics.writer import deterministic_view, read_metrics, read_samples
from reprise.rl.preflight import memory
from reprise.rl.run import run_process
from reprise.rl.settings import run_folder
from reprise.rl.speculation.config import DraftModelConfig
from reprise.rl.speculation.device_drafters import check_draft_model
from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle import model as eagle
from tests.support import tiny_run

# What every row of a plain GRPO run has; the names are TRL's where TRL has one.
METRICS = {
    *("step", "num_tokens", "reward", "reward_std", "frac_reward_zero_std", "entropy", "loss"),
    *("grad_norm", "lr", "step_time", "rewards/digits/mean", "rewards/digits/std"),
    *("rewards/failures", "clip_ratio/high_mean", "clip_ratio/low_mean", "clip_ratio/region_mean"),
    *("completions/mean_length", "completions/min_length", "completions/max_length"),
    *("completions/clipped_ratio", "completions/count", "mismatch_kl", "ratio/mean"),
    *("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"),
    *("rollout/rounds", "rollout/fetches", "rollout/prefilled_tokens", "rollout/slot_use"),
    *("time/rollout", "time/reward", "time/update", "time/checkpoint", "perf/throughput"),
}
SAMPLE = {
    *("step", "example_id", "sample_index", "prompt", "completion", "answer", "reward", "rewards"),
    *("reward_failure", "advantage", "logprob", "num_tokens", "finish_reason"),
}


FIELDS = {
    "policy/model.safetensors": "Policy.directory/model.safetensors",
    "policy/tokenizer.json": "Policy.directory/tokenizer.json",
    "reward.py": "Reward.functions/reward.py",
}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with tiny_run.keep_every_program():
        config = tiny_run.make_inputs(tmp_path_factory.mktemp("train_command"))
        # newer tokenizers keep their template in a file of its own: it belongs to the policy
        (config.parent / "policy" / "chat_template.jinja").write_text(TEMPLATE)
        yield config


def run_train(*arguments) -> int:
    return call_main(train.main, *arguments)


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert run_train(f"--gin_file={tiny}", f"--gin.Run.directory='{folder}'") == 0
    return folder


def test_metrics_and_samples_have_their_columns(run):
    rows, samples = read_metrics(run), read_samples(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert METRICS - row.keys() == set()
        assert all(value is None or np.isfinite(value) for value in row.values())
    assert len(samples) == 3 * 8
    assert all(sample.keys() == SAMPLE for sample in samples)
    assert {s["prompt"] for s in samples} <= set(tiny_run.PROMPTS)
    assert {s["finish_reason"] for s in samples} == {"stop", "length"}


def test_tensorboard_has_what_metrics_jsonl_has(run):
    files = list((run / "tensorboard").glob("events.*"))
    assert files and sum(f.stat().st_size for f in files) > 1000


def test_the_policy_it_leaves_loads_and_has_moved(run, tiny):
    model, params = hf.load_pretrained(run / "policy", dtype=jnp.float32)
    assert model == tiny_run.MODEL
    words = tokenizer.load(run / "policy")
    assert (run / "policy" / "chat_template.jinja").read_text() == TEMPLATE
    tokenizer.check_vocabulary(words, model)
    assert words.decode(words.encode("1+1=")) == "1+1="
    _, before = hf.load_pretrained(tiny.parent / "policy", dtype=jnp.float32)
    moved = np.abs(np.asarray(params.embedding_VD) - np.asarray(before.embedding_VD))
    assert 0 < moved.max() < 0.1  # three steps of Adam at 0.01


def test_an_export_of_its_last_step_is_the_policy_it_leaves(run, tmp_path):
    out = tmp_path / "out"
    assert export.main([str(run), "--output", str(out), "--dtype", "float32"]) == 0
    assert {p.name for p in out.iterdir()} == {p.name for p in (run / "policy").iterdir()}
    for ours in out.iterdir():
        assert ours.read_bytes() == (run / "policy" / ours.name).read_bytes()
    assert ", step 3\n" in (out / "README.md").read_text()


def test_the_run_can_be_reported(run):
    assert report.main([str(run)]) in (0, None)
    assert list(run.rglob("*.html"))


def test_a_gguf_file_and_a_folder_made_of_it_give_the_same_run(tiny, tmp_path, capsys):
    file, folder = tmp_path / "policy.gguf", tmp_path / "policy"
    model, params = hf.load_pretrained(tiny.parent / "policy", dtype=jnp.float32)
    words = gguf_by_hand.character_vocabulary(tiny_run.CHARACTERS, model.vocab_size)
    words["tokenizer.chat_template"] = TEMPLATE
    gguf_by_hand.write(file, model, gguf_by_hand.by_name(model, params), metadata=words)
    assert export.main([str(file), "--output", str(folder), "--dtype", "float32"]) == 0
    runs = {policy: tmp_path / f"run_{policy.suffix}" for policy in (file, folder)}
    for policy, run in runs.items():
        named = f"--gin.Policy.directory='{policy}'"
        where = f"--gin.Run.directory='{run}'"
        assert run_train(f"--gin_file={tiny}", named, where, "--gin.Run.steps=1") == 0
    for ours, theirs in zip(*map(read_metrics, runs.values()), strict=True):
        assert deterministic_view(ours) == deterministic_view(theirs)
    left = ("policy/model.safetensors", "policy/config.json", "policy/tokenizer.json")
    for name in ("samples.jsonl", *left):
        assert (runs[file] / name).read_bytes() == (runs[folder] / name).read_bytes()
    chat = tokenizer.load(runs[file] / "policy").apply_chat_template([{"content": "1+1="}])
    assert chat == [4, 13, 4, 14]
    drafts = DraftModelConfig(directory=str(file))
    assert check_draft_model(drafts, model, tokenizer.load(folder), 16) == (file, model)
    capsys.readouterr()
    asked = [f"--gin_file={tiny}", "--gin.Eval.num_prompts=2", "--json"]
    assert evaluate.main([*asked, "--policy", str(file)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["policy"] == str(file)


def test_a_folder_that_holds_a_run_is_not_written_over(run, tiny, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    assert run_train(f"--gin_file={tiny}", f"--gin.Run.directory='{run}'") == 2
    assert "holds a run already: go on with it through --resume" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_resuming_a_finished_run_says_so_at_once_and_changes_nothing(run, capsys, monkeypatch):
    monkeypatch.setattr(
        "reprise.rl.run.run_process.run", None
    )  # nothing is opened, nothing compiled
    files = ["metrics.jsonl", "samples.jsonl", "policy/model.safetensors", "config.gin"]
    before = [(run / file).read_bytes() for file in files]
    assert run_train("--resume", f"--gin.Run.directory='{run}'") == 0
    assert f"{run} is done, all 3 steps: to go on raise Run.steps" in capsys.readouterr().err
    assert [(run / file).read_bytes() for file in files] == before


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--gin.Rollout.groupsize=2", "Did you mean Rollout.group_size"),
        ("--gin.Rollout.max_new_tokens=5", "Did you mean Sampling.max_new_tokens?"),
        ("--gin.Optimizer.lr=0.1", "Did you mean Optimizer.learning_rate?"),
        ("--gin.Policy.directory=Qwen/Qwen3-8B", "hf download Qwen/Qwen3-8B --local-dir"),
        ("--gin_file=no/such.gin", "does not exist"),
        ("--gin.Task.specs=('reasoning_gym:gdc',)", "gcd"),
        ("--gin.Reward.functions=('exact_mach',)", "did you mean 'exact_match'"),
    ],
)
def test_a_mistake_is_said_with_its_mend_and_leaves_no_folder(
    tiny, tmp_path, capsys, argument, message
):
    folder = tmp_path / "run"
    code = run_train(f"--gin_file={tiny}", f"--gin.Run.directory='{folder}'", argument)
    assert code == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--dryrun", "--dry_run"),
        ("--Run.steps=3", "--gin.Run.steps=3"),
        ("configs/tiny_cpu.gin", "--gin_file=configs/tiny_cpu.gin"),
    ],
)
def test_an_unknown_flag_has_its_nearest_match(capsys, argument, message):
    with pytest.raises(SystemExit) as left:
        run_train(argument)
    assert left.value.code == 2
    assert f"Did you mean {message}?" in capsys.readouterr().err


def test_a_mesh_that_does_not_fit_the_devices(tiny, tmp_path, capsys):
    folder = tmp_path / "run"
    code = run_train(
        f"--gin_file={tiny}", f"--gin.Run.directory='{folder}'", "--gin.Mesh.tensor=1000"
    )
    assert code == 2
    assert "does not cover" in capsys.readouterr().err
    assert not folder.exists()


def test_a_resume_that_is_refused_changes_nothing(run, tiny, tmp_path, capsys):
    """It is refused before the folder's configuration is written over, and before compiling."""
    shutil.copytree(run, tmp_path / "run")
    wider = dataclasses.replace(tiny_run.MODEL, d_ff=64)
    weights = transformer.init(wider, jax.random.key(0), jnp.float32)
    hf.save_pretrained(tmp_path / "policy", wider, weights)
    save_character_tokenizer(tmp_path / "policy", tiny_run.CHARACTERS)
    where = f"--gin.Run.directory='{tmp_path / 'run'}'"
    changes = f"--gin.Policy.directory='{tmp_path / 'policy'}'", "--gin.Run.steps=4"
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert run_train("--resume", where, *changes, "--allow_changes") == 2
    found = capsys.readouterr()
    assert "another model or optimizer" in found.err
    assert "changed       Run.steps: 3 → 4" in found.err and "compiling" not in found.out
    after = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert after == before
    assert run_train("--resume", where, "--gin.Run.steps=4") == 0


@pytest.mark.parametrize("name", ["policy/model.safetensors", "policy/tokenizer.json", "reward.py"])
def test_a_resume_with_other_files_is_refused(run, tiny, tmp_path, capsys, name):
    """Settings name them, and are the same: only their contents are others."""
    shutil.copytree(run, tmp_path / "run")
    where = f"--gin.Run.directory='{tmp_path / 'run'}'", "--gin.Run.steps=4"
    file = tiny.parent / name
    before = file.read_bytes()
    try:
        if file.suffix == ".safetensors":
            weights = load_file(file)
            save_file({key: x * x.dtype.type(1.5) for key, x in weights.items()}, file)
        else:
            file.write_bytes(before + b"\n")
        assert run_train("--resume", *where) == 2
        found = capsys.readouterr().err
        assert f"files that the run had up to step 3, got other contents of {FIELDS[name]}" in found
        assert (
            "fix: bring the files back" in found
            and not (tmp_path / "run" / "config.1.gin").exists()
        )
        assert run_train("--resume", *where, "--allow_changes") == 0
    finally:
        file.write_bytes(before)
    assert f"changed       {FIELDS[name]}: contents" in capsys.readouterr().err
    changed = run_folder.read_launches(tmp_path / "run")[-1].changes
    assert any(line.startswith(f"{FIELDS[name]}: contents") for line in changed)


def test_resume_without_a_run(tmp_path, capsys):
    assert run_train("--resume", f"--gin.Run.directory='{tmp_path}/none'") == 2
    assert "found no config.gin there" in capsys.readouterr().err


@pytest.mark.slow
def test_a_learned_drafter_is_left_beside_the_policy(tiny, tmp_path, capsys):
    folder, out = tmp_path / "run", tmp_path / "out"
    where = f"--gin.Run.directory='{folder}'"
    assert run_train(f"--gin_file={tiny}", where, *(f"--gin.{x}" for x in TRAINED_AFTER)) == 0
    assert f"its drafter in {folder / 'drafter_model'}" in capsys.readouterr().err
    assert [row["drafter/total_steps"] for row in read_metrics(folder)] == [3, 6, 9]
    assert export.main([str(folder), "--drafter", "--output", str(out)]) == 0
    assert f"9 steps, by {folder / 'drafter'}\n" in capsys.readouterr().out
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (folder / "drafter_model" / file).read_bytes() == (out / file).read_bytes()
    got = eagle_files.load(out, tiny_run.MODEL).params
    start = eagle.init(eagle.config_for(tiny_run.MODEL), jax.random.key(0))
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), got, start)
    assert all(0 < x < 0.1 for x in jax.tree.leaves(moved))

    assert run_train("--resume", where) == 0
    again = eagle_files.load(folder / "drafter_model", tiny_run.MODEL).params
    jax.tree.map(np.testing.assert_array_equal, again, got)


def test_messages_about_things_from_outside_reach_the_terminal_escaped(tiny, monkeypatch, capsys):
    def refuse(config):
        raise ValueError("tensor \x1b]0;title\x07\x1b[2J\u202eevil")

    monkeypatch.setattr(train, "open_inputs", refuse)
    assert run_train(f"--gin_file={tiny}", "--dry_run") == 2
    assert capsys.readouterr().err == r"error: tensor \x1b]0;title\x07\x1b[2J\u202eevil" + "\n"


def test_list_shows_every_section(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        run_train("--list")
    out = capsys.readouterr().out
    assert "Sampling.temperature: float = 1.0" in out and "Checkpoint.every_steps" in out


def test_a_dry_run_touches_no_device_and_makes_no_folder(tiny, tmp_path):
    folder = tmp_path / "run"
    env = tiny_run.environment() | {"JAX_PLATFORMS": "no_such_platform"}  # any use would raise
    done = tiny_run.call(tiny_run.command(tiny, folder, "--dry_run", "--show_config"), env)
    assert done.returncode == 0, done.stderr
    assert not folder.exists()
    for line in ("Run.steps = 3", "# examples      6\n", "# ok ", "# per step      8 responses"):
        assert line in done.stdout
    assert "total" in done.stdout and "MiB" in done.stdout
    assert "# disk          checkpoints take up to " in done.stdout


def test_a_dry_run_shows_the_first_prompt_and_is_short(tiny, tmp_path, capsys):
    other = tmp_path / "other.jinja"
    other.write_text("a{{ messages[0].content }}\n{{ 'b' if add_generation_prompt }}")
    template = f"--gin.Task.chat_template='{other}'"
    assert run_train(f"--gin_file={tiny}", "--dry_run", template) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("# first prompt  7 tokens, answer '0'; its text:")
    assert lines[at + 1 : at + 3] == ["#   a1+1=<unk>b", "# per step      8 responses"]
    assert len(lines) < 40 and all(line.startswith("# ") for line in lines)


def test_a_run_keeps_the_day_of_its_start(run, tiny, tmp_path, monkeypatch):
    where = [f"Run.directory='{run}'"]
    started = train._resolve([], where, resume=True)[0].task.date
    monkeypatch.setattr(run_folder, "today", lambda: "2031-01-02")
    resumed, _ = train._resolve([str(tiny)], [*where, "Task.date=''"], resume=True)
    assert resumed.task.date == started and len(started) == 10
    new, _ = train._resolve([str(tiny)], [f"Run.directory='{tmp_path}'"], resume=False)
    assert new.task.date == "2031-01-02"


@pytest.mark.parametrize("field", ["num_processes=2", "process_id=1", "coordinator='a:1'"])
def test_fields_of_several_processes_are_refused_in_a_new_run_of_one(tiny, capsys, field):
    assert run_train(f"--gin_file={tiny}", f"--gin.Cluster.{field}", "--dry_run") == 2
    error = capsys.readouterr().err
    assert 'expected Cluster.kind = "spmd"' in error and "each process would train" in error


def test_a_run_as_one_of_several_processes_is_refused(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.chdir(tmp_path)
    assert run_train(f"--gin_file={tiny}") == 2
    assert "expected one process, got JAX_NUM_PROCESSES=2" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_run_that_cannot_fit_is_refused(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "_host_bytes", lambda: 2**10)
    folder = tmp_path / "run"
    for dry in ([], ["--dry_run"]):
        given = [f"--gin_file={tiny}", f"--gin.Run.directory='{folder}'", *dry]
        assert run_train(*given) == 2
        assert "expected a run that fits" in capsys.readouterr().err
    assert not folder.exists()


def test_a_reward_file_that_cannot_be_imported_is_refused(tiny, tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text(
        "import no_such_module\n\n\ndef score(completions, **columns):\n    return 1\n"
    )
    code = run_train(
        f"--gin_file={tiny}",
        f"--gin.Run.directory='{tmp_path / 'run'}'",
        f"--gin.Reward.functions=('{broken}:score',)",
    )
    assert code == 2
    assert "no_such_module" in capsys.readouterr().err


@pytest.mark.parametrize("error", [NonFiniteWeights, UnreadableExample, WeightsError])
def test_an_error_of_the_users_data_ends_in_one_line(tiny, tmp_path, monkeypatch, capsys, error):
    def fails(config, inputs, folder, **options):
        (folder / "newest_checkpoint").write_text("7\n")
        raise error("what is wrong")

    monkeypatch.setattr(run_process, "train", fails)
    run = tmp_path / "$(touch run)"
    assert run_train(f"--gin_file={tiny}", f"--gin.Run.directory={str(run)!r}") == 1
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error")]
    assert line.startswith("error: what is wrong")
    if error is not WeightsError:
        assert line.endswith(f"python -m rl.train --resume --gin.Run.directory='{run}'")
