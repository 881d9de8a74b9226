"""What stops a run before any device is touched, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import pytest

from policies.make.characters import save_character_tokenizer
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.rl.gin.loader import ConfigError, load
from reprise.rl.losses.algorithms import ALGORITHMS
from reprise.rl.settings.checks import ahead_loss, check_correct_by, check_task_names
from reprise.rl.settings.config import TrainConfig, recipe
from reprise.rl.settings.inputs import open_inputs, remarks
from reprise.rl.slots.config import EngineConfig
from reprise.spec.budget.bandit import node_counts
from reprise.spec.budget.config import TunerConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle import model as eagle
from tests.support import tiny_run


def opened(tiny, *overrides):
    return open_inputs(load(TrainConfig, [tiny], overrides))


def save_policy(folder, **changes):
    model = dataclasses.replace(tiny_run.MODEL, **changes)
    hf.save_pretrained(folder, model, transformer.init(model, jax.random.key(0), jnp.float32))
    save_character_tokenizer(folder, tiny_run.CHARACTERS)
    return f"Policy.directory={str(folder)!r}"


def test_inputs_open_and_encode(tiny):
    inputs = opened(tiny)
    assert (len(inputs.task), inputs.left_out) == (6, 0)
    ids = inputs.encode(inputs.task[0], load(TrainConfig, [tiny]).task)
    assert inputs.tokenizer.decode(ids) == "1+1="
    assert inputs.model.eos_token_ids == (1,)
    assert inputs.model.unused_ids == ((18, 24),)  # the padding of the embedding


def test_long_prompts_are_left_out_and_counted(tiny):
    inputs = opened(tiny, "Rollout.max_prompt_tokens=4")  # "10+4=" and "5+5+5=" are longer
    assert (len(inputs.task), inputs.left_out) == (4, 2)
    assert [inputs.task[i].prompt for i in range(4)] == ["1+1=", "2+3=", "7=", "0+8="]


def test_the_files_of_a_folder_are_named(tiny, tmp_path):
    for name in "abc":
        shutil.copy(tiny.parent / "task.jsonl", tmp_path / f"{name}.jsonl")
    config = load(TrainConfig, [tiny], [f"Task.specs=('all=jsonl:{tmp_path}',)"])
    inputs = open_inputs(config)
    assert len(inputs.task) == 18
    said = f"all=jsonl:{tmp_path}: 3 files, {tmp_path}/a.jsonl … c.jsonl"
    assert said in remarks(config, inputs)


def test_large_data_is_looked_at_as_it_comes(tiny):
    stream = "Task.stream_above_examples=5"
    inputs = opened(tiny, "Rollout.max_prompt_tokens=4", stream)
    assert (len(inputs.task), inputs.left_out) == (6, None)
    config = load(TrainConfig, [tiny], [stream])
    assert "6 examples, above Task.stream_above" in "\n".join(remarks(config, inputs))
    with pytest.raises(ValueError, match="first 1000 prompts of the data order are longer"):
        opened(tiny, "Rollout.max_prompt_tokens=1", stream)
    assert opened(tiny, "Task.stream_above_examples=6").left_out == 0


def test_remarks_say_what_becomes_of_settings(tiny):
    def said(*overrides):
        config = load(TrainConfig, [tiny], overrides)
        return config, "\n".join(remarks(config, open_inputs(config)))

    _, text = said("Speculation.budget='goodput'")
    assert text == ""
    _, text = said("Rollout.max_prompt_tokens=4")
    assert "speculation: off in this configuration" in text and "2 examples are left out" in text
    config, text = said("Trainer.minibatches=32")
    assert "Trainer.minibatches=32 becomes 2" in text  # two groups a step
    assert recipe(config, tiny_run.MODEL).total_steps == 2 * config.run.steps


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        (
            "Rollout.max_prompt_tokens=1",
            ValueError,
            r"every one of 6 prompts is longer than Rollout.max_prompt_tokens=1 "
            r"\(the shortest has 2\): raise the limit",
        ),
        (
            "Sampling.max_new_tokens=57",
            ValueError,
            "max_prompt_tokens=8 and Sampling.max_new_tokens=57 make 65 positions, "
            "the policy has 64: lower one of them",
        ),
        (
            "Rollout.group_size=1",
            ValueError,
            "Algorithm.name='grpo' compares.*group_size of 2 or more, got 1; raise it, or set "
            'Algorithm.name = "ppo"',
        ),
        (
            "Algorithm.overlong_buffer_tokens=9",
            ValueError,
            "overlong_buffer_tokens of at most Sampling.max_new_tokens=8, got 9: lower it",
        ),
        ("Policy.directory='no/such/folder'", FileNotFoundError, "no/such/folder"),
        (
            "Task.chat_template='no/such.jinja'",
            ValueError,
            "Task.chat_template: expected a file with a template: .*no/such.jinja",
        ),
        ("Task.date='tomorrow'", ConfigError, "Task.date: expected a day as YYYY-MM-DD, got 'tom"),
        ("Task.specs=('jsonl:no/such.jsonl',)", FileNotFoundError, "no/such.jsonl"),
        ("Reward.functions=('no/such.py:f',)", FileNotFoundError, "no/such.py"),
    ],
)
def test_what_does_not_fit_is_said_with_its_mend(tiny, override, error, message):
    with pytest.raises(error, match=message):
        opened(tiny, override)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_who_compares_siblings_needs_some(tiny, name):
    settings = (f"Algorithm.name='{name}'", "Rollout.group_size=1")
    if name == "ppo":
        assert len(opened(tiny, *settings).task) == 6
        return
    with pytest.raises(ValueError, match=f"'{name}' compares"):
        opened(tiny, *settings)


UPDATES, STALE = "updates of a batch move the policy away", "weights that are one update old"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("Algorithm.name='rloo'", "Trainer.minibatches=2"), UPDATES),
        (("Algorithm.name='rloo'", "Trainer.inner_updates=2"), UPDATES),
        (("Algorithm.name='rloo'", "Sched.mode='pipeline'"), STALE),
        (("Algorithm.name='gspo'", "Sched.mode='pipeline'"), STALE),
        (("Algorithm.old_logprobs='recomputed'", "Sched.mode='pipeline'"), STALE),
    ],
)
def test_a_loss_that_would_ignore_an_older_policy_needs_a_correction(tiny, settings, message):
    with pytest.raises(ValueError, match=f'{message}.*Algorithm.correction = "token_tis:2"'):
        opened(tiny, *settings)
    assert opened(tiny, *settings, "Algorithm.correction='token_tis:2'").task


@pytest.mark.parametrize(
    "settings",
    [
        ("Algorithm.name='rloo'", "Rollout.prompts_per_step=1", "Trainer.minibatches=2"),  # one
        ("Algorithm.name='gspo'", "Trainer.minibatches=2", "Sched.mode='ahead'"),
        ("Algorithm.name='gspo'", "Algorithm.old_logprobs='rollout'", "Sched.mode='pipeline'"),
        ("Algorithm.name='ppo'", "Sched.mode='pipeline'"),
    ],
)
def test_a_loss_with_a_ratio_or_one_update_needs_none(tiny, settings):
    assert opened(tiny, *settings).task


def test_coupled_noise_counts_the_prompts_of_every_phase(tiny):
    """6 examples: 2 prompts a step and 2 more phases are all of them, a third would repeat some."""
    settings = ("Algorithm.name='dapo'", "Reuse.mode='coupled'")
    opened(tiny, *settings, "Algorithm.max_extra_phases=2")
    with pytest.raises(ValueError, match="got 8 prompts of 6 examples"):
        opened(tiny, *settings, "Algorithm.max_extra_phases=3")


def test_a_pipeline_bounds_the_age_of_the_tokens_that_reuse_keeps(tiny):
    pipeline = ("Sched.mode='pipeline'", "Reuse.mode='lenient:e^0.5'")
    with pytest.raises(ValueError, match="bounds the age of all tokens.*Reuse.max_age_steps"):
        opened(tiny, *pipeline)
    opened(tiny, *pipeline, "Reuse.max_age_steps=4")
    opened(tiny, "Sched.mode='pipeline'", "Reuse.mode='coupled'")
    opened(tiny, pipeline[1])


@pytest.mark.parametrize(
    ("settings", "youngest"),
    [
        (("Reuse.mode='lenient:1'",), 3),
        (("Reuse.mode='full'", "Sched.mode='pipeline'"), 4),
        (("Reuse.mode='delayed:1'",), 6),
        (("Reuse.mode='full'", "Algorithm.name='dapo'", "Algorithm.max_extra_phases=2"), 1),
    ],
)
def test_an_age_that_no_response_of_the_last_epoch_has_is_refused(tiny, settings, youngest):
    """6 examples: 2 prompts a step are an epoch of three."""
    opened(tiny, *settings, f"Reuse.max_age_steps={youngest}")
    if youngest > 1:
        with pytest.raises(ValueError, match=f"leaves nothing to reuse.* are {youngest} steps old"):
            opened(tiny, *settings, f"Reuse.max_age_steps={youngest - 1}")


def test_an_empty_data_set(tiny, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(ValueError, match="empty.jsonl: the data set is empty"):
        opened(tiny, f"Task.specs=('jsonl:{empty}',)")


def test_a_tokenizer_with_more_ids_than_the_policy_has_rows(tiny, tmp_path):
    with pytest.raises(ValueError, match="does not fit the policy.*vocab_size=12.*ids up to 17"):
        opened(tiny, save_policy(tmp_path / "small", vocab_size=12))


def test_a_policy_folder_without_weights(tiny, tmp_path):
    override = save_policy(tmp_path / "policy")
    (tmp_path / "policy" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        opened(tiny, override)


def test_the_tokenizer_names_the_end_token_where_the_config_does_not(tiny, tmp_path):
    inputs = opened(tiny, save_policy(tmp_path / "policy", eos_token_ids=()))
    assert inputs.model.eos_token_ids == (1,)
    assert inputs.model.unused_ids == ((18, 24),)  # the padding of the embedding


def test_end_tokens_are_those_of_config_generation_config_and_tokenizer(tiny, tmp_path):
    override = save_policy(tmp_path / "policy", eos_token_ids=(4,))
    path = tmp_path / "policy" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [4, 5]}))
    assert opened(tiny, override).model.eos_token_ids == (4, 5, 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stop_ids=(24,)", "vocabulary of 24, got 24"),
        ("stop=('é',)", "no response can hold 'é': the policy's tokenizer has no tokens for it"),
        ("stop=('1+1=1+1=1',)", "takes 9 tokens, and .* at most Sampling.max_new_tokens=8: leave"),
        ("by_task=('gsm: top_k=3',)", "names of tasks .*got 'gsm'"),
        ("temperature=0", "is 0: all responses"),
        ("by_task=('jsonl:TASK: temperature=0',)", "is 0: all responses"),
        ("by_task=('jsonl:TASK: max_new_tokens=500',)", "make 508 positions"),
    ],
)
def test_sampling_that_does_not_fit_is_refused(tiny, override, message):
    task = load(TrainConfig, [tiny]).task.specs[0]
    with pytest.raises(ValueError, match=message):
        opened(tiny, "Sampling." + override.replace("jsonl:TASK", task))


def test_the_longest_task_makes_the_sizes(tiny):
    [task] = load(TrainConfig, [tiny]).task.specs
    for limit, longest in ((4, 8), (12, 12)):
        config = load(
            TrainConfig, [tiny], [f"Sampling.by_task=('{task}: max_new_tokens={limit}',)"]
        )
        assert config.longest_tokens == config.rollout.max_prompt_tokens + longest


def test_variables_that_a_chat_template_does_not_mention_are_said(tiny, tmp_path):
    override = save_policy(tmp_path / "policy")
    pairs = "Task.chat_template_kwargs=(('think', False), ('deep', 1))"

    def said():
        config = load(TrainConfig, [tiny], [override, pairs])
        return "\n".join(remarks(config, opened(tiny, override, pairs)))

    assert "sets think, and the policy's chat template does not exist" in said()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '=' if think else '+' }}"
    save_character_tokenizer(tmp_path / "policy", tiny_run.CHARACTERS, template)
    assert "think" not in said() and "sets deep, and the policy's chat template does not" in said()
    inputs = opened(tiny, override, pairs)
    config = load(TrainConfig, [tiny], [override, pairs]).task
    assert inputs.tokenizer.decode(inputs.encode(inputs.task[0], config)) == "1+1=+"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ("(('messages', 1),)", "'messages', which is set already"),
        ("(('add_generation_prompt', False),)", "which is set already"),
        ("(('eos_token', 'x'),)", "which is set already"),
        ("(('a b', 1),)", "names of a chat template's own variables.*got 'a b'"),
        ("(('a', 1), ('a', 2))", "each once, got 'a' twice"),
        ("(('a', 1e999),)", "not JSON compliant"),
        ("('a', 1)", "expected tuple"),
    ],
)
def test_variables_of_a_chat_template_that_are_refused(tiny, pairs, message):
    with pytest.raises(ConfigError, match=f"chat_template_kwargs.*{message}"):
        load(TrainConfig, [tiny], [f"Task.chat_template_kwargs={pairs}"])


def test_a_policy_that_could_never_end_a_response(tiny, tmp_path):
    override = save_policy(tmp_path / "policy", eos_token_ids=())
    settings = tmp_path / "policy" / "tokenizer_config.json"
    kept = {k: v for k, v in json.loads(settings.read_text()).items() if k != "eos_token"}
    settings.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="names an end token.*set eos_token_id in config.json"):
        opened(tiny, override)


@pytest.mark.parametrize(
    "override",
    [
        *("Run.steps=0", "Run.seed=-1", "Rollout.group_size=0", "Run.steps=3000000000"),
        *("Run.hang_limit_s=1e300", "Rollout.group_size=2147483647", "Reward.workers=1000000"),
        *("Rollout.prompts_per_step=1099511627776", "Reward.memory_limit_mib=35184372088832"),
        *("Reward.deadline_s=1e300", "Trainer.micro_batch_tokens=100000000"),
        *("Trainer.minibatches=1000000000", "Optimizer.warmup_steps=3000000000"),
        *("Optimizer.learning_rate=1e999", "Critic.learning_rate=1e30", "Optimizer.eps=1e999"),
        *("Optimizer.max_grad_norm=1e999", "Cluster.deadline_s=1e9"),
    ],
)
def test_sections_refuse_values_that_make_no_run(tiny, override):
    field = override.partition(".")[2].partition("=")[0]
    with pytest.raises(ConfigError, match=f"{field} must be"):
        load(TrainConfig, [tiny], [override])


def test_requests_of_a_step_are_bounded(tiny):
    with pytest.raises(ConfigError, match="at most 1,048,576, got"):
        load(TrainConfig, [tiny], ["Rollout.group_size=65536", "Rollout.prompts_per_step=65536"])


def test_optimizer_steps_are_counted_in_32_bits(tiny):
    with pytest.raises(ValueError, match="expected fewer than 2³¹ optimizer steps, got Run.steps"):
        opened(tiny, "Run.steps=60000000", "Trainer.inner_updates=40")


# --- the learned drafter ----------------------------------------------------------------

LEARNED = ("Speculation.sources=('learned',)", "Speculation.budget='fixed:3'", "Engine.max_nodes=4")


def save_drafter(folder, **changes):
    """A drafter of the tiny policy, or of one that differs from it."""
    policy = dataclasses.replace(tiny_run.MODEL, **changes)
    shape = eagle.config_for(policy)
    start = eagle.EagleWeights(shape, eagle.init(shape, jax.random.key(0)))
    eagle_files.save(folder, start, policy, None)
    return f"Drafter.directory={str(folder)!r}"


def test_a_run_starts_from_a_drafters_folder(tiny, tmp_path):
    opened(tiny, *LEARNED, save_drafter(tmp_path / "own"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 32}, "hidden_size"),
        ({"vocab_size": 25}, "vocab"),
        ({"num_layers": 2}, "layers"),
    ],
)
def test_a_drafter_of_another_policy_stops_before_any_device(tiny, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        opened(tiny, *LEARNED, save_drafter(tmp_path / "other", **changes))


def test_a_drafter_of_another_design_stops_too(tiny, tmp_path):
    with pytest.raises(ValueError, match="holds a drafter of design 'eagle'.*another variant"):
        opened(tiny, *LEARNED, save_drafter(tmp_path / "d"), "DrafterTraining.variant='eagle3'")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("Tuner.verify_tokens=(9, 1)", r"Engine.max_nodes − 1 = 3, got \(9, 1\)"),
        ("Tuner.depths=(11, 12)", r"Drafter.max_depth=10, got \(11, 12\)"),
    ],
)
def test_a_tuner_beyond_the_engine_stops_too(tiny, override, message):
    tuner = ("Speculation.budget='bandit'", "Tuner.thresholds=(1, 5)", "Tuner.verify_tokens=(3, 1)")
    opened(tiny, *LEARNED, *tuner)
    with pytest.raises(ValueError, match=message):
        opened(tiny, *LEARNED, *tuner, override)


def test_rounds_have_room_for_what_the_tuner_verifies_by_default():
    """Of each number of slots there is a round of just the size that its range wants."""
    engine = EngineConfig()
    for num_slots, tokens in ((4, 31), (8, 15), (16, 15), (32, 7)):
        wanted = node_counts(TunerConfig(), num_slots)
        assert wanted == {num_slots * (tokens + 1)} <= set(engine.node_sizes(num_slots))
    assert node_counts(TunerConfig(), 64) == set()


@pytest.mark.parametrize(
    ("settings", "got"),
    [(("Sched.mode='pipeline'",), '"pipeline" and 1'), (("Sched.workers=2",), '"sync" and 2')],
)
def test_one_engine_over_all_processes_runs_no_workers_beside_it(tiny, settings, got):
    """Engines of each process's own do."""
    spmd = "Cluster.kind='spmd'", *settings
    assert opened(tiny, *spmd).task
    with pytest.raises(ValueError, match=f"Sched.workers=1 with it, got {got}: set these, or"):
        opened(tiny, *spmd, "Cluster.rollouts='mesh'")


def drafts_apart(tiny, *overrides):
    """Settings of a run with a drafting worker, which are in order without the overrides."""
    model = f"DraftModel.directory={str(tiny.parent / 'policy')!r}"
    sources = "Speculation.sources=('own','model')", "Speculation.budget='fixed:3'"
    size = "Engine.max_nodes=4", "Sched.workers=3", "Drafting.workers=1"
    return (model, *sources, *size, *overrides)


def helps(*overrides):
    """The same of a run whose idle workers help."""
    sources = "Speculation.sources=('own','group')", "Speculation.budget='fixed:3'"
    size = "Engine.max_nodes=4", "Sched.workers=2", "Drafting.requests_per_helper=2"
    return (*sources, *size, "Drafting.methods=('own','group')", *overrides)


BANDIT = ("Speculation.budget='bandit'", "Tuner.thresholds=(1, 5)", "Tuner.verify_tokens=(3, 1)")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("Speculation.sources=('own',)",),
            r"""Drafting.workers=1 draft .*: expected "model" in Speculation.sources, and a """
            r"""budget, got \('own',\) with "fixed:3": add it, or set Drafting.workers = 0""",
        ),
        (
            ("Speculation.budget='off'",),
            r"""expected "model" .* and a budget, got \('own', 'model'\) with "off": add it""",
        ),
        (
            ("Drafting.workers=3",),
            "expected at least one worker that verifies, got Drafting.workers=3 of "
            "Sched.workers=3: raise Sched.workers",
        ),
        (
            ("Drafting.workers=None", "Sched.workers=1"),
            "at least one worker that verifies, got Drafting.workers=None of Sched.workers=1: ",
        ),
        (
            ("Drafting.window=4",),
            r"expected Drafting.window of at most Engine.max_nodes − 1 = 3, got 4: lower it, or "
            "raise Engine.max_nodes",
        ),
        (
            ("Cluster.kind='ray'", "Drafting.workers=None"),
            "expected a number of Drafting.workers there, got None, .*; set Drafting.workers = 1",
        ),
        (
            ("Cluster.kind='ray'", "DraftModel.directories=('a',)"),
            r"""expected no DraftModel.directories there, got \('a',\): leave them out""",
        ),
        (
            ("Drafting.workers=0", "DraftModel.directories=('a',)"),
            r"""DraftModel.directories=\('a',\) are for drafting workers to choose among: .*"""
            r"""got 0: set it, or leave directories out""",
        ),
    ],
)
def test_drafting_workers_that_could_do_nothing_stop_too(tiny, overrides, message):
    opened(tiny, *drafts_apart(tiny))
    opened(tiny, *drafts_apart(tiny, "Drafting.workers=None", "Drafting.window=3"))
    opened(tiny, *drafts_apart(tiny, *BANDIT))
    with pytest.raises(ValueError, match=message):
        opened(tiny, *drafts_apart(tiny, *overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("Sched.mode='pipeline'",),
            """Drafting.requests_per_helper=2 is .* which in Sched.mode="pipeline" go on .*: set """
            'mode = "sync" or "ahead", or requests_per_helper = 0',
        ),
        (
            ("Sched.workers=1",),
            'expected two workers that verify, and a budget, got 1 and "fixed:3": raise '
            "Sched.workers and set Speculation.budget, or requests_per_helper = 0",
        ),
        (
            ("Speculation.budget='off'",),
            'expected two workers that verify, and a budget, got 2 and "off": raise',
        ),
        (
            ("Drafting.methods=('own','model')",),
            "expected Drafting.methods of group, own, which Speculation.sources has, got 'model': "
            "leave it out, or add it to the sources",
        ),
        (
            ("Drafting.methods=('telepathy',)",),
            r"Drafting.methods: expected tuple of one of 'model', .* got tuple \('telepathy'",
        ),
        (
            ("Speculation.sources=('last','own')", "Drafting.methods=('last',)"),
            r"Drafting.methods: expected tuple of one of 'model', .* got tuple \('last'",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["local", "ray"])
def test_helpers_that_could_not_help_stop_too(tiny, overrides, message, kind):
    cluster = f"Cluster.kind={kind!r}"
    assert opened(tiny, *helps(cluster)).task and opened(tiny, *helps(cluster, *BANDIT)).task
    with pytest.raises(ValueError, match=message):
        opened(tiny, *helps(cluster, *overrides))


def test_one_of_two_workers_that_drafts_leaves_nobody_to_help(tiny):
    both = "Drafting.requests_per_helper=1", "Drafting.methods=('own','model')"
    opened(tiny, *drafts_apart(tiny, *both))
    opened(tiny, *drafts_apart(tiny, *both, "Cluster.kind='ray'"))
    with pytest.raises(ValueError, match='got 1 and "fixed:3": raise Sched.workers'):
        opened(tiny, *drafts_apart(tiny, *both, "Sched.workers=2"))


@pytest.mark.parametrize(
    ("overrides", "scheme"),
    [
        (("Sampling.draw='auto'",), "cdf"),
        (("Sampling.draw='auto'", "Reuse.mode='lenient:e^0.5'"), "cdf"),
        (("Sampling.draw='auto'", "Reuse.mode='coupled'"), "gumbel_blocks"),
        (("Sampling.draw='auto'", "Reuse.mode='repeated_noise'"), "gumbel_blocks"),
        (("Reuse.mode='coupled'", "Sampling.draw='cdf'"), "cdf"),
        (("Sampling.draw='auto'", "Sched.mode='ahead'"), "gumbel_blocks"),
        (("Sampling.draw='gumbel'",), "gumbel"),
    ],
)
def test_what_the_same_noise_draws_again_is_drawn_by_gumbel_blocks_unless_it_is_named(
    tiny, overrides, scheme
):
    assert SamplingConfig().draw == "auto"
    sampling = load(TrainConfig, [tiny], overrides).sampling
    assert sampling.draw == sampling.scheme == scheme


# --- the verdict of pass@k ------------------------------------------------------------------

EVALUATED = ("Eval.num_prompts=2", "Eval.sets=('own=reasoning_gym:gcd',)")
TWO = "Reward.functions=('task', 'exact_match')"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((TWO,), 'since Reward.functions has several; got none: set it to "task" or "exact_match"'),
        (("Reward.weights=(2.0,)",), "since Reward.weights is not 1"),
        (("Algorithm.name='dapo'",), "since Algorithm adds a length penalty"),
        (("Eval.correct_by='digit'",), """expected "digits", got 'digit'; did you mean 'digits'"""),
    ],
)
def test_a_verdict_that_is_not_clear_is_asked_for(tiny, settings, message):
    def check(*more):
        check_correct_by(load(TrainConfig, [tiny], [*EVALUATED, *settings, *more]))

    with pytest.raises(ValueError, match=re.escape(message)):
        check()
    check("Eval.num_prompts=0")
    name = "exact_match" if TWO in settings else "digits"
    check(f"Eval.correct_by='{name}'")


def test_a_single_function_is_the_verdict_and_may_be_named_by_its_file(tiny):
    config = load(TrainConfig, [tiny], EVALUATED)
    check_correct_by(config)
    assert config.correct_by == "digits"
    by_file = [*EVALUATED, f"Eval.correct_by={config.reward.functions[0]!r}"]
    check_correct_by(named := load(TrainConfig, [tiny], by_file))
    assert named.correct_by == "digits"


def test_a_task_of_a_mix_may_not_have_a_functions_name(tiny):
    specs = "Task.specs=('digits=reasoning_gym:gcd', 'b=reasoning_gym:lcm')"
    with pytest.raises(ValueError, match="a task and a reward function are both called 'digits'"):
        check_task_names(load(TrainConfig, [tiny], [specs]))


@dataclasses.dataclass(frozen=True)
class Device:
    number: int
    platform: str = "gpu"


def test_ahead_on_shared_devices_is_said_to_slow_updates():
    trainer, worker = Device(0), Device(1)
    assert ahead_loss("ahead", [trainer], [worker]) is None
    assert ahead_loss("sync", [trainer], [trainer]) is None
    assert "0.63 of their speed" in ahead_loss("ahead", [trainer, worker], [trainer, worker])
    cores = Device(0, "cpu"), Device(1, "cpu")  # several devices of one CPU
    assert "the CPU's cores are shared" in ahead_loss("ahead", cores[:1], cores[1:])
