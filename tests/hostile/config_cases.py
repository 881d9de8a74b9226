"""Hostile configurations: bombs by hand, every field with values of no use, files with damage."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import itertools
import random
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

from reprise.rl.gin.loader import dump, load
from reprise.rl.preflight import memory
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs, open_inputs
from tests.hostile.watch import CANARY, Case, Wrong

ROOT = Path(__file__).parents[2]
TOUCH = f"__import__('os').system('touch ../{CANARY}')"
VALUES = (
    "None", "True", "-1", "0", "1", "10**9", "2147483648", "99999999999999999999", "1e999",
    "-1e999", "1e-999", "0.5", "''", "'x'", "'../../etc/passwd'", "'/dev/zero'", "'/proc/self/mem'",
    "'a\\0b'", "'a\\ud800'", "'\\x1b[2J'", "'jsonl:/dev/zero'", "'reasoning_gym:x?size=1e9'",
    "()", "(1,)", "('x',)", "(None,)", "((),)", "{}", "{'a': 1}", "[[[[]]]]", "('a.py:f',)",
    f"'{CANARY}:f'", f"('{CANARY}.py:f',)", f"\"{TOUCH}\"", "@os.system", "%undefined", "nan",
    "'" + "x" * 5000 + "'", "(" + "1," * 3000 + ")",
)  # fmt: skip
# What would be right, only large: it runs for as long as was asked, and is no fault.
LEFT_OUT = {"Task.size"}


def check(gin_file: Path, *overrides: str) -> Inputs:
    """Do what `rl.train --dry_run` does before it tries the rewards; raise Wrong as `compare`."""
    config = load(TrainConfig, [gin_file], overrides)
    compare(config, gin_file.read_text(), *overrides)
    inputs = open_inputs(config)
    devices = memory.Devices(1, 2**40)
    memory.estimate(config, inputs.model, devices).check(devices)
    dump(config)
    return inputs


def compare(config: TrainConfig, *texts: str) -> None:
    """Raise Wrong unless fields have the values that Python's parser reads in the lines."""
    wanted = dict[str, object]()
    for line in itertools.chain(*(text.split("\n") for text in texts)):
        if binding := re.fullmatch(r"\s*(\w+\.\w+)\s*=(.*)", line):
            wanted.pop(binding[1], None)
            with contextlib.suppress(ValueError, SyntaxError):  # on several lines, or of macros
                wanted[binding[1]] = ast.literal_eval(binding[2].strip())
    sections = {type(x).__name__.removesuffix("Config"): x for x in vars(config).values()}
    for name, value in wanted.items():
        section, _, field = name.partition(".")
        got = getattr(sections[section], field)
        value = float(value) if isinstance(got, float) and isinstance(value, int) else value
        if got != (tuple(value) if isinstance(value, list) else value):
            raise Wrong(f"{name} is {got!r:.200}, and the text says {value!r:.200}")


def of_text(name: str, text: str | bytes, tiny: Path, *, refused: bool = False) -> Case:
    """A file that includes the smallest run, then says something."""

    def run(folder: Path) -> None:
        start = f"include '{tiny}'\n".encode()
        more = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        (folder / "case.gin").write_bytes(start + more)
        check(folder / "case.gin")

    return Case(f"config: {name}", run, refused)


def by_hand(tiny: Path) -> Iterator[Case]:
    laughs = "m0 = (1,)\n" + "".join(f"m{i + 1} = ({f'%m{i}, ' * 10})\n" for i in range(12))
    chain = "m0 = 1\n" + "".join(f"m{i + 1} = %m{i}\n" for i in range(5000))
    for name, text in {
        "billion laughs": f"{laughs}Task.specs = %m12\n",
        "a chain of macros": f"{chain}Run.steps = %m5000\n",
        "a macro of itself": "a = %b\nb = %a\nRun.steps = %a\n",
        "an import": f"import {CANARY}\n",
        "an import from": f"from {CANARY} import x\n",
        "a reference": "Run.steps = @os.system\n",
        "a called reference": f"Run.directory = @os.system('touch ../{CANARY}')()\n",
        "an expression": f"Run.directory = {TOUCH}\n",
        "a call": "Run.steps = int('5')\n",
        "a lambda": "Run.steps = lambda: 5\n",
        "an f-string": f"Run.directory = f'{{{TOUCH}}}'\n",
        "a scope": "a/Run.steps = 5\n",
        "a dunder": "Run.__class__ = 5\n",
        "a dunder section": "__builtins__.open = 5\n",
        "deep lists": "Run.steps = " + "[" * 5000 + "]" * 5000 + "\n",
        "strings side by side": "Run.directory = " + "'x' " * 50_000 + "\n",
        "a number of many digits": f"Run.steps = {'9' * 100_000}\n",
        "a long line": f"# {'x' * 10**6}\n",
        "many lines": "Run.steps = 5\n" * 10**5,
        "not UTF-8": b"\xff\xfe",
        "NUL": b"Run.steps = \0\n",
        "half a pair": 'Task.prompt_suffix = "\\ud800"\n',
        "terminal codes": "Run.\x1b[2J = 5\n",
        "right to left": "Run.\u202esteps = 5\n",
        "an unknown user's home": "Task.specs = ('jsonl:~nosuchuser/x',)\n",
        "a reward beside": f"Reward.functions = ('{CANARY}:f',)\n",
        "a file of devices": "Task.specs = ('jsonl:/dev/zero',)\n",
        "a glob of everything": "Task.specs = ('jsonl:/**/no such file',)\n",
        "a tree of everything": "Task.specs = ('json:/proc',)\n",
        "included device": "include '/dev/zero'\n",
        "included folder": "include '/'\n",
        "included NUL": "include 'a\\0b'\n",
    }.items():
        yield of_text(name, text, tiny, refused=name not in ("a long line",))
    for name, made in {"includes twice": _twice, "a chain of includes": _chain}.items():
        yield Case(f"config: {name}", lambda folder, made=made: check(made(folder)), refused=True)


def _twice(folder: Path) -> Path:
    for i in range(28):
        (folder / f"f{i}.gin").write_text(f"include 'f{i + 1}.gin'\n" * 2)
    (folder / "f28.gin").write_text("Run.steps = 1\n")
    return folder / "f0.gin"


def _chain(folder: Path) -> Path:
    for i in range(100):
        (folder / f"f{i}.gin").write_text(f"include 'f{i + 1}.gin'\n")
    (folder / "f100.gin").write_text("Run.steps = 1\n")
    return folder / "f0.gin"


def fields(tiny: Path, draw: random.Random) -> Iterator[Case]:
    """Fields of every section with values drawn from those of no use."""
    names = []
    for section in dataclasses.fields(TrainConfig):
        cls = typing.get_type_hints(TrainConfig)[section.name]
        names += [
            f"{cls.__name__.removesuffix('Config')}.{f.name}" for f in dataclasses.fields(cls)
        ]
    names = [name for name in names if name not in LEFT_OUT]
    while True:
        name, value = draw.choice(names), draw.choice(VALUES)
        if draw.random() < 0.5:
            yield of_text(f"{name} = {value[:40]}", f"{name} = {value}\n", tiny)
        else:
            yield _override(f"{name}={value}", tiny)


def _override(text: str, tiny: Path) -> Case:
    return Case(f"config: --gin.{text[:60]}", lambda folder: check(tiny, text))


def damaged(tiny: Path, draw: random.Random) -> Iterator[Case]:
    """Shipped files with bytes changed, cut, doubled and exchanged."""
    texts = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.gin"))]
    while True:
        text = draw.choice(texts)
        for _ in range(draw.randint(1, 3)):
            text = change(text, draw)
        yield Case(f"config: damaged {text[:20]!r}", _loads(text))


def _loads(text: bytes) -> Callable[[Path], object]:
    def run(folder: Path) -> None:
        (folder / "case.gin").write_bytes(text)
        config = load(TrainConfig, [folder / "case.gin"])
        compare(config, text.decode())
        dump(config)

    return run


def change(data: bytes, draw: random.Random) -> bytes:
    """One random damage."""
    i, j = sorted(draw.randrange(len(data) + 1) for _ in range(2))
    j = min(j, i + 64)
    piece = bytes(draw.randrange(256) for _ in range(draw.randint(1, 4)))
    kind = draw.randrange(5)
    if kind == 0:
        return data[:i] + piece + data[i + len(piece) :]
    if kind == 1:
        return data[:i] + data[j:]
    if kind == 2:
        return data[:j] + data[i:]
    if kind == 3:
        return data[:i]
    return (
        data[:i]
        + draw.choice((b"[", b"{", b"'", b"%", b"@", b"\n", b"=", b"\0", b"1e999"))
        + data[i:]
    )
