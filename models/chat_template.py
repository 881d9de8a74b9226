"""Chat templates, rendered in a child process.

A template is an untrusted Jinja program. transformers' sandbox does not bound its
computation (`"a" * 10**10`), so a child process renders it, with `MEMORY_BYTES` more than it
started with, `DEADLINE_S` for each prompt and `MAX_CHARACTERS` for the text. If it exceeds a bound
it ends, and the next prompt starts another. One child serves all tokenizers of a process.
`strftime_now` prints a day that the caller fixes, so that a run has the same prompts every day.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2**30
DEADLINE_S = 10
START_S = 120  # for the imports of a new child, on a busy machine
MAX_CHARACTERS = 2**22  # of a prompt; as long as today's longest contexts
# Variables that the renderer and transformers set themselves.
RESERVED = frozenset(
    "messages conversation conversations template chat_template tools documents tokenize names "
    "add_generation_prompt continue_final_message return_dict return_assistant_tokens_mask self "
    "render raise_exception strftime_now".split()
)


def check_variables(variables: Iterable[str], specials: Iterable[str] = ()) -> None:
    """Raise ValueError for names that a user may not give a template's variables."""
    for name in variables:
        is_set = name in RESERVED or name in specials or name.endswith("_token")
        if is_set or not name.isidentifier():
            raise ValueError(
                "expected names of a chat template's own variables, such as enable_thinking, got "
                f"{name[:80]!r}{', which is set already: leave it out' if is_set else ''}"
            )


class Renderer:
    """Starts the child process when it is needed; thread-safe. `deadline_s` is in whole seconds."""

    def __init__(self, deadline_s: int = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        day: datetime.date | None = None,
        **names: Any,
    ) -> str:
        """Render a conversation with the template's other variables; ValueError if that fails.

        `day` is the date that the template may print; None: today's.
        """
        request = {"template": template, "messages": list(messages), "names": names}
        request["day"] = (day or datetime.datetime.now(datetime.UTC).date()).isoformat()
        line = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            answer = json.loads(self._send(line))
        if "text" not in answer:
            raise ValueError(f"the chat template cannot be rendered: {answer['error']}")
        return str(answer["text"])

    def close(self) -> None:
        """End the child process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with suppress(OSError), child:  # half a request may be left in its pipe
                pass

    def _send(self, line: bytes) -> bytes:
        """Return the child's answer. It ends by itself at the deadline, so reading needs none."""
        child = self._child = self._child or _start(self._deadline_s)
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = b""
        except BaseException:  # Ctrl-C between a request and its answer
            self.close()
            raise
        if not answer.endswith(b"\n"):
            self.close()
            raise ValueError(
                f"expected the chat template to render a prompt within {self._deadline_s} s and "
                f"{MEMORY_BYTES // 2**20} MiB, but its process ended: give the tokenizer another "
                "template"
            )
        return answer


def _start(deadline_s: int) -> subprocess.Popen[bytes]:
    # -P: this file's folder has modules with common names
    return subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).resolve()), str(deadline_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,  # the run handles Ctrl-C
    )


SHARED = Renderer()
atexit.register(SHARED.close)


# --- in the child ---------------------------------------------------------------------


def _serve(deadline_s: int) -> None:
    """Answer requests, one JSON object per line, until the input ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # an alarm ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.alarm(START_S)
    import resource  # not on every system

    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints must not mix with answers
    from transformers.utils import chat_template_utils

    if (statm := Path("/proc/self/statm")).exists():  # other systems have only the deadline
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin.buffer:
        signal.alarm(deadline_s)
        answer = _render(chat_template_utils, line)
        signal.alarm(0)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _render(library: Any, line: bytes) -> dict[str, str]:
    request = json.loads(line)
    day = datetime.datetime.fromisoformat(request["day"])
    library.datetime = types.SimpleNamespace(now=lambda: day)  # for strftime_now
    try:
        chat, names = [request["messages"]], request["names"]
        rendered = library.render_jinja_template(
            conversations=chat, chat_template=request["template"], **names
        )
    except Exception as error:  # of many types, all caused by the template
        return {"error": ascii(f"{type(error).__name__}: {str(error)[:300]}")[1:-1]}
    text = rendered[0][0]
    if len(text) > MAX_CHARACTERS:
        return {"error": f"expected at most {MAX_CHARACTERS} characters, got {len(text)}"}
    return {"text": text}


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
