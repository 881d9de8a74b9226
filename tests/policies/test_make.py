"""How the shipped policies are made: right solutions, disjoint seeds, losses, and the folders."""

import dataclasses
import itertools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policies.make import draft, policy, solutions
from reprise.models.config import num_params
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.models.text import tokenizer
from reprise.rl.answers.answers import extract_answer
from reprise.rl.data import tasks
from reprise.rl.runtime.run_files import PROJECT_ROOT

SHIPPED = PROJECT_ROOT / "policies" / "tiny"
SHIPPED_DRAFT = PROJECT_ROOT / "policies" / "tiny_draft"
TINY = policy.Settings(
    steps=4, drill_steps=0, step_examples=4, learning_rate=1e-2, num_layers=1, d_model=64, d_ff=64
)
PAIRS = [([5, 6, 7], [8, 1]), ([9], [1]), ([7, 7], [7, 9, 1]), ([30], [31, 1])]
GCD, CHAIN_SUM, COUNT_BITS, SPELL_BACKWARD = solutions.TASKS
LOGITS = jax.jit(transformer.logits, static_argnums=0)
by_task = pytest.mark.parametrize("task", solutions.TASKS, ids=lambda task: task.name)


@pytest.fixture(scope="module")
def shipped():
    return hf.load_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def tok():
    return tokenizer.load(SHIPPED)


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


# --- solutions ----------------------------------------------------------------------------


@by_task
@pytest.mark.parametrize("is_worked", [True, False])
def test_both_styles_earn_full_marks(task, is_worked):
    dataset = task.dataset(seed=7, size=50)
    for entry in dataset:
        answer = extract_answer("hash", task.response(entry, is_worked=is_worked))
        assert answer == entry["answer"]
        assert dataset.score_answer(answer, entry) == 1.0


@by_task
def test_rl_opens_the_spec_with_the_same_questions(task):
    opened = tasks.open_task(task.spec, seed=3, size=4)
    start = task.dataset(7, 1)[0]["question"][:20]
    assert all(opened[i].prompt.startswith(start) for i in range(4))


def test_solutions_by_hand():
    entry = {"metadata": {"numbers": [18, 48]}, "answer": "6"}
    worked = "48-18=30\n30-18=12\n18-12=6\n12-6=6\n6-6=0\n#### 6"
    assert GCD.response(entry, is_worked=True) == worked
    assert GCD.response(entry, is_worked=False) == "#### 6"
    assert GCD.steps({"metadata": {"numbers": [5, 2]}}) == ["5-2=3", "3-2=1"]
    lines = CHAIN_SUM.steps({"metadata": {"expression": "4 - 1 - 7 + 20"}})
    assert lines == ["4-1-7+20", "3-7+20", "-4+20"]
    assert COUNT_BITS.steps({"metadata": {"number": 5}}) == ["5=2*2+1 1", "2=2*1+0 1", "1=2*0+1 2"]
    assert SPELL_BACKWARD.steps({"metadata": {"word": "word"}}) == ["wor d", "wo dr", "w dro"]


@by_task
def test_every_line_of_working_is_true(task):
    def is_true(line, entry):
        numbers = [int(n) for n in re.findall(r"[+-]?\d+", line)]
        if task is GCD:
            high, low, rest = map(abs, numbers)
            return high - low == rest and math.gcd(high, low) == int(entry["answer"])
        if task is CHAIN_SUM:
            return sum(numbers) == int(entry["answer"])
        if task is COUNT_BITS:
            n, two, half, bit, _ = numbers
            return n == two * half + bit
        rest, moved = line.split(" ")
        return rest + moved[::-1] == entry["metadata"]["word"]

    assert all(is_true(x, entry) for entry in task.dataset(7, 50) for x in task.steps(entry))


def take(stream, direct_fraction, count=300):
    return list(itertools.islice(solutions.examples(stream, direct_fraction), count))


def test_a_stream_is_a_function_of_its_number_and_mixes_tasks_and_styles():
    first, again, other = take(0, 0.3), take(0, 0.3), take(1, 0.3)
    assert first == again != other
    assert {e.task.name for e in first} == {task.name for task in solutions.TASKS}
    # A few worked gcd responses have no lines, hence the wide range.
    assert 0.2 < sum(e.response.startswith("####") for e in first) / len(first) < 0.4
    assert all(e.response.startswith("####") for e in take(0, 1.0))


def test_seeds_of_rl_evaluation_and_training_are_disjoint(monkeypatch):
    opened = set()
    real = solutions.WorkedTask.dataset
    monkeypatch.setattr(
        solutions.WorkedTask,
        "dataset",
        lambda task, seed, size: opened.add((seed, size)) or real(task, seed, size),
    )
    for stream in (0, 1):
        next(solutions.examples(stream, 0.0))
    draft.training_prompts(draft.Settings(responses=1))
    ranges = sorted([*opened, (solutions.EVAL_SEED, 1_000_000), (0, 2**32 + 1_000_000)])
    assert len(ranges) == 5
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ranges))


# --- the policy ---------------------------------------------------------------------------


def test_every_prompt_and_response_is_in_the_vocabulary(tok):
    for example in take(0, 0.3, 100):
        text = example.prompt + example.response
        assert len(tok.encode(text)) == len(text) and tok.decode(tok.encode(text)) == text


def test_losses_are_means_over_the_response_end_token_included(shipped):
    model, params = shipped
    pupil = draft.draft_config(draft.Settings(), model)
    weights = transformer.init(pupil, jax.random.key(0))
    hard = policy.pack(PAIRS[:2][::-1])  # `teach` sorts by length
    (soft,) = draft.teach(shipped, PAIRS[:2], 2)
    p = jax.nn.softmax(LOGITS(model, params, hard.tokens_BT))
    q = jax.nn.softmax(LOGITS(pupil, weights, hard.tokens_BT))
    ends = [(0, 0, 1), (1, 2, 8), (1, 3, 1)]  # row, column, next token
    nll = -sum(jnp.log(q[end]) for end in ends) / 3
    kl = sum(jnp.sum(p[b, t] * jnp.log(p[b, t] / q[b, t])) for b, t, _ in ends) / 3
    for batch, expected in ((hard, nll), (soft, kl)):
        loss, _ = policy.loss_and_grads(pupil, weights, batch, 3.0)
        np.testing.assert_allclose(loss, expected, rtol=1e-3)


def test_a_score_needs_an_end_token_and_an_answer(tok):
    dataset = GCD.dataset(0, 1)
    entry, eos = dataset[0], tok.eos_token_ids[0]
    ids = tok.encode(f"9-6=3\n#### {entry['answer']}")
    assert policy.score(dataset, entry, [*ids, eos], tok) == 1.0
    assert policy.score(dataset, entry, ids, tok) == 0.0
    assert policy.score(dataset, entry, [*tok.encode("9-6=3"), eos], tok) == 0.0


def test_the_recipe_writes_a_folder_that_loads_and_repeats(tmp_path):
    settings = dataclasses.replace(TINY, final_eval_prompts=1, max_new_tokens=4)
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        policy.make(folder, settings)
    (model, params), (_, again) = map(hf.load_pretrained, folders)
    tokenizer.check_vocabulary(tokenizer.load(folders[0]), model)
    assert equal(params, again)
    report = json.loads((folders[0] / "warmstart.json").read_text())
    assert report["steps_run"] == 4 and set(report["rewards"]) == {t.spec for t in solutions.TASKS}


def worked_solutions(tok):
    return policy.pack(
        [(tok.encode(e.prompt), [*tok.encode(e.response), 1]) for e in take(99, 0.0, 4)]
    )


def test_the_shipped_policy_is_small_and_gives_worked_solutions(shipped, tok):
    model, params = shipped
    tokenizer.check_vocabulary(tok, model)
    assert sum(p.stat().st_size for p in SHIPPED.rglob("*") if p.is_file()) <= 8_000_000
    assert 0.5e6 < num_params(model) < 2e6
    assert model.eos_token_ids == tok.eos_token_ids
    # Under 1 nat a character; a uniform token costs 4.6.
    batch = worked_solutions(tok)
    loss, _ = policy.loss_and_grads(model, params, batch, float(batch.in_loss_BT.sum()))
    assert float(loss) < 1.0


# --- the draft model ----------------------------------------------------------------------


def test_distilling_reduces_the_divergence_and_repeats_bit_for_bit(shipped):
    batches = draft.teach(shipped, PAIRS, 1)
    settings = draft.Settings(epochs=4)
    model = draft.draft_config(settings, shipped[0])
    (params, losses), (again, losses_again) = (
        draft.distill(settings, model, batches) for _ in range(2)
    )
    assert losses[-1] < losses[0]
    assert losses == losses_again and equal(params, again)


def test_the_recipe_of_the_draft_model_writes_a_folder_that_loads(tmp_path):
    settings = draft.Settings(responses=4, epochs=1, step_examples=4, max_new_tokens=4)
    draft.make(SHIPPED, tmp_path, settings)
    model, _ = hf.load_pretrained(tmp_path)
    tokenizer.check_vocabulary(tokenizer.load(tmp_path), model)
    assert json.loads((tmp_path / "distilled.json").read_text())["steps_run"] == 1


def test_the_shipped_draft_model_shares_the_vocabulary_and_agrees(shipped, tok):
    """Σ min(p, q), the probability of acceptance, on worked solutions."""
    model, params = hf.load_pretrained(SHIPPED_DRAFT)
    for name in draft.TOKENIZER_FILES:
        assert (SHIPPED_DRAFT / name).read_bytes() == (SHIPPED / name).read_bytes()
    names = ("vocab_size", "max_positions", "eos_token_ids", "pad_token_id")
    assert all(getattr(model, name) == getattr(shipped[0], name) for name in names)
    assert num_params(model) * 10 < num_params(shipped[0])
    batch = worked_solutions(tok)
    p, q = (
        jax.nn.softmax(LOGITS(*policy_, batch.tokens_BT)) for policy_ in (shipped, (model, params))
    )
    assert float(jnp.minimum(p, q).sum(-1)[batch.in_loss_BT].mean()) > 0.7
