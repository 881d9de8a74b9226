"""A drafting worker without a thread: it works while its verifying worker asks for blocks."""

import collections

import numpy as np


class SteppedLink:
    """Steps a way of drafting `steps` times a round; what it sends takes `delay` rounds."""

    def __init__(self, ahead, *, steps=1, delay=0):
        self.ahead, self.steps, self.generation = ahead, steps, 0
        self.told = []
        self.sent = collections.deque([[] for _ in range(delay)])

    def send(self, commits, closed):
        self.told.append((commits, closed))
        self.ahead.update(commits, closed)

    def take(self):
        self.sent.append([block for _ in range(self.steps) for block in self.ahead.step()])
        return self.sent.popleft()

    def wait(self, timeout_s):
        if not self.sent:
            self.sent.append([])
        self.sent[-1].extend(self.ahead.step())


class TroubledLink(SteppedLink):
    """Whatever comes goes through `trouble(blocks, rng)` first."""

    def __init__(self, ahead, trouble, *, seed=0, **options):
        super().__init__(ahead, **options)
        self.trouble, self.rng = trouble, np.random.default_rng(seed)

    def take(self):
        return self.trouble(super().take(), self.rng)


class DeafLink(SteppedLink):
    """Some of what is told is lost, so that what comes later does not follow."""

    def __init__(self, ahead, *, seed=0, **options):
        super().__init__(ahead, **options)
        self.rng, self.lost = np.random.default_rng(seed), 0

    def send(self, commits, closed):
        heard = [commit for commit in commits if self.rng.random() < 0.8]
        self.lost += len(commits) - len(heard)
        super().send(heard, closed)


class ReplacedLink(SteppedLink):
    """Every few rounds its worker is lost, with what it was about to send or without."""

    def __init__(self, make_ahead, *, rounds, keeps, **options):
        super().__init__(make_ahead(), **options)
        self.make_ahead, self.rounds, self.keeps, self.taken = make_ahead, rounds, keeps, 0

    def take(self):
        self.taken += 1
        if self.taken % self.rounds == 0:
            self.ahead, self.generation = self.make_ahead(), self.generation + 1
            if not self.keeps:
                self.sent = collections.deque([] for _ in self.sent)
        return super().take()


def drops(blocks, rng):
    return [block for block in blocks if rng.random() < 0.5]


def repeats(blocks, rng):
    return [block for block in blocks for _ in range(int(rng.integers(1, 4)))]


def wrong_tokens(blocks, rng):
    """Some of a block's tokens are others."""
    found = []
    for block in blocks:
        other = rng.random(len(block.tokens_N)) < 0.4
        tokens_N = np.where(other, rng.integers(0, 50, len(other)), block.tokens_N)
        found.append(block._replace(tokens_N=tokens_N.astype(np.int32)))
    return found


def wrong_bases(blocks, rng):
    """Blocks that say that they follow from somewhere else."""
    return [
        block._replace(base_tokens=max(block.base_tokens + int(rng.integers(-2, 3)), 0))
        for block in blocks
    ]


def wrong_requests(blocks, rng):
    """Each block is another request's, or one's that was never there."""
    ids = [block.request_id for block in blocks]
    return [block._replace(request_id=int(rng.choice([*ids, 999]))) for block in blocks]


class Shuffles:
    """Blocks come in any order, some much later."""

    def __init__(self):
        self.kept = []

    def __call__(self, blocks, rng):
        self.kept += blocks
        rng.shuffle(self.kept)
        n = int(rng.integers(0, len(self.kept) + 1))
        now, self.kept = self.kept[:n], self.kept[n:]
        return now
