"""Make the policy that searches: Countdown with three numbers, taught by random tries.

    python -m policies.make.countdown --output policies/countdown

A question is a target and three numbers. A response is tries, one a line: two equations that use
every number once, a colon, the target, and `!` if it is reached; that try is repeated after `####`.
Tries are drawn independently of each other, so their number is geometric: most responses are short,
and the longest of a hundred takes five times the mean. Some failed tries are given as the answer,
which GRPO can unlearn. The folder also has the questions: `train.jsonl`, the first of them in
`few.jsonl`, for several epochs in minutes, and `test.jsonl`, of which training sees none.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from configs.rewards.countdown import OPERATIONS, reaches
from policies.make.characters import save_character_tokenizer
from policies.make.policy import (
    CHARACTERS,
    make_optimizer,
    model_config,
    pack,
    respond,
    train_step,
    write_report,
)
from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.models.text import tokenizer
from reprise.rl.engine.engine import Engine

WIDTHS_TOKENS = (64, 96, 160, 256, 512, 1024)  # batches are padded to these
BATCHES_PER_STEP = 8  # a step's examples are sorted by length and cut, so that padding is small
MAX_NUMBER, MAX_VALUE, TARGETS = 15, 99, range(10, 100)
MIN_REACHING = 2  # tries of a question that reach its target
NUM_TEST, NUM_FEW = 256, 16
MAX_POSITIONS = 2048


@dataclasses.dataclass(frozen=True)
class Settings:
    """Size of the policy and its training.

    In the first `drill_steps` of `steps` more tries reach the target, so that it is compared more
    often; after them failed tries are given as the answer.
    """

    seed: int = 0
    steps: int = 800
    drill_steps: int = 650
    drill_hit: float = 0.3
    give_up: float = 0.04
    step_examples: int = 64
    learning_rate: float = 2e-3
    max_new_tokens: int = 1024
    num_layers: int = 4
    d_model: int = 128
    d_ff: int = 384


class Question(NamedTuple):
    """A target, and the numbers that reach it."""

    target: int
    numbers: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return f"Make {self.target} of {', '.join(map(str, self.numbers))}.\n"

    @property
    def answer(self) -> str:
        """Return the equations of the first try that reaches the target."""
        return next(one.text for one in tries(self.numbers) if one.value == self.target)


class Try(NamedTuple):
    """Equations, and the number that they reach."""

    text: str
    value: int


def tries(numbers: Sequence[int]) -> list[Try]:
    """Return each order of the numbers with each two operations, of results from 0 to 99."""
    found = []
    for first, *others in itertools.permutations(numbers):
        for signs in itertools.product(OPERATIONS, repeat=len(others)):
            equations, values = list[str](), [first]
            for sign, other in zip(signs, others, strict=True):
                values.append(OPERATIONS[sign](values[-1], other))
                equations.append(f"{values[-2]}{sign}{other}={values[-1]}")
            if min(values) >= 0 and max(values) <= MAX_VALUE:
                found.append(Try(" ".join(equations), values[-1]))
    return found


def questions() -> tuple[list[Question], list[Question]]:
    """Return the questions of training and of tests, each in a fixed order without a rule."""
    found = list[Question]()
    for numbers in itertools.combinations_with_replacement(range(1, MAX_NUMBER + 1), 3):
        reaching = Counter(one.value for one in tries(numbers))
        found += [Question(n, numbers) for n in TARGETS if reaching[n] >= MIN_REACHING]
    random.Random(0).shuffle(found)
    return found[NUM_TEST:], found[:NUM_TEST]


def response(
    question: Question, rng: random.Random, *, hit: float = 0.0, give_up: float = 0.0
) -> str:
    """Return random tries up to the first that reaches the target, without an end token.

    A try is chosen among those that reach it with probability `hit`; one that fails is given as
    the answer with probability `give_up`.
    """
    possible, lines = tries(question.numbers), list[str]()
    reaching = [one for one in possible if one.value == question.target]
    while True:
        text, value = rng.choice(reaching if rng.random() < hit else possible)
        is_reached = value == question.target
        lines.append(f"{text}:{question.target}{'!' if is_reached else ''}")
        if is_reached or rng.random() < give_up:
            return "\n".join([*lines, f"#### {text}"])


Pair = tuple[list[int], list[int]]  # ids of a prompt and its response


def step_pairs(settings: Settings, tok: tokenizer.Tokenizer) -> Iterator[list[Pair]]:
    """Yield the examples of each step, by their length."""
    rng, (train, _) = random.Random(settings.seed), questions()
    for step in itertools.count():
        is_drill = step < settings.drill_steps
        chances = {"hit": settings.drill_hit} if is_drill else {"give_up": settings.give_up}
        pairs = list[Pair]()
        for question in rng.choices(train, k=settings.step_examples):
            order = tuple(rng.sample(question.numbers, 3))
            prompt = tok.encode(question._replace(numbers=order).prompt)
            ids = [*tok.encode(response(question, rng, **chances)), tok.eos_token_ids[0]]
            pairs.append((prompt, ids[: WIDTHS_TOKENS[-1] - len(prompt)]))
        yield sorted(pairs, key=lambda pair: len(pair[0]) + len(pair[1]))


class Measured(NamedTuple):
    """Mean reward, and lengths in tokens: mean and longest."""

    reward: float
    mean_tokens: float
    longest_tokens: int


def measure(
    engine: Engine, params: transformer.Params, tok: tokenizer.Tokenizer, settings: Settings
) -> Measured:
    """Answer every test question once at temperature 1."""
    _, test = questions()
    prompts = [question.prompt for question in test]
    answers = respond(engine, params, tok, prompts, jax.random.key(1), settings.max_new_tokens)
    texts = [tok.decode(t.response_ids.tolist()) for t in answers]
    lengths = [len(t.response_ids) for t in answers]
    rewards = [
        t.response_ids[-1] in tok.eos_token_ids and reaches(text, q.numbers, q.target)
        for q, t, text in zip(test, answers, texts, strict=True)
    ]
    return Measured(float(np.mean(rewards)), float(np.mean(lengths)), max(lengths))


def make(output: Path, settings: Settings) -> None:
    """Train; write the policy, its questions, and its mean reward on the test questions."""
    save_character_tokenizer(output, CHARACTERS)
    tok = tokenizer.load(output)
    model = model_config(settings, tok, MAX_POSITIONS)
    engine, params = Engine(model), transformer.init(model, jax.random.key(settings.seed))
    optimizer = make_optimizer(settings.learning_rate, settings.steps)
    state, losses = optimizer.init(params), list[float]()
    size = settings.step_examples // BATCHES_PER_STEP
    stream = itertools.islice(step_pairs(settings, tok), settings.steps)
    for step, pairs in enumerate(stream, start=1):
        batches = [pack(pairs[at : at + size], WIDTHS_TOKENS) for at in range(0, len(pairs), size)]
        params, state, loss = train_step(model, optimizer.update, params, state, batches)
        losses.append(loss)
        if step % 20 == 0:
            print(f"step {step:5d}  loss {np.mean(losses[-20:]):.4f}", flush=True)
    measured = measure(engine, params, tok, settings)
    hf.save_pretrained(output, model, params)
    train, test = questions()
    for name, rows in {"train": train, "few": train[:NUM_FEW], "test": test}.items():
        lines = [json.dumps({"prompt": q.prompt, "answer": q.answer, **q._asdict()}) for q in rows]
        (output / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_report(output / "warmstart.json", settings, **measured._asdict())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m policies.make.countdown", description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.output, Settings(seed=arguments.seed))


if __name__ == "__main__":
    main()
