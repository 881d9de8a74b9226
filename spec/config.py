"""The configuration of sampling and of draft models."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

Draw = Literal["cdf", "gumbel", "gumbel_blocks"]
DRAWS: tuple[Draw, ...] = get_args(Draw)
MIN_TEMPERATURE = 1e-4  # dividing logits by much less overflows float32
MAX_STOPS = 16  # stop strings of one task
MAX_STOP_CHARACTERS = 100  # of each stop string
MAX_STOP_BYTES = 2048  # in the stop strings of a response, in UTF-8; a byte takes half a KiB
MAX_STOP_IDS = 64
OF_TASKS = ("temperature", "top_k", "top_p", "max_new_tokens", "stop_ids", "stop")
_HOW = 'for example "gsm: temperature=0.6, max_new_tokens=128"'


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """The sampling distribution, the draw scheme, and the stop conditions of responses.

    A response finishes with the first end token of the model, its tokenizer or `stop_ids`, with the
    first token that completes one of the strings in `stop`, or at `max_new_tokens`, and includes
    this last token.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Sample from the `top_k` most likely tokens and ties with the last; 0 is off."""
    top_p: float = 1.0
    """Sample from the fewest tokens with this total probability, and ties; 1 is off."""
    max_new_tokens: int = 256
    """The maximum length of a response, in tokens."""
    draw: Literal["auto", "cdf", "gumbel", "gumbel_blocks"] = "auto"
    """How noise selects a token. `cdf` inverts the cumulative distribution over blocks of about √V
    tokens, then inside the drawn block. `gumbel` takes the argmax of logits plus Gumbel noise,
    which agrees far more often after an update, but costs up to as much as the policy for a large
    vocabulary. `gumbel_blocks` does so for blocks, then inside the drawn block, and is as cheap as
    `cdf`. `auto` is `gumbel_blocks` in a run that verifies earlier draws with the same noise
    (`Reuse.mode = "coupled"`, `Sched.mode = "ahead"`), else `cdf`."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the end tokens of the model."""
    stop: tuple[str, ...] = ()
    """Strings that end a response."""
    by_task: tuple[str, ...] = ()
    """Overrides by task name: "gsm: temperature=0.6, max_new_tokens=128". Values are JSON; `stop`
    and `stop_ids` are added to the general settings."""

    def __post_init__(self) -> None:
        t = self.temperature
        if not (t == 0 or t >= MIN_TEMPERATURE) or not math.isfinite(t):
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {t}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.draw not in ("auto", *DRAWS):
            raise ValueError(f"draw must be 'auto' or one of {DRAWS}, got {self.draw!r}")
        _check_stops(self.stop_ids, self.stop)
        _ = self.tasks

    @property
    def scheme(self) -> Draw:
        """Return the draw scheme; `auto` counts as `cdf`."""
        return "cdf" if self.draw == "auto" else self.draw

    @property
    def may_cut(self) -> bool:
        """True if top-k or top-p of any variant cuts."""
        return any(one.top_k > 0 or one.top_p < 1 for one in self.variants)

    def with_scheme(self, *, verified: bool) -> SamplingConfig:
        """Resolve `auto`; `verified`: the run verifies earlier draws with the same noise."""
        if self.draw != "auto":
            return self
        return dataclasses.replace(self, draw="gumbel_blocks" if verified else "cdf")

    @functools.cached_property
    def tasks(self) -> Mapping[str, SamplingConfig]:
        """The sampling of each task in `by_task`."""
        by_name: dict[str, SamplingConfig] = {}
        for text in self.by_task:
            name, settings = _parsed(text)
            if name in by_name:
                raise ValueError(f"by_task: expected each task once, got {name[:80]!r} again")
            for field in ("stop", "stop_ids"):
                both = (*getattr(self, field), *settings.get(field, ()))
                settings[field] = tuple(dict.fromkeys(both))
            try:
                by_name[name] = dataclasses.replace(self, by_task=(), **settings)
            except ValueError as error:
                raise ValueError(f"by_task, {name[:80]!r}: {error}") from error
        return by_name

    def of(self, task: str) -> SamplingConfig | None:
        """Return the sampling of a task, or None if it uses the general sampling."""
        return self.tasks.get(task)

    def at(self, temperature: float) -> SamplingConfig:
        """Return this sampling with one temperature for all tasks, as evaluations use it."""
        by_task = []
        for name, settings in map(_parsed, self.by_task):
            rest = {key: value for key, value in settings.items() if key != "temperature"}
            if rest:
                pairs = ", ".join(f"{key}={json.dumps(value)}" for key, value in rest.items())
                by_task.append(f"{name}: {pairs}")
        return dataclasses.replace(self, temperature=temperature, by_task=tuple(by_task))

    @property
    def variants(self) -> tuple[SamplingConfig, ...]:
        """The general sampling, then the sampling of each task in `by_task`."""
        return (self, *self.tasks.values())

    @property
    def max_any_new_tokens(self) -> int:
        """The largest `max_new_tokens` of any task."""
        return max(s.max_new_tokens for s in self.variants)

    def check_stops(self, vocab_size: int, min_tokens: Callable[[str], int | None]) -> None:
        """Raise ValueError for stop ids or strings that no response can contain.

        `min_tokens` returns the fewest tokens that contain a text, or None if no tokens can.
        """
        if outside := [i for i in self.stop_ids if i >= vocab_size]:
            raise ValueError(
                f"Sampling.stop_ids: expected ids of the policy's vocabulary of {vocab_size}, "
                f"got {outside[0]}"
            )
        for text in self.stop:
            if (num_tokens := min_tokens(text)) is None:
                raise ValueError(
                    f"Sampling.stop: no response can hold {text!r}: the policy's tokenizer has no "
                    "tokens for it; leave it out"
                )
            if num_tokens > self.max_new_tokens:
                raise ValueError(
                    f"Sampling.stop: {text!r} takes {num_tokens} tokens, and a response has at "
                    f"most Sampling.max_new_tokens={self.max_new_tokens}: leave it out, or raise it"
                )

    def check_tasks(self, names: Iterable[str]) -> None:
        """Raise ValueError if `by_task` names a task that is not among `names`."""
        names = list(names)
        for name in self.tasks:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {close[0][:80]!r}?" if close else ""
                raise ValueError(
                    f"Sampling.by_task: expected names of tasks ({', '.join(names)[:300]}), got "
                    f"{name[:80]!r}{hint} A task in Task.specs is named by NAME=kind:target"
                )


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return the task name and the settings of `NAME: key=JSON, key=JSON`."""
    name, colon, tail = text.partition(": ")
    if not name or not colon:
        raise ValueError(
            f"by_task: expected a task's name, a colon and a space, {_HOW}, got {text[:200]!r}"
        )
    settings: dict[str, Any] = {}
    at = 0
    where = f"by_task, {name[:80]!r}"
    while at < len(tail) or not settings:
        key = re.compile(r"\s*(\w+)\s*=\s*").match(tail, at)
        if key is None or key[1] not in OF_TASKS or key[1] in settings:
            raise ValueError(
                f"{where}: expected one of {', '.join(OF_TASKS)}, each once, {_HOW}, got "
                f"{tail[at:][:80]!r}"
            )
        try:
            value, at = json.JSONDecoder(strict=False).raw_decode(tail, key.end())
        except (ValueError, RecursionError):
            raise ValueError(
                f"{where}: expected {key[1]} to be JSON (a number, or a list of texts in double "
                f'quotes: stop=["\\n\\n"]), got {tail[key.end() :][:80]!r}'
            ) from None
        settings[key[1]] = _typed(value, key[1], where)
        end = re.compile(r"\s*(,|$)").match(tail, at)
        if end is None:
            raise ValueError(f"{where}: expected a comma, got {tail[at:][:80]!r}")
        at = end.end()
    return name, settings


def _typed(value: Any, field: str, where: str) -> Any:
    wanted: dict[str, type] = {"stop": str, "temperature": float, "top_p": float}
    kind = wanted.get(field, int)
    many = field in ("stop", "stop_ids")
    values = value if many and isinstance(value, list) else [value]
    if kind is float:
        values = [float(v) if type(v) is int and abs(v) < 2**53 else v for v in values]
    if any(type(v) is not kind for v in values):
        what = f"{kind.__name__} or a list of {kind.__name__}" if many else kind.__name__
        raise ValueError(f"{where}: expected {field} to be {what}, got {str(value)[:80]!r}")
    return tuple(values) if many else values[0]


def _check_stops(stop_ids: tuple[int, ...], stop: tuple[str, ...]) -> None:
    for name, values, limit in (("stop_ids", stop_ids, MAX_STOP_IDS), ("stop", stop, MAX_STOPS)):
        if isinstance(values, str):  # each character would count as an entry
            raise ValueError(
                f"{name}: expected a tuple, got {values!r:.80}; fix: ({values!r:.80},)"
            )
        if len(values) > limit:
            raise ValueError(f"{name}: expected at most {limit}, got {len(values)}")
        if len(set(values)) < len(values):
            twice = next(x for x in values if values.count(x) > 1)
            raise ValueError(f"{name}: expected each once, got {twice!r} again: leave it out")
    if any(i < 0 for i in stop_ids):
        raise ValueError(f"stop_ids: expected ids of tokens, 0 or more, got {min(stop_ids)}")
    if (size := sum(len(text.encode(errors="replace")) for text in stop)) > MAX_STOP_BYTES:
        raise ValueError(f"stop: expected at most {MAX_STOP_BYTES:,} bytes in all, got {size:,}")
    for text in stop:
        if not text:
            raise ValueError(
                "stop: expected texts, got an empty one, which every response has: leave it out"
            )
        if len(text) > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"stop: expected at most {MAX_STOP_CHARACTERS} characters, got {len(text)}: "
                f"{text[:40]!r}…"
            )
        if any("\ud800" <= c <= "\udfff" or c == "\ufffd" for c in text):
            raise ValueError(
                f"stop: expected whole characters, got {text!r}: half a character in it would "
                "never be found"
            )


Proposal = Literal["likeliest", "shared_noise"]


@dataclasses.dataclass(frozen=True)
class ChainConfig:
    """Sizes of the passes and chains of a draft model.

    The first pass of a chain computes `window_tokens` tokens per row; earlier tokens come in chunks
    of up to `chunk_tokens`, about `pass_tokens` per pass. Chains have up to `max_draft_tokens`
    draft tokens and stop when their probability falls below `min_prob`.
    """

    window_tokens: int = 2
    chunk_tokens: int = 128
    pass_tokens: int = 512
    max_draft_tokens: int = 16
    min_prob: float = 0.0

    def __post_init__(self) -> None:
        if self.max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens must be at least 1, got {self.max_draft_tokens}")
        if not 0 <= self.min_prob <= 1:
            raise ValueError(f"expected min_prob in [0, 1], got {self.min_prob}")
