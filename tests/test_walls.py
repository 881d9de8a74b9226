"""The walls between the packages, read from every import by AST (docs/architecture.md).

A rule is a function from a tree of files to a list of complaints. Each one is
run on this checkout, where it must be silent, and on a small tree with a
planted fault, where it must not be.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "models": {"models"},
    "spec": {"models", "spec"},
    "sched": {"sched"},
    "rl": {"models", "spec", "sched", "rl"},
}
# The sub-packages ("rooms") of a package, and which others of that package each may import;
# "" is the package's own files; of rl these, and each `__main__`, only start a command. A room
# imports rooms of the lines above, and itself; in rl also `EVERYWHERE`.
EVERYWHERE = {"runtime", "records"}
KERNELS = {"kernels", "kernels.shared", "kernels.cpu", "kernels.gpu", "kernels.tpu"}
ROOMS: dict[str, dict[str, set[str]]] = {
    "models": {
        "": set(),
        "kernels.shared": set(),
        "kernels.cpu": set(),
        "kernels.gpu": {"kernels.shared"},
        "kernels.tpu": {"kernels.shared"},
        "kernels": {"kernels.cpu", "kernels.gpu"},
        "attention": {"", *KERNELS},
        "decoder": {"", "attention", *KERNELS},
        "formats": {"", "decoder"},
        "text": {"", "formats"},
    },
    "spec": {
        "": set(),
        "verification": {""},
        "reuse": {"", "verification"},
        "draft_cache": {"", "verification"},
        "eagle": {"", "draft_cache", "verification"},
        "eagle_training": {"eagle"},
        "draft_model": {"", "draft_cache", "verification"},
        "decoupled": {"", "draft_cache", "draft_model"},
        "retrieval": {"", "reuse"},
        "budget": {"", "retrieval"},
    },
    "sched": {"": set(), "policies": {""}, "simulator": {"", "policies"}},
    "rl": {
        "answers": set(),
        "cluster": set(),
        "gin": set(),
        "http": set(),
        "records": set(),
        "runtime": set(),
        "weights": set(),
        "checkpoint": {"cluster"},
        "data": {"answers"},
        "losses": {"gin"},
        "slots": {"gin"},
        "batches": {"losses"},
        "rewards": {"answers", "cluster", "data"},
        "slot_memory": {"slots"},
        "engine": {"slot_memory", "slots"},
        "learner": {"batches", "gin", "losses"},
        "metrics": {"data", "rewards"},
        "reports": {"metrics"},
        "speculation": {"cluster", "engine", "slot_memory"},
        "workers": {"engine", "slots"},
        "drafter_training": {"checkpoint", "slot_memory", "speculation"},
        "exchange": {"cluster", "data", "engine", "losses", "rewards", "workers"},
        "environments": {"data", "engine", "exchange", "rewards"},
        "sessions": {"engine", "workers"},
        "warm_up": {"cluster", "engine", "slot_memory", "slots", "speculation"},
        "drafting": {"cluster", "engine", "slots", "speculation", "warm_up"},
        "ray_workers": {
            *("cluster", "drafter_training", "drafting", "engine", "speculation"),
            *("warm_up", "weights", "workers"),
        },
        "settings": {
            *("checkpoint", "cluster", "data", "drafter_training", "drafting", "gin"),
            *("environments", "learner", "losses", "metrics", "rewards", "slots", "speculation"),
            *("warm_up", "workers"),
        },
        "placement": {"learner", "settings", "slots", "weights", "workers"},
        "assembly": {
            *("checkpoint", "cluster", "data", "drafter_training", "drafting", "engine"),
            *("environments", "exchange", "learner", "metrics", "placement", "ray_workers"),
            *("rewards", "sessions", "settings", "speculation", "warm_up", "weights", "workers"),
        },
        "export": {
            *("assembly", "checkpoint", "drafter_training", "gin", "learner", "metrics"),
            *("settings",),
        },
        "preflight": {
            *("assembly", "learner", "placement", "settings", "slot_memory"),
            *("speculation", "warm_up", "workers"),
        },
        "ablation": {"gin", "metrics", "reports", "settings"},
        "simulation": {"metrics", "reports", "warm_up", "workers"},
        "steps": {
            *("assembly", "data", "engine", "exchange", "learner", "losses", "metrics"),
            *("rewards", "sessions", "settings", "warm_up", "workers"),
        },
        "run": {
            *("assembly", "checkpoint", "cluster", "data", "engine", "exchange", "export"),
            *("gin", "learner", "metrics", "placement", "preflight", "rewards"),
            *("sessions", "settings", "steps", "warm_up", "weights", "workers"),
        },
        "python": {
            *("assembly", "batches", "checkpoint", "data", "engine", "exchange", "export"),
            *("gin", "learner", "placement", "rewards", "run", "settings", "speculation"),
            *("warm_up", "weights", "workers"),
        },
        "server": {"http", "python"},
        "endpoint": {"http", "python", "server"},
        "commands": {
            *("ablation", "assembly", "checkpoint", "data", "drafter_training", "endpoint"),
            *(
                "environments",
                "exchange",
                "export",
                "gin",
                "http",
                "learner",
                "metrics",
                "placement",
                "preflight",
            ),
            *("python", "reports", "rewards", "run", "server", "settings", "simulation"),
            *("workers",),
        },
        "": {"commands"},
    },
}
NAME = "reprise"  # under which the packages are imported
OURS = {*MAY_IMPORT, "benchmarks", "configs", "policies", "tests"}
CODE = (*MAY_IMPORT, "benchmarks", "policies", "tests")

# What a pure state machine has no use for: clocks, probability, the outside world, threads.
IMPURE = {
    *("time", "datetime", "calendar", "random", "secrets", "uuid", "os", "io", "sys", "pathlib"),
    *("shutil", "tempfile", "glob", "logging", "socket", "select", "selectors", "ssl", "signal"),
    *("subprocess", "multiprocessing", "threading", "_thread", "concurrent", "asyncio", "queue"),
    *("sqlite3", "urllib", "http", "importlib", "runpy", "sysconfig", "ctypes", "mmap", "atexit"),
}
IMPURE_BUILTINS = {"open", "print", "input"}
SEEDED_NUMPY = {"Generator", "default_rng", "SeedSequence", "PCG64", "Philox", "BitGenerator"}

# The engine runs where only these, and what they bring along, are installed.
ENGINE_NEEDS = {"jax", "jaxlib", "numpy", "numba", "optax", "orbax", "safetensors", "flax"}
ENGINE = (
    "models.config",
    "models.decoder.transformer",
    "models.attention.kv_cache",
    "models.sharding",
)
ENGINE += (
    "rl.engine",
    "rl.slots",
    "rl.slot_memory",
    "rl.python.generate",
    "rl.records.trajectory",
    "spec",
    "benchmarks",
)
# Programs around other people's samplers, each run by the Python that has that one.
NOT_ENGINE = "benchmarks.baselines."
NOT_FOR_ENGINE = {
    *("transformers", "tokenizers", "huggingface_hub", "jinja2", "gin", "reasoning_gym", "sympy"),
    *("math_verify", "latex2sympy2_extended", "tensorboardX", "matplotlib", "pyarrow"),
    *("pandas", "torch", "tunix", "pytest", "hypothesis"),
}


@dataclasses.dataclass(frozen=True)
class Import:
    """One import: the module's absolute name, where it stands, and what is taken from it."""

    name: str
    where: str
    members: tuple[str, ...] = ()
    is_relative: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """What may be a module: `rl.records.stats` of `from rl.engine import stats` too."""
        return tuple(f"{self.name}.{member}" for member in self.members) or (self.name,)

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def python_files(root: Path, packages: tuple[str, ...] = CODE) -> Iterator[tuple[str, Path]]:
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(relative: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file as `imports_as_written`, without `reprise.` before our packages."""
    for found in imports_as_written(relative, tree):
        if found.name == NAME:
            for member in found.members:
                yield Import(member, found.where)
        else:
            yield dataclasses.replace(found, name=found.name.removeprefix(f"{NAME}."))


def imports_as_written(relative: str, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, wherever it stands; `import_module("x")` counts."""
    package = relative.split("/")[:-1]
    for node in ast.walk(tree):
        names: list[str] = []
        is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*base, *([node.module] if node.module else [])])]
            if node.level and not node.module:  # from . import x
                names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
        members = [a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            yield Import(name, f"{relative}:{node.lineno}", tuple(members), is_relative)


def called(node: ast.Call) -> str:
    """The last name of what is called: `f` of `f()` and of `a.b.f()`."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


# The rules


def walls(root: Path) -> list[str]:
    """models → nothing of ours, spec → models, sched → nothing of ours, rl → all of these."""
    return [
        f"{found.where}: {relative.split('/')[0]} must not import {found.name}"
        for relative, path in python_files(root, tuple(MAY_IMPORT))
        for found in imports(relative, parse(path))
        if found.top in OURS - MAY_IMPORT[relative.split("/")[0]]
    ]


def one_name(root: Path) -> list[str]:
    """Our packages are imported under `reprise`: a user's project may have its own `models`."""
    return [
        f"{found.where}: expected {NAME}.{found.name}, got {found.name}"
        for relative, path in python_files(root)
        for found in imports_as_written(relative, parse(path))
        if found.top in MAY_IMPORT and not found.is_relative
    ]


def rooms(root: Path) -> list[str]:
    """Inside a package a room imports only what `ROOMS` and `EVERYWHERE` say."""
    return [
        f"{found.where}: {relative} must not import {name}"
        for relative, path in python_files(root, tuple(ROOMS))
        for found in imports(relative, parse(path))
        for name in found.modules
        if not may_enter(relative, name)
    ]


def may_enter(relative: str, imported: str) -> bool:
    package, *here = relative.removesuffix(".py").split("/")
    top, *there = imported.split(".")
    if top != package or not there:
        return True
    table = ROOMS[package]
    own = ".".join(here[:-1])
    if own not in table:
        return False  # a new room needs a line in the table
    other = room_of(there, table)
    if package == "rl" and (not other or here[-1] == "__main__"):
        own = ""
    return other in {own, *table[own]} or (package == "rl" and other in EVERYWHERE)


def room_of(module: list[str], table: dict[str, set[str]]) -> str:
    """Return the longest room that starts a module's path, "" for the package's own files."""
    starts = (".".join(module[:n]) for n in range(len(module), 0, -1))
    return next((start for start in starts if start in table), "")


def sched_is_pure(root: Path) -> list[str]:
    """sched uses numpy and the pure part of the standard library, and seeded probability only."""
    complaints = []
    for relative, path in python_files(root, ("sched",)):
        allowed = (sys.stdlib_module_names - IMPURE) | {"numpy", "sched"}
        tree = parse(path)
        for found in imports(relative, tree):
            if found.top not in allowed or found.name == "numpy.random":
                complaints.append(f"{found.where}: sched must not import {found.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in IMPURE_BUILTINS:
                complaints.append(f"{relative}:{node.lineno}: sched must not call {called(node)}()")
            complaints += [f"{relative}:{node.lineno}: {c}" for c in unseeded_prob(node)]
    return complaints


def unseeded_prob(node: ast.AST) -> list[str]:
    """`np.random.x` other than the seeded generators; `default_rng()` without a seed."""
    owner = getattr(node, "value", None)
    if isinstance(node, ast.Attribute) and isinstance(owner, ast.Attribute):
        if owner.attr == "random" and node.attr not in SEEDED_NUMPY:
            return [f"sched must not use the global numpy.random.{node.attr}"]
    if isinstance(node, ast.Call) and called(node) == "default_rng":
        if not node.args and not node.keywords:
            return ["default_rng() needs a seed"]
    return []


def no_code_from_data(root: Path) -> list[str]:
    """Nothing that a model or a file says is ever executed or unpickled.

    Processes of one job read one another's pickles of a few classes (`rl.exchange.responses`).
    """
    modules = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
    complaints = []
    for relative, path in python_files(root):
        tree = parse(path)
        for found in imports(relative, tree):
            is_pickle = found.top in modules and relative != "rl/exchange/responses.py"
            if is_pickle or found.name.endswith("parse_expr"):
                complaints.append(f"{found.where}: {found.name} must not be imported")
        for node in ast.walk(tree):
            if isinstance(node, ast.alias) and node.name in ("parse_expr", "sympify"):
                complaints.append(f"{relative}:{node.lineno}: {node.name} must not be imported")
            if isinstance(node, ast.Call):
                complaints += [f"{relative}:{node.lineno}: {c}" for c in dangerous_call(node)]
    return complaints


def dangerous_call(node: ast.Call) -> list[str]:
    is_builtin = isinstance(node.func, ast.Name) or (
        isinstance(node.func, ast.Attribute)
        and getattr(node.func.value, "id", "") in ("builtins", "__builtins__")
    )
    found = []
    if called(node) in ("parse_expr", "sympify") or (
        is_builtin and called(node) in ("eval", "exec")
    ):
        found.append(f"{called(node)}() must not be called")
    for keyword in node.keywords:
        is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in ("trust_remote_code", "allow_pickle") and not is_false:
            found.append(f"{keyword.arg} must be False")
    return found


def no_standard_names(root: Path) -> list[str]:
    """No file is named after a standard module, nor a package except `reprise.sched`."""
    standard = set(sys.stdlib_module_names) - {"__future__"}
    files = [r for r, path in python_files(root) if path.stem in standard]
    folders = [p.name for p in root.iterdir() if p.is_dir() and p.name in standard - {"sched"}]
    return [f"{name} is named after a standard module" for name in files + folders]


RULES = (walls, one_name, rooms, sched_is_pure, no_code_from_data, no_standard_names)


def imports_below(table: dict[str, set[str]], above: set[str] = frozenset()) -> list[str]:
    """Rooms that import a room of a later line: without one there is no circle."""
    rooms = list(table)
    return [
        f"{room} imports {other}, which is below it"
        for i, room in enumerate(rooms)
        for other in sorted(table[room] - above)
        if other not in rooms[:i]
    ]


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_rooms_above_them(package):
    assert not imports_below(ROOMS[package], EVERYWHERE if package == "rl" else set())


def test_a_circle_of_rooms_is_found():
    table = {"a": set(), "b": {"a", "c"}, "c": {"b"}}
    assert imports_below(table) == ["b imports c, which is below it"]
    assert imports_below(table, {"c"}) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_this_checkout_keeps(rule):
    assert not rule(ROOT), "\n".join(rule(ROOT))


def test_the_rules_see_this_checkout():
    """A rule that reads no file would be silent too."""
    seen = {relative for relative, _ in python_files(ROOT)}
    assert {"models/config.py", "rl/records/trajectory.py", "sched/__init__.py"} <= seen
    assert "tests/test_walls.py" in seen


PLANTED = [
    (walls, "models/a.py", "import rl.engine"),
    (walls, "models/a.py", "def f():\n    from reprise.spec.verification import verify"),
    (walls, "spec/a.py", "from reprise.sched.request import Request"),
    (
        walls,
        "spec/a.py",
        "import typing as t\nif t.TYPE_CHECKING:\n    from reprise.rl import engine",
    ),
    (walls, "sched/deep/a.py", "import models.config as c"),
    (walls, "sched/a.py", "import importlib\nimportlib.import_module('spec.verification.nodes')"),
    (walls, "rl/a.py", "from benchmarks import rollout"),
    (walls, "models/a.py", "from reprise import rl"),
    (one_name, "spec/a.py", "from models.config import ModelConfig"),
    (one_name, "benchmarks/a.py", "def f():\n    import rl.engine.engine as e"),
    (
        one_name,
        "tests/a.py",
        "import importlib\nimportlib.import_module('spec.verification.nodes')",
    ),
    (sched_is_pure, "sched/a.py", "import jax.numpy as jnp"),
    (sched_is_pure, "sched/a.py", "from time import monotonic"),
    (sched_is_pure, "sched/a.py", "import random"),
    (sched_is_pure, "sched/a.py", "def f():\n    import threading"),
    (sched_is_pure, "sched/a.py", "import os.path"),
    (sched_is_pure, "sched/a.py", "from numpy.random import randint"),
    (sched_is_pure, "sched/a.py", "import numpy as np\nx = np.random.rand()"),
    (sched_is_pure, "sched/a.py", "import numpy as np\nx = np.random.default_rng()"),
    (sched_is_pure, "sched/a.py", "print('decided')"),
    (sched_is_pure, "sched/a.py", "import sysconfig"),
    (sched_is_pure, "sched/a.py", "from reprise import spec"),
    (no_code_from_data, "rl/a.py", "import pickle"),
    (no_code_from_data, "models/a.py", "x = eval('1')"),
    (no_code_from_data, "rl/a.py", "import builtins\nbuiltins.exec('1')"),
    (no_code_from_data, "rl/a.py", "from sympy.parsing.sympy_parser import parse_expr"),
    (no_code_from_data, "rl/a.py", "import sympy\nsympy.parse_expr('1')"),
    (no_code_from_data, "models/a.py", "load('x', trust_remote_code=True)"),
    (no_code_from_data, "rl/a.py", "np.load('x', allow_pickle=flag)"),
    (no_standard_names, "rl/queue.py", ""),
    (no_standard_names, "logging/a.py", ""),
]
# A planted fault for every row of the table: each room enters one that it must not.
PLANTED += [
    (
        rooms,
        "/".join([package, *room.split("."), "a.py"]).replace("//", "/"),
        f"import {package}.{closed[0]}.b",
    )
    for package, table in ROOMS.items()
    for room, allowed in table.items()
    if (closed := sorted(set(table) - allowed - {room, "", *EVERYWHERE}))
]
PLANTED += [
    (rooms, "rl/engine/a.py", "from reprise.rl.commands import train"),
    (rooms, "rl/run/__main__.py", "from reprise.rl.run import loop"),
    (rooms, "rl/engine/a.py", "from reprise.rl.steps.pipeline import PipelineRollouts"),
    (rooms, "rl/run/loop.py", "from reprise.rl.commands.train import main"),
    (rooms, "rl/steps/step.py", "from reprise.rl.run.run_checkpoint import RunCheckpointer"),
    (rooms, "rl/engine/a.py", "def f():\n    from reprise.rl.rewards import pool"),
    (rooms, "rl/records/trajectory.py", "from reprise.rl.engine.engine import Engine"),
    (rooms, "rl/runtime/a.py", "from reprise.rl.gin.loader import load"),
    (rooms, "rl/attic/a.py", "from reprise.rl.engine import engine"),
    (rooms, "spec/verification/nodes.py", "from reprise.spec.retrieval import group"),
]
INNOCENT = [
    (
        rooms,
        "rl/run/loop.py",
        "from reprise.rl.steps import pipeline\nfrom reprise.rl.records import a",
    ),
    (rooms, "rl/export/__main__.py", "from reprise.rl.commands.main import run"),
    (
        rooms,
        "rl/engine/a.py",
        "from reprise.rl.runtime.waits import wait\nfrom . import b\nimport reprise.spec.x",
    ),
    (
        rooms,
        "spec/budget/a.py",
        "from reprise.spec.drafter import Drafts\nfrom reprise.spec.retrieval import group",
    ),
    (
        walls,
        "spec/a.py",
        "from reprise.models.config import ModelConfig\nfrom . import b\nfrom .c import d",
    ),
    (walls, "rl/a.py", "import reprise.sched\nfrom reprise import sched, spec, models"),
    (one_name, "rl/a.py", "from reprise import spec, models\nimport reprise.rl.engine\nimport jax"),
    (one_name, "rl/a.py", "from . import b\nfrom .c import d\nfrom benchmarks import rollout"),
    (
        sched_is_pure,
        "sched/a.py",
        "import heapq, math\nfrom reprise.sched.b import c\nfrom . import d",
    ),
    (sched_is_pure, "sched/a.py", "import numpy as np\nx = np.random.default_rng(3).random()"),
    (no_code_from_data, "models/a.py", "model.eval()\nload('x', trust_remote_code=False)"),
    (no_standard_names, "sched/tracing.py", ""),
]


def plant(root: Path, relative: str, text: str) -> None:
    (root / relative).parent.mkdir(parents=True, exist_ok=True)
    (root / relative).write_text(text)


@pytest.mark.parametrize(("rule", "relative", "text"), PLANTED)
def test_a_planted_fault_is_named(rule, relative, text, tmp_path):
    plant(tmp_path, relative, text)
    assert any(relative.split("/")[0] in complaint for complaint in rule(tmp_path))


@pytest.mark.parametrize(("rule", "relative", "text"), INNOCENT)
def test_the_innocent_pass(rule, relative, text, tmp_path):
    plant(tmp_path, relative, text)
    assert rule(tmp_path) == []


# The engine's imports, tried in a process where nothing else can be imported


def engine_modules(root: Path) -> list[str]:
    names = (r.removesuffix(".py").removesuffix("/__init__") for r, _ in python_files(root))
    dotted = (name.replace("/", ".") for name in names)
    found = [d for d in dotted if any(d == e or d.startswith(f"{e}.") for e in ENGINE)]
    found = [d for d in found if not d.startswith(NOT_ENGINE)]
    return [f"{NAME}.{d}" if d.split(".")[0] in MAY_IMPORT else d for d in found]


def import_engine(root: Path) -> subprocess.CompletedProcess[str]:
    """Imports every engine module with the packages that it must not need blocked."""
    code = (
        "import importlib, sys\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        f"for name in {sorted(NOT_FOR_ENGINE)!r}: sys.modules[name] = None\n"
        f"for name in {engine_modules(root)!r}: importlib.import_module(name)\n"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)


def test_the_engine_imports_with_nothing_but_its_needs():
    expected = {
        "reprise.models.decoder.transformer",
        "reprise.rl.records.trajectory",
        "reprise.spec.verification.nodes",
    }
    assert expected <= set(engine_modules(ROOT))
    done = import_engine(ROOT)
    assert done.returncode == 0, (
        f"expected the engine to import with only {sorted(ENGINE_NEEDS)}, got:\n{done.stderr}\n"
        "fix: move the import into the function that needs it"
    )


def test_an_engine_that_needs_more_is_found(tmp_path):
    plant(tmp_path, "reprise/__init__.py", "")
    (tmp_path / "reprise" / "rl").symlink_to(tmp_path / "rl")
    plant(tmp_path, "rl/__init__.py", "")
    plant(tmp_path, "rl/pictures.py", "import matplotlib")
    plant(tmp_path, "rl/engine/engine.py", "from reprise.rl import pictures")
    done = import_engine(tmp_path)
    assert done.returncode != 0 and "matplotlib" in done.stderr


def without_functions(tree: ast.Module) -> ast.Module:
    """The part that runs when a module is imported; `tree` is changed in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []
    return tree


def test_the_engine_itself_names_only_its_needs():
    """The blocked list cannot hold every package; the imports at the top of a module can."""
    allowed = sys.stdlib_module_names | OURS | ENGINE_NEEDS | {NAME, "ml_dtypes", "scipy"}
    for name in engine_modules(ROOT):
        name = name.removeprefix(f"{NAME}.")
        path = ROOT / (name.replace(".", "/") + ".py")
        path = path if path.exists() else ROOT / name.replace(".", "/") / "__init__.py"
        top = without_functions(parse(path))
        found = {i.top for i in imports(path.relative_to(ROOT).as_posix(), top)}
        assert found <= allowed, f"{name} needs {found - allowed} when it is imported"


def test_sched_needs_no_jax():
    """Every module of `sched` imports if jax and our other packages are absent."""
    code = """
import importlib, pkgutil, sys
for name in ("jax", "jaxlib", "reprise.models", "reprise.spec", "reprise.rl"):
    sys.modules[name] = None
import reprise.sched
for module in pkgutil.walk_packages(reprise.sched.__path__, "reprise.sched."):
    importlib.import_module(module.name)
"""
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, timeout=120).returncode == 0
    command[-1] += "\nimport jax"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "jax" in done.stderr
