"""Figures of programs: what the compiler says, lines through two depths, the roofline's seconds."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from rl.targets import measure
from rl.targets.hlo import Moved
from rl.targets.live import Live
from rl.targets.measure import Figures, Measured, compiled_figures, extrapolated, roofline_s
from rl.targets.run_shapes import RunProgram
from rl.targets.table import parse_target

CPU = parse_target("cpu:8")


def program(lower=None, **changes):
    given = RunProgram("training", "step", "", lower, held_bytes=0, order=0)
    return dataclasses.replace(given, **changes)


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
    held = program(held_bytes=2 * size)
    assert Measured(held, figures, None).beyond_held_bytes == figures.needed_bytes - 2 * size


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


def figures(layers):
    """Those of a program whose every figure is linear in its layers."""
    return Figures(
        argument_bytes=100 + 10 * layers,
        output_bytes=50 + layers,
        alias_bytes=50 + layers,
        temporary_bytes=1000 + 7 * layers,
        operations=5.0 + 2 * layers,
        compiler_s=None if layers == 4 else 1.0,
        collectives={"all-reduce": Moved(2 + layers, 30 * layers)},
        kernels={"attend": layers, "Sort": 1},
        live=(Live("layers[#].up", "f32[10]", layers, 40 * layers), Live("head", "f32[9]", 1, 36)),
    )


def test_figures_are_extrapolated_by_a_line():
    found, wanted = extrapolated(figures(2), figures(4), (2, 4), 36), figures(36)
    for field in ("argument_bytes", "temporary_bytes", "operations", "collectives", "kernels"):
        assert getattr(found, field) == getattr(wanted, field), field
    assert found.needed_bytes == wanted.needed_bytes
    assert found.compiler_s is None  # one of both is not known
    assert found.live == wanted.live


def test_a_roofline_is_the_slower_of_operations_and_bytes_and_what_is_sent():
    target = parse_target("v5p:2x2x1")
    device = target.kind.figures
    given = Figures(
        argument_bytes=4_000_000, output_bytes=1_000_000, alias_bytes=500_000, operations=10.0
    )
    plain = program(tokens=8, passes=1)
    assert roofline_s(plain, given, target, 1000) == 4_500_000 / device.bytes_per_s
    busy = program(tokens=10**9, passes=4)
    operations = 2 * 1000 * 4 * 10**9 / 4
    assert roofline_s(busy, given, target, 1000) == operations / device.operations_per_s
    sent = dataclasses.replace(
        given, collectives={"all-reduce": Moved(1, 10**9), "all-gather": Moved(1, 10**9)}
    )
    more_s = roofline_s(plain, sent, target, 1000) - roofline_s(plain, given, target, 1000)
    assert more_s == pytest.approx(3 * 10**9 / device.link_bytes_per_s)
    assert roofline_s(plain, given, CPU, 1000) is None


def test_seconds_without_meaning_are_left_out(monkeypatch):
    lowered = jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((8,), "float32"))
    monkeypatch.setattr(measure, "_costs", lambda _: {"optimal_seconds": -2.9, "flops": 3.0})
    found = compiled_figures(program(lambda: lowered), CPU)
    assert found.compiler_s is None and found.operations == 3.0
