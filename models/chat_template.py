"""Chat templates, rendered in a process of their own.

A template is a Jinja program that came with a folder. transformers' sandbox keeps it away from
Python and from files, but does not bound its computation: `"a" * 10**10` is one product. So it
runs in a child process that has `MEMORY_BYTES` more than it started with, `DEADLINE_S` for each
prompt and `MAX_CHARACTERS` for its answer; a child that takes longer is killed, and the next
prompt gets a new one. One child serves all tokenizers of a process.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2**30
DEADLINE_S = 10
START_S = 120.0  # of the imports of a new child, on a busy machine
MAX_CHARACTERS = 2**22  # of a prompt; the longest contexts of today are as many
# What the renderer and transformers set themselves.
TAKEN = frozenset(
    "messages conversation conversations template chat_template tools documents tokenize names "
    "add_generation_prompt continue_final_message return_dict return_assistant_tokens_mask self "
    "render raise_exception strftime_now".split()
)


def check_variables(variables: Iterable[str], specials: Iterable[str] = ()) -> None:
    """Raise ValueError for names that a user may not give a template's variables."""
    for name in variables:
        if name in TAKEN or name in specials or name.endswith("_token"):
            raise ValueError(
                f"expected names of a chat template's own variables, such as enable_thinking, got "
                f"{name[:80]!r}, which is set already: leave it out"
            )
        if not name.isidentifier():
            raise ValueError(
                f"expected names of a chat template's variables, such as enable_thinking, got "
                f"{name[:80]!r}"
            )


class Renderer:
    """The child process, started when it is needed; any thread may use it.

    `deadline_s` is in whole seconds.
    """

    def __init__(self, deadline_s: int = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], **names: Any) -> str:
        """Render a conversation as text; `names` are the other variables of the template.

        Raises ValueError where the template fails, and where it exceeds a bound.
        """
        request = {"template": template, "messages": list(messages), "names": names}
        line = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            answer = json.loads(self._answer(line))
        if "text" not in answer:
            raise ValueError(f"the chat template cannot be rendered: {answer['error']}")
        return str(answer["text"])

    def close(self) -> None:
        """End the child process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except OSError:
                    pass  # a part of a request to a child that has ended

    def _answer(self, line: bytes) -> bytes:
        if self._child is None:
            self._child = _started(self._deadline_s)
            if not _read_line(self._child, START_S):
                self.close()
                raise ValueError("the process that renders chat templates did not start")
        child = self._child
        assert child.stdin is not None
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer = _read_line(child, self._deadline_s + 5.0)
        except OSError:
            answer = b""
        except BaseException:  # Ctrl-C between a question and its answer
            self.close()
            raise
        if not answer:
            self.close()
            raise ValueError(
                f"the chat template was expected to render a prompt within {self._deadline_s} s "
                f"and {MEMORY_BYTES // 2**20} MiB, and did not: give the tokenizer another template"
            )
        return answer


def _started(deadline_s: int) -> subprocess.Popen[bytes]:
    # -P: the folder of this file holds modules with common names.
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).resolve()), str(deadline_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,  # Ctrl-C is for the run to handle
    )


def _read_line(child: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Read a line of the child's; empty where it ends, or sends no whole line in time."""
    assert child.stdout is not None
    until, pieces = time.monotonic() + timeout_s, [b""]
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while not pieces[-1].endswith(b"\n"):
            if not selector.select(max(0.0, until - time.monotonic())):
                return b""
            piece = os.read(child.stdout.fileno(), 2**16)
            if not piece:
                return b""
            pieces.append(piece)
    return b"".join(pieces)


# --- in the child ---------------------------------------------------------------------


def _serve(deadline_s: int) -> None:
    """Answer requests, one JSON object per line, until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints must not mix with answers
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    answers.write(b"ready\n")
    answers.flush()
    for line in sys.stdin.buffer:
        signal.alarm(deadline_s)  # it is not caught, and ends the process
        answer = _rendered(render_jinja_template, line)
        signal.alarm(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _rendered(render: Any, line: bytes) -> dict[str, str]:
    request = json.loads(line)
    try:
        texts, _ = render(
            conversations=[request["messages"]],
            chat_template=request["template"],
            **request["names"],
        )
    except Exception as error:  # of many types, all caused by the template
        return {"error": ascii(f"{type(error).__name__}: {str(error)[:300]}")[1:-1]}
    if len(texts[0]) > MAX_CHARACTERS:
        return {"error": f"expected at most {MAX_CHARACTERS} characters, got {len(texts[0])}"}
    return {"text": texts[0]}


def _limit_memory() -> None:
    import resource

    statm = Path("/proc/self/statm")
    if statm.exists():  # elsewhere only the deadline bounds it
        mapped = int(statm.read_text().split()[0]) * resource.getpagesize()
        limit = mapped + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
else:
    SHARED = Renderer()
    atexit.register(SHARED.close)
