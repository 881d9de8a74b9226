"""The launcher of trainer processes on Ray, without Ray: what the user sees, and how it ends."""

import contextlib
import io
import os
import signal

import fake_trainers
import pytest
from thread_actors import ThreadRoom

from reprise.rl.cluster import ray_session
from reprise.rl.cluster.ray_session import RayProblem
from reprise.rl.gin.loader import dump, load
from reprise.rl.run.launch import Screen, _config, launch
from reprise.rl.run.ray_trainers import Start
from reprise.rl.runtime.run_files import NEWEST_FILE
from reprise.rl.settings.checks import check_trainers, trainer_devices
from reprise.rl.settings.config import TrainConfig

TWO = ("Cluster.kind='ray'", "Cluster.num_processes=2", "Mesh.data=2")


def config_of(*overrides):
    return load(TrainConfig, [], [*TWO, *overrides])


@pytest.fixture
def started(monkeypatch):
    """Starts the launcher's processes in threads; returns what it requests of Ray."""
    requested = {}

    @contextlib.contextmanager
    def open_ray(address, num_cpus, deadline_s):
        requested.update(address=address, num_cpus=num_cpus)
        yield "127.0.0.1:1"

    @contextlib.contextmanager
    def reserve(count, setting, start_s, *, devices):
        requested.update(count=count, devices=devices)
        if count == 3:
            raise RayProblem(f"expected room for {setting}")
        yield ThreadRoom()

    monkeypatch.setattr(ray_session, "open_ray", open_ray)
    monkeypatch.setattr(ray_session, "reserve", reserve)
    monkeypatch.setattr("reprise.rl.run.launch.COMMAND", fake_trainers.COMMAND)
    return requested


def play(monkeypatch, what):
    monkeypatch.setattr("reprise.rl.run.launch.dump", lambda config: what)


def test_it_asks_for_as_many_as_are_set_and_shows_them(started, monkeypatch, tmp_path, capsys):
    play(monkeypatch, "ends")
    config = config_of("Mesh.tensor=2", "Sched.workers=3")
    assert launch(config, tmp_path, resume=False) == 0
    assert started == {"address": None, "num_cpus": 7, "count": 2, "devices": 2}
    told = capsys.readouterr()
    assert told.out.startswith("number 0 at 127.0.0.1:") and "number 1" not in told.out
    assert told.err.count("error: all say so") == 1
    assert "only 0 says so" in told.err and "only 1 says so" not in told.err


@pytest.mark.fault
def test_a_loss_is_one_line_with_the_last_checkpoint(started, monkeypatch, tmp_path, capsys):
    play(monkeypatch, "one is killed")
    (tmp_path / NEWEST_FILE).write_text("3\n")
    assert launch(config_of(), tmp_path, resume=False) == 1
    lines = capsys.readouterr().err.splitlines()
    [line] = [line for line in lines if "lost" in line]
    assert line.startswith(
        "error: trainer process 1 of 2 is lost: killed by SIGKILL; step 3 is the last that is saved"
    )


def test_no_room_is_a_line_too(started, tmp_path, capsys):
    config = config_of("Cluster.num_processes=3", "Mesh.data=3")
    assert launch(config, tmp_path, resume=False) == 1
    assert (
        capsys.readouterr().err
        == "error: expected room for Cluster.num_processes=3; nothing to save\n"
    )


def test_one_that_fails_without_naming_an_error_is_explained(
    started, monkeypatch, tmp_path, capsys
):
    play(monkeypatch, "one fails, the other ends")
    assert launch(config_of(), tmp_path, resume=False) == 1
    assert "process 1: only 1 says so" in capsys.readouterr().err


def test_of_two_that_fail_the_first_is_explained(started, monkeypatch, tmp_path, capsys):
    def run(actors, start, host, limit_s, show, num_stops):
        show(1, True, "only 1 says so")
        return {1: 1, 0: 1}

    monkeypatch.setattr("reprise.rl.run.launch.run_trainers", run)
    assert launch(config_of(), tmp_path, resume=False) == 1
    assert "process 1: only 1 says so" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "number", "status"),
    [("stops", signal.SIGINT, 75), ("stops at the start", signal.SIGINT, 130)],
)
def test_a_signal_is_handed_on(started, monkeypatch, tmp_path, what, number, status):
    play(monkeypatch, what)
    ready, show = set(), Screen.show

    def shown(self, index, is_error, text):
        show(self, index, is_error, text)
        if text == "ready" and not ready >= {0, 1}:
            ready.add(index)
            if ready == {0, 1}:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(Screen, "show", shown)
    before = signal.getsignal(number)
    assert launch(config_of(), tmp_path, resume=False) == status
    assert signal.getsignal(number) is before


def test_an_error_of_several_is_shown_once_and_process_0_as_it_speaks():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err)
    for index in (1, 0, 2):
        screen.show(index, True, "error: the same")
    screen.show(2, True, "process 2: warning: its own")
    for index in (0, 1):
        screen.show(index, False, f"plain {index}")
    screen.show(0, True, "step 1")
    assert out.getvalue() == "plain 0\n"
    assert err.getvalue() == "process 1: error: the same\nprocess 2: warning: its own\nstep 1\n"


def test_settings_that_trainers_on_ray_cannot_follow_are_refused():
    assert trainer_devices(config_of("Mesh.fsdp=3")) == 3
    check_trainers(config_of())
    check_trainers(load(TrainConfig, [], ["Cluster.kind='ray'"]))
    drafts = "Speculation.sources=('own', 'learned', 'model')"
    check_trainers(config_of("Sched.mode='pipeline'", "Sched.policy='histopipe'", drafts))
    for overrides, match in {
        ("Mesh.data=-1",): r"as many devices for each of Cluster.num_processes=2 .* Mesh.data = -1",
        ("Mesh.data=3",): "got 3 devices: set Mesh.data, fsdp and tensor to a multiple of 2",
        ("Cluster.num_processes=0",): "expected Cluster.num_processes of 1 or more, got 0",
        ("Cluster.process_id=0",): "one command starts all trainer processes",
        ("Cluster.coordinator='127.0.0.1:1'",): "one command starts all trainer processes",
    }.items():
        with pytest.raises(ValueError, match=match):
            check_trainers(config_of(*overrides))


def test_a_process_reads_the_configuration_that_was_sent():
    config = config_of("Run.directory='runs/it is # one'", "Task.prompt_suffix=' = ?'")
    start = Start(dump(config), False, ".", "127.0.0.1:1", 0, "127.0.0.1:2")
    assert _config(start) == config
