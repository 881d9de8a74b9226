"""The page of the server, as a stranger follows it: its command, its code, a kill, a new start."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import child_environment
from served import KEY, call

from reprise.rl.commands import serve
from reprise.rl.runtime.exit_codes import EXIT_USAGE
from reprise.rl.server.records import Records

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
SIZES = ("--gin.Policy.lora_rank=16", "--gin.Engine.slots=8", "--gin.Engine.min_slots=8")
# The client's daemon thread can abort an interpreter that exits (2 of 240 under load): the process
# ends before.
END = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"
AFTERWARDS = """
again = service.create_training_client_from_state_with_optimizer(PATH).result()
print(again.get_info().lora_rank)
"""


@contextlib.contextmanager
def started(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the page's command; yields the process and its address."""
    command = [sys.executable, "-m", "rl.serve", "--policy", "policies/tiny", "--port", "0"]
    process = subprocess.Popen(
        [*command, "--folder", str(folder), *SIZES],
        cwd=ROOT,
        env=child_environment(1),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert match, line
        yield process, match[0]
    finally:
        process.kill()
        process.wait()


def run(code: str, address: str) -> str:
    names = {"TINKER_BASE_URL": address, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code + END],
        cwd=ROOT,
        env=os.environ | names | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.fault
def test_the_page_trains_and_its_checkpoint_outlives_a_kill(tmp_path):
    code, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with started(tmp_path / "server") as (process, address):
        *_, metrics, path = run(code, address).splitlines()
        assert "grad_norm" in metrics
        assert re.fullmatch(r"tinker://\S+/weights/first", path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with started(tmp_path / "server") as (process, address):
        first, *_ = code.partition("model = ")
        assert run(first + AFTERWARDS.replace("PATH", repr(path)), address).strip() == "16"
        assert call(address, "sessions", method="GET")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0


@pytest.fixture
def served(monkeypatch):
    """What is served, in place of an answer: nothing compiles."""
    found = []

    def make_app(one, *given, **options):
        found.append(one)

    monkeypatch.setattr("reprise.rl.server.app.make_app", make_app)
    monkeypatch.setattr(serve, "_serve", lambda app, sock, args: 0)
    return found


def test_clients_get_a_tokenizer_that_exists_from_any_folder(tmp_path, monkeypatch, served):
    """`--policy policies/tiny` is found below the project from elsewhere too."""
    monkeypatch.chdir(tmp_path)
    given = ["--policy", "policies/tiny", "--port", "0", "--folder", str(tmp_path / "server")]
    assert serve.main(given) == 0
    assert (Path(served[0].tokenizer) / "tokenizer.json").is_file()


def test_settings_of_a_file_are_not_replaced(tmp_path, served):
    (tmp_path / "own.gin").write_text("Policy.lora_rank = 3\nSpeculation.budget = 'off'\n")
    given = ["--policy", "policies/tiny", "--port", "0", "--folder"]
    assert serve.main([*given, str(tmp_path / "a"), f"--gin_file={tmp_path / 'own.gin'}"]) == 0
    assert serve.main([*given, str(tmp_path / "b")]) == 0
    configs = [one.policy.config for one in served]
    assert [config.policy.lora_rank for config in configs] == [3, 32]
    assert [config.speculation.enabled for config in configs] == [False, True]


def test_a_port_or_a_folder_that_is_taken_is_refused_before_anything_compiles(
    tmp_path, served, capsys
):
    given = ["--policy", str(ROOT / "policies" / "tiny"), "--folder", str(tmp_path / "server")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main([*given, "--port", f"{port}"]) == EXIT_USAGE
    assert f"127.0.0.1, port {port}: Address already in use" in capsys.readouterr().err
    with contextlib.closing(Records(tmp_path / "server")):
        assert serve.main([*given, "--port", "0"]) == EXIT_USAGE
    assert "another server" in capsys.readouterr().err and not served


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--port", "70000"], "--port: expected 0 to 65535, got 70000"),
        (["--adapters", "0"], "--adapters: expected 1 to 64, got 0"),
        (["--host", "0.0.0.0"], "others could reach the server: set REPRISE_API_KEY"),
        (["--gin.Policy.lora_rank=0"], "expected at least 1: clients train adapters"),
        (["--policy", "nowhere"], "expected a local Hugging Face folder, got 'nowhere'"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, error, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv(serve.KEY, raising=False)
    given = ["--policy", str(ROOT / "policies" / "tiny"), "--folder", str(tmp_path / "server")]
    assert serve.main([*given, *arguments]) == EXIT_USAGE
    assert error in capsys.readouterr().err
    assert not (tmp_path / "server").exists()
