"""Faults of worker programs that are planted: they are killed, stop, and say what is not so."""

import dataclasses
import threading
import time

from rl.remote import messages
from rl.remote.messages import CODEC


class Killing:
    """Kills a program, or stops it, with its nth message of a kind; only the first of a number.

    Of all messages of the kind those count for which `when` is true.
    """

    def __init__(self, kind, nth, how="kill", numbers=(0,), when=lambda message: True):
        self.kind, self.nth, self.how, self.numbers = kind, nth, how, numbers
        self.when = when
        self.victims, self.made = [], 0

    def __call__(self, channel):
        number, self.made = self.made, self.made + 1
        if number in self.numbers:
            counted = iter(range(1, 1000))

            def heard(message):
                told = CODEC.decode(message)
                counts = isinstance(told, self.kind) and self.when(told)
                if counts and next(counted) == self.nth:
                    self.victims.append(channel)
                    if self.how == "stop":
                        channel.stopped = True
                    else:
                        threading.Thread(target=channel.kill).start()

            channel._heard = heard


class Lying:
    """Answers the nth Poll with another report."""

    def __init__(self, change):
        self._change = change

    def __call__(self, channel):
        true = channel._answer

        def answer(message):
            told = CODEC.decode(true(message))
            changed = self._change(told) if isinstance(told, messages.Report) else None
            return CODEC.encode(told if changed is None else changed)

        channel._answer = answer


def other_report(change):
    def changed(report):
        events = tuple(filter(None, (change(e) for e in report.events)))
        return dataclasses.replace(report, events=events)

    return changed


def wait_until(holds, limit_s=30.0):
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, "in time"
        time.sleep(0.01)


def of_first(number, change):
    """Change the first program of a number alone."""
    changed = []

    def of_channel(channel):
        if channel.number == number and not changed:
            changed.append(channel)
            change(channel)

    return of_channel
