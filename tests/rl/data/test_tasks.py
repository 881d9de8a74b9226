"""Tasks: the allow-list, determinism, files, mixtures, and what bad specs are told."""

import builtins
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reprise.rl.data import reasoning_gym_tasks
from reprise.rl.data.reasoning_gym_tasks import REFUSED_TASKS, SAFE_TASKS, open_procedural
from reprise.rl.data.tasks import TaskConfig, open_task, open_tasks, parse_spec

ROOT = Path(__file__).resolve().parents[3]


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- reasoning-gym ----


def test_gcd_examples_follow_the_query():
    task = open_task("reasoning_gym:gcd?min_numbers=2&max_numbers=2&max_value=99", seed=0, size=20)
    assert len(task) == 20
    for index in range(20):
        example = task[index]
        first, second = example.columns["metadata"]["numbers"]
        assert 1 <= first <= 99 and 1 <= second <= 99
        divisors = [d for d in range(1, 100) if first % d == 0 and second % d == 0]
        assert example.answer == str(max(divisors))
        assert f"{first}, {second}" in example.prompt
    with pytest.raises(IndexError):
        task[20]


def test_examples_depend_on_seed_and_index_alone():
    spec = "reasoning_gym:chain_sum"
    task, again = open_task(spec, seed=3, size=10), open_task(spec, seed=3, size=50)
    backwards = [again[index].prompt for index in reversed(range(10))][::-1]
    assert [task[index].prompt for index in range(10)] == backwards
    assert task[4].example_id == "reasoning_gym:chain_sum@3#4"
    # Neighbouring seeds share no run of examples (the library's own would be shifted by one).
    other = open_task(spec, seed=4, size=10)
    prompts = {task[index].prompt for index in range(10)}
    assert len(prompts & {other[index].prompt for index in range(10)}) == 0
    assert task[4].example_id != other[4].example_id


def test_query_values_are_typed():
    config = open_procedural(
        "simple_equations", {"operators": "+,-", "operators_weights": "0.5,0.5", "max_value": "9"}
    ).dataset.config
    assert config.operators == ("+", "-")
    assert config.operators_weights == [0.5, 0.5] and config.max_value == 9
    config = open_procedural(
        "basic_arithmetic", {"allow_negation": "false", "operators": "*", "whitespace": "no_space"}
    ).dataset.config
    assert config.allow_negation is False
    assert list(config.operators) == ["*"] and config.whitespace == "no_space"
    transformation = open_procedural("word_sorting", {"transformation": "uppercase"})
    assert transformation.dataset.config.transformation.value == "uppercase"
    assert len(open_task("reasoning_gym:gcd?size=7", seed=0, size=20)) == 7


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning_gym:gdc", "did you mean reasoning_gym:gcd"),
        ("reasoning_gym:countdown", "refused.*parse_expr"),
        ("reasoning_gym:word_ladder", "refused.*PYTHONHASHSEED"),
        ("reasoning_gym:gcd?max_valu=9", "did you mean max_value"),
        ("reasoning_gym:gcd?max_value=many", "expected int, got 'many'"),
        ("reasoning_gym:gcd?max_value=0", "max_value must be > min_value"),
        ("reasoning_gym:gcd?seed=1", "Run.seed"),
        ("reasoning_gym:gcd?size=99999999999999", "from 1 to 1,000,000, got '99999999999999'"),
        ("reasoning_gym:gcd?size=" + "9" * 5000, "from 1 to 1,000,000"),
        ("reasoning_gym:chain_sum?max_digits=100000000", "max_digits: expected at most 1,000 in"),
        ("reasoning_gym:count_primes?max_n=1000000000000", "expected at most 1,000,000 in"),
        ("reasoning_gym:power_function?max_base=inf", "in size, got inf"),
        ("reasoning_gym:gcd?max_value=" + "9" * 20000, "expected at most 10,000 characters"),
        ("reasoning_gym:gcd?max_value", "key=value"),
        ("reasoning_gym:chain_sum?allow_negation=maybe", "one of true"),
        ("reasoning_gim:gcd", "did you mean reasoning_gym"),
        ("gcd", "expected one of reasoning_gym, jsonl, parquet"),
        ("jsonl:", "name or path"),
    ],
)
def test_bad_specs_are_told_what_to_mend(spec, message):
    with pytest.raises(ValueError, match=message):
        open_task(spec, seed=0, size=5)


def test_lists_cover_what_the_package_has_without_overlap():
    from reasoning_gym.factory import DATASETS

    assert not set(SAFE_TASKS) & set(REFUSED_TASKS)
    assert set(SAFE_TASKS) | set(REFUSED_TASKS) <= set(DATASETS)
    assert len(set(SAFE_TASKS)) == len(SAFE_TASKS) > 50


HOSTILE = (
    *("__import__('os').abort()", "[x for x in 'a'.__class__.__mro__]", "7*11*13", '{"a": [1]}'),
    *("nan", "inf", "-inf", "1e999", "9" * 5000, "[" * 5000, "\x00", "[NaN]"),
)


def test_no_safe_scorer_evaluates_text(monkeypatch):
    """Right answers score 1 and hostile ones do not, with every evaluator booby-trapped."""
    import sympy
    import sympy.parsing.sympy_parser

    sources = {name: open_procedural(name, {}, seed=1, size=2) for name in SAFE_TASKS}
    entries = {name: source.entry(1) for name, source in sources.items()}
    touched = []

    def trap(*arguments, **keywords):
        touched.append(arguments)
        raise RuntimeError("text was evaluated")

    for owner, name in (
        *((builtins, name) for name in ("eval", "exec", "compile")),
        *((sympy, name) for name in ("parse_expr", "sympify")),
        (sympy.parsing.sympy_parser, "parse_expr"),
    ):
        monkeypatch.setattr(owner, name, trap)
    try:
        right = {name: sources[name].score(e["answer"], e) for name, e in entries.items()}
        for name, entry in entries.items():
            for text in HOSTILE:
                assert 0.0 <= sources[name].score(text, entry) < 0.9, (name, text[:40])
    finally:
        monkeypatch.undo()
    assert touched == []
    assert right == dict.fromkeys(SAFE_TASKS, 1.0)


def fingerprints():
    """A line a task; a process of its own calls this too."""
    for name in SAFE_TASKS:
        source = open_procedural(name, {}, seed=5, size=4)
        entries = [source.entry(index) for index in (1, 0)]
        yield f"{name} {hashlib.sha256(json.dumps(entries).encode()).hexdigest()}"


def test_examples_are_the_same_in_every_process():
    """Resuming in a new process, with another hash seed, must find the same examples."""
    ours = os.environ.get("PYTHONHASHSEED", "random")
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    env = os.environ | {"PYTHONHASHSEED": "2" if ours == "1" else "1", "PYTHONPATH": path}
    code = "import test_tasks; print(*test_tasks.fingerprints(), sep='\\n')"
    command = [sys.executable, "-c", code]
    theirs = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True).stdout
    assert theirs.splitlines() == list(fingerprints())


def test_unreadable_answers_are_wrong_and_not_a_scorers_failure():
    source = open_procedural("prime_factorization", {}, seed=0, size=1)
    assert source.score("two times three", source.entry(0)) == 0.0


def test_all_gsm_symbolic_templates_travel_as_json():
    """Some of its metadata are fractions; the answer must survive the trip."""
    source = open_procedural("gsm_symbolic", {}, seed=0, size=200)
    for index in range(200):
        entry = source.entry(index)
        assert source.score(entry["answer"], json.loads(json.dumps(entry))) == 1.0


def test_decimal_precision_does_not_leak_between_tasks():
    import decimal

    before = decimal.getcontext().prec
    open_procedural("decimal_arithmetic", {"precision": "6"}, seed=0, size=1).entry(0)
    assert decimal.getcontext().prec == before


def test_another_version_of_the_package_is_refused(monkeypatch):
    reasoning_gym_tasks._registered.cache_clear()
    monkeypatch.setattr(reasoning_gym_tasks.importlib.metadata, "version", lambda name: "0.2.0")
    with pytest.raises(ImportError, match="expected reasoning-gym 0.1.25.*got 0.2.0"):
        open_procedural("gcd", {})
    reasoning_gym_tasks._registered.cache_clear()


# ---- files ----


def test_jsonl_with_renamed_columns(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        {"question": "2+2?", "solution": 4, "level": [1, 2]},
        {"question": "3+3?", "solution": "6", "level": [3]},
    )
    spec = f"jsonl:{path}?prompt=question&answer=solution"
    task = open_task(spec, seed=9)
    assert len(task) == 2
    assert task[0].prompt == "2+2?" and task[0].answer == "4"
    assert task[0].columns == {"level": [1, 2]}
    assert task[1].example_id == f"{spec}#1" and task[1].task == spec


@pytest.mark.parametrize(
    ("text", "query", "message"),
    [
        ("", "", "empty"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": \n', "", r"a\.jsonl:2: expected one JSON"),
        ('{"prompt": "a"}\n', "", "no column 'answer'.*?answer=COLUMN"),
        ('{"prompt": "a", "answer": ["b"]}\n', "", "text or a number, got list"),
        ('{"prompt": "a", "answer": "b", "task": 1}\n', "", "rename column 'task'"),
        ('{"prompt": "a", "answer": "b"}\n', "?answer_extract=hash", "finds nothing"),
        ('{"prompt": "a", "answer": "b"}\n', "?promt=a", "unknown key 'promt'"),
        (
            '{"prompt": "a\\ud800", "answer": "b"}\n',
            "",
            r"a\.jsonl:1: the prompt: half of a surrogate",
        ),
        (
            '{"prompt": "a", "answer": "\\ud800b"}\n',
            "",
            r"a\.jsonl:1: the answer: half of a surrogate",
        ),
        (json.dumps({"prompt": "a" * 1_000_001}) + "\n", "?answer=", "at most 1,000,000 char"),
    ],
)
def test_bad_files_are_told_by_file_and_line(tmp_path, text, query, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        list(open_task(f"jsonl:{path}{query}", seed=0))


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl"):
        open_task(f"jsonl:{tmp_path}/absent.jsonl", seed=0)
    with pytest.raises(ValueError, match="jsonl:~nosuchuser/x: .*home"):
        open_task("jsonl:~nosuchuser/x", seed=0)


# ---- mixtures ----


@pytest.fixture
def two_files(tmp_path):
    rows = [[{"prompt": f"{name}{i}", "answer": ""} for i in range(30)] for name in "ab"]
    return tuple(
        f"jsonl:{write_lines(tmp_path / f'{name}.jsonl', *part)}"
        for name, part in zip("ab", rows, strict=True)
    )


def test_a_mixture_holds_every_example_once(two_files):
    task = open_tasks(TaskConfig(specs=two_files), seed=0)
    prompts = [task[index].prompt for index in range(len(task))]
    assert sorted(prompts) == sorted(f"{name}{i}" for name in "ab" for i in range(30))
    firsts = [prompt[0] for prompt in prompts]
    assert firsts != sorted(firsts)  # interleaved
    again = open_tasks(TaskConfig(specs=two_files), seed=0)
    assert [again[index].prompt for index in range(60)] == prompts
    other = open_tasks(TaskConfig(specs=two_files), seed=1)
    assert [other[index].prompt for index in range(60)] != prompts


def test_weights_set_the_share_of_each_task(two_files):
    task = open_tasks(TaskConfig(specs=two_files, weights=(9.0, 1.0)), seed=0)
    prompts = [task[index].prompt for index in range(len(task))]
    assert len(prompts) == 60
    # Binomial(60, 0.9): below 45 with probability 3e-4; the seed is fixed.
    num_a = sum(prompt.startswith("a") for prompt in prompts)
    assert 45 <= num_a < 60
    ordered = [prompt for prompt in prompts if prompt.startswith("a")]
    assert ordered == [f"a{i % 30}" for i in range(num_a)]  # in order, then again


def test_invalid_task_configs_are_refused():
    with pytest.raises(ValueError, match="one per spec"):
        TaskConfig(weights=(1.0, 2.0))
    with pytest.raises(ValueError, match="positive"):
        TaskConfig(weights=(0.0,))
    for size in (0, 10**12):
        with pytest.raises(ValueError, match="1 to 1,000,000 examples"):
            TaskConfig(size=size)
    for field in ("system_prompt", "prompt_suffix"):
        with pytest.raises(ValueError, match=f"Task.{field}: expected at most 100,000"):
            TaskConfig(**{field: "x" * 100_001})
        with pytest.raises(ValueError, match=f"Task.{field}: half of a surrogate"):
            TaskConfig(**{field: "\ud800"})
    with pytest.raises(ValueError, match="expected all, messages or none, got 'some'"):
        TaskConfig(chat="some")
    with pytest.raises(ValueError, match="empty"):
        TaskConfig(specs=())
    with pytest.raises(ValueError, match="did you mean"):
        TaskConfig(specs=("reasoning_gym:lmc",))
    for specs in (("a=jsonl:x", "a=jsonl:y"), ("jsonl:x", "jsonl:x")):
        with pytest.raises(ValueError, match=f"different names, got '{specs[0][:1]}.*twice"):
            TaskConfig(specs=specs)


def test_a_name_is_what_a_task_is_called(tmp_path):
    path = write_lines(tmp_path / "a=b.jsonl", {"prompt": "2+2?", "answer": "4"})
    example = open_task(f"easy-1=jsonl:{path}?answer=answer", seed=0)[0]
    assert (example.task, example.prompt) == ("easy-1", "2+2?")
    assert example.spec == f"easy-1=jsonl:{path}?answer=answer"
    example = open_task("sums=reasoning_gym:chain_sum", seed=3, size=1)[0]
    assert example.task == "sums"
    assert example.prompt == open_task("reasoning_gym:chain_sum", seed=3, size=1)[0].prompt
    assert parse_spec("jsonl:a=b").name == "jsonl:a=b"
    for bad in ("1a=jsonl:x", "a b=jsonl:x", "=jsonl:x"):
        with pytest.raises(ValueError, match="expected one of reasoning_gym"):
            parse_spec(bad)


def test_a_plus_in_a_query_is_a_plus():
    assert parse_spec("reasoning_gym:gcd?a=+,-&b=%2B%26").query == {"a": "+,-", "b": "+&"}
