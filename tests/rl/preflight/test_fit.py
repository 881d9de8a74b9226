"""Whether a run fits: figures of programs, the peak of all, deep models, and the report."""

import dataclasses
import json
import re
import threading

import jax
import jax.numpy as jnp
import pytest
from figured_programs import figured

from reprise.models.config import ModelConfig
from reprise.rl.gin.loader import load
from reprise.rl.preflight import fit as fit_module
from reprise.rl.preflight import report
from reprise.rl.preflight.fit import (
    Figures,
    Fit,
    Fitting,
    Measured,
    compiled_figures,
    largest_of_kinds,
)
from reprise.rl.preflight.memory import ROLLOUTS, TRAINING
from reprise.rl.preflight.programs import RunProgram
from reprise.rl.preflight.targets import parse_target
from reprise.rl.settings.config import TrainConfig

TARGET = parse_target("v5e:1x4")
MODEL = ModelConfig("qwen3", 64, 16, 8, 4, 2, 8, 32, qk_norm=True, max_positions=256)
FLAGS = (
    *("Engine.slots=8", "Engine.min_slots=4", "Engine.page_tokens=64", "Engine.max_nodes=2"),
    *("Rollout.prompts_per_step=2", "Rollout.group_size=4", "Rollout.max_prompt_tokens=16"),
    *("Sampling.max_new_tokens=48", "Trainer.micro_batch_tokens=512", "Mesh.fsdp=4"),
)
GB = 10**9


def measured(part, kind, needed, held, tokens=0):
    program = RunProgram(part, kind, "", lambda: None, held, order=needed, num_tokens=tokens)
    return Measured(program, Figures(argument_bytes=held, temporary_bytes=needed - held))


def fit(**changes):
    given = Fit(
        TARGET,
        {TRAINING: {"master weights": 4 * GB}, ROLLOUTS: {"keys and values": 3 * GB}},
        (measured(TRAINING, "accumulate", 9 * GB, 4 * GB, 8), measured(ROLLOUTS, "x", 4 * GB, GB)),
        *(7, 1, False, None),
    )
    return dataclasses.replace(given, **changes)


def test_a_peak_is_what_stays_and_the_program_that_needs_most_beside():
    found = fit()
    assert found.peak_bytes == (4 + 3 + 5) * GB and found.fits
    name, _, at = found.peak
    assert (name, at.program.kind) == ("training and rollouts", "accumulate")
    assert not fit(held={TRAINING: {"w": 9 * GB}, ROLLOUTS: {"x": 3 * GB}}).fits


def test_devices_of_their_own_have_peaks_of_their_own():
    found = fit(is_disjoint=True)
    assert {name: stays for name, (stays, _) in found.groups.items()} == {
        TRAINING: 4 * GB,
        ROLLOUTS: 3 * GB,
    }
    assert found.peak_bytes == 9 * GB


def test_an_evaluation_on_training_devices_has_a_peak_too():
    apart = fit(is_disjoint=True, evaluation_bytes=7 * GB)
    assert apart.peak_bytes == 11 * GB and apart.peak[0] == TRAINING
    assert fit(evaluation_bytes=GB).peak_bytes == fit().peak_bytes, "they take turns"
    assert any("evaluation    on training devices" in line for line in report.lines_of(apart))


def test_of_each_kind_the_largest_is_compiled():
    sizes = [("a", 1), ("b", 5), ("a", 3), ("b", 2), ("a", 2)]
    programs = [RunProgram(ROLLOUTS, k, "", lambda: None, 0, order=n) for k, n in sizes]
    assert largest_of_kinds(programs) == [2, 1]


@pytest.fixture
def compiled(monkeypatch):
    """Instead of compiling: temporaries by a program's tokens, arguments by its bytes."""
    return figured(monkeypatch, lambda one: 10 * one.num_tokens + one.held_bytes // 2)


def fitted(*flags, target=TARGET, model=MODEL, **options):
    config = load(TrainConfig, [], [*FLAGS, *flags])
    worker = Fitting(target, jax.devices()[: target.count], **options)
    return worker, config, worker.fit(config, model)


def test_deep_models_are_compiled_at_two_depths(compiled):
    _, _, found = fitted()
    deep = sum(one.program.is_deep for one in found.measured)
    assert 0 < deep < len(found.measured)  # what moves rows compiles fast, and is compiled whole
    assert found.depths == (2, 4) and len(compiled) == deep + len(found.measured)
    compiled.clear()
    _, _, whole = fitted(all_layers=True)
    assert whole.depths is None and len(compiled) == len(whole.measured)
    # what is linear in the layers is the same
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, abs=2)
    assert found.held == whole.held and found.num_programs == whole.num_programs


def test_what_is_compiled_is_told_at_once_and_while_it_lasts(compiled, monkeypatch):
    said, slow = [], threading.Event()
    figures = fit_module.compiled_figures

    def slowly(program, target):
        assert slow.wait(60)
        return figures(program, target)

    def say(*told):
        said.append(told)
        if "still at" in told[0]:
            slow.set()

    monkeypatch.setattr(fit_module, "compiled_figures", slowly)
    monkeypatch.setattr(fit_module, "SAY_S", 0.05)
    fitted(on_compiled=say)
    (first, *start), (still, *then), *_, last = said
    total = last[2]
    assert first.startswith("none yet; first accumulate, ") and start == then == [0, total]
    assert re.match(r"after 0 s still at accumulate, .* layers", still), still
    assert [done for _, done, _ in said if done] == list(range(1, total + 1))


def test_all_programs_are_compiled_where_they_are_asked_for(compiled):
    _, _, found = fitted(all_layers=True, all_programs=True)
    assert len(compiled) == len(found.measured) == found.num_programs
    assert found.num_whole_model == sum(one.program.num_tokens > 0 for one in found.measured)


def test_a_model_that_no_settings_fit_is_refused_before_anything_is_compiled(compiled):
    huge = dataclasses.replace(MODEL, vocab_size=2**26, d_model=512)
    with pytest.raises(ValueError, match="fit v5e:1x4, got .* GB for each of 4 devices of 16.0 GB"):
        fitted(model=huge)
    assert not compiled


def test_a_refit_compiles_the_program_at_the_peak_alone(compiled):
    worker, config, before = fitted()
    compiled.clear()
    peak = before.peak[2].program
    smaller = config.with_sizes({"Trainer.micro_batch_tokens": 256, "Engine.slots": 4})
    after = worker.refit(before, smaller, MODEL)
    assert {one.kind for one in compiled} == {peak.kind} and 0 < len(compiled) <= 2
    assert len(after.measured) == len(before.measured)
    assert after.peak_bytes < before.peak_bytes


def test_a_report_has_programs_arrays_and_the_program_at_the_peak():
    first, second = fit().measured
    figures = dataclasses.replace(first.figures, compiler_s=0.001)
    found = fit(measured=(dataclasses.replace(first, figures=figures), second), depths=(2, 4))
    text = "\n".join(report.lines_of(found))
    for said in ("7 programs, 1 of them", "models of 2 and 4 layers", "master weights", "1.00 ms"):
        assert said in text
    assert "7.000 GB stay, 5.000 GB extra in accumulate: 12.000 GB" in text
    assert text.endswith("fits: 12.000 GB, 75% of a device")


def test_a_refusal_is_one_sentence_that_names_the_program_and_settings():
    large = fit(held={TRAINING: {"w": 14 * GB}, ROLLOUTS: {}})
    text = report.refusal(large)
    assert text.startswith("expected a run that fits 16.000 GB of a device of v5e:1x4, got 19.000")
    assert "with accumulate: lower Engine.slots" in text and "\n" not in text
    told = json.loads(json.dumps(report.as_json(large)))
    assert list(told)[:4] == ["fits", "peak_bytes", "device_bytes", "programs"]
    assert (told["fits"], told["peak_bytes"]) == (False, 19 * GB)
    assert told["peak_program"] == "accumulate"


# figures of one program


CPU = parse_target("cpu:8")


def program(lower, held_bytes=0):
    return RunProgram(TRAINING, "step", "", lower, held_bytes, order=0)


def test_what_a_program_needs_is_what_its_compiler_says():
    step = jax.jit(lambda x, y: (x + 1, jnp.sort(y @ x)), donate_argnums=0)
    shapes = [jax.ShapeDtypeStruct((64, 64), "float32")] * 2
    lowered = step.lower(*shapes)
    memory = lowered.compile().memory_analysis()
    figures = compiled_figures(program(lambda: lowered), CPU)
    size = 64 * 64 * 4
    assert figures.argument_bytes == 2 * size and figures.alias_bytes == size
    assert figures.temporary_bytes == memory.temp_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert outputs >= size
    assert figures.needed_bytes == 2 * size + outputs + memory.temp_size_in_bytes
    extra_bytes = Measured(program(None, held_bytes=2 * size), figures).extra_bytes
    assert extra_bytes == figures.needed_bytes - 2 * size


class Refused:
    """A lowered step that is too large for its device, or does not compile."""

    def __init__(self, message):
        self.message = message

    def compile(self, compiler_options=None):
        raise RuntimeError(self.message)


def test_a_program_that_the_compiler_refuses_needs_what_it_says():
    message = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 98.5G of 95.74G hbm."
    figures = compiled_figures(program(lambda: Refused(message)), CPU)
    assert figures.needed_bytes == int(98.5 * 2**30) and figures.refused == message


def test_other_errors_of_the_compiler_are_not_swallowed():
    with pytest.raises(RuntimeError, match="an invariant is broken"):
        compiled_figures(program(lambda: Refused("INTERNAL: an invariant is broken")), CPU)
