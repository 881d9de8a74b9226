"""The worker pool: every fault costs one sample, and everything else is unaffected."""

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import runs
from waiting import wait_until

from reprise.rl.data.tasks import Example
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.rewards.scores import Score, ScoreJob, combine

PLUGINS = Path(__file__).parent / "plugins"
FAULTY = f"{PLUGINS / 'faults.py'}:faulty"
HALF = f"{PLUGINS / 'faults.py'}:half"


def job(completion, answer="4", prompt="2+2?", ids=(1, 2, 3), **columns):
    example = Example("test#0", prompt, answer, columns, "jsonl:test.jsonl")
    return ScoreJob(example, completion, ids)


def config(*functions, **changes):
    return RewardConfig(**{"functions": functions, "deadline_s": 60.0, "workers": 1} | changes)


def impatient(pool):
    """Workers that run now have little time for a sample; those in their place have all of it."""
    for worker in pool._workers.values():
        worker._config = dataclasses.replace(worker._config, deadline_s=0.5)


def test_no_worker_starts_where_environments_give_the_rewards():
    with RewardPool(config("environment", workers=2)) as pool:
        pool.wait_started()
        assert not pool._threads
    with RewardPool(config("exact_match", workers=2)) as pool:
        assert len(pool._threads) == 2


FAULTS = {
    "raise": "raised",
    "sys_exit": "raised",
    "os_exit": "died",
    "kill": "died",
    "length": "length",
    "empty": "length",
    "nan": "not_finite",
    "inf": "not_finite",
    "text": "not_a_number",
    "not_a_list": "not_a_list",
    "nothing": "not_a_list",
}


@pytest.fixture(scope="module")
def stormy():
    """Each of `FAULTS` once, mixed with 50 good samples, on two workers."""
    completions = [f"{'x' * (i % 7)}!" for i in range(50)]
    for place, fault in enumerate(FAULTS):
        completions.insert(4 * place + 2, fault)
    completions += ["print", "read", "none", "true"]
    with RewardPool(config(FAULTY, workers=2)) as pool:
        futures = [pool.submit(job(completion)) for completion in completions]
        scores = [future.result(timeout=60) for future in futures]
        metrics = pool.metrics()
    return completions, scores, pool, metrics


def test_good_samples_are_unaffected_by_faults(stormy):
    completions, scores, _, _ = stormy
    good = [(c, s) for c, s in zip(completions, scores, strict=True) if c.endswith("!")]
    assert len(good) == 50
    for completion, score in good:
        assert score == Score({"faulty": float(len(completion))}, float(len(completion)))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_its_sample_the_reward(stormy, fault):
    completions, scores, _, _ = stormy
    score = scores[completions.index(fault)]
    assert score.total is None
    assert score.values == {"faulty": None}
    assert score.failure.startswith(f"faulty/{FAULTS[fault]}: ")


def test_faults_are_counted_by_kind(stormy):
    completions, scores, pool, metrics = stormy
    assert dict(pool.counters) == {
        ("faulty", "raised"): 2,
        ("faulty", "died"): 2,
        ("faulty", "length"): 2,
        ("faulty", "not_finite"): 2,
        ("faulty", "not_a_number"): 1,
        ("faulty", "not_a_list"): 2,
    }
    assert metrics["rewards/faulty/failures"] == 11
    assert metrics["rewards/faulty/failures/died"] == 2
    assert "expected 1 value for 1 completion, got 0" in scores[completions.index("empty")].failure


def test_printing_and_reading_cannot_touch_the_protocol(stormy):
    completions, scores, _, _ = stormy
    assert scores[completions.index("print")].total == 5.0
    assert scores[completions.index("read")].total == 4.0  # an empty standard input


def test_none_is_not_applicable_and_true_is_one(stormy):
    completions, scores, _, _ = stormy
    assert scores[completions.index("none")] == Score({"faulty": None}, None)
    assert scores[completions.index("true")] == Score({"faulty": 1.0}, 1.0)


def test_messages_say_where_a_scorer_raised_and_how_a_worker_died():
    with RewardPool(config(FAULTY)) as pool:
        raised = pool.submit(job("raise")).result(timeout=60)
        exited = pool.submit(job("os_exit")).result(timeout=60)
        killed = pool.submit(job("kill")).result(timeout=60)
    assert "RuntimeError: scorer bug" in raised.failure and "faults.py:" in raised.failure
    assert "exit status 7" in exited.failure
    assert "SIGKILL" in killed.failure


def test_a_failure_is_charged_to_the_function_that_ran():
    with RewardPool(config(HALF, FAULTY, weights=(2.0, 3.0))) as pool:
        good = pool.submit(job("xy")).result(timeout=60)
        impatient(pool)
        hung = pool.submit(job("hang")).result(timeout=60)
        none = pool.submit(job("none")).result(timeout=60)
    assert good == Score({"half": 0.5, "faulty": 2.0}, 2.0 * 0.5 + 3.0 * 2.0)
    assert hung.total is None
    assert hung.failure == "faulty/deadline: no result within Reward.deadline_s=60.0; killed"
    assert none == Score({"half": 0.5, "faulty": None}, 1.0)
    assert dict(pool.counters) == {("faulty", "deadline"): 1}


def test_a_scorer_over_the_memory_limit_fails_alone():
    with RewardPool(config(FAULTY, memory_limit_mib=1024)) as pool:
        memory = pool.submit(job("memory")).result(timeout=60)
        after = pool.submit(job("xyz")).result(timeout=60)
    assert memory.failure.startswith("faulty/raised: MemoryError")
    assert after.total == 3.0


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_hung_scorer_is_killed_with_its_children_even_in_sessions_of_their_own(tmp_path):
    with RewardPool(config(f"{PLUGINS / 'faults.py'}:leaves_daemons")) as pool:
        assert pool.submit(job(str(tmp_path / "pid"))).result(timeout=60).total == 1.0
        children = [int(path.read_text()) for path in sorted(tmp_path.iterdir())]
        assert len(children) == 2 and all(map(runs, children))
        impatient(pool)
        hung = pool.submit(job("hang")).result(timeout=60)
        assert hung.failure.startswith("leaves_daemons/deadline")
        wait_until(lambda: not any(map(runs, children)))


def test_submit_returns_at_once_and_scoring_starts_while_others_are_made():
    with RewardPool(config(FAULTY, workers=2)) as pool:
        hung = pool.submit(job("hang"))
        quick = [pool.submit(job("x" * i)) for i in range(20)]
        assert [future.result(timeout=60).total for future in quick] == list(range(20))
        assert not hung.done()
    # close does not wait for the hung one, which its deadline would answer for
    with pytest.raises(RuntimeError, match="closed"):
        hung.result(timeout=1)


def test_close_cancels_what_is_queued_and_ends_the_workers():
    pool = RewardPool(config(FAULTY))
    with pool:
        first = pool.submit(job("hang"))
        queued = pool.submit(job("x"))
        wait_until(first.running)
        pid = pool._workers[0]._process.pid
    assert queued.cancelled()
    assert not runs(pid)
    with pytest.raises(RuntimeError, match="not open"):
        pool.submit(job("x"))


PARENT = """
import sys, time
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.pool import RewardPool
from reprise.rl.rewards.scores import ScoreJob
from reprise.rl.data.tasks import Example

with RewardPool(RewardConfig(functions=(sys.argv[1],), deadline_s=60.0, workers=1)) as pool:
    future = pool.submit(ScoreJob(Example("test#0", "q", "a", {}, "jsonl:x"), "hang"))
    while not future.running():
        time.sleep(0.01)
    print(pool._workers[0]._process.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_workers_do_not_outlive_a_killed_parent_even_in_a_hung_scorer():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, FAULTY],
        cwd=Path(__file__).resolve().parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = int(parent.stdout.readline())
    time.sleep(0.2)  # well inside the scorer
    assert runs(worker)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not runs(worker))


def test_user_functions_get_columns_ids_and_chats_as_trl_gives_them():
    faults = PLUGINS / "faults.py"
    with RewardPool(config(f"{faults}:sees")) as pool:
        assert pool.submit(job("x", difficulty=10)).result(timeout=60).total == 10 + 3 + 4
    with RewardPool(config(f"{faults}:chat")) as pool:
        prompt = ({"role": "user", "content": "hi"},)
        assert pool.submit(job("hello", prompt=prompt)).result(timeout=60).total == 1.0


GROUP = ("a", "abc", "ab")


def group(pool, *completions):
    jobs = [job(text, n=1, ids=(i,)) for i, text in enumerate(completions)]
    return pool.submit_group(jobs).result(timeout=60)


def test_a_group_is_scored_in_one_call_and_fails_as_one():
    functions = f"{PLUGINS / 'faults.py'}:longest", "exact_match"
    with RewardPool(config(*functions, weights=(1.0, 0.5), extract="whole")) as pool:
        assert [s.total for s in group(pool, *GROUP)] == [0.0, 1.0, 0.0]
        assert [s.values["exact_match"] for s in group(pool, "4", "5")] == [1.0, 0.0]
        one = group(pool, "a", "nan", "abcd")  # a value is its response's alone
        assert [s.failure and s.failure.partition(":")[0] for s in one] == [
            *(None, "longest/not_finite", None)
        ]
        impatient(pool)
        late = group(pool, "a", "hang", "b")
        assert {s.failure.partition(":")[0] for s in late} == {"longest/deadline"}
        assert pool.counters["longest", "deadline"] == 3
        died = group(pool, "a", "die")
        assert [s.total for s in died] == [None, None]
        assert {s.failure.partition(":")[0] for s in died} == {"longest/died"}


def test_async_functions_score_responses_and_groups_in_one_event_loop():
    with RewardPool(config(f"{PLUGINS / 'faults.py'}:later")) as pool:
        assert pool.submit(job("x")).result(timeout=60).total == 1.0
        assert [s.total for s in group(pool, *GROUP)] == [1.0] * 3
        failed = group(pool, "a", "raise")
        assert {s.failure.partition(" (")[0] for s in failed} == {
            "later/raised: RuntimeError: judge is away"
        }
        assert pool.submit(job("x")).result(timeout=60).total == 1.0


def test_a_reward_file_imports_its_neighbours(tmp_path, monkeypatch):
    """As a script does: also a package called models, which is not ours."""
    folder = tmp_path / "rewards"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "__init__.py").write_text("BONUS = 2.0\n")
    (folder / "helper.py").write_text("from models import BONUS\n")
    (tmp_path / "spec.py").write_text("FACTOR = 3.0\n")  # where the run was started
    body = "from helper import BONUS\nfrom spec import FACTOR\n"
    body += "def score(completions, **c): return [BONUS * FACTOR]\n"
    (folder / "mine.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    with RewardPool(config("rewards/mine.py:score", "exact_match", extract="whole")) as pool:
        assert pool.submit(job("4")).result(timeout=60).total == 7.0
    other = tmp_path / "other"
    other.mkdir()
    (other / "helper.py").write_text("BONUS = 5.0\n")
    (other / "more.py").write_text("from helper import BONUS\ndef more(**c): return [BONUS]\n")
    with pytest.raises(RewardWorkerError, match="both have a module helper"):
        with RewardPool(config("rewards/mine.py:score", "other/more.py:more")):
            pass


def test_an_import_error_in_the_users_file_is_told_at_the_start():
    with pytest.raises(RewardWorkerError, match="a_module_that_does_not_exist"):
        with RewardPool(config(f"{PLUGINS / 'broken_import.py'}:score", workers=2)):
            pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", r"cannot work: SyntaxError: .* \(at .*mine.py:1\)$"),
        (
            "\nimport absent",
            r"cannot work: ModuleNotFoundError: .*absent' \(at .*mine.py:2\)$",
        ),
        ("def g(**c): pass", "mine.py defines no function or class 'f'.*; it has g$"),
        ("f = 3", "mine.py: expected f as a function or class, got int$"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_in_one_sentence(tmp_path, capfd, text, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(RewardWorkerError, match=message):
        with RewardPool(config(f"{tmp_path / 'mine.py'}:f")):
            pass
    assert capfd.readouterr().err == ""


def test_the_way_to_an_error_in_another_file_is_shown_without_lines_of_ours(tmp_path, capfd):
    (tmp_path / "mine.py").write_text("import deeper_one\ndef f(**c): return [1.0]\n")
    (tmp_path / "deeper_one.py").write_text("def make():\n    return [][1]\nmake()\n")
    with pytest.raises(RewardWorkerError, match=r"IndexError: .* \(at .*deeper_one.py:2\)$"):
        with RewardPool(config(f"{tmp_path / 'mine.py'}:f")):
            pass
    until_s, printed = time.monotonic() + 30, ""
    while "[][1]" not in printed and time.monotonic() < until_s:  # a thread copies it
        printed += capfd.readouterr().err
        time.sleep(0.01)
    lines = [line for line in printed.splitlines() if line.startswith("  File")]
    assert [Path(line.split('"')[1]).name for line in lines] == ["mine.py"] + ["deeper_one.py"] * 2


def test_a_file_that_breaks_later_stops_the_run_instead_of_respawning_for_ever(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import os\ndef f(**columns):\n    os._exit(1)\n")
    with RewardPool(config(f"{file}:f")) as pool:
        file.write_text("raise ValueError('edited meanwhile')\n")
        assert pool.submit(job("x")).result(timeout=60).failure.startswith("f/died")
        with pytest.raises(RewardWorkerError, match="edited meanwhile"):
            pool.submit(job("y")).result(timeout=60)


def test_a_task_that_cannot_be_opened_is_an_error_and_not_a_zero():
    example = Example("x#0", "q", "1", {"metadata": {}}, "reasoning_gym:countdown")
    with RewardPool(config("task")) as pool:
        with pytest.raises(RewardWorkerError, match="refused"):
            pool.submit(ScoreJob(example, "#### 1")).result(timeout=60)


def test_a_named_task_is_opened_by_its_spec_and_shown_by_its_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def named(task, **columns):\n    return [float(task == ['sums'])]\n")
    spec = "sums=reasoning_gym:chain_sum"
    example = Example("x#0", "q", "1000", {"metadata": {}}, "sums", spec)
    with RewardPool(config("task", f"{file}:named"), tasks=(spec,)) as pool:
        # chain_sum compares numbers, which a file's exact match does not
        assert pool.submit(ScoreJob(example, "#### 1,000.0")).result(timeout=60).total == 2.0


def test_a_worker_that_dies_while_idle_costs_nothing():
    with RewardPool(config(FAULTY)) as pool:
        assert pool.submit(job("x")).result(timeout=60).total == 1.0
        pool._workers[0].kill()
        assert pool.submit(job("xx")).result(timeout=60).total == 2.0
    assert not pool.counters


def test_columns_that_are_not_json_are_refused_at_submit():
    with RewardPool(config("exact_match")) as pool:
        with pytest.raises(TypeError, match="test#0.*JSON"):
            pool.submit(job("x", when=object()))


def test_combine_weighs_what_applies():
    two = RewardConfig(functions=("exact_match", "math_verify"), weights=(1.0, 0.5))
    ok = combine(two, [[1.0, None, None], [0.25, None, None]])
    assert ok == Score({"exact_match": 1.0, "math_verify": 0.25}, 1.125)
    assert combine(two, [[None, None, None], [1.0, None, None]]).total == 0.5
    assert combine(two, [[None, None, None], [None, None, None]]).total is None
    failed = combine(two, [[1.0, None, None], [None, "raised", "boom"]])
    assert failed.total is None and failed.failure == "math_verify/raised: boom"
