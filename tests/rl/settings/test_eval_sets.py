"""The questions of evaluations: which are asked, which training holds, and what is refused."""

from __future__ import annotations

import json

import pytest

from reprise.rl.data.tasks import TaskConfig, open_tasks
from reprise.rl.gin.loader import load
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.eval_sets import (
    EVAL_SEED,
    EvalConfig,
    EvalSet,
    EvalSets,
    open_sets,
    split_names,
)
from reprise.rl.settings.inputs import open_inputs, remarks
from reprise.spec.config import SamplingConfig

GCD = "reasoning_gym:gcd"


def write(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": p, "answer": "1"}) + "\n" for p in prompts))
    return f"jsonl:{path}"


def opened(config, training=("t",), *, task=None, tmp_path=None, **options):
    """Sets of questions whose tokens are their characters."""
    spec = write(tmp_path / "training.jsonl", *training)
    trained = TaskConfig(specs=(spec,))
    return open_sets(
        config,
        task or trained,
        40,
        lambda e: tuple(map(ord, e.prompt if isinstance(e.prompt, str) else "chat")),
        lambda: open_tasks(trained, 0),
        **options,
    )


def prompts(found):
    return [[e.prompt for e in s.examples] for s in found.sets]


# --- the section ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"samples": 0}, "samples must be 1 to 1,024"),
        ({"num_prompts": -1}, "num_prompts must be 0 to 100,000"),
        ({"every_steps": -1}, "every_steps must be 0 to"),
        ({"num_prompts": 10**9}, "num_prompts must be 0 to 100,000"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"samples": 4}, "greedy responses to a question would all be the same"),
        ({"correct_at": float("nan")}, "correct_at must be finite"),
        ({"sets": ("a=jsonl:x", "a=jsonl:y")}, "every name once, got a twice"),
        ({"sets": ("jsonl:x/test.jsonl", "jsonl:y/test.jsonl")}, "every name once, got test"),
        ({"sets": ("a=nonsense",)}, "nonsense"),
    ],
)
def test_the_section_refuses_what_cannot_be(wrong, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig(**wrong)


def test_the_powers_of_two_are_the_ks():
    def ks(samples):
        return EvalConfig(samples=samples, temperature=1.0).ks

    assert (ks(8), ks(7)) == ((1, 2, 4, 8), (1, 2, 4))


def test_it_is_due_before_at_the_end_and_in_between():
    def due(every):
        return [s for s in range(8) if EvalConfig(every_steps=every).due(s, 7)]

    assert due(3) == [0, 3, 6, 7]
    assert due(0) == [0, 7]


def test_names_are_given_or_short():
    asked = ("a-1=jsonl:x?prompt=q", "jsonl:some/where/test set.jsonl", f"{GCD}?min_value=2")
    assert split_names(asked) == [
        ("a-1", asked[0]),
        ("test_set", asked[1]),
        ("gcd", asked[2]),
    ]
    assert split_names(["parquet:data/unseen/*.parquet"])[0][0] == "unseen"


# --- the questions ----------------------------------------------------------------------


def test_questions_of_a_file_that_training_holds_are_counted_and_said(tmp_path):
    spec = write(tmp_path / "x.jsonl", "What  IS it?", "seen", "new", "\nSEEN ", "new", "x" * 41)
    config = EvalConfig(sets=(f"own={spec}",))
    found = opened(config, ("what is it?", "seen"), tmp_path=tmp_path)
    (one,) = found.sets
    assert prompts(found) == [["What  IS it?", "seen", "new", "\nSEEN "]]  # `new` once
    assert (one.name, one.seen, one.alike, one.too_long) == ("own", 1, 2, 1)
    assert one.prompts[1] == tuple(map(ord, "seen"))
    said = found.remarks()
    assert said[0].startswith("3 of 4 questions of set own are in the training set, 2 of them but")
    assert said[1].startswith("1 questions of set own are left out: longer than Rollout.max_p")


def test_a_chat_holds_a_question_that_training_has_as_text(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Seen"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": chat, "answer": "1"}) + "\n")
    found = opened(EvalConfig(sets=(f"jsonl:{path}",)), ("seen",), tmp_path=tmp_path)
    assert (found.sets[0].seen, found.sets[0].alike) == (0, 1)


def test_of_a_large_file_the_same_questions_are_drawn_in_the_files_order(tmp_path):
    spec = write(tmp_path / "x.jsonl", *(f"q{i:03}" for i in range(200)))
    first, again = (
        prompts(opened(EvalConfig(sets=(spec,), num_prompts=8), tmp_path=tmp_path))[0]
        for _ in range(2)
    )
    assert first == again == sorted(first) and len(set(first)) == 8
    assert first != [f"q{i:03}" for i in range(8)]


def test_generated_questions_are_those_that_training_does_not_have(tmp_path):
    task = TaskConfig(specs=(f"{GCD}?max_value=99", GCD, write(tmp_path / "file.jsonl", "x")))
    config = EvalConfig(num_prompts=30)
    everything = open_tasks(TaskConfig(specs=(f"{GCD}?max_value=99",), size=120), EVAL_SEED)
    held = [everything[i].prompt for i in range(60)]
    limit, encode = 10**6, lambda e: tuple(map(ord, e.prompt))
    spec = write(tmp_path / "held.jsonl", *(p.upper() for p in held))
    trained = TaskConfig(specs=(spec,))
    found = open_sets(config, task, limit, encode, lambda: open_tasks(trained, 0))
    assert [s.name for s in found.sets] == ["gcd", "gcd-2"]
    assert all(len(s.examples) == 30 and not s.seen and not s.alike for s in found.sets)
    assert found.sets[0].left_out > 0
    assert not set(held) & {e.prompt for e in found.sets[0].examples}
    (said,) = found.remarks()
    assert "file.jsonl, since training sees all of its questions; name others with Eval" in said


def test_a_generated_set_of_which_training_has_all_is_refused_skipped_or_kept(tmp_path):
    tight = f"{GCD}?min_numbers=2&max_numbers=2&min_value=1&max_value=2"
    config, encode = EvalConfig(num_prompts=4), lambda e: tuple(map(ord, e.prompt))
    own = TaskConfig(specs=(tight,), size=200)
    asked = (own, 10**6, encode, lambda: open_tasks(own, 0))
    assert opened_names(open_sets(config, *asked)) == []
    assert "since training has all of its questions" in open_sets(config, *asked).remarks()[0]
    (kept,) = open_sets(config, *asked, keeps_seen=True).sets
    assert 0 < len(kept.examples) <= 4 and kept.seen == len(kept.examples)
    with pytest.raises(ValueError, match=r"training holds all \d+ questions of set gcd"):
        open_sets(EvalConfig(sets=(tight,), num_prompts=4), *asked)


def opened_names(found):
    return [s.name for s in found.sets]


def test_no_questions_are_opened_where_none_are_asked_for(tmp_path):
    config = EvalConfig(num_prompts=0, sets=("jsonl:no/such/file.jsonl",))
    assert opened(config, tmp_path=tmp_path).sets == ()
    with pytest.raises(FileNotFoundError, match="no/such/file"):
        opened(EvalConfig(sets=("jsonl:no/such/file.jsonl",)), tmp_path=tmp_path)


def test_prompts_that_are_all_too_long_are_refused(tmp_path):
    spec = write(tmp_path / "x.jsonl", "x" * 41, "y" * 50)
    with pytest.raises(ValueError, match=r"every one of 2 prompts of set x.*max_prompt_tokens"):
        opened(EvalConfig(sets=(spec,)), tmp_path=tmp_path)


def test_the_best_is_judged_by_a_figure_that_there_is(tmp_path):
    spec = write(tmp_path / "x.jsonl", "q")
    for name in ("pass@1", "own/mean_reward", "own/pass@1"):
        opened(EvalConfig(sets=(f"own={spec}",), best_by=name), tmp_path=tmp_path)
    with pytest.raises(ValueError, match=r"best_by: expected one of mean_reward, pass@1, own/"):
        opened(EvalConfig(sets=(f"own={spec}",), best_by="pass@2"), tmp_path=tmp_path)


def test_the_fingerprint_is_that_of_what_is_asked_and_how():
    def marked(prompt=(1, 2), **options):
        one = EvalSet("a", "jsonl:x", (), (prompt,))
        return EvalSets((one,)).fingerprint(EvalConfig(**options), SamplingConfig())

    others = [marked(prompt=(1, 3)), marked(temperature=1.0), marked(correct_at=0.5)]
    assert len({marked(), *others}) == 4
    assert marked() == marked(every_steps=7)


# --- in a run's inputs -------------------------------------------------------------------


def test_a_run_opens_its_sets_with_its_other_inputs(tiny, tmp_path):
    spec = write(tmp_path / "x.jsonl", "1+1=", "3+3+3+3+3=")
    asked = (f"Eval.sets=('own={spec}',)", "Eval.num_prompts=4", "Rollout.max_prompt_tokens=12")
    config = load(TrainConfig, [tiny], asked)
    inputs = open_inputs(config)
    assert [len(p) for p in inputs.evals.sets[0].prompts] == [4, 10]
    assert any("1 of 2 questions of set own are in the" in r for r in remarks(config, inputs))
