"""Episodes on an engine: the tokens of each turn, whatever the speed of environments and drafts.

The device computes hashes (`symbolic_device`), so that the tokens of a turn are known beforehand.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from shapes import PLAIN

from reprise.rl.data.tasks import Example
from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.environments.episode_rollout import EpisodeJob, EpisodeRollout, total_reward
from reprise.rl.environments.pool import Answer, row_of
from reprise.rl.environments.server import EnvironmentServerError, EpisodeFailed
from reprise.rl.records.trajectory import FinishReason, Request
from reprise.sched.episodes import TURN_NAMES, EpisodeLimits
from reprise.spec.config import SamplingConfig
from reprise.spec.retrieval.suffix_drafter import NgramDrafter
from reprise.spec.verification.sampling import step_key
from tests.support import symbolic_device
from tests.support.symbolic_device import SymbolicEngine, response

SAMPLING = SamplingConfig(max_new_tokens=6)
END = 3
LIMITS = EpisodeLimits(
    max_turns=4, max_environment_tokens=12, max_prompt_tokens=12, max_tokens=30, max_live=4
)


def answer_to(text):
    """An environment by hand: a function of the text of a turn."""
    ids = [int(word) for word in text.split()]
    n = (sum(ids) + len(ids)) % 6
    if n == 0:
        return Answer(done=True, rewards={"": 1.0}, reward=0.25, num_calls=1)
    words = " ".join(str((ids[-1] + i) % 20) for i in range(n))
    return Answer(({"role": "user", "content": words},), reward=-0.5, seconds=0.5)


class ByHand:
    """Environments that answer by `answer_to`, after `delay()` seconds in other threads."""

    def __init__(self, delay=None, faults=()):
        self.threads = None if delay is None else ThreadPoolExecutor(8)
        self.delay = delay
        self.faults = dict(faults)
        self.open = set()
        self.most_open = 0
        self.rows = {}
        self.lock = threading.Lock()

    def _later(self, work):
        if self.threads is not None:
            return self.threads.submit(lambda: (time.sleep(self.delay()), work())[1])
        future = Future()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        return future

    def _answer(self, episode, op, answer):
        if fault := self.faults.get((episode, op)):
            raise fault
        return answer

    def reset(self, episode, row, seeds):
        with self.lock:
            self.open.add(episode)
            self.most_open = max(self.most_open, len(self.open))
            self.rows[episode] = row, tuple(seeds)
        return self._later(lambda: self._answer(episode, "reset", Answer(text="")))

    def step(self, episode, text):
        return self._later(lambda: self._answer(episode, "step", answer_to(text)))

    def score(self, episode):
        scored = Answer(done=True, rewards={"": 0.5})
        return self._later(lambda: self._answer(episode, "score", scored))

    def end(self, episode):
        self.open.discard(episode)

    def end_all(self):
        self.open.clear()


class Words:
    """Token ids as words; no template."""

    tokenizer = property(lambda self: self)

    def decode(self, ids):
        return " ".join(map(str, ids))

    def uses_template(self, example):
        return False

    def prompt(self, example, messages=(), text=""):
        return tuple(example.columns["ids"])

    def after(self, turn_ids, messages, *, uses_template):
        return [int(word) for message in messages for word in message["content"].split()]


def jobs(count=12, seed=0):
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(0, 20, n).tolist()) for n in rng.integers(1, 12, count // 3)]
    made = []
    for i in range(count):
        ids = prompts[i // 3]
        example = Example(f"test#{i // 3}", "?", "1", {"ids": ids}, "test")
        request = Request(i, ids, group_id=i // 3, sample_index=i % 3)
        made.append(EpisodeJob(request, example, [i // 3, i]))
    return made


def expected(job, limits=LIMITS):
    """The pieces of an episode, turns and inserted tokens alternating, and why it has stopped."""
    tokens = list(job.request.prompt_ids)
    pieces = []
    inserted = 0
    for turn in range(limits.max_turns):
        after_prompt = len(tokens) - len(job.request.prompt_ids)
        room = min(SAMPLING.max_new_tokens, limits.max_tokens - after_prompt)
        request = Request(job.request.request_id + turn * TURN_NAMES, tuple(tokens), 0, 0, room)
        drawn, _ = response(request, (END,))
        tokens += drawn
        after_prompt += len(drawn)
        pieces.append(drawn)
        answer = answer_to(" ".join(map(str, drawn)))
        if answer.done:
            return pieces, "done"
        if END not in drawn:
            return pieces, "length"
        ids = [int(word) for word in answer.messages[0]["content"].split()]
        if turn + 1 == limits.max_turns:
            return pieces, "max_turns"
        if inserted + len(ids) > limits.max_environment_tokens:
            return pieces, "environment_tokens"
        if after_prompt + len(ids) >= limits.max_tokens:
            return pieces, "length"
        inserted += len(ids)
        tokens += ids
        pieces.append(ids)
    raise AssertionError("an episode has a last turn")


def play(environments, some, *, drafts=False, limits=LIMITS, on_failure="skip", **options):
    config = dataclasses.replace(PLAIN, max_nodes=8, page_tokens=4)
    engine = SymbolicEngine(symbolic_device.MODEL, config, dtype=np.float32)
    drafter = draft_with(NgramDrafter()) if drafts else draft_with(None)
    spec = RolloutSpec(None, SAMPLING, step_key(0, 0), (END,), drafts=drafter)
    rollout = EpisodeRollout(engine, environments, Words(), limits, on_failure)
    with symbolic_device.device():
        played = rollout.run(spec, some, **options)
    return played, engine.stats


def check(played, some, limits=LIMITS):
    for (t, _), job in zip(played, some, strict=True):
        pieces, end = expected(job, limits)
        assert t.episode.tokens.tolist() == [token for piece in pieces for token in piece]
        turns = [k // 2 if k % 2 == 0 else -1 for k, piece in enumerate(pieces) for _ in piece]
        assert t.episode.turns.tolist() == turns
        assert t.response_ids.tolist() == [token for piece in pieces[::2] for token in piece]
        assert t.episode.end == end
        assert t.episode.num_turns == len(pieces[::2])
        assert t.truncated == (end != "done")


def slowly(seed):
    rng = random.Random(seed)
    return lambda: rng.choice([0.0, 0.0, 0.001, 0.01])


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("delay", [None, 0, 1], ids=["immediate", "slow", "slower"])
def test_turns_are_functions_of_the_tokens_before_them(drafts, delay):
    some = jobs()
    environments = ByHand(None if delay is None else slowly(delay))
    played, stats = play(environments, some, drafts=drafts)
    check(played, some)
    ends = {t.episode.end for t, _ in played}
    assert len(ends) > 1 and max(t.episode.num_turns for t, _ in played) > 1
    assert environments.most_open <= LIMITS.max_live
    assert stats.tokens == sum(t.num_tokens for t, _ in played)
    assert [t.request_id for t, _ in played] == list(range(len(some)))


@pytest.mark.parametrize("max_live", [1, 12])
def test_the_number_of_open_environments_changes_no_token(max_live):
    some = jobs(seed=1)
    limits = dataclasses.replace(LIMITS, max_live=max_live)
    environments = ByHand(slowly(2))
    played, _ = play(environments, some, limits=limits)
    check(played, some, limits)
    assert environments.most_open <= max_live


@pytest.mark.parametrize(
    "changes",
    [{"max_turns": 1}, {"max_environment_tokens": 0}, {"max_tokens": 9}],
    ids=["turns", "environment", "tokens"],
)
def test_limits_end_episodes(changes):
    some = jobs(seed=2)
    limits = dataclasses.replace(LIMITS, **changes)
    played, _ = play(ByHand(), some, limits=limits)
    check(played, some, limits)


def test_one_turn_has_the_tokens_of_a_rollout_without_environments():
    some = jobs()
    limits = dataclasses.replace(LIMITS, max_turns=1)
    played, _ = play(ByHand(), some, limits=limits)
    config = dataclasses.replace(PLAIN, max_nodes=8, page_tokens=4)
    engine = SymbolicEngine(symbolic_device.MODEL, config, dtype=np.float32)
    spec = RolloutSpec(None, SAMPLING, step_key(0, 0), (END,))
    with symbolic_device.device():
        plain = engine.run(spec, [job.request for job in some])
    for (one, _), t in zip(played, plain, strict=True):
        assert one.response_ids.tolist() == t.response_ids.tolist()
        np.testing.assert_array_equal(one.logprobs, t.logprobs)


def test_a_turn_computes_its_new_tokens_only():
    some = jobs(12)
    played, stats = play(ByHand(slowly(0)), some)
    episodes = [t.episode for t, _ in played]
    later = sum(episode.num_turns - 1 for episode in episodes)
    prompts = sum(len(job.request.prompt_ids) for job in some)
    # the inserted tokens, and the last token of each turn; prompts at most once for each episode
    new = prompts + sum(episode.num_inserted for episode in episodes) + later
    assert later and stats.prefilled_tokens <= new


def test_rewards_are_of_turns_and_of_the_episode():
    some = jobs()
    played, _ = play(ByHand(), some)
    for t, score in played:
        episode = t.episode
        last = 0.25 if episode.end == "done" else -0.5
        assert list(episode.turn_rewards) == [-0.5] * (episode.num_turns - 1) + [last]
        whole = 1.0 if episode.end == "done" else 0.5
        assert score.total == pytest.approx(whole + sum(episode.turn_rewards))
        assert score.values == {"environment": score.total}
    assert total_reward({}, []) is None and total_reward({"": None}, [None]) is None
    assert total_reward({"a": 1.0, "b": 2.0, "c": None}, [0.5, None]) == 3.5


@pytest.mark.parametrize(("on_failure", "total"), [("skip", None), ("zero", 0.0)])
@pytest.mark.parametrize("op", ["reset", "step", "score"])
def test_a_failure_costs_its_episode(op, on_failure, total):
    some = jobs(seed=2)
    limits = dataclasses.replace(LIMITS, max_turns=2)
    ends = [expected(job, limits)[1] for job in some]
    [bad, *_] = [i for i, end in enumerate(ends) if end != "done"]
    fault = {(bad, op): EpisodeFailed("deadline", "no answer")}
    played, _ = play(ByHand(slowly(0), fault), some, limits=limits, on_failure=on_failure)
    t, score = played.pop(bad)
    check(played, [job for i, job in enumerate(some) if i != bad], limits)
    assert t.episode.failure == "deadline" and t.episode.end == "failed"
    assert score.failure == "environment/deadline: no answer"
    assert score.total == total
    assert t.episode.num_turns == {"reset": 0, "step": 1}.get(op, t.episode.num_turns)
    assert t.finish_reason is FinishReason.STOP


def test_one_hung_one_raising_and_one_killed_environment_of_64_cost_three_episodes():
    some = jobs(66, seed=3)[:64]
    kinds = {5: "deadline", 31: "raised", 62: "died"}
    faults = {(i, "step"): EpisodeFailed(kind, "a fault") for i, kind in kinds.items()}
    limits = dataclasses.replace(LIMITS, max_live=16)
    played, _ = play(ByHand(slowly(4), faults), some, drafts=True, limits=limits)
    failed = {i: t.episode.failure for i, (t, _) in enumerate(played) if t.episode.failure}
    assert failed == kinds
    good = [i for i in range(len(some)) if i not in kinds]
    check([played[i] for i in good], [some[i] for i in good], limits)


def test_messages_without_tokens_cost_their_episode():
    class Broken(Words):
        def after(self, turn_ids, messages, *, uses_template):
            raise ValueError("the chat template cannot be rendered")

    some = jobs(3)
    engine = SymbolicEngine(symbolic_device.MODEL, PLAIN, dtype=np.float32)
    spec = RolloutSpec(None, SAMPLING, step_key(0, 0), (END,))
    with symbolic_device.device():
        played = EpisodeRollout(engine, ByHand(), Broken(), LIMITS).run(spec, some)
    for (_, score), job in zip(played, some, strict=True):
        [first, *_], _ = expected(job)
        is_done = answer_to(" ".join(map(str, first))).done
        assert (score.failure is None) == is_done


def test_a_prompt_that_is_too_long_costs_its_episode():
    some = jobs(3)
    limits = dataclasses.replace(LIMITS, max_prompt_tokens=len(some[0].request.prompt_ids) - 1 or 1)
    long = [len(job.request.prompt_ids) > limits.max_prompt_tokens for job in some]
    played, _ = play(ByHand(), some, limits=limits)
    for (t, score), is_long in zip(played, long, strict=True):
        assert (t.episode.failure == "long_prompt") == is_long
        assert (score.failure is not None) == is_long


def test_an_environment_gets_the_columns_and_seeds_of_its_episode():
    some = jobs(3)
    environments = ByHand()
    play(environments, some)
    for job in some:
        row, seeds = environments.rows[job.request.request_id]
        assert row == row_of(job.example) and seeds == tuple(job.seeds)
        assert row["answer"] == "1" and row["task"] == "test"
    assert not environments.open


@pytest.mark.parametrize("where", ["on_round", "environments"])
def test_an_error_closes_all_environments(where):
    some = jobs()
    environments = ByHand(slowly(0))
    options = {}
    if where == "on_round":

        def stop(finished, tokens):
            if tokens:
                raise KeyboardInterrupt

        options = {"on_round": stop}
    else:
        environments.faults = {(5, "reset"): EnvironmentServerError("no process")}
    with pytest.raises((KeyboardInterrupt, EnvironmentServerError)):
        play(environments, some, **options)
    assert not environments.open


def test_no_episodes_need_no_rollout():
    assert play(ByHand(), [])[0] == []
