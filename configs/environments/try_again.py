"""Environments for `Environment.factory`: questions with a second and a third try; a calculator."""


class TryAgain:
    """A question that may be answered up to three times; fewer tries are paid better."""

    tries = 3

    def reset(self, answer, **columns):
        """Keep the answer of the row; the prompt is the question."""
        self.answer = answer.strip()
        self.used = 0
        self.is_right = False

    def step(self, completion):
        """Compare an answer after ####, as in GSM8K; a wrong answer gets a reply."""
        self.used += 1
        self.is_right = completion.rpartition("####")[2].strip() == self.answer
        return None if self.is_right else "\nWrong. Try again.\n"

    def get_reward(self):
        """Return 1 for the first try, 2/3 for the second, 1/3 for the third, 0 for none."""
        return (self.tries + 1 - self.used) / self.tries if self.is_right else 0.0


class Calculator:
    """A question with a tool; the reward compares the last number of the last turn."""

    def reset(self, answer, **columns):
        """Keep the answer of the row."""
        self.answer = answer.rpartition("####")[2].replace(",", "").strip()
        self.last = ""

    def calculate(self, operation: str, a: float, b: float) -> float:
        """
        Compute with two numbers.

        Args:
            operation: One of +, -, * and /
            a: The first number
            b: The second number

        Returns:
            The result.
        """
        if operation == "/":
            return a / b
        if operation not in ("+", "-", "*"):
            raise ValueError(f"expected +, -, * or /, got {operation!r}")
        return {"+": a + b, "-": a - b, "*": a * b}[operation]

    def step(self, completion):
        """End at the first turn without a call."""
        self.last = completion

    def get_reward(self):
        """Return 1 if the last turn ends with the answer after ####."""
        return float(self.last.rpartition("####")[2].replace(",", "").strip() == self.answer)
