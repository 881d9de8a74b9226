"""An environment for `Environment.factory`: a wrong number is corrected by a sum."""


class Corrections:
    """A wrong answer N gets the reply `N+K` or `N-K`, whose value is the right answer.

    The reward is 1 if an answer is right before the turns of the episode are used up.
    """

    def reset(self, answer, **columns):
        """Keep the answer of the row; the prompt is the question."""
        self.answer = int(answer)
        self.is_right = False

    def step(self, completion):
        """Compare the number after ####; a right one ends the episode."""
        text = completion.rpartition("####")[2].strip()
        if "####" not in completion or not text.isdecimal() or len(text) > 3:
            return "\n?\n"
        missing = self.answer - int(text)
        self.is_right = missing == 0
        return None if self.is_right else f"\n{text}{missing:+d}\n"

    def get_reward(self):
        """Return 1 for a right answer, else 0."""
        return float(self.is_right)
