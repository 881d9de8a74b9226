"""Runs hostile cases in this process, and counts what must not happen.

A case is given a folder, does what a command would, and may end in the errors that the command
turns into a sentence. Counted are writes outside of the folder and executions of anything that the
case brought along (Python's audit events say so, and no canary file may appear), reads of files
that are not this program's or the inputs', cases that do not end within their limit, errors of
any other kind, and inputs that are accepted in silence and read as another one than they are.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable
from pathlib import Path

CANARY = "reprise_canary"  # in every payload: who executes one, is seen by it
SENTENCES = (ValueError, OSError, ImportError)  # what rl.train prints as one line, and exits with 2
LIMIT_S = 120.0  # of a busy machine

_STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen"}
_FIRST, _SECOND, _BOTH = slice(0, 1), slice(1, 2), slice(0, 2)
_PATHS = {  # which arguments name what is changed
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod"), _FIRST),
    "shutil.rmtree": _FIRST,
    **dict.fromkeys(("os.link", "os.symlink"), _SECOND),
    "os.rename": _BOTH,
}
# processes that checks start themselves
_OURS = "models.text.chat_template", "models.text.tokenizer_files", "rl.data.unpack", "nvidia-smi"
_OURS += ("rl.rewards.worker",)
LONG_S = 30.0
LARGE_BYTES = 2e9


# Python, this checkout, and tables of processes and devices; `count` is told where inputs lie.
_READABLE = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), "/proc/", "/sys/")


class Wrong(Exception):
    """An input was accepted without a word, and read as another one than it is."""


@dataclasses.dataclass(frozen=True)
class Case:
    """`run(folder)` does what is tried; `refused`: it must not be accepted."""

    name: str
    run: Callable[[Path], object]
    refused: bool = False


@dataclasses.dataclass
class Counts:
    """How many cases were tried, and what became of them; `seen` names what must not happen."""

    tried: int = 0
    accepted: int = 0
    outside_writes: int = 0
    outside_reads: int = 0
    executions: int = 0
    hangs: int = 0
    tracebacks: int = 0
    over_30_s: int = 0
    over_2_gb: int = 0
    accepted_though_wrong: int = 0
    seen: list[str] = dataclasses.field(default_factory=list)

    @property
    def row(self) -> dict[str, int]:
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "seen"}


class Hang(BaseException):
    """A case's time is up."""


class _Spy:
    """What audit events say while a case runs. Hooks cannot be removed: there is one a process."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.readable: tuple[str, ...] = ()
        self.writes: list[str] = []
        self.reads: list[str] = []
        self.executions: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple) -> None:
        if self.folder is None:
            return
        if event == "open":
            path, mode, flags = arguments
            if _writes(mode, flags):
                self._wrote(event, path)
            elif isinstance(path, str | bytes | os.PathLike):
                full = os.path.realpath(os.fsdecode(path))
                if not full.startswith((self.folder, os.devnull, *self.readable)):
                    self.reads.append(f"read {full}")
        elif event in _PATHS:
            for path in arguments[_PATHS[event]]:
                self._wrote(event, path)
        elif event in _STARTS:
            text = repr(arguments)
            if not any(name in text for name in _OURS):
                self.executions.append(f"{event} {text}"[:200])
        elif event == "import" and CANARY in str(arguments[0]):
            self.executions.append(f"import {arguments[0]}")
        elif event == "exec" and _is_of_the_case(arguments[0], self.folder):
            self.executions.append(f"exec {arguments[0]!r}"[:200])
        elif event == "pickle.find_class":
            self.executions.append(f"unpickled {arguments!r}"[:200])

    def _wrote(self, event: str, path: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor: its opening was seen
        full = os.path.realpath(os.fsdecode(path))
        assert self.folder is not None
        allowed = full.startswith(self.folder + os.sep) or full in (self.folder, os.devnull)
        if not (allowed or "__pycache__" in full):
            self.writes.append(f"{event} {full}")


def _writes(mode: object, flags: object) -> bool:
    if isinstance(mode, str) and any(letter in mode for letter in "wax+"):
        return True
    wanted = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    return isinstance(flags, int) and bool(flags & wanted)


def _is_of_the_case(code: object, folder: str) -> bool:
    if not isinstance(code, types.CodeType):
        return False
    names = (*code.co_names, *(c for c in code.co_consts if isinstance(c, str)))
    return code.co_filename.startswith(folder) or any(CANARY in name for name in names)


_spy: _Spy | None = None


def count(
    cases: Iterable[Case], limit_s: float = LIMIT_S, inputs: Path = Path("/nowhere")
) -> Counts:
    """Run every case in a folder of its own; `inputs` is the folder of good ones."""
    global _spy
    _spy = _spy or _Spy()
    counts = Counts()
    for case in cases:
        with tempfile.TemporaryDirectory() as outer:
            folder = Path(outer).resolve() / "case"
            folder.mkdir()
            _spy.readable = (*_READABLE, str(inputs.resolve()))
            _one(case, folder, counts, _spy, limit_s)
            if any(CANARY in p.name for p in Path(outer).iterdir()):
                counts.executions += 1
                counts.seen.append(f"{case.name}: the canary file is there")
    return counts


def _memory_bytes(*, reset: bool = False) -> int:
    """Return the most memory of this process since a reset; 0 without /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _one(case: Case, folder: Path, counts: Counts, spy: _Spy, limit_s: float) -> None:
    counts.tried += 1

    def ring(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    before_bytes, start_s = _memory_bytes(reset=True), time.monotonic()
    spy.writes, spy.reads, spy.executions, spy.folder = [], [], [], str(folder)
    try:
        case.run(folder)
        counts.accepted += 1
        if case.refused:
            counts.accepted_though_wrong += 1
            counts.seen.append(f"{case.name}: accepted")
    except SENTENCES:
        pass
    except Wrong as error:
        counts.accepted += 1
        counts.accepted_though_wrong += 1
        counts.seen.append(f"{case.name}: {error}")
    except Hang:
        counts.hangs += 1
        counts.seen.append(f"{case.name}: not done in {limit_s} s")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        counts.tracebacks += 1
        counts.seen.append(f"{case.name}: {type(error).__name__}: {str(error)[:200]!r}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        spy.folder = None
    seconds, more_bytes = time.monotonic() - start_s, _memory_bytes() - before_bytes
    if seconds > LONG_S or more_bytes > LARGE_BYTES:
        counts.over_30_s += seconds > LONG_S
        counts.over_2_gb += more_bytes > LARGE_BYTES
        counts.seen.append(f"{case.name}: {seconds:.0f} s, {more_bytes / 1e9:.1f} GB")
    counts.outside_writes += len(spy.writes)
    counts.outside_reads += len(spy.reads)
    counts.executions += len(spy.executions)
    seen = (*spy.writes, *spy.reads, *spy.executions)
    counts.seen += [f"{case.name}: {what}" for what in seen]
