"""Environments that work: tools as TRL has them, a game in turns, and some that draw at random."""

import asyncio
import random

OPENED = []  # of this process: a fork starts without the episodes of others


class Calculator:
    """Tools; the reward compares the last result with the answer."""

    def __init__(self):
        OPENED.append(self)
        self.result = None

    def reset(self, answer, **columns):
        self.answer = float(answer)
        return f" Use a tool. ({len(OPENED)} open)"

    def add(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: The first number
            b: The second number

        Returns:
            The sum.
        """
        self.result = a + b
        return self.result

    async def later(self, a: int) -> int:
        """
        Return a number, later.

        Args:
            a: The number
        """
        await asyncio.sleep(0)
        self.result = a
        return a

    def _hidden(self):
        raise AssertionError("no tool")

    def get_reward(self):
        return float(self.result == self.answer)


class Guess:
    """A number from 0 to 9 in turns; the reward of a turn is −0.1, of the episode 1 if found."""

    def reset(self, row):
        self.goal = int(row["answer"])
        self.reward = 0.0
        return [{"role": "user", "content": "Guess a number."}]

    def step(self, completion):
        guess = int(completion)
        if guess == self.goal:
            self.reward = 1.0
            return None
        word = "higher" if guess < self.goal else "lower"
        return {"messages": f"\n{word}\n", "reward": -0.1}


class Dice:
    """Says what it has drawn, with the random numbers of Python."""

    def reset(self, **columns):
        return f"{random.random()}"

    def step(self, completion):
        return f"{random.random()}"

    def get_reward(self):
        return {"luck": random.random(), "none": None}


def make_guess():
    """A factory need not be a class."""
    return Guess()
