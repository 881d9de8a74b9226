"""Hostile data files, GGUF files, tokenizers and run folders: bombs by hand, and random damage."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from reprise.models.text import tokenizer
from reprise.rl.checkpoint import reader
from reprise.rl.commands import export, report, train
from reprise.rl.data.tasks import TaskConfig, open_tasks
from reprise.rl.gin.loader import load
from reprise.rl.learner.optimizer import SavedArrays
from reprise.rl.reports.runs import load_runs
from reprise.rl.run.run_checkpoint import saved_shapes
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs, open_policy
from tests.hostile.config_cases import change
from tests.hostile.folder_cases import VALUES
from tests.hostile.watch import Case, Wrong

ROWS = [
    {"prompt": f"é{i}+1=", "answer": str(i), "more": {"n": i, "list": [i, None, 1.5], "x": "y"}}
    for i in range(40)
]
BITS = (
    *(b"NaN", b"1e400", b"-1", b"null", b"[]", b"{}", b'""', b'"\\ud800"', b"9" * 5000, b"\xff"),
    *(
        b"[" * 200_000,
        b"\xef\xbb\xbf",
        b'"\\u0000"',
        b"\n" * 200_000,
        b'{"a":{"a":{}}}',
        b"\0" * 4096,
    ),
    *(b'"a":1,' * 50_000, b"[[]," * 100_000, b"-0.0", b"true", b"\r", b"18446744073709551616"),
)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """One to four changes: of bytes, pieces of JSON, and numbers of four and eight bytes."""
    if draw.random() < 0.6:  # in place: offsets stay right, and the reader gets further
        i = draw.randrange(len(content))
        some = bytes([draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))])
        return content[:i] + some + content[i + 1 :]
    for _ in range(draw.randint(1, 4)):
        i = draw.randrange(len(content) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            content = change(content, draw)
        elif kind == 1:
            content = content[:i] + draw.choice(BITS) + content[i:]
        elif kind == 2:
            size = draw.choice((4, 8))
            number = draw.choice((0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, draw.randrange(2**32)))
            number = number << 32 if size == 8 and draw.random() < 0.3 else number
            content = content[:i] + number.to_bytes(8, "little")[:size] + content[i + size :]
        else:
            j = draw.randrange(len(content) + 1)
            content = content[:i] + content[j : j + draw.randint(1, 400)] + content[i:]
    return content


# --- data -------------------------------------------------------------------------------


@functools.cache
def data_files() -> dict[str, bytes]:
    """A good file of each format, as bytes: by format and by how it is packed."""
    import pyarrow
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_pylist(ROWS)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    made = {"jsonl": lines, "json": json.dumps(ROWS).encode()}
    for codec in ("none", "zstd", "snappy"):
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(table, sink, row_group_size=15, compression=codec)
        made[f"parquet {codec}"] = sink.getvalue().to_pybytes()
    sink = pyarrow.BufferOutputStream()
    delta = {name: "DELTA_BYTE_ARRAY" for name in ("prompt", "answer")}
    parquet.write_table(table, sink, use_dictionary=False, column_encoding=delta)
    made["parquet delta"] = sink.getvalue().to_pybytes()
    for new in (ipc.new_stream, ipc.new_file):
        for codec in (None, "zstd", "lz4"):
            sink = pyarrow.BufferOutputStream()
            options = ipc.IpcWriteOptions(compression=codec)
            with new(sink, table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=15)
            made[f"datasets {new.__name__} {codec}"] = sink.getvalue().to_pybytes()
    return made


def data_case(name: str, content: bytes) -> Case:
    form = name.partition(" ")[0]

    def run(folder: Path) -> None:
        path = folder / f"a.{form}"
        path.write_bytes(content)
        if form == "datasets":
            (folder / "state.json").write_text(
                json.dumps({"_data_files": [{"filename": path.name}]})
            )
            path = folder
        task = open_tasks(TaskConfig(specs=(f"{form}:{path}",)), 0)
        for i in range(min(len(task), 2000)):
            task[i]

    return Case(f"data: {name}", run)


def data(draw: random.Random, forms: tuple[str, ...]) -> Iterator[Case]:
    made = {name: x for name, x in data_files().items() if name.startswith(forms)}
    while True:
        name = draw.choice(sorted(made))
        yield data_case(name, mutated(made[name], draw))


# --- policies ---------------------------------------------------------------------------


def ggufs(draw: random.Random, good: bytes) -> Iterator[Case]:
    head = good.rfind(b"\0" * 32) if len(good) > 4096 else len(good)

    def case(content: bytes) -> Case:
        def run(folder: Path) -> None:
            (folder / "a.gguf").write_bytes(content)
            open_policy(str(folder / "a.gguf"))

        return Case("gguf", run)

    while True:
        yield case(mutated(good[:head], draw) + good[head:])


_REPLACE: tuple[Any, ...] = (
    {"type": "Replace", "pattern": {"Regex": "."}, "content": "aa"},
    {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
    {"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 10_000},
)
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
RULES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "normalizer": (
        "normalizers",
        (*_REPLACE, {"type": "Prepend", "prepend": "y" * 10_000}, {"type": "NFKC"}),
    ),
    "pre_tokenizer": (
        "pretokenizers",
        (
            *(_SPLIT | {"pattern": {"Regex": x}} for x in ("(a+)+$", "", "(?=(1+))\\1=")),
            *({"type": "Digits", "individual_digits": True}, {"type": "UnicodeScripts"}),
        ),
    ),
    "decoder": (
        "decoders",
        (*_REPLACE, {"type": "Strip", "content": "1", "start": 2**31, "stop": 0}, {"type": "Fuse"}),
    ),
}


def spoiled(content: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A tokenizer.json with other rules, or another value somewhere in it."""
    if draw.random() < 0.5:
        place = draw.choice(sorted(RULES))
        name, known = RULES[place]
        rules = draw.choices(known, k=draw.choice((1, 3, 40, 2000)))
        return content | {place: {"type": "Sequence", name: rules}}
    node: Any = content
    while True:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = draw.choice(list(keys))
        if isinstance(node[key], dict | list) and node[key] and draw.random() < 0.8:
            node = node[key]
            continue
        node[key] = draw.choice((*VALUES, 2**31, 2**32 - 1, 2**63, "", "\0", "x" * 10**6))
        return content


def tokenizers(draw: random.Random, policy: Path) -> Iterator[Case]:
    from tokenizers import Tokenizer

    good = json.loads((policy / tokenizer.RULES).read_text())

    def case(content: str | bytes) -> Case:
        def run(folder: Path) -> None:
            ours = Path(shutil.copytree(policy, folder / "policy"))
            data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
            (ours / tokenizer.RULES).write_bytes(data)
            words = tokenizer.load(ours)
            ids = words.encode(text := "1+1=2, and so on: " * 3)
            words.decode(ids)
            assert words.token_bytes is not None
            if ids != Tokenizer.from_buffer(data).encode(text, add_special_tokens=False).ids:
                raise Wrong("other tokens than the file's")

        return Case("tokenizer", run)

    while True:
        if draw.random() < 0.7:
            yield case(json.dumps(spoiled(json.loads(json.dumps(good)), draw)))
        else:
            yield case(mutated(json.dumps(good).encode(), draw))


# --- run folders ------------------------------------------------------------------------


def finished_run(folder: Path, tiny: Path) -> Path:
    """A run of two steps."""
    run = folder / "finished"
    if not run.exists():
        arguments = [f"--gin_file={tiny}", f"--gin.Run.directory={str(run)!r}", "--gin.Run.steps=2"]
        status = train.main(arguments)
        assert status == 0, status
    return run


def _special(path: Path, kind: str) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to("nowhere")
    elif kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(2**40)
    else:
        path.mkdir()


SPECIAL = ("pipe", "device", "link", "sparse", "folder")


def effect(command: str, ours: Path, folder: Path) -> tuple[Any, str]:
    """Run a command on a run folder; return its result and errors. Raises ValueError if it fails.

    A result has what no damage may change in silence: the steps of a report and how many samples it
    has, the files of an export, the state that a run goes on with.
    """
    if command == "restore":
        config = load(TrainConfig, [ours / "config.gin"])
        shapes = saved_shapes(config, open_inputs(config))
        found = reader.restore(ours / "checkpoints", shapes, optional=SavedArrays.OPTIONAL)
        return (jax.tree.map(lambda x: x.tobytes(), found.arrays), found.host), "\n".join(
            (*found.warnings, "")
        )
    main, *arguments = {
        "report": (report.main, str(ours), "--output", str(folder / "report")),
        "export": (export.main, str(ours), "--output", str(folder / "export")),
        "resume": (
            *(train.main, "--resume", "--dry_run"),
            *(f"--gin.Run.directory={str(ours)!r}", "--gin.Run.steps=3"),
        ),
    }[command]
    said = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stderr(said):
        status = main(arguments)  # names relative to a handle look like names in this folder
    if status:
        raise ValueError(f"status {status}")
    if command == "report":
        run = load_runs([ours])[0]
        return (*run.steps, *map(len, (run.samples, run.timeline, run.workers))), said.getvalue()
    files = (folder / "export").glob("*[!d]")  # but for the card, which has the date and the rows
    return {path.name: path.read_bytes() for path in files}, said.getvalue()


def runs(
    draw: random.Random, good: Path, files: Sequence[Path], commands: Sequence[str]
) -> Iterator[Case]:
    """Damaged files of a run folder, read by commands."""
    names = sorted(path.relative_to(good).as_posix() for path in files)
    expected = {}
    for command in commands:
        with tempfile.TemporaryDirectory() as folder:
            expected[command] = effect(command, good, Path(folder))

    def case(name: str, kind: str, seed: float, command: str) -> Case:
        def run(folder: Path) -> None:
            ours = Path(shutil.copytree(good, folder / "run"))
            path = ours / name
            if kind in SPECIAL:
                _special(path, kind)
            else:
                path.write_bytes(mutated(path.read_bytes(), random.Random(seed)))
            got, said = effect(command, ours, folder)
            wanted, always = expected[command]
            if got != wanted and said.count("\n") <= always.count("\n"):
                raise Wrong(f"another result, and no word: {got!r:.300}")

        return Case(f"run: {command} with {name} {kind}", run)

    while True:
        kind = draw.choice((*SPECIAL, *["damaged"] * 8))
        yield case(draw.choice(names), kind, draw.random(), draw.choice(commands))


def records(draw: random.Random, run: Path) -> Iterator[Case]:
    files = [path for path in run.iterdir() if path.is_file()]
    return runs(draw, run, files, ("report", "export", "resume"))


def checkpoints(draw: random.Random, run: Path) -> Iterator[Case]:
    files = [path for path in (run / "checkpoints").rglob("*") if path.is_file()]
    return runs(draw, run, files, ("export", "resume", "restore"))
