"""The warm start: learns, repeats, samples what the model says; and the folder that ships."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.warmstart import evaluation as warmstart_check
from benchmarks.warmstart import solutions
from benchmarks.warmstart import supervised as warmstart
from models import hf, tokenizer, transformer
from models.params import num_params
from rl.config.loader import PROJECT_ROOT

SHIPPED = PROJECT_ROOT / "policies" / "tiny"
TINY = warmstart.WarmstartConfig(
    step_examples=4,
    drill_steps=0,
    warmup_steps=1,
    learning_rate=1e-2,
    num_layers=1,
    d_model=64,
    d_ff=64,
)


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    tokenizer.save_character_tokenizer(folder, warmstart.CHARACTERS)
    return tokenizer.load(folder)


def test_every_prompt_and_response_is_in_the_vocabulary(tok):
    unknown = tok.encode("é")[0]
    for example in itertools.islice(solutions.examples(solutions.TASKS, 0, 0.3), 100):
        text = example.prompt + example.response
        ids = tok.encode(text)
        assert len(ids) == len(text) and unknown not in ids
        assert tok.decode(ids) == text


def test_pack_counts_the_response_alone():
    batch = warmstart.pack([([5, 6, 7], [8, 1]), ([5], [1])], pad_id=0)
    assert batch.tokens_BT.shape == (2, warmstart.WIDTHS_TOKENS[0])
    assert batch.tokens_BT[0, :6].tolist() == [5, 6, 7, 8, 1, 0]
    assert batch.tokens_BT[1, :3].tolist() == [5, 1, 0]
    assert np.argwhere(batch.in_loss_BT).tolist() == [[0, 3], [0, 4], [1, 1]]


def test_loss_is_the_mean_over_the_response_end_token_included(tok):
    model = warmstart.model_config(TINY, tok)
    params = transformer.init(model, jax.random.key(0))
    batch = warmstart.pack([([5, 6, 7], [8, 1]), ([9], [1])], pad_id=0)
    logprobs = jax.nn.log_softmax(transformer.logits(model, params, batch.tokens_BT))
    # The token at column t is predicted at column t − 1.
    wanted = -(logprobs[0, 2, 8] + logprobs[0, 3, 1] + logprobs[1, 0, 1]) / 3
    got, _ = warmstart.loss_and_grads(model, params, batch.tokens_BT, batch.in_loss_BT, 3.0)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_a_step_in_parts_is_the_step_in_one(tok):
    model = warmstart.model_config(TINY, tok)
    pairs = [([5, 6, 7], [8, 1]), ([9], [1])]
    optim = optax.sgd(1.0)
    updated = []
    for step in ([pairs], [pairs[:1], pairs[1:]]):
        params = transformer.init(model, jax.random.key(0))
        group = [warmstart.pack(part, pad_id=0) for part in step]
        params, _, value = warmstart.train_step(
            model, optim.update, params, optim.init(params), group
        )
        updated.append((value, np.asarray(params.embedding_VD)))
    np.testing.assert_allclose(updated[0][0], updated[1][0], rtol=1e-5)
    np.testing.assert_allclose(updated[0][1], updated[1][1], atol=1e-6)


def train(config, tok, num_steps):
    model = warmstart.model_config(config, tok)
    params = transformer.init(model, jax.random.key(config.seed))
    optim = warmstart.optimizer(config)
    state = optim.init(params)
    group = next(warmstart.step_batches(config, tok))
    losses = []
    for _ in range(num_steps):
        params, state, value = warmstart.train_step(model, optim.update, params, state, group)
        losses.append(value)
    return losses, params


def test_a_few_steps_reduce_the_loss_and_repeat_bit_for_bit(tok):
    losses, params = train(TINY, tok, 4)
    again, params_again = train(TINY, tok, 4)
    assert losses[-1] < losses[0] - 0.3
    assert losses == again
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(params_again), strict=True)
    )


def test_batches_are_a_function_of_the_seed(tok):
    def first(seed):
        stream = warmstart.step_batches(dataclasses.replace(TINY, seed=seed), tok)
        return [b.tokens_BT.tolist() for group in itertools.islice(stream, 2) for b in group]

    assert first(0) == first(0)
    assert first(0) != first(1)


def test_drill_comes_first_and_is_all_worked(tok):
    config = dataclasses.replace(TINY, drill_steps=2, step_examples=16)
    drill, _, questions = itertools.islice(warmstart.step_batches(config, tok), 3)
    said = [[tok.decode(row) for b in group for row in b.tokens_BT] for group in (drill, questions)]
    assert len(said[0]) == len(said[1]) == 16
    assert max(len(text.split("\n")[0]) for text in said[0]) < 25
    assert min(len(text.split("\n")[0]) for text in said[1]) > 45
    assert any(text.count("\n") == 1 for text in said[1])  # a direct answer


def test_sampled_tokens_are_those_of_the_uncached_forward_pass(tok):
    """One prompt a row, of unequal lengths: each draw is categorical of the full pass' logits."""
    model = warmstart.model_config(TINY, tok)
    params = transformer.init(model, jax.random.key(1))
    params = dataclasses.replace(params, embedding_VD=8 * params.embedding_VD)  # far from flat
    prompts, lengths = np.asarray([[10, 11, 12], [20, 0, 0]], np.int32), np.asarray([3, 1])
    key = jax.random.key(2)
    drawn = np.asarray(warmstart_check.sample(model, params, prompts, lengths, key, 5))
    tokens = np.zeros((2, 8), np.int32)
    for row in range(2):
        tokens[row, : lengths[row]] = prompts[row, : lengths[row]]
        tokens[row, lengths[row] : lengths[row] + 5] = drawn[row]
    logits = transformer.logits(model, params, tokens)
    for t in range(5):
        at_t = jnp.stack([logits[row, lengths[row] - 1 + t] for row in range(2)])
        wanted = jax.random.categorical(jax.random.fold_in(key, t), at_t)
        for row in range(2):
            ended = tokenizer.EOS in tok.decode(drawn[row, :t], skip_special=False)
            assert drawn[row, t] == (0 if ended else wanted[row])


def test_score_needs_an_end_token_and_an_answer(tok):
    source = solutions.dataset(solutions.TASKS[0], 0, 1)
    entry = source[0]
    said = tok.encode(f"9-6=3\n#### {entry['answer']}")
    ended = np.asarray([*said, 1, 0, 0])
    assert warmstart_check._score(source, entry, ended, tok) == (1.0, True, len(said) + 1, False)
    assert warmstart_check._score(source, entry, np.asarray(said), tok) == (
        0.0,
        True,
        len(said),
        True,
    )
    silent = np.asarray([*tok.encode("9-6=3"), 1])
    assert warmstart_check._score(source, entry, silent, tok)[0] == 0.0


def test_command_writes_a_folder_that_loads(tmp_path, tok):
    names = ["--steps", "1", "--step_examples", "4", "--num_layers", "1", "--d_model", "64"]
    names += ["--d_ff", "64", "--final_eval_prompts", "1", "--max_new_tokens", "4"]
    reports = warmstart.run(warmstart.parse([*names, "--output", str(tmp_path)]))
    assert [r.task for r in reports] == [task.spec for task in solutions.TASKS] + ["all"]
    model, _ = hf.load_pretrained(tmp_path)
    tokenizer.check_vocabulary(tokenizer.load(tmp_path), model)
    written = json.loads((tmp_path / "warmstart.json").read_text())
    assert written["steps_run"] == 1 and len(written["reports"]) == len(reports)


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("direct_fraction", 1.5)])
def test_impossible_settings_are_named(name, value):
    with pytest.raises(ValueError, match=f"--{name}.*got {value}"):
        dataclasses.replace(TINY, **{name: value})


def test_shipped_policy_loads_is_small_and_speaks_the_format():
    model, params = hf.load_pretrained(SHIPPED)
    tok = tokenizer.load(SHIPPED)
    tokenizer.check_vocabulary(tok, model)
    assert sum(p.stat().st_size for p in SHIPPED.rglob("*") if p.is_file()) <= 8_000_000
    assert 0.5e6 < num_params(model) < 2e6
    assert model.eos_token_ids == tok.eos_token_ids
    # A worked solution is likely to it: under 1 nat a character, where a flat draft token costs
    # 4.6.
    pairs = [
        (tok.encode(e.prompt), [*tok.encode(e.response), tok.eos_token_ids[0]])
        for e in itertools.islice(solutions.examples(solutions.TASKS, 99, 0.0), 4)
    ]
    batch = warmstart.pack(pairs, pad_id=0)
    count = float(batch.in_loss_BT.sum())
    value, _ = warmstart.loss_and_grads(model, params, batch.tokens_BT, batch.in_loss_BT, count)
    assert float(value) < 1.0
