"""Hostile answers, put to every built-in reward function through real workers.

`run(budget)` counts what must not happen, and is what benchmarks count too. Cases are data:
texts for all functions, mathematics for `math_verify`, and fragments joined at random, by a
seeded draw, for as long as the budget lasts.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

from reprise.rl.answers.answers import with_marker
from reprise.rl.data import reasoning_gym_tasks
from reprise.rl.data.tasks import Example, open_task
from reprise.rl.rewards.config import RewardConfig
from reprise.rl.rewards.pool import STARTUP_S, RewardPool
from reprise.rl.rewards.process import RewardWorkerError
from reprise.rl.rewards.scores import Score, ScoreJob

SPY = Path(__file__).with_name("spy.py")
EXTRACT = "answer_tag"
DEADLINE_S = 1.0

TEXTS = (
    *("", " ", "\x00", "\n", "​", "‮4", "４", "²", "\ud800", "é" * 1000, "🙂"),
    *(
        "__import__('os').system('touch /tmp/x')",
        "exec('1')",
        "open('/tmp/x', 'w')",
        "().__class__",
    ),
    *("{{7*7}}", "${7*7}", "%s%n", "'; DROP TABLE x;--", "<script>1</script>", "../../etc/passwd"),
    *("nan", "inf", "-inf", "1e999", "-0", "0x10", "1_0", "1e-999", "1e308", "NaN", "Infinity"),
    *("9" * 5000, "0." + "9" * 5000, "[" * 5000, "(" * 5000, "{" * 5000, '{"a":' * 2000),
    *(
        "[[1, 2], [3, 4]]",
        "[NaN]",
        '{"a": [1]}',
        "null",
        "true",
        "1,2,3",
        "1 2 3",
        "1/0",
        "A" * 5000,
    ),
    *(
        "2**99999999",
        "9**9**9**9",
        "1e999999999",
        "factorial(99999)",
        "lambda: 0",
        "yield",
        "import os",
    ),
    *(
        "\\",
        "\\\\" * 500,
        "$" * 500,
        "####",
        "<answer>",
        "</answer>",
        "\\boxed{",
        "----4",
        "4 or 5",
    ),
)

MATHS = (
    r"\frac{1}{0}",
    r"\sqrt{-1}",
    r"\frac" * 50,
    r"\frac{1}{" * 60 + "2" + "}" * 60,
    r"x_{__import__('os')}",
    r"\operatorname{eval}(1)",
    r"\text{__import__('os').system('true')}",
    r"\mathrm{exec}(x)",
    r"f(__class__)",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    r"\begin{pmatrix}" + "1&" * 200 + r"1\end{pmatrix}",
    r"\{" + ",".join(map(str, range(300))) + r"\}",
    r"\int_0^1 x^2 dx",
    r"\int e^{x^2} dx",
    r"\sum_{i=1}^{100} i",
    r"\lim_{x\to 0} \frac{\sin x}{x}",
    r"x = y = z = 4",
    r"[1, 2) \cup (3, 4]",
    r"1{,}000{,}000",
    "5E-310",
    "5E310",
    "1.2.3",
    "0,5",
    r"50\%",
    r"90^\circ",
    r"4\text{ km}",
    r"\binom{50}{25}",
    r"\log_{2} 8",
    r"|x - 4| < 1",
    r"x \in \mathbb{R}",
)

# Each of these keeps sympy busy: the deadline ends it, or the memory limit.
BOMBS = (
    "9^{9^{9^{9}}}",
    r"100000!",
    r"\sum_{i=1}^{10^{9}} \frac{1}{i^{2}+1}",
    r"(x+1)^{2000}",
    r"\prod_{i=1}^{10^{7}} i",
    r"\int_0^1 \sin(\sin(\sin(x^x))) dx",
)

FRAGMENTS = (
    *("1", "0.5", "5E-3", "x", "y", "e", "i", "+", "-", "*", "/", "^", "_", "=", "<", ",", "."),
    *("(", ")", "[", "]", "{", "}", "|", "!", "%", "$", "&", "'", '"', "\\", " ", "\n", "1_0"),
    *(r"\frac{1}{2}", r"\sqrt{2}", r"\pi", r"\sin", r"\{1,2\}", r"\text{a}", r"\int", r"\cup"),
    *(r"\sum_{i=1}^{3}", r"\infty", r"\lim_{x\to 0}", r"\alpha", r"\overline{3}", r"\cdot"),
    *("eval", "exec", "__import__", "lambda", "Symbol", "sympify", "S.One", "oo", "I"),
)

GOLDS = ("4", "x^2+1", r"\frac{1}{2}", r"\{1,2\}")


@dataclasses.dataclass(frozen=True)
class Case:
    """One answer to one example, by one reward function."""

    function: str
    example: Example
    text: str


def cases(budget: int) -> Iterator[Case]:
    """`budget` of them: of each function's texts the first, then fragments."""
    sources = [
        itertools.chain(_of_math(MATHS + TEXTS), _of_math(_fragments(1))),
        itertools.chain(_of_file(TEXTS), _of_file(_fragments(2))),
        _of_tasks(),
    ]
    mixed = itertools.chain.from_iterable(zip(*sources, strict=False))
    return itertools.islice(mixed, budget)


def bombs() -> Iterator[Case]:
    return _of_math(BOMBS)


def _of_math(texts) -> Iterator[Case]:
    for text, gold in zip(texts, itertools.cycle(GOLDS), strict=False):
        yield Case("math_verify", Example("math#0", "q", gold, {}, "jsonl:hostile"), text)


def _of_file(texts) -> Iterator[Case]:
    for text in texts:
        yield Case("exact_match", Example("file#0", "q", "4", {}, "jsonl:hostile"), text)


def _of_tasks() -> Iterator[Case]:
    """Every task with a text, then every task with the next one."""
    names = reasoning_gym_tasks.SAFE_TASKS
    examples = [open_task(f"reasoning_gym:{name}", seed=1, size=1)[0] for name in names]
    for number in itertools.count():
        for place, example in enumerate(examples):
            text = TEXTS[(7 * place + number) % len(TEXTS)]
            yield Case("task", example, text if number % 3 else f"{example.answer}{text}")


def _fragments(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(1, 8)))


def run(budget: int, num_bombs: int = len(BOMBS), workers: int = 1) -> dict[str, int]:
    """Score `budget` answers and some bombs; counts that must all be 0, but `tried`.

    executions, outside_writes: what the spy in the worker saw. hangs: samples that took
    longer than their deadline and a new worker's start. tracebacks: scorers that raised
    anything but for want of memory, died, or answered nonsense; ends of the pool.
    """
    counts = dict.fromkeys(("tried", "executions", "hangs", "tracebacks", "outside_writes"), 0)
    by_function: dict[str, list[Case]] = {}
    for case in itertools.chain(cases(budget), itertools.islice(bombs(), num_bombs)):
        by_function.setdefault(case.function, []).append(case)
    for function, its_cases in by_function.items():
        config = RewardConfig(
            functions=(f"{SPY}:begin", function, f"{SPY}:seen"),
            extract=EXTRACT,
            deadline_s=DEADLINE_S,
            workers=workers,
        )
        with RewardPool(config) as pool:
            for case in its_cases:
                job = ScoreJob(case.example, with_marker(EXTRACT, case.text))
                began = time.monotonic()
                try:
                    score = pool.result(pool.submit(job))
                except RewardWorkerError:
                    counts["tracebacks"] += 1
                    break
                counts["hangs"] += time.monotonic() - began > DEADLINE_S + 2 * STARTUP_S
                counts["tried"] += 1
                _count(counts, score)
    return counts


def _count(counts: dict[str, int], score: Score) -> None:
    seen = int(score.values["seen"] or 0)
    counts["executions"] += seen % 1_000_000
    counts["outside_writes"] += seen // 1_000_000
    ended_by_rule = ("/deadline:", "/raised: MemoryError")
    if score.failure is not None and not any(rule in score.failure for rule in ended_by_rule):
        counts["tracebacks"] += 1
        print(f"failed: {score.failure}")
