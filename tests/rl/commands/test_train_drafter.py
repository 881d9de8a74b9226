"""`python -m rl.train_drafter` from its arguments to its folder."""

from __future__ import annotations

import json
import signal
import sys

import jax
import numpy as np
import pytest

from reprise.models.formats import hf_files
from reprise.models.text import tokenizer
from reprise.rl.commands import train_drafter
from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle import model as eagle
from tests.support import tiny_run

SMALL = (
    *("--gin.Drafter.micro_batches=1", "--gin.Drafter.row_tokens=32"),
    *("--gin.DrafterTraining.learning_rate=0.01", "--gin.DrafterTraining.warmup_steps=1"),
)


@pytest.fixture(scope="module")
def policy(tiny):
    return tiny.parent / "policy"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """A run's folder: sums of its own tokens, in texts; and a file of tokens."""
    folder = tmp_path_factory.mktemp("trace")
    rows = [
        {"step": 1, "prompt": f"{i}+1=", "completion": f"{i}+1+" * 3, "finish_reason": "stop"}
        for i in range(8)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ids = {"prompt_ids": [3, 13, 4], "response_ids": [3, 13, 4, 3, 13, 4, 1]}
    (folder / "ids.jsonl").write_text(json.dumps(ids) + "\n")
    return folder


@pytest.fixture
def train(policy, tmp_path):
    """Its exit code; this process's signal handlers are put back."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

    def call(*arguments):
        given = [str(a) for a in arguments]
        if not any(a.startswith("--policy") for a in given):
            given += ["--policy", str(policy)]
        if not any(a.startswith("--out") for a in given):
            given += ["--out", str(tmp_path / "out")]
        return train_drafter.main([*given, *SMALL])

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def said(line):
    """The numbers of a line by their names."""
    words = line.split()
    names = ("loss", "top-1", "top-3", "agreement")
    return {name: float(words[words.index(name) + 1]) for name in names}


def test_a_drafter_is_trained_evaluated_and_written(train, trace, tmp_path, policy, capsys):
    arguments = (trace, trace / "ids.jsonl", "--steps", 60, "--gin.Drafter.draft_vocab_size=14")
    assert train(*arguments, "--eval_share=0.2") == 0
    lines = capsys.readouterr().out.splitlines()
    [before] = [said(x) for x in lines if x.startswith("before")]
    [after] = [said(x) for x in lines if x.startswith("after")]
    steps = [x for x in lines if x.startswith("step")]
    assert [x.split()[1] for x in steps] == ["50/60", "60/60"]
    assert after["loss"] < before["loss"] and after["agreement"] > before["agreement"]
    assert after["top-3"] >= after["top-1"]
    assert "9 sequences" in lines[2] and "8 of texts" in lines[2]
    assert "held out  2 sequences" in lines[3]

    out = tmp_path / "out"
    got = eagle_files.load(out, tiny_run.MODEL)
    assert got.config == eagle.config_for(tiny_run.MODEL, draft_vocab_size=14)
    # the digits of responses and + come first, then the end token, whatever their number
    used = {1, *tokenizer.load(policy).encode("01234567+")}
    assert used <= set(got.draft_ids_U.tolist())
    start = eagle.init(got.config, jax.random.key(0))
    for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(start), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() > 0
    assert eagle_files.EMBEDDING in hf_files.headers(out)
    assert tokenizer.load(out).encode("1+") == tokenizer.load(policy).encode("1+")
    assert any(f"--gin.Drafter.directory={out}" in line for line in lines)

    assert train(*arguments, f"--gin.Drafter.directory='{out}'", "--steps=1") == 0
    [again] = [said(x) for x in capsys.readouterr().out.splitlines() if x.startswith("before")]
    assert again["loss"] < before["loss"]  # training continues from there


def test_ctrl_c_saves_what_there_is(train, trace, tmp_path, monkeypatch, capsys):
    class Interrupting(train_drafter._Speaker):
        def __call__(self, step, row):
            if step == 3:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(train_drafter, "_Speaker", Interrupting)
    assert train(trace, "--steps=1000") == 75
    out = capsys.readouterr().out
    assert "3 of 1,000 steps" in out and "\nafter" not in out
    eagle_files.load(tmp_path / "out", tiny_run.MODEL)


def test_stopped_before_anything_was_learnt(train, trace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_drafter.Watch, "asked", lambda self: True)
    assert train(trace, "--eval_share=0") == 75
    assert "nothing is saved" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_buffer_without_room_for_the_longest_sequence(train, trace, tmp_path, capsys):
    # 17 tokens of 4 bytes, and 16 states of 16 values: of two bytes each they would fit
    assert train(trace, "--gin.DataBuffer.max_bytes=1000") == 2
    assert "expected DataBuffer.max_bytes of at least" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_checks_all_and_touches_no_device(policy, trace, tmp_path):
    arguments = [str(trace), "--policy", str(policy), "--out", str(tmp_path / "out"), "--dry_run"]
    env = tiny_run.environment() | {"JAX_PLATFORMS": "no_such_platform"}  # any use would raise
    command = [sys.executable, "-m", "rl.train_drafter", *arguments]
    done = tiny_run.call([*command, "--gin.DrafterTraining.variant=eagle3"], env)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()
    for text in ('variant = "eagle3"', "# trace     8 sequences", "# drafter   eagle3", "MiB"):
        assert text in done.stdout.replace("'", '"')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected a TRACE, got none"),
        (("no/such/trace",), "a file or a run folder, found none at no/such/trace"),
        (("TRACE", "--policy="), "expected --policy DIR, got none"),
        (("TRACE", "--policy=no/such/policy"), "no/such/policy"),
        (("TRACE", "--out="), "expected --out DIR, got none"),
        (("TRACE", "--out=TRACE"), "holds something else"),
        (("TRACE", "--steps=0"), "--steps: expected 1 or more"),
        (("TRACE", "--eval_share=1"), "--eval_share: expected a share"),
        (("TRACE", "--seed=-1"), "--seed: expected 0"),
        (("TRACE", "--temperature=nan"), "--temperature: expected 0 or at least 0.0001"),
        (("TRACE", "--gin.Drafter.directory=no/such"), "no/such"),
        (("TRACE", "--gin.DataBuffer.max_bytes=100"), "max_bytes of at least"),
    ],
)
def test_errors_are_said_before_any_work(train, trace, arguments, message, capsys):
    given = [a.replace("TRACE", str(trace)) for a in arguments]
    assert train(*given, "--dry_run") == 2
    assert message in capsys.readouterr().err


def test_rows_that_hold_no_entry_are_refused(policy, trace, tmp_path, capsys):
    arguments = [str(trace), "--policy", str(policy), "--out", str(tmp_path / "out")]
    assert train_drafter.main([*arguments, "--gin.Drafter.row_tokens=2"]) == 2
    assert "expected row_tokens above 2" in capsys.readouterr().err
