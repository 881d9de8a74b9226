"""Answers that are late, of another request, endless or no JSON stop the connection."""

import socket
import threading
import time

import pytest

from reprise.rl.rewards import process
from reprise.rl.rewards.process import Lines, WorkerStopped


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Lines(ours), theirs


def answering(theirs, answer):
    """Answer one request with a function of its ticket."""

    def work():
        text = theirs.recv(1 << 16).decode()
        ticket = text.split('"')[3]
        theirs.sendall(answer(ticket))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def call(ours, body, limit):
    return ours.receive(ours.send(body, limit), limit)


def soon():
    return time.monotonic() + 0.3


def test_an_answer_has_the_ticket_of_its_request(pair):
    ours, theirs = pair
    thread = answering(theirs, lambda t: f'{{"ticket": "{t}", "answer": 1}}\n'.encode())
    assert call(ours, b"{}", time.monotonic() + 30)["answer"] == 1
    thread.join()


@pytest.mark.parametrize(
    "text",
    [
        b'{"ticket": "1-0", "answer": 1}\n',
        b"\n",
        b"no JSON\n",
        b"[1]\n",
        b"[" * 5000 + b"\n",
        b"\xff\n",
    ],
    ids=["ticket", "empty", "text", "list", "deep", "bytes"],
)
def test_other_lines_break_the_protocol(pair, text):
    ours, theirs = pair
    thread = answering(theirs, lambda ticket: text)
    with pytest.raises(WorkerStopped) as stopped:
        call(ours, b"{}", time.monotonic() + 30)
    assert stopped.value.kind == "protocol"
    thread.join()


def test_a_line_without_end_breaks_the_protocol(pair, monkeypatch):
    ours, theirs = pair
    monkeypatch.setattr(process, "MAX_LINE_BYTES", 100)
    thread = answering(theirs, lambda ticket: b"a" * 200)
    with pytest.raises(WorkerStopped) as stopped:
        call(ours, b"{}", time.monotonic() + 30)
    assert stopped.value.kind == "protocol"
    thread.join()


def test_no_answer_is_a_missed_deadline(pair):
    with pytest.raises(WorkerStopped) as stopped:
        call(pair[0], b"{}", soon())
    assert stopped.value.kind == "deadline"


def test_a_side_that_takes_no_input_misses_its_deadline(pair):
    with pytest.raises(WorkerStopped) as stopped:
        call(pair[0], b'"' + b"a" * (1 << 24) + b'"', soon())
    assert stopped.value.kind == "deadline"


def test_a_closed_socket_is_a_death(pair):
    ours, theirs = pair
    theirs.close()
    for _ in range(2):
        with pytest.raises(WorkerStopped) as stopped:
            call(ours, b"{}", soon())
        assert stopped.value.kind == "died"


def test_closing_ends_a_call_in_another_thread(pair):
    ours, _ = pair
    timer = threading.Timer(0.05, ours.close)
    timer.start()
    with pytest.raises(WorkerStopped) as stopped:
        call(ours, b"{}", time.monotonic() + 30)
    assert stopped.value.kind == "died"
    timer.join()


def test_text_before_a_request_breaks_the_protocol(pair):
    ours, theirs = pair
    both = lambda t: f'{{"ticket": "{t}"}}\n{{"ticket": "{t}"}}\n'.encode()  # noqa: E731
    thread = answering(theirs, both)
    call(ours, b"{}", time.monotonic() + 30)
    thread.join()
    with pytest.raises(WorkerStopped) as stopped:
        call(ours, b"{}", soon())
    assert stopped.value.kind == "protocol"
