"""A standing child: started again if it ended by itself between requests, and without secrets."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.models import child
from reprise.models.child import Child, ChildEnded

MODULE = """
import os, signal, sys
sys.path.insert(0, {home!r})
from reprise.models.child import serve

def answer(request):
    words = request.decode().split()
    if words[0] == "kill":
        os.kill(os.getpid(), int(words[1]))
    if words[0] == "once" and not os.path.exists(words[1]):
        open(words[1], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if words[0] == "environment":
        return [f"{{k}}={{v}}".encode() for k, v in os.environ.items()]
    return [request, str(os.getpid()).encode()]

if __name__ == "__main__":
    serve(lambda: answer)
"""


@pytest.fixture
def standing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    (tmp_path / "answering.py").write_text(MODULE.format(home=str(Path(__file__).parents[2])))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    standing = Child("answering", 2**28, 30)
    yield standing
    standing.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_ended_between_requests_is_started_again(
    standing: Child, number: signal.Signals
) -> None:
    _, first = standing.call(b"a")
    assert standing.call(b"b") == [b"b", first], "it serves all requests"
    process = standing._process
    assert process is not None
    process.send_signal(number)
    process.wait()
    request, second = standing.call(b"c")
    assert request == b"c" and second != first


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGSEGV, signal.SIGABRT])
def test_one_that_ends_within_a_request_is_the_requests_fault(
    standing: Child, number: signal.Signals
) -> None:
    starts = counted_starts(standing)
    with pytest.raises(ChildEnded):
        standing.call(f"kill {int(number)}".encode())
    assert len(starts) == 1 and standing.call(b"a")[0] == b"a"


def test_one_that_is_killed_within_a_request_has_another_try(
    standing: Child, tmp_path: Path
) -> None:
    request = f"once {tmp_path / 'there'}".encode()
    assert standing.call(request)[0] == request
    with pytest.raises(ChildEnded):
        standing.call(b"kill %d" % signal.SIGKILL)


def test_one_that_never_begins_is_no_fault_of_the_request(standing: Child, tmp_path: Path) -> None:
    (tmp_path / "answering.py").write_text("raise SystemExit(3)")
    starts = counted_starts(standing)
    with pytest.raises(OSError, match=r"process of answering .* twice \(status 3\)"):
        standing.call(b"a")
    assert len(starts) == 2


def counted_starts(standing: Child) -> list[int]:
    start, starts = standing._start, list[int]()
    standing._start = lambda: starts.append(1) or start()  # type: ignore[assignment, method-assign]
    return starts


def test_it_has_no_secrets_of_the_environment(
    standing: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "k-1234")
    found = {one.decode().partition("=")[0] for one in standing.call(b"environment")}
    own = {"HF_HUB_OFFLINE", "MALLOC_ARENA_MAX", "TOKENIZERS_PARALLELISM"}
    own |= {"TRANSFORMERS_NO_ADVISORY_WARNINGS", "XLA_FLAGS"}  # the last one is set by `models`
    assert found - own <= child._PASSED_ON and "PATH" in found
    assert not any("k-1234" in one for one in map(bytes.decode, standing.call(b"environment")))
