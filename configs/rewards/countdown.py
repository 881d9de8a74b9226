"""The reward of Countdown: 1 if the last line's equations use every number and reach the target.

    3*7=21 21-5=16:22
    3*5=15 15+7=22:22!
    #### 3*5=15 15+7=22

Each equation takes two numbers away and adds its result. Text is matched and never evaluated.
"""

import operator
import re

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EQUATION = re.compile(r"(\d{1,6})([-+*])(\d{1,6})=(\d{1,6})")


def score(completions, numbers, target, **columns):
    """Return 1.0 or 0.0 for each completion."""
    rows = zip(completions, numbers, target, strict=True)
    return [float(reaches(text, given, wanted)) for text, given, wanted in rows]


def reaches(text, numbers, target):
    """Return whether the equations after the last `####` are true and leave the target alone."""
    left = list(numbers)
    for equation in text.rpartition("####")[2].split():
        match = EQUATION.fullmatch(equation)
        if match is None:
            return False
        first, second, result = (int(match[i]) for i in (1, 3, 4))
        if OPERATIONS[match[2]](first, second) != result:
            return False
        for used in (first, second):
            if used not in left:
                return False
            left.remove(used)
        left.append(result)
    return left == [target]
