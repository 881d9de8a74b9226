"""Procedural tasks from reasoning-gym: the safe tasks, and their configuration by a spec.

Entry i is a function of (seed, i) only, in every process; no scorer evaluates text of the model.
"""

from __future__ import annotations

import dataclasses
import decimal
import difflib
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

PREFIX = "reasoning_gym:"
REVIEWED_VERSION = "0.1.25"

# Each task was reviewed in that version by reading its `score_answer` and everything it calls, and
# by a probe that the tests repeat: the same seed gives the same entries, the answer of an entry
# scores 1.0 (except in base_conversion for 0, which is empty: set min_value=1), and garbage never.
# Scored by the base class: equality, or the share of the text that is the answer.
_EQUALITY = """
    acre aiw arc_1d base_conversion basic_arithmetic binary_alternation caesar_cipher count_bits
    count_primes course_schedule gcd largest_island lcm leg_counting letter_counting
    list_functions mahjong_puzzle maze modulo_grid number_filtering number_sequence rotate_matrix
    rotten_oranges simple_equations simple_geometry string_manipulation string_splitting
    string_synthesis syllogism word_sequence_reversal
""".split()
# Scored by comparing strings, words or letters, or numbers read by int, float, Decimal or json.
_OWN_SCORER = """
    ab calendar_arithmetic chain_sum circuit_logic color_cube_rotation cryptarithm
    decimal_arithmetic decimal_chain_sum dice family_relationships fraction_simplification
    gsm_symbolic knights_knaves manipulate_matrix mini_sudoku needle_haystack number_format
    number_sorting palindrome_generation path_star polynomial_equations power_function
    prime_factorization products quantum_lock rectangle_count self_reference sentence_reordering
    shortest_path spell_backward word_sorting
""".split()
SAFE_TASKS = tuple(sorted(_EQUALITY + _OWN_SCORER))

# The form of answers that may be paid, if the scorer of the task accepts other text around them.
_DECIMAL = r"[+-]?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)(\.[0-9]*)?"
_FRACTION = (
    r"(\$\s*)?(-?[0-9]+\s*/\s*[0-9]+|\\d?frac\s*\{\s*[0-9]+\s*\}\s*\{\s*[0-9]+\s*\})(\s*\$)?"
)
_CLAIM = r"\w+ is an? \w+"
_NUMBER = r"[+-]?[0-9]+(\.[0-9]*)?(e[+-]?[0-9]+)?"
_FORMS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(form, re.IGNORECASE | re.ASCII)
    for name, form in {
        "chain_sum": _DECIMAL,
        "products": _DECIMAL,
        "fraction_simplification": _FRACTION,
        "gsm_symbolic": _DECIMAL,
        "knights_knaves": rf"{_CLAIM}((,| and|, and) {_CLAIM})*\.?",
        "polynomial_equations": rf"{_NUMBER}(\s*,\s*{_NUMBER})*",
        "quantum_lock": r"[ABC](\s*(→|->|,)?\s*[ABC])*",
    }.items()
}
# These pay 1 or 0: their partial marks are for a part of the answer text, or for the answer
# within other text.
EXACT_TASKS = frozenset(_EQUALITY) | frozenset(
    "chain_sum fraction_simplification gsm_symbolic knights_knaves products spell_backward".split()
)

# The largest numbers that a spec may set. A field counts parts of a question or digits of a
# number; a field listed below is a number in the question.
_MAX_COUNT = 1_000
_MAX_BY_FIELD: Mapping[str, int] = {
    **dict.fromkeys("min_value max_value min_factor max_factor max_delta".split(), 10**12),
    **dict.fromkeys("min_base max_base max_target node_range".split(), 10**12),
    **dict.fromkeys("count_bits?min_n count_bits?max_n".split(), 10**12),
    **dict.fromkeys("number_format?min_n number_format?max_n".split(), 10**12),
    **dict.fromkeys("count_primes?min_n count_primes?max_n".split(), 10**6),  # it fills a sieve
    **dict.fromkeys("year leap_year_range offset_upper_bound max_iterations".split(), 10**4),
}

_EVAL = "its scorer runs the model's text through eval"
_PARSE = "its scorer runs the model's text through sympy's parse_expr, which evaluates it"
_HASH = "its entries change with PYTHONHASHSEED, so that a run could not be resumed"
REFUSED_TASKS: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _EVAL),
        **dict.fromkeys(("countdown", "intermediate_integration", "puzzle24"), _PARSE),
        **dict.fromkeys(("polynomial_multiplication", "simple_integration"), _PARSE),
        **dict.fromkeys(("isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"), _HASH),
        "bitwise_arithmetic": "its scorer evaluates the problem's text at every call",
        "codeio": "it executes stored programs",
        "bf": "it interprets generated programs",
        "complex_arithmetic": "its scorer gives the answer nan full marks",
        "coin_flip": "its scorer expands answers like 1e999999999 to exact fractions",
        "composite": "it holds other tasks; list several specs instead",
        "game_of_life_halting": "its scorer gives every non-empty answer full marks",
        "time_intervals": "its entries read today's date, so that a run could not be resumed",
    }
)


def check_name(name: str) -> None:
    """Raise ValueError, with the reason or the nearest match, for a name off the allow-list."""
    if name in REFUSED_TASKS:
        raise ValueError(
            f"{PREFIX}{name} is refused: {REFUSED_TASKS[name]}. Take another task, for example "
            "gcd or chain_sum (rl.data.reasoning_gym_tasks.SAFE_TASKS lists all)"
        )
    if name not in SAFE_TASKS:
        close = difflib.get_close_matches(name, SAFE_TASKS, n=1)
        hint = f"did you mean {PREFIX}{close[0]}?" if close else "for example reasoning_gym:gcd"
        num_tasks = len(SAFE_TASKS)
        raise ValueError(f"{PREFIX}{name} is not on the list of {num_tasks} reviewed tasks; {hint}")


@dataclasses.dataclass(frozen=True)
class Procedural:
    """A seeded generator of JSON-able entries (question, answer, metadata) with its verifier."""

    name: str
    dataset: Any

    def entry(self, index: int) -> dict[str, Any]:
        # decimal_arithmetic sets the decimal precision of the thread: keep it from leaking.
        with decimal.localcontext(decimal.Context()):
            entry = self.dataset[index]
        # No listed scorer reads the few metadata that are not JSON (fractions of gsm_symbolic).
        return json.loads(json.dumps(entry, default=str))

    def score(self, answer: str, entry: Mapping[str, Any]) -> float:
        """Score an extracted answer by the task verifier: 0 to 1; only right answers get 1."""
        entry = dict(entry)
        form = _FORMS.get(self.name)
        if form is not None and not form.fullmatch(answer) and answer != entry["answer"]:
            return 0.0
        if self.name == "spell_backward":  # reasoning-gym sums up letters, past the word
            return float(answer.lower() == entry["answer"].lower())
        if self.name == "gsm_symbolic":  # reasoning-gym misses signs and commas
            got, wanted = (decimal.Decimal(x.replace(",", "")) for x in (answer, entry["answer"]))
            return float(got == wanted)
        if self.name == "number_sorting":  # single quotes would send it to its eval fallback
            entry["answer"] = entry["answer"].replace("'", '"')
        with decimal.localcontext(decimal.Context()):
            try:
                score = float(self.dataset.score_answer(answer, entry))
            except (ValueError, OverflowError, RecursionError):  # int("x"), int("inf"), [[[[…
                return 0.0
        if self.name in EXACT_TASKS:
            return float(score >= 1.0)
        return min(1.0, max(0.0, score)) if score == score else 0.0


def open_procedural(
    name: str, query: Mapping[str, str], seed: int = 0, size: int = 1
) -> Procedural:
    """Open a task; `query` holds config fields as text. Raises ValueError, ImportError."""
    check_name(name)
    dataset_class, config_class = _registered(name)
    fields = typing.get_type_hints(config_class)
    values: dict[str, Any] = {}
    for field, text in query.items():
        if field == "seed":
            raise ValueError(f"{PREFIX}{name}?seed={text}: set Run.seed instead")
        if field not in fields:
            close = difflib.get_close_matches(field, fields, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(fields))}"
            raise ValueError(f"{PREFIX}{name} has no field {field!r}; {hint}")
        values[field] = _typed(text, fields[field], f"{PREFIX}{name}?{field}")
        _check_size(values[field], name, field)
    # Entry i draws from Random(seed + i): close seeds would share almost all entries.
    spread_seed = int.from_bytes(hashlib.sha256(f"reprise {seed}".encode()).digest()[:4], "big")
    config = config_class(**{"size": size, **values, "seed": spread_seed})
    try:  # the constructor validates its config, by assertions
        return Procedural(name, dataset_class(config))
    except (AssertionError, ValueError) as error:
        shown = "&".join(f"{key}={value}" for key, value in query.items())
        raise ValueError(f"{PREFIX}{name}?{shown} is refused by the task: {error}") from error


def _check_size(value: Any, name: str, field: str) -> None:
    """Raise ValueError for numbers so large that questions would fill the memory."""
    numbers = value if isinstance(value, list | tuple) else [value]
    limit = _MAX_BY_FIELD.get(f"{name}?{field}", _MAX_BY_FIELD.get(field, _MAX_COUNT))
    for number in numbers:
        if isinstance(number, int | float) and not abs(number) <= limit:
            raise ValueError(
                f"{PREFIX}{name}?{field}: expected at most {limit:,} in size, got {number}"
            )


class _LateModule(types.ModuleType):
    """A module that is imported on the first access to an attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


@functools.cache
def _registered(name: str) -> tuple[type, type]:
    hint = f"pip install reasoning-gym=={REVIEWED_VERSION}"
    is_late = "cellpylib" not in sys.modules  # of a task that is not offered; imports matplotlib
    if is_late:
        sys.modules["cellpylib"] = _LateModule("cellpylib")
    try:
        version = importlib.metadata.version("reasoning-gym")
        from reasoning_gym.factory import DATASETS
    except ImportError as error:  # includes PackageNotFoundError
        raise ImportError(f"{PREFIX}{name} needs the package reasoning-gym: {hint}") from error
    finally:
        if is_late:
            del sys.modules["cellpylib"]
    if version != REVIEWED_VERSION:  # scorers of other versions may evaluate text
        raise ImportError(
            f"{PREFIX}{name}: expected reasoning-gym {REVIEWED_VERSION}, whose scorers were "
            f"reviewed, got {version}: {hint}"
        )
    return DATASETS[name]


_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def _typed(text: str, kind: Any, where: str) -> Any:
    """Read `text` as a value of the annotation `kind`."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return None if text.lower() == "none" else _typed(text, inner[0], where)
    if origin is typing.Literal:
        return _choice(text, {str(choice): choice for choice in arguments}, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _choice(text, {str(member.value): member for member in kind}, where)
    if kind is bool:
        return _choice(text.lower(), _BOOLS, where)
    if kind is str:
        return text
    sequence = kind if origin is None else origin
    if sequence in (tuple, list) or getattr(sequence, "__name__", "") == "Sequence":
        element: Callable | Any = arguments[0] if arguments else str
        items = [_typed(item, element, where) for item in text.split(",")]
        return items if sequence is list else tuple(items)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{where}: expected {kind.__name__}, got {text!r}") from None
    raise ValueError(f"{where}: a field of type {kind} cannot be set from a spec; leave it out")


def _choice(text: str, choices: Mapping[str, Any], where: str) -> Any:
    if text not in choices:
        raise ValueError(f"{where}: expected one of {', '.join(choices)}, got {text!r}")
    return choices[text]
