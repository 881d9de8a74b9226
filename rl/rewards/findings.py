"""Findings of the check before a run: messages from the scores of answer forms."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from reprise.models.formats.hf_files import shown
from reprise.rl.answers.answers import extract_answer, with_marker
from reprise.rl.data.tasks import Example
from reprise.rl.rewards.answer_forms import MARKERS, OTHER, QUESTION, Core, Form
from reprise.rl.rewards.config import BUILT_IN, RewardConfig
from reprise.rl.rewards.scores import Score
from reprise.rl.runtime.user_files import split_user_name

_MAX_LINES = 12


class Reading(NamedTuple):
    """A response as rewards receive it; `change` says why, if that is not its text."""

    text: str
    change: str = ""


Reader = Callable[[str, str], Reading]  # takes the text of a response, and the name of its task


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """An example, its answer, and another example with a surely different answer."""

    index: int
    example: Example
    core: Core
    other: Row | None = None


@dataclasses.dataclass(eq=False)
class Scored:
    """The scores of a row, by response."""

    row: Row
    right: dict[Form, Score] = dataclasses.field(default_factory=dict)
    wrong: dict[Form, Score] = dataclasses.field(default_factory=dict)

    def best(self, name: str) -> float | None:
        """Return the maximum that a function pays for the answer; None if it does not apply."""
        values = [score.values[name] for score in self.right.values()]
        return max((value for value in values if value is not None), default=None)

    def highest_wrong(self, name: str) -> tuple[float, Form] | None:
        """Return the maximum that a function pays for a wrong response, and that response."""
        pairs = [(score.values[name], form) for form, score in self.wrong.items()]
        known = [(value, form) for value, form in pairs if value is not None]
        return max(known, key=lambda pair: pair[0], default=None)

    def is_paid(self, name: str) -> bool:
        """Return whether a function pays for the answer.

        A built-in function must pay 1; other functions must pay more than for any wrong response.
        """
        best = self.best(name)
        wrong = self.highest_wrong(name)
        if best is None or name in BUILT_IN:
            return best is not None and best >= 1.0
        return best > (0.0 if wrong is None else wrong[0])

    @property
    def failure(self) -> str | None:
        scores = [*self.right.values(), *self.wrong.values()]
        return next((score.failure for score in scores if score.failure is not None), None)


class Finding(NamedTuple):
    """A fault of one row. Rows of one kind share a line, with the text of the first row."""

    kind: str
    text: str
    row: Row


def findings(config: RewardConfig, scored: Sequence[Scored], read: Reader) -> list[str]:
    """Return a line for each kind of fault. Raises ValueError if no answer can be matched."""
    every = list(_Judge(config, scored, read).findings())
    unmatched = {f.row.index for f in every if f.kind.startswith(_UNMATCHED)}
    kinds: dict[str, list[Finding]] = {}
    for finding in sorted(every, key=lambda finding: finding.row.index):
        kinds.setdefault(finding.kind, []).append(finding)
    lines = [
        f"{len(rows)} of {len(scored)} answers, first {rows[0].row.example.example_id}: "
        f"{rows[0].text}"
        for rows in kinds.values()
    ]
    is_built_in = all(name in BUILT_IN for name in config.functions)
    if scored and is_built_in and len(unmatched) == len(scored):
        raise ValueError(f"Reward.functions: {lines[0]}")
    hidden = len(lines) - _MAX_LINES
    return lines[:_MAX_LINES] + [f"and {hidden} more findings on answers"] * (hidden > 0)


_UNMATCHED = "unmatched"


class _Judge:
    """Finds the faults of each row, without functions that pay the same for all answers."""

    def __init__(self, config: RewardConfig, scored: Sequence[Scored], read: Reader) -> None:
        self._config = config
        self._scored = scored
        self._read = read
        self._floors = {name: self._floor(name) for name in config.names}
        self._judges = [name for name in config.names if name in BUILT_IN or self._judges_by(name)]
        self._markers = dict[str, list[str | None]]()  # of the answers, by task
        for s in scored:
            self._markers.setdefault(s.row.example.task, []).append(s.row.core.marker)

    def findings(self) -> Iterator[Finding]:
        for scored in self._scored:
            fault = self._unmatched(scored)
            failure = scored.failure
            if fault is None and failure is not None:
                kind = failure.partition(":")[0]
                is_own = kind.partition("/")[0] not in BUILT_IN
                fault = f"{'' if is_own else _UNMATCHED} {kind}".strip(), failure
            if fault is None and (usual := self._missing_marker(scored.row)) is not None:
                fault = "marker", f"it has no {MARKERS[usual]}, which most answers have"
            faults = [] if fault is None else [fault]
            for kind, text in [*faults, *self._wrong(scored)]:
                yield Finding(kind, text, scored.row)
        yield from self._idle_functions()

    # -- answers that are not paid ---------------------------------------------------------

    def _unmatched(self, scored: Scored) -> tuple[str, str] | None:
        """Return why no response is paid for the answer; None if a response is paid."""
        names = [name for name in self._config.names if scored.best(name) is not None]
        built_in = [name for name in names if name in BUILT_IN]
        if built_in:
            if all(map(scored.is_paid, built_in)):
                return None
        elif any((scored.best(n) or 0.0) > self._floors[n] for n in names if n in self._judges):
            return None
        kind, why = self._why(scored, names)
        return f"{_UNMATCHED} {kind}", why

    def _missing_marker(self, row: Row) -> str | None:
        """Return the marker that most answers of the task have, if this answer lacks it."""
        markers = self._markers[row.example.task]
        usual = max(MARKERS, key=markers.count)
        is_usual = 2 * markers.count(usual) > len(markers)
        return usual if is_usual and row.core.marker is None else None

    def _why(self, scored: Scored, names: list[str]) -> tuple[str, str]:
        config = self._config
        core, marker = scored.row.core
        marked = with_marker(config.extract, core)
        if not core:
            return "empty", "the answer is empty"
        if change := self._read(marked, scored.row.example.task).change:
            return change.partition("=")[0].partition(":")[0], f"no response can match it: {change}"
        built_in = any(name in BUILT_IN for name in names)
        if scored.failure is not None and not built_in:
            return scored.failure.partition(":")[0], scored.failure
        if marker is not None and not (built_in and marker == config.extract):
            extract = f", and Reward.extract is {config.extract!r}" if built_in else ""
            return marker, (
                f"no response can match it: the answer holds {MARKERS[marker]}{extract}: add "
                f"?answer_extract={marker} to the task, so that the text there is the answer"
            )
        if built_in and (read := extract_answer(config.extract, marked)) != core:
            return "extract", (
                f"no response can match it: Reward.extract={config.extract!r} reads "
                f"{shown(read or '')} of the answer {shown(core)}: choose another, or "
                "?answer_extract=NAME for the task"
            )
        if scored.failure is not None:
            return scored.failure.partition(":")[0], scored.failure
        paid = {name: scored.best(name) for name in self._config.names}
        if all(value is None for value in paid.values()):
            return "none", "no reward function applies: all return None"
        if any((value or 0.0) > 0 for value in paid.values()):
            text = f"{paid} for the answer {shown(core)}, no more than for another example's"
        else:
            text = f"nothing for the answer {shown(core)} in any of {len(scored.right)} forms"
        return "unpaid", f"the rewards pay {text}"

    # -- wrong responses, and functions ------------------------------------------------------

    def _wrong(self, scored: Scored) -> Iterator[tuple[str, str]]:
        for name in self._judges:
            best = scored.best(name)
            wrong = scored.highest_wrong(name)
            # a comparison of a whole group may pay anything for any response
            is_relative = self._config.per == "group" and name not in BUILT_IN
            if best is None or wrong is None or name in ("task", "exact_match") or is_relative:
                continue
            value, form = wrong
            floor = self._floors[name]
            if value > floor and value >= (1.0 if name in BUILT_IN else best) and best > floor:
                kind = "number" if form.kind not in (OTHER, QUESTION) else form.kind
                text = (
                    f"{name} pays {value:g} for the wrong response {shown(form.text)}, "
                    f"{form.kind}; the answer is {shown(scored.row.core.text)}"
                )
                yield f"wrong {name} {kind}", text

    def _idle_functions(self) -> Iterator[Finding]:
        """Yield functions with a parameter `answer` that pay for no answer, unlike others."""
        for function, name in zip(self._config.functions, self._config.names, strict=True):
            if not self._judges or name in self._judges or not _names_answer(function):
                continue
            if all((s.best(name) or 0.0) <= self._floors[name] for s in self._scored):
                for s in self._scored:
                    text = f"{name} pays nothing for the answer {shown(s.row.core.text)}"
                    yield Finding(f"idle {name}", text, s.row)

    def _floor(self, name: str) -> float:
        """Return the minimum that a function pays for any response."""
        scores = (score for s in self._scored for score in (*s.right.values(), *s.wrong.values()))
        return min((v for score in scores if (v := score.values[name]) is not None), default=0.0)

    def _judges_by(self, name: str) -> bool:
        """Return whether a function pays differently for the same text if the answer differs."""
        if self._config.per == "group":
            return True
        pairs = []
        right = {s.row.index: s.right for s in self._scored}
        for s in self._scored:
            for form, score in s.wrong.items():
                if s.row.other is not None and form.kind == OTHER:
                    own = right.get(s.row.other.index, {}).get(Form(form.text))
                    if own is not None:
                        pairs.append((score.values[name], own.values[name]))
        if pairs:
            return any(one != other for one, other in pairs)
        return any((s.best(name) or 0.0) > self._floors[name] for s in self._scored)


def _names_answer(function: str) -> bool:
    """Return whether a user function has a parameter `answer`, without running its file."""
    path, name = split_user_name(function)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return "answer" in [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
    return False
