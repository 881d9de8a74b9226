"""Sizes of "auto": the largest that fit, by programs whose needs are known by hand."""

import dataclasses

import jax
import pytest
from figured_programs import figured

from reprise.models.config import ModelConfig
from reprise.rl.commands import train
from reprise.rl.gin.loader import load
from reprise.rl.preflight import sizes
from reprise.rl.preflight.fit import Fitting
from reprise.rl.preflight.memory import TRAINING, USABLE_SHARE
from reprise.rl.preflight.targets import parse_target
from reprise.rl.run import run_process
from reprise.rl.settings.config import SIZES, TrainConfig

TARGET = parse_target("v5e:1x4")
MODEL = ModelConfig("qwen3", 64, 16, 2, 4, 2, 8, 32, qk_norm=True, max_positions=256)
LONGEST, PAGE = 64, 16
FLAGS = (
    *("Engine.min_slots=4", "Engine.max_nodes=2", "Mesh.fsdp=4"),
    *("Rollout.prompts_per_step=8", "Rollout.group_size=4", "Rollout.max_prompt_tokens=16"),
    *("Sampling.max_new_tokens=48", f"Engine.page_tokens={PAGE}"),
)
AUTO = tuple(f"{name}='auto'" for name in SIZES)
BYTES_A_TOKEN = 100  # beside what stays, of every program


@pytest.fixture
def compiled(monkeypatch):
    """Instead of compiling: temporaries in proportion to a program's tokens."""
    return figured(monkeypatch, lambda program: BYTES_A_TOKEN * program.num_tokens)


def found(num_bytes, *flags, model=MODEL):
    """The sizes, the configuration with them, and its fit on devices of so many bytes."""
    target = dataclasses.replace(TARGET, known_bytes=num_bytes)
    config = load(TrainConfig, [], [*FLAGS, *flags])
    worker = Fitting(target, jax.devices()[: target.count])
    given = sizes.find(worker, config, model)
    return given, worker.fit(config.with_sizes(given), model), worker


def test_where_memory_is_plenty_all_are_as_large_as_is_of_use(compiled):
    given, fit, _ = found(10**9, *AUTO)
    # slots for all 32 responses, pages for as many tokens as they can have, 32 rows of 64 tokens
    assert given == {
        "Engine.slots": 32,
        "Engine.pages": 32 * LONGEST // PAGE,
        "Trainer.micro_batch_tokens": 32 * 64,
    }
    assert fit.fits


def test_pages_take_what_is_left_and_no_more(compiled):
    plenty, fit, _ = found(10**9, *AUTO)
    room = fit.peak_bytes  # as much memory as all of it needs, of which a share is used
    given, less, worker = found(room, *AUTO)
    assert less.peak_bytes <= USABLE_SHARE * room
    assert 0 < given["Engine.pages"] < plenty["Engine.pages"]
    assert given["Engine.slots"] == plenty["Engine.slots"]
    # with the next pages it would be more
    config = load(TrainConfig, [], [*FLAGS, *AUTO]).with_sizes(given)
    more = config.with_sizes({"Engine.pages": given["Engine.pages"] + 2})
    assert worker.fit(more, MODEL).peak_bytes > USABLE_SHARE * room


def test_slots_are_halved_where_pages_would_hold_too_little_for_them(compiled):
    _, fit, _ = found(10**9, *AUTO)
    stays = sum(fit.held[TRAINING].values())
    given, less, _ = found(int((stays + 60_000) / USABLE_SHARE), *AUTO)
    assert given["Engine.slots"] < 32 and less.peak_bytes <= stays + 60_000
    held = given["Engine.pages"] * PAGE
    assert held >= sizes.MIN_FILLED * given["Engine.slots"] * LONGEST


def test_rows_of_micro_batches_are_halved_while_training_does_not_fit(compiled):
    small = "Engine.slots=4", "Engine.pages=0"
    _, fit, _ = found(10**9, *small, "Trainer.micro_batch_tokens=512")
    one = "Trainer.micro_batch_tokens='auto'"
    assert found(10**9, *small, one)[0] == {"Trainer.micro_batch_tokens": 2048}
    given, less, _ = found(int(fit.peak_bytes / USABLE_SHARE) + 1, *small, one)
    assert given == {"Trainer.micro_batch_tokens": 512}
    assert less.peak_bytes == fit.peak_bytes


def test_one_row_a_device_is_the_least(compiled):
    given, fit, _ = found(30_000, *AUTO)
    assert given["Trainer.micro_batch_tokens"] == 4 * 64 and given["Engine.slots"] == 4
    assert not fit.fits  # what is printed then is what preflight says of a run that does not fit


def test_a_resumed_run_has_the_sizes_that_it_had():
    before = load(TrainConfig, [], [*FLAGS, "Engine.slots=8", "Engine.pages=40"])
    now = load(TrainConfig, [], [*FLAGS, "Engine.slots='auto'", "Engine.pages=50"])
    kept = now.with_sizes_of(before)
    assert (kept.engine.slots, kept.engine.pages) == (8, 50) and not kept.open_sizes


@pytest.mark.parametrize("name", SIZES)
def test_what_needs_a_number_says_which(name):
    config = load(TrainConfig, [], [f"{name}='auto'"])
    assert config.open_sizes == (name,)
    with pytest.raises(ValueError, match=f"{name}: expected a number, got 'auto', for which"):
        {
            "Engine.slots": lambda: config.engine.slot_bucket(3),
            "Engine.pages": lambda: config.engine.num_pages(4, 64),
            "Trainer.micro_batch_tokens": lambda: config.trainer.positions_of_micro_batch,
        }[name]()


def test_a_run_finds_its_own_and_several_processes_are_told_to_ask_preflight(
    compiled, monkeypatch, tmp_path, capsys
):
    given = []
    monkeypatch.setattr(run_process, "run", lambda config, *rest: given.append(config) or 0)
    flags = (
        "--gin_file=configs/plain_tiny.gin",
        f"--gin.Run.directory={tmp_path / 'run'}",
        "--gin.Mesh.data=1",
        "--gin.Mesh.fsdp=8",
        *(f"--gin.{name}='auto'" for name in SIZES),
    )
    assert train.main(flags) == 0
    assert not given[0].open_sizes and given[0].engine.slots == 128
    assert train.main((*flags, "--gin.Cluster.kind='spmd'")) == 2
    said = capsys.readouterr().err
    assert "expected numbers if Cluster.kind is 'spmd', got 'auto'" in said
    assert len(given) == 1
    assert train.main((*flags, "--dry_run")) == 0
    assert "# open          Engine.slots, Engine.pages" in capsys.readouterr().out
