"""Whether a run fits: the peak of all programs, deep models, and settings that would help."""

import dataclasses
import json

import jax
import pytest
from figured_programs import figured

from models.config import ModelConfig
from rl.config.loader import load
from rl.loop.experiment import TrainConfig
from rl.targets import report
from rl.targets.fitting import Fit, Fitting, largest_of_kinds
from rl.targets.live import Live
from rl.targets.measure import Figures, Measured
from rl.targets.mends import Mend, best, candidates, tried
from rl.targets.run_shapes import ROLLOUTS, TRAINING, RunProgram
from rl.targets.table import parse_target

TARGET = parse_target("v5e:1x4")
MODEL = ModelConfig("qwen3", 64, 16, 8, 4, 2, 8, 32, qk_norm=True, max_positions=256)
FLAGS = (
    *("Engine.slots=8", "Engine.min_slots=4", "Engine.min_positions=64", "Engine.max_nodes=2"),
    *("Rollout.prompts_per_step=2", "Rollout.group_size=4", "Rollout.max_prompt_tokens=16"),
    *("Sampling.max_new_tokens=48", "Trainer.micro_batch_tokens=512", "Mesh.fsdp=4"),
)
GB = 10**9


def measured(part, kind, needed, held, tokens=0):
    program = RunProgram(part, kind, "", lambda: None, held, order=needed, tokens=tokens)
    return Measured(program, Figures(argument_bytes=held, temporary_bytes=needed - held), 0.001)


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
    found = fit(apart=True)
    assert {name: stays for name, (stays, _) in found.groups.items()} == {
        TRAINING: 4 * GB,
        ROLLOUTS: 3 * GB,
    }
    assert found.peak_bytes == 9 * GB


def test_of_each_kind_the_largest_is_compiled():
    sizes = [("a", 1), ("b", 5), ("a", 3), ("b", 2), ("a", 2)]
    programs = [RunProgram(ROLLOUTS, k, "", lambda: None, 0, order=n) for k, n in sizes]
    assert largest_of_kinds(programs) == [2, 1]


@pytest.fixture
def compiled(monkeypatch):
    """Instead of compiling: temporaries by a program's tokens, arguments by its bytes."""
    return figured(monkeypatch, lambda one: 10 * one.tokens + one.held_bytes // 2)


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
    _, _, whole = fitted(whole=True)
    assert whole.depths is None and len(compiled) == len(whole.measured)
    # what is linear in the layers is the same
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, abs=2)
    assert found.held == whole.held and found.num_programs == whole.num_programs


def test_all_programs_are_compiled_where_they_are_asked_for(compiled):
    _, _, found = fitted(whole=True, wanted="all")
    assert len(compiled) == len(found.measured) == found.num_programs
    assert found.num_whole_model == sum(one.program.tokens > 0 for one in found.measured)


def test_a_model_that_no_settings_fit_is_refused_before_anything_is_compiled(compiled):
    huge = dataclasses.replace(MODEL, vocab_size=2**26, d_model=512)
    with pytest.raises(ValueError, match="fit v5e:1x4, got .* GB for each of 4 devices of 16.0 GB"):
        fitted(model=huge)
    assert not compiled


def test_settings_are_tried_and_the_best_are_named(compiled):
    worker, config, before = fitted()
    tries = []
    found = tried(worker, before, config, MODEL, tries.append)
    assert len(tries) > 3 >= len(found) > 0
    assert [one.saved_bytes for one in found] == sorted(o.saved_bytes for o in found)[::-1]
    for one in found:
        section, _, value = one.flag.split(" ")[0].removeprefix("--gin.").partition("=")
        assert section.count(".") == 1 and value
        assert one.peak_bytes == before.peak_bytes - one.saved_bytes < before.peak_bytes
    # the flags are those of a command line, and do what they say
    flags = [flag.removeprefix("--gin.") for flag in found[0].flag.split(" ")]
    changed = load(TrainConfig, [], [*FLAGS, *flags])
    assert worker.again(before, changed, MODEL).peak_bytes == found[0].peak_bytes
    # what does not change the program at the peak compiles nothing
    compiled.clear()
    worker.again(before, changed, MODEL, compiles=False)
    assert not compiled


def test_candidates_keep_the_number_of_devices():
    config = load(TrainConfig, [], [*FLAGS, "Mesh.data=2", "Mesh.fsdp=2", "Mesh.tensor=3"])
    sizes = {"data": 2, "fsdp": 2, "tensor": 3}
    changed = [one.config.mesh for one in candidates(config, sizes)]
    assert {m.data * m.fsdp * m.tensor for m in changed} == {12} and len(set(changed)) == 3


def test_only_the_three_best_are_named():
    assert [m.flag for m in best([Mend(str(n), n, 0) for n in (1, 4, 2, 3)])] == ["4", "3", "2"]


def test_a_report_names_all_that_was_asked_for():
    live = (Live("layers[#].up", "f32[8,8]", 4, 5 * GB),)
    first, second = fit().measured
    figures = dataclasses.replace(first.figures, live=live, kernels={"attend": 4})
    found = fit(measured=(dataclasses.replace(first, figures=figures), second), depths=(2, 4))
    text = "\n".join(report.lines_of(found))
    for said in ("7 programs, 1 of them", "models of 2 and 4 layers", "master weights", "1.00 ms"):
        assert said in text
    assert "4 × attend" in text and "4 × f32[8,8] layers[#].up" in text
    assert text.endswith("fits: 12.000 GB, 75% of a device")


def test_a_refusal_is_one_sentence_with_what_helps():
    large = fit(held={TRAINING: {"w": 14 * GB}, ROLLOUTS: {}})
    helps = [Mend("--gin.Engine.slots=4", 4 * GB, 15 * GB), Mend("--gin.X.y=1", GB, 18 * GB)]
    text = report.refusal(large, helps)
    assert text.startswith("expected a run that fits 16.000 GB of a device of v5e:1x4, got 19.000")
    assert "--gin.Engine.slots=4 saves 4.000 GB and fits; --gin.X.y=1 saves 1.000 GB" in text
    assert "no single setting" in report.refusal(large, []) and "\n" not in text
    told = json.loads(json.dumps(report.as_json(large, helps)))
    assert list(told)[:4] == ["fits", "peak_bytes", "device_bytes", "programs"]
    assert (told["fits"], told["peak_bytes"]) == (False, 19 * GB)
    assert told["helps"][0]["saved_bytes"] == 4 * GB
