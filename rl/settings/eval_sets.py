"""Evaluation questions: the config section, the named sets, and their overlap with training.

Nothing here touches a device, so `--dry_run` opens every set.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from reprise.rl.data.conversations import prompt_key
from reprise.rl.data.prompts import DataOrder
from reprise.rl.data.tasks import Example, Message, Task, TaskConfig, open_task, parse_spec
from reprise.spec.config import MIN_TEMPERATURE, SamplingConfig

Prompt = tuple[int, ...]  # token ids
Encode = Callable[[Example], Prompt]
_Question = tuple[int, Example, Prompt]  # index in the task, question, prompt
EVAL_SEED = 1_000_000_007  # of the questions of evaluations, and of their noise
MAX_PROMPTS = 100_000  # of a set
_LOOKED_AT = 20_000  # training examples that questions are compared with, at least
_CANDIDATES = 4  # generated questions per wanted question, since training may hold some


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Section `Eval`: questions that measure the progress of a policy, and when.

    A run is evaluated before its first step, regularly, and after its last step. The k of pass@k
    are the powers of two up to `samples`.
    """

    every_steps: int = 40
    """Steps between evaluations; 0: only the first and the last."""
    sets: tuple[str, ...] = ()
    """Tasks, `NAME=SPEC`. Empty: the generated tasks of the run, with questions that training does
    not have."""
    num_prompts: int = 64
    """The maximum number of questions of each set; 0 evaluates nothing."""
    samples: int = 1
    """Responses to each question."""
    temperature: float = 0.0
    """The sampling temperature; 0 is greedy. Other settings of the section Sampling apply."""
    correct_by: str | None = None
    """The reward function, one of Reward.functions, that decides whether a response is correct.
    None: the single function of weight 1, without a length penalty."""
    correct_at: float = 1.0
    """A response is correct if this function returns at least this value."""
    best_by: str = "mean_reward"
    """The best step has the highest `mean_reward` or `pass@K` over all sets, or `NAME/mean_reward`
    of one set."""

    def __post_init__(self) -> None:
        bounds = {"every_steps": (0, 2**31), "num_prompts": (0, MAX_PROMPTS), "samples": (1, 1024)}
        for field, (low, high) in bounds.items():
            if not low <= getattr(self, field) <= high:
                raise ValueError(f"{field} must be {low} to {high:,}, got {getattr(self, field)}")
        t = self.temperature
        if not (t == 0 or MIN_TEMPERATURE <= t < math.inf):
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {t}"
            )
        if t == 0 and self.samples > 1:
            raise ValueError(
                f"samples={self.samples} greedy responses to a question would all be the same: "
                "set temperature above 0, or samples = 1"
            )
        if not math.isfinite(self.correct_at):
            raise ValueError(f"correct_at must be finite, got {self.correct_at}")
        split_names(self.sets)

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k."""
        return tuple(2**i for i in range(self.samples.bit_length()))

    def due(self, step: int, last_step: int) -> bool:
        """Return whether a run is evaluated after `step`; step 0 is before the first step."""
        return step in (0, last_step) or (self.every_steps > 0 and step % self.every_steps == 0)

    def sampling(self, run: SamplingConfig) -> SamplingConfig:
        """Return the sampling of the evaluations of a run."""
        return run.at(self.temperature)


@dataclasses.dataclass(frozen=True, eq=False)
class EvalSet:
    """The questions of a set and their tokens.

    Training has `seen` of the questions word for word, and `alike` more up to case and spaces.
    Omitted questions are `too_long`, or `left_out` because training has them.
    """

    name: str
    spec: str
    examples: tuple[Example, ...]
    prompts: tuple[Prompt, ...]
    seen: int = 0
    alike: int = 0
    too_long: int = 0
    left_out: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class EvalSets:
    """The sets of evaluations; `skipped` are sentences on tasks without a set."""

    sets: tuple[EvalSet, ...] = ()
    skipped: tuple[str, ...] = ()

    @property
    def num_questions(self) -> int:
        return sum(len(s.examples) for s in self.sets)

    @property
    def specs(self) -> tuple[str, ...]:
        return tuple(s.spec for s in self.sets)

    def remarks(self) -> list[str]:
        """Return sentences on questions that training has, and on omitted questions."""
        result = list(self.skipped)
        for s in self.sets:
            if s.seen or s.alike:
                more = f", {s.alike} of them but for case and spaces" if s.alike else ""
                result.append(
                    f"{s.seen + s.alike} of {len(s.examples)} questions of set {s.name} are in "
                    f"the training set{more}"
                )
            if s.too_long:
                result.append(
                    f"{s.too_long} questions of set {s.name} are left out: longer than "
                    "Rollout.max_prompt_tokens"
                )
        return result

    def fingerprint(self, config: EvalConfig, sampling: SamplingConfig) -> str:
        """Return a hash of questions, sampling and grading; if equal, metrics are comparable."""
        wanted = [(s.name, s.prompts, [e.answer for e in s.examples]) for s in self.sets]
        how = repr(config.sampling(sampling)), config.samples, EVAL_SEED, config.ks
        judged = config.correct_by, config.correct_at, config.best_by
        return hashlib.sha256(json.dumps([wanted, how, judged]).encode()).hexdigest()[:32]


def split_names(sets: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, spec) of each set; a set without a name has the name of its task.

    Raises ValueError if two sets have the same name.
    """
    pairs = [(_short_name(text), text) for text in sets]
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"sets: expected every name once, got {', '.join(twice)} twice: write NAME=SPEC with "
            "different names"
        )
    return pairs


def _short_name(spec: str) -> str:
    """Return the name of a task, or a name from its target, such as gcd or a file stem."""
    parsed = parse_spec(spec)
    if parsed.name != parsed.text:
        return parsed.name
    stems = [Path(part).stem for part in reversed(Path(parsed.target).parts)]
    clean = [re.sub(r"[^A-Za-z0-9_-]+", "_", stem).strip("_") for stem in stems]  # no `*`
    return next(filter(None, clean), "set")


def task_names(task: TaskConfig) -> list[tuple[str, str]]:
    """Return (name, spec) of the tasks of a run, numbered if they share a name."""
    pairs: list[tuple[str, str]] = []
    for spec in task.specs:
        name = _short_name(spec)
        number = 1
        while any(taken == (name if number == 1 else f"{name}-{number}") for taken, _ in pairs):
            number += 1
        pairs.append((name if number == 1 else f"{name}-{number}", spec))
    return pairs


def is_generated(spec: str) -> bool:
    """Return whether a task generates any number of questions, different for each seed."""
    return parse_spec(spec).kind == "reasoning_gym"


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingPrompts:
    """Hashes of training prompts: exact, and without case and spaces."""

    exact: frozenset[int] = frozenset()
    normalized: frozenset[int] = frozenset()

    @staticmethod
    def of(task: Task, most: int) -> TrainingPrompts:
        """Return the hashes of the first `most` examples of a task."""
        prompts = (task[i].prompt for i in range(min(len(task), most)))
        pairs = [(hash(_exact(p)), hash(prompt_key(p))) for p in prompts]
        return TrainingPrompts(frozenset(e for e, _ in pairs), frozenset(n for _, n in pairs))

    def holds(self, prompt: str | tuple[Message, ...]) -> str | None:
        """Return `seen` or `alike` if training holds a prompt, else None."""
        if hash(_exact(prompt)) in self.exact:
            return "seen"
        return "alike" if hash(prompt_key(prompt)) in self.normalized else None


def _exact(prompt: str | tuple[Message, ...]) -> str:
    return json.dumps(prompt, sort_keys=True)


def open_sets(
    config: EvalConfig,
    task: TaskConfig,
    limit_tokens: int,
    encode: Encode,
    training: Callable[[], Task] | None,
    *,
    keeps_seen: bool = False,
) -> EvalSets:
    """Open the sets of an evaluation: the named sets, or the generated tasks of the run.

    `training` opens the training task; None if it is unknown. Its questions are left out of
    generated sets, and counted in files. A task without other questions is skipped, or kept with
    `keeps_seen`. Raises ValueError for a set without usable questions.
    """
    if not config.num_prompts:
        return EvalSets()
    named = bool(config.sets)
    pairs = split_names(config.sets) if named else task_names(task)
    skipped = []
    if not named and training is not None and not keeps_seen:
        skipped = [
            f"not evaluated: {spec}, since training sees all of its questions; name others with "
            "Eval.sets"
            for _, spec in pairs
            if not is_generated(spec)
        ]
        pairs = [(name, spec) for name, spec in pairs if is_generated(spec)]
    held = TrainingPrompts()
    if training is not None and pairs:
        trained = training()
        limit = max(task.stream_above_examples, _LOOKED_AT)
        held = TrainingPrompts.of(trained, limit)
        if len(trained) > limit:
            skipped.append(
                f"questions of evaluations are compared with the first {limit:,} of the "
                f"{len(trained):,} training examples only (Task.stream_above_examples)"
            )
    opened = []
    for name, spec in pairs:
        result = _open_set(config, name, spec, limit_tokens, encode, held, keeps_seen)
        if result.examples:
            opened.append(result)
        elif named or result.too_long:
            raise ValueError(_why_empty(result, limit_tokens))
        else:
            skipped.append(f"not evaluated: {spec}, since training has all of its questions")
    sets = EvalSets(tuple(opened), tuple(skipped))
    if not keeps_seen:  # a single evaluation has no best step
        check_best_by(config, [s.name for s in opened])
    return sets


def _open_set(
    config: EvalConfig,
    name: str,
    spec: str,
    limit_tokens: int,
    encode: Encode,
    held: TrainingPrompts,
    keeps_seen: bool,
) -> EvalSet:
    generated = is_generated(spec)
    task = open_task(spec, EVAL_SEED, _CANDIDATES * config.num_prompts)
    order: Iterable[int] = range(len(task))
    if not generated:
        order = DataOrder(len(task), EVAL_SEED).indices(0, len(task)).tolist()
    chosen = dict[str, _Question]()
    held_back = dict[str, _Question]()
    too_long = 0
    for index in order:
        if len(chosen) == config.num_prompts:
            break
        example = task[index]
        key = json.dumps([example.prompt, example.answer], sort_keys=True)
        if key in chosen or key in held_back:
            continue
        tokens = encode(example)
        if len(tokens) > limit_tokens:
            too_long += 1
        elif generated and held.holds(example.prompt):
            held_back[key] = index, example, tokens
        else:
            chosen[key] = index, example, tokens
    left_out = len(held_back)
    if keeps_seen and not chosen:
        chosen = dict(list(held_back.items())[: config.num_prompts])
        left_out = 0
    questions = sorted(chosen.values(), key=lambda question: question[0])
    kinds = [held.holds(example.prompt) for _, example, _ in questions]
    return EvalSet(
        name,
        spec,
        tuple(example for _, example, _ in questions),
        tuple(tokens for _, _, tokens in questions),
        seen=kinds.count("seen"),
        alike=kinds.count("alike"),
        too_long=too_long,
        left_out=left_out,
    )


def _why_empty(found: EvalSet, limit_tokens: int) -> str:
    if found.too_long:
        return (
            f"Eval: every one of {found.too_long} prompts of set {found.name} is longer than "
            f"{limit_tokens} tokens: raise Rollout.max_prompt_tokens"
        )
    return (
        f"Eval.sets: training holds all {found.left_out} questions of set {found.name} "
        f"({found.spec}): name another task, or widen its ranges"
    )


def check_best_by(config: EvalConfig, names: Sequence[str]) -> None:
    """Raise ValueError unless `best_by` is a metric of an evaluation of these sets."""
    figures = ["mean_reward", *(f"pass@{k}" for k in config.ks)]
    known = figures + [f"{name}/{figure}" for name in names for figure in figures]
    if names and config.best_by not in known:
        raise ValueError(
            f"Eval.best_by: expected one of {', '.join(known[:20])}, got {config.best_by[:200]!r}"
        )
