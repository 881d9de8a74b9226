"""A child process with memory and time limits, for work on files that may be hostile.

Templates, tokenizers and packed columns are small programs: a few bytes can take all memory, or
run for hours in code that holds Python's lock, so that no exception and no signal stops them. The
child may allocate `memory_bytes` above its initial size, and exits by itself at the deadline of a
request; the next request starts another child. The child gets no keys or tokens of the environment.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from reprise import IMPORT_ROOT

START_S = 120  # for the imports of a new child, on a busy machine
_SIZE_BYTES = 8  # of the length before each part; length 0 terminates an answer
_STARTED = b"\1"  # before the parts of an answer: the child has read the request
_PASSED_ON = frozenset(  # variables that imports need; others may be secrets
    "PATH HOME TMPDIR TZ LANG LANGUAGE LC_ALL LC_CTYPE LD_LIBRARY_PATH DYLD_LIBRARY_PATH "
    "PYTHONHOME PYTHONPATH PYTHONUSERBASE PYTHONNOUSERSITE PYTHONDONTWRITEBYTECODE "
    "PYTHONPYCACHEPREFIX OMP_NUM_THREADS".split()
)


class ChildEnded(Exception):
    """The child exceeded a limit, or crashed, during a request."""


class Child:
    """A process that runs `module`, which calls `serve`; starts on first use. Thread-safe."""

    def __init__(self, module: str, memory_bytes: int, deadline_s: int) -> None:
        self.memory_bytes = memory_bytes
        self.deadline_s = deadline_s
        self._module = module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def call(self, request: bytes) -> list[bytes]:
        """Return the parts of the answer to a request.

        Raises ChildEnded. A child that exited before it read the request, or was killed from
        outside (by the kernel when memory is short), is restarted once. Raises OSError if the
        second child also exits before it reads the request.
        """
        with self._lock:
            return self._call(request, is_again=False)

    def _call(self, request: bytes, *, is_again: bool) -> list[bytes]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        has_started = False
        try:
            process.stdin.write(len(request).to_bytes(_SIZE_BYTES, "little") + request)
            process.stdin.flush()
            # the child exits at its deadline, so reading needs no timeout
            has_started = _exactly(process.stdout, len(_STARTED)) == _STARTED
            parts = list[bytes]()
            while size := int.from_bytes(_exactly(process.stdout, _SIZE_BYTES), "little"):
                parts.append(_exactly(process.stdout, size))
            return parts
        except OSError as error:
            self.close()
            status = process.returncode
            if has_started and (is_again or status != -signal.SIGKILL):
                raise ChildEnded from error
            if is_again:
                raise OSError(
                    f"expected a process of {self._module} that reads a request, got one that "
                    f"ended before, twice (status {status}): is memory short?"
                ) from error
        except BaseException:  # Ctrl-C between a request and its answer
            self.close()
            raise
        return self._call(request, is_again=True)

    def close(self) -> None:
        """Kill the process if it is running."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            with suppress(OSError), process:  # the pipe may hold half a request
                pass

    def _start(self) -> subprocess.Popen[bytes]:
        passed_on = {name: os.environ[name] for name in _PASSED_ON & os.environ.keys()}
        paths = [IMPORT_ROOT, *filter(None, [passed_on.get("PYTHONPATH")])]
        return subprocess.Popen(
            # -P: the current folder may hold modules of any name
            [
                sys.executable,
                "-P",
                "-m",
                self._module,
                f"{self.memory_bytes}",
                f"{self.deadline_s}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # libraries print pages when they run out of memory
            env={
                **passed_on,
                "PYTHONPATH": os.pathsep.join(paths),
                "HF_HUB_OFFLINE": "1",
                "MALLOC_ARENA_MAX": "2",  # each arena reserves address space
                "TOKENIZERS_PARALLELISM": "false",
                "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
            },
            start_new_session=True,  # the run handles Ctrl-C
        )


def _exactly(file: IO[bytes], num_bytes: int) -> bytes:
    content = file.read(num_bytes)
    if len(content) < num_bytes:
        raise OSError("the end of the pipe")
    return content


# --- in the child ---------------------------------------------------------------------


def serve(prepare: Callable[[], Callable[[bytes], Iterable[bytes]]]) -> None:
    """Answer requests with the function that `prepare` returns after its imports."""
    memory_bytes, deadline_s = map(int, sys.argv[1:])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # an alarm kills this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.alarm(START_S)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints must not mix with answers
    answer = prepare()
    limit_memory(memory_bytes)
    requests = sys.stdin.buffer
    while size := requests.read(_SIZE_BYTES):
        request = requests.read(int.from_bytes(size, "little"))
        signal.alarm(deadline_s)
        answers.write(_STARTED)
        answers.flush()
        for part in answer(request):
            if part:
                answers.write(len(part).to_bytes(_SIZE_BYTES, "little") + part)
        answers.write(bytes(_SIZE_BYTES))
        answers.flush()
        signal.alarm(0)


def limit_memory(more_bytes: int) -> None:
    """Limit this process to `more_bytes` above its present size, if /proc exists."""
    import resource  # not on every system

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (statm := Path("/proc/self/statm")).exists():
        limit = int(statm.read_text().split()[0]) * resource.getpagesize() + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
