"""The actors of a run: programs that answer messages. Ray carries bytes, and reads none of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class _Actor:
    """Has a `rl.remote.program.MessageProgram`, which jax and its settings come with."""

    _program: Any

    def __init__(self) -> None:
        from rl.runtime import host_memory

        host_memory.bound_arenas()  # before any thread of a device

    def answer(self, message: bytes) -> bytes:
        return self._program.answer(message)


class WorkerActor(_Actor):
    """A rollout worker: `rl.remote.worker.WorkerProgram` on the devices that it was placed with.

    `drafts` is the handle of the draft server, if there is one; history workers and drafting
    programs are found by name.
    """

    def __init__(self, config_text: str, drafts: Any, deadline_s: float) -> None:
        super().__init__()
        from rl.remote.program import end_process
        from rl.remote.worker import WorkerProgram
        from rl.runtime import program_cache

        program_cache.keep()
        ask = None if drafts is None else asking(drafts, deadline_s)
        self._program = WorkerProgram(
            config_text, ask, _AskingByName(deadline_s), leave=end_process
        )


class DraftingActor(_Actor):
    """A drafting program: `rl.remote.drafting_service.DraftingProgram` on the devices of its place.

    (The draft server, which has no devices, is `DraftActor`.)
    """

    def __init__(self, config_text: str) -> None:
        super().__init__()
        from rl.remote.drafting_service import DraftingProgram
        from rl.remote.program import end_process
        from rl.runtime import program_cache

        program_cache.keep()
        self._program = DraftingProgram(config_text, leave=end_process)


class DraftActor(_Actor):
    """The draft server: what requests of all workers have said, by group."""

    def __init__(self) -> None:
        super().__init__()
        from rl.remote.drafts import DraftService

        self._program = DraftService()


def asking(actor: Any, deadline_s: float) -> Callable[[bytes], bytes]:
    """Return a function that asks an actor and waits. It raises ProgramLost after the deadline."""
    import ray

    from rl.runtime.waits import ProgramLost

    def ask(message: bytes) -> bytes:
        try:
            answer = ray.get(actor.answer.remote(message), timeout=deadline_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise ProgramLost(f"{type(error).__name__}: {_first_line(error)}") from error
        if type(answer) is not bytes:
            raise ProgramLost(f"expected bytes, got {type(answer).__name__}")
        return answer

    return ask


class _AskingByName:
    """Asks the actor of a name, and waits. Raises ProgramLost where there is none, or it is late.

    No name is given twice, so that who was found once is not looked for again.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._found: dict[str, Callable[[bytes], bytes]] = {}

    def __call__(self, name: str, message: bytes) -> bytes:
        import ray

        from rl.runtime.waits import ProgramLost

        ask = self._found.get(name)
        if ask is None:
            try:
                actor = ray.get_actor(name)
            except (ValueError, ray.exceptions.RayError) as error:
                raise ProgramLost(f"it is not there: {_first_line(error)}") from error
            ask = self._found[name] = asking(actor, self._deadline_s)
        try:
            return ask(message)
        except ProgramLost:
            self._found.pop(name, None)
            raise


class RayChannel:
    """A `rl.remote.link.Channel` to an actor.

    Ray brings answers in the thread that all of its calls need: nothing is done there but handing
    them to `hearing`, as a call of Ray's would never come back.
    """

    def __init__(self, actor: Any, share: Callable[[bytes], Any], hearing: Executor) -> None:
        self._actor, self._share, self._hearing = actor, share, hearing

    def submit(self, message: bytes) -> Future[bytes]:
        """Send a message; the future fails where the actor has died."""
        import ray

        given: Future[bytes] = Future()

        def hear(came: Future[bytes]) -> None:
            error = came.exception()
            if error is None:
                given.set_result(came.result())
            else:
                given.set_exception(RuntimeError(_first_line(error)))

        try:
            sent = self._actor.answer.remote(self._share(message)).future()
        except ray.exceptions.RayError as error:
            raise RuntimeError(_first_line(error)) from error

        def bring(came: Future[bytes]) -> None:
            with contextlib.suppress(RuntimeError):  # nobody hears any more: the run has ended
                self._hearing.submit(hear, came)

        sent.add_done_callback(bring)
        return given

    def end(self) -> None:
        """End the actor, in a thread: Ray may take as long as it likes."""
        threading.Thread(target=self._kill, name="end of an actor", daemon=True).start()

    def _kill(self) -> None:
        import ray

        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # it has ended by itself
            ray.kill(self._actor, no_restart=True)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
