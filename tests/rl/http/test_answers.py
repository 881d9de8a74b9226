"""Results wait to be fetched, more than once, within a bound of bytes."""

from __future__ import annotations

import asyncio

import pytest

from reprise.rl.http.account import Account
from reprise.rl.http.answers import OVERHEAD_BYTES, Answers


def run(coroutine):
    return asyncio.run(coroutine)


def test_an_answer_is_fetched_again_and_waited_for():
    async def play():
        answers = Answers(Account())
        answers.open("a")
        assert await answers.fetch("a", 0.01) is None and answers.num_waiting == 1
        asyncio.get_running_loop().call_later(0.01, answers.set, "a", b"done")
        for _ in range(2):
            answer = await answers.fetch("a", 60.0)
            assert answer.body == b"done"
        assert answers.num_waiting == 0 and len(answers) == 1
        with pytest.raises(KeyError):
            await answers.fetch("b", 0.01)

    run(play())


def test_the_oldest_ready_answers_go_first():
    async def play():
        answers = Answers(Account(), max_bytes=2 * (100 + OVERHEAD_BYTES))
        for name in "abcd":
            answers.open(name)
        for name in "cab":
            answers.set(name, b"x" * 100)
        assert ["a" in answers, "b" in answers, "c" in answers] == [True, True, False]
        assert "d" in answers, "it is not ready"
        answers.set("d", b"x" * 1000)
        assert [name in answers for name in "abcd"] == [False, False, False, True]

    run(play())
