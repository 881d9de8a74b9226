"""The draft model: imitates the policy, measured under its noise; and the folder that ships."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.warmstart import distilled, solutions, supervised
from models import hf, tokenizer, transformer
from models.params import num_params
from rl.config.loader import PROJECT_ROOT
from spec import sampling

POLICY = PROJECT_ROOT / "policies" / "tiny"
SHIPPED = PROJECT_ROOT / "policies" / "tiny_draft"
TINY = distilled.DistillConfig(
    policy=str(POLICY), step_examples=4, warmup_steps=1, epochs=4, held_out_prompts=2
)
PAIRS = [([5, 6, 7], [8, 1]), ([9], [1]), ([7, 7], [7, 9, 1]), ([30], [31, 1])]


@pytest.fixture(scope="module")
def policy():
    return hf.load_pretrained(POLICY)


@pytest.fixture(scope="module")
def tok():
    return tokenizer.load(POLICY)


def draft_of(policy, seed=0):
    model = distilled.draft_config(TINY, policy[0])
    return model, transformer.init(model, jax.random.key(seed))


def test_loss_is_the_mean_divergence_over_the_response_end_token_included(policy):
    draft, params = draft_of(policy)
    (lesson,) = distilled.lessons(policy, PAIRS[:2], 2)  # the shorter one comes first
    batch = lesson.batch
    p = jax.nn.softmax(jnp.asarray(lesson.policy_logits_BTV, jnp.float32))
    q = jax.nn.softmax(transformer.logits(draft, params, batch.tokens_BT))
    # The token at column t is predicted at column t − 1.
    wanted = sum(jnp.sum(p[at] * jnp.log(p[at] / q[at])) for at in [(0, 0), (1, 2), (1, 3)]) / 3
    value, _ = distilled.loss_and_grads(
        draft, params, batch.tokens_BT, batch.in_loss_BT, lesson.policy_logits_BTV, 3.0
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-4)


def test_a_few_steps_reduce_the_divergence_and_repeat_bit_for_bit(policy):
    taught = distilled.lessons(policy, PAIRS, 1)
    draft, _ = draft_of(policy)
    (params, losses), (again, losses_again) = (
        distilled.distill(TINY, draft, taught) for _ in range(2)
    )
    assert losses[-1] < losses[0] - 0.3
    assert losses == losses_again
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True)
    )


def test_batches_leave_out_the_shortest(policy):
    taught = distilled.lessons(policy, PAIRS, 3)
    assert [lesson.batch.in_loss_BT.sum() for lesson in taught] == [7]


def test_responses_end_with_the_end_token_or_at_the_limit(policy, tok):
    asked = [f"{n} + 4 =\n" for n in range(3)]
    told = list(distilled.answered(policy, tok, asked, jax.random.key(0), 8))
    assert [tok.decode(prompt) for prompt, _ in told] == asked
    for _, response in told:
        ends = [token in policy[0].eos_token_ids for token in response]
        assert sum(ends) == ends[-1] and (ends[-1] or len(response) == 8)


def test_a_model_agrees_with_itself_and_less_with_another(policy):
    batch = supervised.pack(PAIRS, 0)
    key = sampling.step_key(0, 0)
    same = distilled.Agreement.of("same", distilled.measure(policy, policy, batch, key))
    assert (same.tokens, same.kl_nats, same.gumbel, same.cdf) == (8, 0.0, 1.0, 1.0)
    assert same.overlap == pytest.approx(1)
    other = distilled.Agreement.of("other", distilled.measure(policy, draft_of(policy), batch, key))
    assert other.kl_nats > 0.5 and other.overlap < 0.7


def test_overlap_and_shares_are_those_of_the_distributions():
    """At one position, over many noises: the share under Gumbel noise has a closed form."""
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.4, 0.2, 0.4])
    logits = [
        jnp.broadcast_to(jnp.log(jnp.asarray(x, jnp.float32)), (1, 20_000, 3)) for x in (p, q)
    ]
    keys = jax.random.split(sampling.step_key(0, 0), (1, 20_000))
    _, overlap, gumbel, cdf, likeliest = np.asarray(distilled._measured(*logits, keys)).mean((1, 2))
    agree = sum(1 / np.maximum(p / p[v], q / q[v]).sum() for v in range(3))
    assert overlap == pytest.approx(np.minimum(p, q).sum(), abs=1e-4)
    assert gumbel == pytest.approx(agree, abs=0.02)
    assert 0.5 < cdf <= overlap + 0.02
    assert likeliest == pytest.approx(p[np.argmax(np.log(q))], abs=0.02)


def test_seeds_are_neither_the_policys_nor_those_of_measuring(monkeypatch):
    opened = []
    real = solutions.dataset
    monkeypatch.setattr(
        solutions,
        "dataset",
        lambda task, seed, size: opened.append((seed, size)) or real(task, seed, size),
    )
    distilled.training_prompts(dataclasses.replace(TINY, responses=4))
    trained, opened[:] = set(opened), []
    distilled.held_out_prompts(TINY)
    ((measured, count),) = set(opened)
    ((first, size),) = trained
    assert measured == solutions.FIRST_SEED and count == TINY.held_out_prompts
    assert first >= solutions.FIRST_SEED + (1 + distilled.FIRST_STREAM) * size
    next(solutions.examples(solutions.TASKS, 1, 0.0))  # the later stream of the shipped policy
    assert max(seed for seed, _ in opened) + size <= first


def test_command_writes_a_folder_that_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(distilled, "SAMPLED_ROWS", 2)
    names = ["--policy", str(POLICY), "--output", str(tmp_path), "--responses", "4"]
    names += ["--epochs", "1", "--step_examples", "4", "--held_out_prompts", "1"]
    reports = distilled.run(distilled.parse([*names, "--max_new_tokens", "4"]))
    assert [r.task for r in reports] == [task.spec for task in solutions.TASKS] + ["all"]
    model, _ = hf.load_pretrained(tmp_path)
    tokenizer.check_vocabulary(tokenizer.load(tmp_path), model)
    written = json.loads((tmp_path / "distilled.json").read_text())
    assert written["steps_run"] == 1 and len(written["reports"]) == len(reports)


@pytest.mark.parametrize(("name", "value"), [("epochs", 0), ("step_examples", 3)])
def test_impossible_settings_are_named(name, value):
    with pytest.raises(ValueError, match=f"--{name}.*got {value}"):
        dataclasses.replace(TINY, **{name: value})


def test_shipped_draft_model_speaks_as_the_policy_and_agrees_with_it(policy, tok):
    model, params = hf.load_pretrained(SHIPPED)
    for name in distilled.TOKENIZER_FILES:
        assert (SHIPPED / name).read_bytes() == (POLICY / name).read_bytes()
    same = ("vocab_size", "max_positions", "eos_token_ids", "pad_token_id")
    assert all(getattr(model, name) == getattr(policy[0], name) for name in same)
    assert num_params(model) * 10 < num_params(policy[0])
    source = solutions.dataset(solutions.TASKS[1], solutions.FIRST_SEED, 128)
    asked = [source[i]["question"] + solutions.PROMPT_SUFFIX for i in range(128)]
    told = list(distilled.answered(policy, tok, asked, jax.random.key(1), 64))
    batch = supervised.pack(told, 0)
    measured = distilled.measure(policy, (model, params), batch, sampling.step_key(1, 0))
    assert distilled.Agreement.of("chain_sum", measured).gumbel > 0.7
