"""The scoring of a run's responses, by reward workers of its own program or by scorers on Ray."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

from models.tokenizer import Tokenizer
from rl.cluster.actors import ActorSettings
from rl.config import TrainConfig
from rl.data.tasks import Example
from rl.engine.stats import EngineStats
from rl.exchange import UNSCORED, WHOLE, Responses, Shares
from rl.rewards.pool import RewardPool
from rl.rewards.process import RewardWorkerError
from rl.rewards.scorers import Scorers
from rl.rewards.scores import Rewards, Score, ScoreJob
from rl.runtime.progress import Progress
from rl.trajectory import Trajectory


@contextlib.contextmanager
def open_rewards(
    config: TrainConfig, tasks: Sequence[str], say: Callable[[str], None]
) -> Iterator[Rewards]:
    """Start them without waiting (`wait_started` does), and end them at the end.

    Scorers are actors: Ray must be there (`rl.ray_run.open_workers`).
    """
    with contextlib.ExitStack() as stack:
        rewards: Rewards
        if count := config.cluster.scorers:
            from rl.cluster.ray_session import reserve

            limit_s, cpus = config.cluster.deadline_s, config.reward.workers
            setting = f"Cluster.scorers={count} of Reward.workers={cpus}"
            room = stack.enter_context(reserve(count, setting, 2 * limit_s, cpus=cpus))
            settings = ActorSettings({}, limit_s, 2 * limit_s, say)
            rewards = Scorers(config.reward, tasks, count, room, settings)
        else:
            rewards = RewardPool(config.reward, tasks)
        stack.callback(rewards.close)
        rewards.start()  # their processes start while training is traced
        yield rewards


class Scorer:
    """Called with a response as it ends, it sends it to the reward workers; `examples` by group.

    Of the groups that another process scores it does not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        rewards: Rewards,
        check: Callable[[], None],
        shares: Shares = WHOLE,
    ) -> None:
        self._tokenizer, self._rewards, self._check = tokenizer, rewards, check
        self._shares = shares
        self.examples: dict[int, Example] = {}
        self._waiting: dict[int, tuple[Future[Score], str]] = {}

    def __call__(self, t: Trajectory) -> None:
        if not self._shares.scores(t.group_id):
            return
        text = self._tokenizer.decode(t.response_ids.tolist())
        job = ScoreJob(self.examples[t.group_id], text, tuple(t.response_ids.tolist()))
        self._waiting[t.request_id] = self._rewards.submit(job), text

    def result(self, t: Trajectory) -> tuple[Score, str]:
        """The response's score, once it is there, and its text; `check` is called meanwhile."""
        future, text = self._waiting.pop(t.request_id)
        return self._rewards.result(future, self._check), text

    def responses(self, done: Iterable[Trajectory], stats: EngineStats) -> Responses:
        """Return the responses with their scores and texts, by group and sample.

        Those that another process scores have neither.
        """
        ordered = sorted(done, key=lambda t: (t.group_id, t.sample_index))
        here = self._shares.scores
        scored = [self.result(t) if here(t.group_id) else (UNSCORED, "") for t in ordered]
        pairs = zip(ordered, scored, strict=True)
        rewarded = [dataclasses.replace(t, reward=score.total) for t, (score, _) in pairs]
        return Responses(rewarded, [s for s, _ in scored], [x for _, x in scored], stats)

    def forget(self, *, before: int) -> None:
        """Groups below this number have nothing to be scored any more."""
        self.examples = {g: example for g, example in self.examples.items() if g >= before}


def tell_failures(show: Progress, scores: Sequence[Score], step: int) -> None:
    """Say how many samples could not be scored, and why.

    Raises RewardWorkerError where that is all of a run's first step: it would learn nothing.
    """
    told = told_failures(scores)
    if step == 1 and all(score.failure is not None for score in scores):
        raise RewardWorkerError(f"no sample of the first step could be scored: {told}")
    if told:
        show.message(f"warning: step {step}: {told}")


def told_failures(scores: Sequence[Score]) -> str:
    """Return how many samples could not be scored, and why; empty where all could.

    It is one line: a reward's message may quote the response.
    """
    kinds: dict[str, list[str]] = {}
    for failure in (score.failure for score in scores):
        if failure is not None:
            line = " ".join(failure.split())
            kinds.setdefault(line.split(": ")[0], []).append(line)
    return "; ".join(f"{len(k)} of {len(scores)} samples: {k[0]}" for k in kinds.values())
