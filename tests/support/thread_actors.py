"""Programs of actors in threads of this process, which can be killed, stopped and started late."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from reprise.rl.cluster.actors import ActorDied, ActorSettings, Host

SETTINGS = ActorSettings({}, deadline_s=300.0, start_s=300.0)


class ThreadHandle:
    """A `Host` in this process; `kill` fails what waits, `stop` leaves all without an answer."""

    def __init__(self, host, concurrency):
        self.host, self.calls, self.is_stopped, self.is_killed = host, [], False, False
        self._threads, self._lock = ThreadPoolExecutor(concurrency), threading.Lock()
        self._waiting = set()

    def submit(self, member, *args):
        answer = Future()
        with self._lock:
            if self.is_killed:
                answer.set_exception(ActorDied("killed"))
                return answer
            self._waiting.add(answer)
            self.calls.append((member, *args))
        self._threads.submit(self._work, answer, member, *args)
        return answer

    def _work(self, answer, member, *args):
        done = Future()
        try:
            done.set_result(getattr(self.host, member)(*args))
        except Exception as error:
            done.set_exception(error)
        with self._lock:
            if self.is_killed or self.is_stopped:
                return
            self._waiting.discard(answer)
        if done.exception() is None:
            answer.set_result(done.result())
        else:
            answer.set_exception(done.exception())

    def kill(self):
        with self._lock:
            if self.is_killed:
                return
            self.is_killed, waiting = True, list(self._waiting)
        if hasattr(getattr(self.host, "_object", None), "close"):
            self.host._object.close()
        for answer in waiting:
            answer.set_exception(ActorDied("killed"))


class ThreadRoom:
    """Starts programs in threads: `started` has those of each index, in order.

    `changed` gets each before its first call; the starts of an index wait for `hold[index]`.
    """

    def __init__(self, changed=lambda index, handle: None):
        self.started, self.hold, self._changed = {}, {}, changed

    def start(self, index, concurrency, name):
        if index in self.hold:
            assert self.hold[index].wait(60)
        handle = ThreadHandle(Host(cpu_only=False), concurrency)
        self.started.setdefault(index, []).append(handle)
        self._changed(index, handle)
        return handle
