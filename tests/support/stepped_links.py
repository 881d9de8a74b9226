"""A drafting worker without a thread: it works while its verifying worker asks for blocks."""

import collections

from spec.drafter import Source


class SteppedLink:
    """Steps a way of drafting `steps` times a round; what it sends takes `delay` rounds."""

    source = Source.MODEL

    def __init__(self, ahead, *, steps=1, delay=0, source=Source.MODEL):
        self.ahead, self.steps, self.generation = ahead, steps, 0
        self.source = source
        self.told = []
        self.sent = collections.deque([[] for _ in range(delay)])

    def tell(self, commits, closed):
        self.told.append((commits, closed))
        self.ahead.hear(commits, closed)

    def take(self):
        self.sent.append([block for _ in range(self.steps) for block in self.ahead.step()])
        return self.sent.popleft()

    def wait(self, timeout_s):
        self.sent[-1].extend(self.ahead.step()) if self.sent else self.sent.append(
            self.ahead.step()
        )
