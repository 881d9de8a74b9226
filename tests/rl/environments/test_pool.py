"""Environments in processes: every fault costs its episode, and every other one is unaffected."""

import select
import signal
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
from processes import descendants, runs
from waiting import wait_until

from reprise.rl.environments import pool as pool_module
from reprise.rl.environments.config import EnvironmentConfig
from reprise.rl.environments.pool import Environments, read_answer, seeds_of
from reprise.rl.environments.server import (
    EnvironmentServer,
    EnvironmentServerError,
    EpisodeFailed,
    how_ended,
)

PLUGINS = Path(__file__).parent / "plugins"
FAULTY = f"{PLUGINS / 'faults.py'}:Faulty"
KINDS = {
    "raise": "raised",
    "sys_exit": "raised",
    "memory": "raised",
    "os_exit": "died",
    "kill": "died",
    "hang": "deadline",
    "scribble": "protocol",
    "number": "answer",
    "long": "answer",
}
SEEDS = [1, 2]


def config(factory=FAULTY, **changes):
    return EnvironmentConfig(**{"factory": factory, "deadline_s": 60.0} | changes)


def failure(future):
    with pytest.raises(EpisodeFailed) as failed:
        future.result(timeout=90)
    return failed.value


@pytest.fixture(scope="module")
def faulty():
    with Environments(config(deadline_s=5.0), 16) as environments:
        yield environments


def test_an_episode_keeps_its_state_between_calls():
    with Environments(config(f"{PLUGINS / 'games.py'}:Guess"), 4) as environments:
        assert not environments.tools
        for episode in range(3):
            start = environments.reset(episode, {"answer": f"{episode}"}, SEEDS).result(60)
            assert [m["content"] for m in start.messages] == ["Guess a number."]
        for episode in range(3):
            low = environments.step(episode, "-1").result(60)
            assert low.messages[0]["content"] == "\nhigher\n" and low.reward == -0.1
        found = environments.step(2, "2").result(60)
        assert found.done and found.rewards == {"": 1.0}
        assert environments.score(0).result(60).rewards == {"": 0.0}
        assert found.seconds > 0


def test_tools_are_described():
    with Environments(config(f"{PLUGINS / 'games.py'}:Calculator"), 2) as environments:
        assert [tool["function"]["name"] for tool in environments.tools] == ["add", "later"]


def test_episodes_do_not_see_one_another():
    """Each is a fork of the same process, so that module state is the same for all."""
    with Environments(config(f"{PLUGINS / 'games.py'}:Calculator"), 4) as environments:
        texts = [environments.reset(i, {"answer": "1"}, SEEDS).result(60).text for i in range(4)]
        assert texts == [" Use a tool. (1 open)"] * 4


def test_random_numbers_are_a_function_of_the_seeds():
    with Environments(config(f"{PLUGINS / 'games.py'}:Dice"), 4) as environments:

        def drawn(episode, seeds):
            first = environments.reset(episode, {}, seeds).result(60).text
            then = environments.step(episode, "").result(60).messages[0]["content"]
            return first, then

        one = drawn(0, [1, 2])
        assert drawn(1, [1, 2]) == one
        sibling = drawn(2, [1, 3])
        assert sibling[0] == one[0] and sibling[1] != one[1]
        assert drawn(3, [4, 2])[0] != one[0]


def test_seeds_are_shared_by_a_group_in_reset_only():
    first = seeds_of("3-0", group_id=5, sample_index=1)
    assert first == seeds_of("3-0", 5, 1)
    assert seeds_of("3-0", 5, 2)[0] == first[0] and seeds_of("3-0", 5, 2)[1] != first[1]
    others = [seeds_of("3-1", 5, 1), seeds_of("3-0", 6, 1)]
    assert all(seeds[0] != first[0] for seeds in others)
    assert all(0 <= seed < 2**63 for seed in first)


@pytest.mark.fault
@pytest.mark.parametrize("when", ["reset", "step"])
@pytest.mark.parametrize("fault", KINDS)
def test_a_fault_costs_its_episode_only(faulty, fault, when):
    if when == "reset" and fault in ("number", "long"):
        pytest.skip("an answer of step")
    good = faulty.reset(1, {"answer": "a"}, SEEDS)
    if when == "reset":
        failed = failure(faulty.reset(0, {"answer": fault}, SEEDS))
    else:
        faulty.reset(0, {"answer": "a"}, SEEDS).result(60)
        failed = failure(faulty.step(0, fault))
    assert failed.kind == KINDS[fault]
    good.result(60)
    assert faulty.step(1, "b").result(60).messages[0]["content"] == "b"
    assert failure(faulty.step(0, "b")).message == "its environment is closed"
    faulty.end(1)


def test_messages_of_failures_say_how(faulty):
    assert "environment bug (at" in failure(faulty.reset(0, {"answer": "raise"}, SEEDS)).message
    assert failure(faulty.reset(0, {"answer": "os_exit"}, SEEDS)).message.endswith("exit status 7")
    assert "SIGKILL" in failure(faulty.reset(0, {"answer": "kill"}, SEEDS)).message
    assert how_ended(-signal.SIGTERM) == "signal SIGTERM" and how_ended(3) == "exit status 3"


def test_output_of_an_environment_is_no_answer(faulty):
    faulty.reset(0, {"answer": "print"}, SEEDS).result(60)
    assert faulty.step(0, "c").result(60).messages[0]["content"] == "c"
    faulty.end(0)


def test_a_fork_of_an_environment_does_not_answer(faulty):
    faulty.reset(0, {"answer": "fork"}, SEEDS).result(60)
    for text in "abc":
        assert faulty.step(0, text).result(60).messages[0]["content"] == text
    faulty.end(0)


@pytest.mark.fault
def test_children_of_a_hung_environment_are_killed(tmp_path):
    with Environments(config(deadline_s=2.0), 2) as environments:
        note = tmp_path / "child"
        assert failure(environments.reset(0, {"answer": f"child {note}"}, SEEDS)).kind == "deadline"
        wait_until(lambda: not runs(int(note.read_text())))


@pytest.mark.fault
def test_a_dead_server_is_replaced_and_costs_the_open_episodes():
    with Environments(config(), 4) as environments:
        environments.reset(0, {"answer": "a"}, SEEDS).result(60)
        assert failure(environments.reset(1, {"answer": "kill server"}, SEEDS)).kind == "died"
        assert failure(environments.step(0, "b")).kind == "died"
        environments.reset(2, {"answer": "a"}, SEEDS).result(60)
        assert environments.step(2, "b").result(60).messages[0]["content"] == "b"


@pytest.mark.fault
def test_a_server_that_dies_again_and_again_ends_the_run(monkeypatch):
    monkeypatch.setattr(pool_module, "MAX_RESTARTS", 1)
    with Environments(config(), 2) as environments:
        for episode in range(2):
            future = environments.reset(episode, {"answer": "kill server"}, SEEDS)
            assert failure(future).kind == "died"
        for episode in (2, 3):
            with pytest.raises(EnvironmentServerError, match="has ended 2 times"):
                environments.reset(episode, {"answer": "a"}, SEEDS).result(60)


def test_closing_leaves_no_process_and_ends_calls():
    environments = Environments(config(), 4)
    with environments:
        environments.reset(0, {"answer": "a"}, SEEDS).result(60)
        server = environments._server._process.pid
        hung = environments.step(0, "hang")
        wait_until(lambda: len(descendants(server)) > 1)
        pids = descendants(server)
        timer = threading.Timer(0.2, environments.close)
        timer.start()
        assert failure(hung).kind == "died"
        timer.join()
    assert len(pids) == 2
    wait_until(lambda: not any(runs(pid) for pid in pids))


def test_a_process_whose_answer_nobody_reads_exits_without_an_error():
    server = EnvironmentServer(config(), 60)
    try:
        server.wait_ready()
        process = server.open()
        pid = process._pid
        process._lines.send(b'{"op": "describe", "seeds": [1, 2]}', time.monotonic() + 10)
        connection = process._lines._socket
        assert select.select([connection], [], [], 10)[0]
        connection.close()
        stat = Path(f"/proc/{pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
        assert server.end(pid) == "its process ended: exit status 0"
    finally:
        server.dispose()


def test_an_ended_episode_leaves_no_process():
    with Environments(config(), 4) as environments:
        environments.reset(0, {"answer": "a"}, SEEDS).result(60)
        server = environments._server._process.pid
        [pid] = descendants(server) - {server}
        environments.end(0)
        environments.end(0)
        wait_until(lambda: not runs(pid))
        wait_until(lambda: descendants(server) == {server})
        environments.reset(1, {"answer": "a"}, SEEDS).result(60)
        environments.end_all()
        wait_until(lambda: descendants(server) == {server})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("faults.py:Missing", "defines no function or class 'Missing'"),
        ("faults.py:not_callable", "as a function or class, got int"),
        ("faults.py:NoReset", "expected an environment with reset"),
        ("faults.py:NoStep", "step\\(completion\\), or a tool"),
        ("faults.py:Untyped", "missing a type hint"),
        ("threads.py:Environment", "starts the thread 'of the user'"),
    ],
)
def test_a_factory_that_cannot_be_used_is_refused_at_the_start(name, message):
    with pytest.raises(EnvironmentServerError, match=message):
        with Environments(config(f"{PLUGINS}/{name}"), 1):
            pass


def test_a_row_that_is_no_json_is_an_error_of_the_caller(faulty):
    with pytest.raises(TypeError):
        faulty.reset(0, {"answer": object()}, SEEDS).result(60)
    assert faulty.end(0) is None


def test_calls_of_many_episodes_run_side_by_side():
    with Environments(config(), 8) as environments:
        futures = [environments.reset(i, {"answer": "a"}, SEEDS) for i in range(8)]
        done, waiting = wait(futures, 60)
        assert len(done) == 8 and not waiting
        start_s = time.monotonic()
        hung = environments.step(0, "hang")
        rest = [environments.step(i, "b") for i in range(1, 8)]
        assert all(future.result(60).messages for future in rest)
        assert not hung.done() and time.monotonic() - start_s < 50


@pytest.mark.parametrize(
    "answer",
    [{"messages": 5}, {"messages": [5]}, {"calls": "x"}, {"calls": []}],
)
def test_an_answer_in_another_form_breaks_the_protocol(answer):
    with pytest.raises(EpisodeFailed) as failed:
        read_answer(answer, 0.0)
    assert failed.value.kind == "protocol"
