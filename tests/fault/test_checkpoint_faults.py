"""Damage is found and the checkpoint before is used; a kill at any moment loses nothing.

The content of a checkpoint is a function of its step, so that the right one can
be told from a wrong one.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from whole_steps import whole_steps

from reprise.models.folder import Folder
from reprise.rl.checkpoint import checkpointer, contents, folders, reader
from reprise.rl.checkpoint import manifest as checkpoint_manifest
from reprise.rl.checkpoint.checkpointer import Checkpointer, LinkedFiles
from reprise.rl.checkpoint.config import CheckpointConfig
from reprise.rl.checkpoint.manifest import Content
from reprise.spec.reuse.rollout_cache import RolloutCache, of_group

ROOT = Path(__file__).parents[2]
TEMPLATE = {"w": jnp.zeros((3, 4)), "h": jnp.zeros((5,), jnp.bfloat16)}


def content(step: int) -> dict:
    return {"w": jnp.full((3, 4), 1.5 * step), "h": jnp.full((5,), step, jnp.bfloat16)}


def host(step: int) -> dict:
    return {"step": step, "cache": np.arange(step, step + 4)}


def save_steps(directory: Path, *steps: int, **options: int) -> None:
    with Checkpointer(directory, CheckpointConfig(**options)) as saver:
        for step in steps:
            saver.save(step, content(step), host(step))


def assert_is_step(restored: reader.Restored, step: int) -> None:
    assert restored.step == step
    for name, expected in content(step).items():
        assert np.asarray(restored.arrays[name]).tobytes() == np.asarray(expected).tobytes()
    assert restored.host["step"] == step
    np.testing.assert_array_equal(restored.host["cache"], host(step)["cache"])


def all_files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    where = random.randrange(len(raw))
    raw[where] ^= 1 << random.randrange(8)
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(random.randrange(path.stat().st_size))


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink], ids=lambda f: f.__name__)
def test_every_damaged_file_is_found_and_the_previous_checkpoint_used(tmp_path, damage):
    save_steps(tmp_path, 4, 8)
    folder = tmp_path / "step_00000008"
    files = all_files(folder)
    assert len(files) >= 8 and checkpoint_manifest.MANIFEST_NAME in files
    for name in files:
        good = (folder / name).read_bytes()
        for _ in range(1 if damage is Path.unlink else 3):
            damage(folder / name)
            restored = reader.restore(tmp_path, TEMPLATE)
            assert_is_step(restored, 4)
            (warning,) = restored.warnings
            assert str(folder / name) in warning
            (folder / name).write_bytes(good)
    assert_is_step(reader.restore(tmp_path, TEMPLATE), 8)


def test_every_byte_of_a_manifest_matters(tmp_path):
    (tmp_path / "file").write_text("x")
    checkpoint_manifest.write_manifest(tmp_path, {"step": 1})
    path = tmp_path / checkpoint_manifest.MANIFEST_NAME
    good = path.read_bytes()
    for where in range(len(good)):
        for bit in (0, 2, 5):
            path.write_bytes(good[:where] + bytes([good[where] ^ 1 << bit]) + good[where + 1 :])
            assert checkpoint_manifest.verify(tmp_path), (where, bit)
    for bad in (
        good[:-1],
        good + b"\n",
        good.replace(b" ", b"  ", 1),
        b"",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
    ):
        path.write_bytes(bad)
        (problem,) = checkpoint_manifest.verify(tmp_path)
        assert "damaged" in str(problem)
    path.write_bytes(good)
    assert checkpoint_manifest.verify(tmp_path) == []


def test_surplus_linked_and_exchanged_files_are_found(tmp_path):
    save_steps(tmp_path, 4, 8)
    folder = tmp_path / "step_00000008"
    surplus = folder / "arrays" / "more"
    surplus.write_text("")
    assert "not listed" in reader.restore(tmp_path, TEMPLATE).warnings[0]
    surplus.unlink()
    outside = tmp_path / "outside"
    shutil.move(folder / "host" / "process_0.json", outside)
    (folder / "host" / "process_0.json").symlink_to(outside)
    assert "found a link" in reader.restore(tmp_path, TEMPLATE).warnings[0]


def test_a_checkpoint_under_another_name_is_not_used(tmp_path):
    save_steps(tmp_path, 4)
    shutil.copytree(tmp_path / "step_00000004", tmp_path / "step_00000012")
    restored = reader.restore(tmp_path, TEMPLATE)
    assert_is_step(restored, 4)
    assert "manifest of step 12, found one of step 4" in restored.warnings[0]


def test_nothing_whole_is_one_error_that_lists_each(tmp_path):
    with pytest.raises(reader.NoWholeCheckpointError, match="found none") as caught:
        reader.restore(tmp_path / "absent", TEMPLATE)
    assert caught.value.problems == {}
    save_steps(tmp_path, 4, 8)
    flip(next((tmp_path / "step_00000004" / "arrays").glob("*/0.0")))
    (tmp_path / "step_00000008" / "host" / "process_0.npz").unlink()
    assert whole_steps(tmp_path) == []
    with pytest.raises(reader.NoWholeCheckpointError) as caught:
        reader.restore(tmp_path, TEMPLATE)
    text = str(caught.value)
    assert "step 4:" in text and "expected SHA-256" in text
    assert "step 8:" in text and "process_0.npz: listed in the manifest, but missing" in text
    assert sorted(caught.value.problems) == [4, 8]


def test_a_requested_step_is_never_replaced_by_another(tmp_path):
    save_steps(tmp_path, 4, 8)
    assert_is_step(reader.restore(tmp_path, TEMPLATE, step=4), 4)
    (tmp_path / "step_00000008" / checkpoint_manifest.MANIFEST_NAME).unlink()
    with pytest.raises(reader.NoWholeCheckpointError, match=r"other steps that are there: \[4\]"):
        reader.restore(tmp_path, TEMPLATE, step=8)
    with pytest.raises(reader.NoWholeCheckpointError, match="found none"):
        reader.restore(tmp_path, TEMPLATE, step=5)


def test_background_errors_surface_at_the_next_call_and_the_next_save_works(tmp_path, monkeypatch):
    real = checkpoint_manifest.write_manifest

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with Checkpointer(tmp_path) as saver:
        saver.save(1, content(1), host(1))
        saver.wait()
        for call in (lambda: saver.save(3, content(3), host(3)), saver.wait):
            monkeypatch.setattr(checkpoint_manifest, "write_manifest", full_disk)
            saver.save(2, content(2), host(2))
            with pytest.raises(OSError, match="No space left") as caught:
                call()
            assert "step_00000002" in caught.value.__notes__[0]
            assert not list(tmp_path.glob(".working-*"))
            saver.wait()  # told once
        monkeypatch.setattr(checkpoint_manifest, "write_manifest", real)
        saver.save(4, content(4), host(4))
    assert_is_step(reader.restore(tmp_path, TEMPLATE), 4)


def test_closing_after_an_error_keeps_that_error_and_tells_of_the_save(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_manifest, "write_manifest", full_disk)
    with pytest.raises(OSError, match="No space left"), Checkpointer(tmp_path) as saver:
        saver.save(1, content(1))
    with pytest.raises(KeyError) as caught, Checkpointer(tmp_path) as saver:
        saver.save(2, content(2))
        raise KeyError("the trainer's own")
    assert "No space left" in caught.value.__notes__[0]


def fail_after_writing(saver, monkeypatch, error):
    """Have the next save fail once its writes are done: they would go on after its event loop."""
    finished = saver._orbax.wait_until_finished

    def failing():
        finished()
        raise error

    monkeypatch.setattr(saver._orbax, "wait_until_finished", failing)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(30, "Read-only file system"),
        ValueError("RESOURCE_EXHAUSTED: Failed to write: No space left on device [28]"),
    ],
    ids=["full", "read-only", "as tensorstore says it"],
)
def test_a_disk_error_is_one_line_that_names_the_newest_checkpoint(tmp_path, monkeypatch, error):
    with pytest.raises(checkpointer.SaveError) as caught, Checkpointer(tmp_path) as saver:
        saver.save(1, content(1))
        saver.wait()

        fail_after_writing(saver, monkeypatch, error)
        saver.save(2, content(2))
    text = str(caught.value)
    assert "\n" not in text and "the newest whole one is of step 1" in text
    assert f"step 2 could not be written to {tmp_path}: " in text
    assert ("No space left" in text) or ("Read-only" in text)
    assert whole_steps(tmp_path) == [1]
    assert_is_step(reader.Restored(1, reader.restore(tmp_path, TEMPLATE).arrays, host(1)), 1)


def test_writes_that_end_after_a_failed_one_are_not_reported(tmp_path, monkeypatch):
    """The first failure closes the event loop, to which tensorstore reports each of the others."""
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(contents, "_report", lambda u: reported.append(str(u.exc_value)))
    Checkpointer(tmp_path).close()

    async def begin(future):
        return next(future.__await__())

    for error in ("", "another"):
        promise, future = tensorstore.Promise.new()
        loop = asyncio.new_event_loop()
        waiting = loop.run_until_complete(begin(future))
        loop.close()
        if error:
            loop.call_soon_threadsafe = functools.partial(fail, error)
        promise.set_result(waiting)
    assert reported == ["another"]


def fail(error, *_):
    raise RuntimeError(error)


def test_a_disk_that_refuses_a_deletion_at_the_end_is_told_of(tmp_path, monkeypatch):
    with pytest.raises(checkpointer.SaveError) as caught, Checkpointer(tmp_path) as saver:
        saver.save(1, content(1))
        saver.wait()

        def refusing(*_):
            raise OSError(30, "Read-only file system")

        monkeypatch.setattr(folders, "retire", refusing)
    text = str(caught.value)
    assert "what follows step 1 could not be written" in text and "Read-only" in text
    with Checkpointer(tmp_path):  # the folder was released
        assert whole_steps(tmp_path) == [1]


def test_a_run_that_saved_nothing_deletes_nothing_when_it_closes(tmp_path, monkeypatch):
    save_steps(tmp_path, 1, 2, keep=9)
    folders.step_folder(tmp_path, 2).joinpath(checkpoint_manifest.MANIFEST_NAME).unlink()
    with Checkpointer(tmp_path, CheckpointConfig(keep=1)) as saver:
        monkeypatch.setattr(folders, "publish", lambda *_, **named: 1 / 0)
        saver.save(3, content(3))
        with pytest.raises(ZeroDivisionError):
            saver.wait()
    assert whole_steps(tmp_path) == [1]


def test_errors_that_are_not_the_disks_are_raised_unchanged(tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError), Checkpointer(tmp_path) as saver:
        fail_after_writing(saver, monkeypatch, ZeroDivisionError())
        saver.save(1, content(1))


def forge(folder: Path, change) -> None:
    """A manifest that is as its own hash says, with something else in it."""
    path = folder / checkpoint_manifest.MANIFEST_NAME
    payload = json.loads(path.read_bytes())
    payload.pop("sha256_of_the_rest")
    change(payload)
    path.write_bytes(checkpoint_manifest._encode(payload))


FORGERIES = {
    "no files": lambda m: m.update(files=None),
    "a list of files": lambda m: m.update(files=[]),
    "files left out": lambda m: m.pop("files"),
    "entry of nothing": lambda m: m["files"].update({"host/process_0.json": None}),
    "entry without bytes": lambda m: m["files"]["host/process_0.json"].pop("bytes"),
    "bytes as text": lambda m: m["files"]["host/process_0.json"].update(bytes="9"),
    "hash as a number": lambda m: m["files"]["host/process_0.json"].update(sha256=1),
    "extra of nothing": lambda m: m.update(extra=None),
    "extra as a list": lambda m: m.update(extra=[]),
    "no arrays": lambda m: m["extra"].pop("arrays"),
    "arrays as a list": lambda m: m["extra"].update(arrays=[]),
    "shapes as numbers": lambda m: m["extra"].update(arrays={"['w']": 1}),
    "step as text": lambda m: m["extra"].update(step="8"),
    "a file outside": lambda m: m["files"].update({"../x": {"bytes": 0, "sha256": ""}}),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_manifest_falls_back_as_other_damage_does(two_steps, tmp_path, change):
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    forge(tmp_path / "step_00000008", change)
    restored = reader.restore(tmp_path, TEMPLATE)
    assert_is_step(restored, 4)
    assert len(restored.warnings) == 1


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_steps")
    save_steps(folder, 4, 8)
    return folder


def test_a_manifest_that_is_a_link_or_a_pipe_is_refused(two_steps, tmp_path):
    shutil.copytree(two_steps, tmp_path / "c")
    manifest = tmp_path / "c" / "step_00000008" / checkpoint_manifest.MANIFEST_NAME
    shutil.move(manifest, tmp_path / "the_same")
    manifest.symlink_to(tmp_path / "the_same")
    assert_is_step(reader.restore(tmp_path / "c", TEMPLATE), 4)
    manifest.unlink()
    os.mkfifo(manifest)
    assert_is_step(reader.restore(tmp_path / "c", TEMPLATE), 4)


# --- files that a checkpoint links ---------------------------------------------------------


def save_spilled(run: Path, step: int, cache: RolloutCache) -> None:
    known = {f.name: Content(f.num_bytes, f.sha256) for f in cache.spilled().values()}
    with Checkpointer(run / "checkpoints") as saver:
        saver.save(step, content(step), {"c": cache.state()}, LinkedFiles(cache.folder, known))


def spilled_cache(run: Path, groups: int = 3) -> RolloutCache:
    cache = RolloutCache(1, run / "rollouts")
    for i in range(groups):
        cache.replace(f"p{i}", of_group([np.arange(i + 5, dtype=np.int32)], [1.0]))
    return cache


def restored_cache(run: Path) -> tuple[RolloutCache, reader.Restored]:
    restored = reader.restore(run / "checkpoints", TEMPLATE)
    cache = RolloutCache(1, run / "rollouts")
    files = None if restored.files is None else Folder(restored.files)
    cache.load_state(restored.host["c"], files, restored.damaged_files)
    return cache, restored


def test_spilled_rollouts_are_linked_and_come_back(tmp_path, monkeypatch):
    cache = spilled_cache(tmp_path)
    read = []
    monkeypatch.setattr(Folder, "read", lambda self, name: read.append(name) or b"")
    save_spilled(tmp_path, 1, cache)
    monkeypatch.undo()
    assert not [name for name in read if name.endswith(".rollouts")], "nothing is read to be saved"
    names = [f.name for f in cache.spilled().values()]
    linked = tmp_path / "checkpoints" / "step_00000001" / "files"
    assert sorted(os.listdir(linked)) == sorted(names)
    assert all((linked / name).samefile(tmp_path / "rollouts" / name) for name in names)
    cache.replace("p0", of_group([np.arange(99, dtype=np.int32)], [0.0]))  # the cache goes on
    (tmp_path / "rollouts" / "0-left.rollouts").write_bytes(b"of a process that was killed")
    again, restored = restored_cache(tmp_path)
    assert restored.warnings == () and again.problems == []
    assert [len(again.get(f"p{i}").responses[0].tokens) for i in range(3)] == [5, 6, 7]
    assert "0-left.rollouts" not in os.listdir(tmp_path / "rollouts")


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink], ids=lambda f: f.__name__)
def test_a_damaged_linked_file_costs_its_prompt_alone(tmp_path, damage):
    cache = spilled_cache(tmp_path)
    save_spilled(tmp_path, 1, cache)
    name = cache.spilled()["p1"].name
    path = tmp_path / "checkpoints" / "step_00000001" / "files" / name
    content_before = path.read_bytes()
    path.unlink()  # the cache's own file is another one now
    path.write_bytes(content_before)
    damage(path)
    again, restored = restored_cache(tmp_path)
    assert restored.step == 1 and again.get("p1") is None
    assert len(again.problems) == 1 and "'p1'" in again.problems[0]
    assert again.get("p0") is not None and again.get("p2") is not None


class Crash(BaseException):
    """Stands for the end of the process."""


def test_a_crash_at_each_file_system_change_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """Every rename, replacement and deletion of a save that replaces, sets aside and retires."""
    real = {"rename": os.rename, "replace": os.replace, "rmtree": shutil.rmtree}
    left = [0]

    def dying(name):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Crash(name)
            return real[name](*args, **kwargs)

        return call

    crashes = 0
    for allowed in range(40):
        directory = tmp_path / str(allowed)
        save_steps(directory, 1, 2, 3, 4, keep=9)
        saver = Checkpointer(directory, CheckpointConfig(keep=2))
        left[0] = allowed
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", dying("rename"))
            patch.setattr(os, "replace", dying("replace"))
            patch.setattr(shutil, "rmtree", dying("rmtree"))
            try:
                saver.save(3, content(30), host(30))
                saver.wait()
                crashed = False
            except Crash:
                crashed = True
        crashes += crashed
        saver.close()
        with Checkpointer(directory) as reopened:  # tidies up
            restored = reopened.restore(TEMPLATE)
        value = restored.host["step"]
        assert (restored.step, value) in {(4, 4), (3, 3), (3, 30)} and restored.warnings == ()
        assert_is_step(reader.Restored(value, restored.arrays, restored.host), value)
        assert not [e.name for e in directory.iterdir() if e.name[0] == "." and e.name != ".lock"]
        if not crashed:
            assert (restored.step, value) == (3, 30)
            break
    assert not crashed and crashes >= 6


def test_a_second_writer_is_kept_out(tmp_path):
    script = "import sys\nfrom reprise.rl.checkpoint.checkpointer import Checkpointer\n"
    script += "Checkpointer(sys.argv[1])"
    with Checkpointer(tmp_path):
        done = run_python(script, tmp_path)
    assert done.returncode != 0 and "to have one writer, got a second" in done.stderr


# One process imports jax and forks a victim a round, so that a round costs no start-up.
# A victim checks what the last kill left, tells how far it is, and saves until it dies.
KILL_LOOP = """
    import os, random, signal, sys, time
    import orbax.checkpoint
    sys.path.insert(0, sys.argv[1])

    def victim(directory, pipe):
        from test_checkpoint_faults import TEMPLATE, assert_is_step, content, host
        from reprise.rl.checkpoint.checkpointer import Checkpointer, CheckpointConfig
        from whole_steps import whole_steps
        saver = Checkpointer(directory, CheckpointConfig(keep=1))
        step = max(whole_steps(saver), default=0)
        if step:
            restored = saver.restore(TEMPLATE)
            assert restored.warnings == (), restored.warnings
            assert_is_step(restored, step)
        os.write(pipe, f"{step}\\n".encode())
        while True:
            step += 1
            saver.save(step, content(step), host(step))
            saver.wait()
            os.write(pipe, f"{step}\\n".encode())

    def one_round(directory, saves, delay_s):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                victim(directory, write)
            finally:
                os._exit(1)
        os.close(write)
        with os.fdopen(read) as lines:
            told = [lines.readline() for _ in range(1 + saves)]
            time.sleep(delay_s)
            os.kill(child, signal.SIGKILL)
            told += lines
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and "" not in told, (status, told)
        told = [int(line) for line in told]
        return told

    random.seed(int(sys.argv[3]))
    last = 0
    for _ in range(int(sys.argv[4])):
        told = one_round(sys.argv[2], random.randrange(3), random.uniform(0.0, 0.2))
        # What was told as saved is there; one more may have been.
        assert told[0] in (last, last + 1), (last, told)
        last = told[-1]
    print("last", last)
"""


def run_python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_kill_minus_nine_at_random_moments_loses_nothing_that_was_saved(tmp_path):
    seed = random.randrange(10**6)
    done = run_python(KILL_LOOP, Path(__file__).parent, tmp_path, seed, 6)
    assert done.returncode == 0, f"seed {seed}\n{done.stderr}"
    last = int(done.stdout.split()[-1])
    restored = reader.restore(tmp_path, TEMPLATE)
    assert restored.step in (last, last + 1) and last > 0
    assert_is_step(restored, restored.step)
