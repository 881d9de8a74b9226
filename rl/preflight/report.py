"""Preflight reports as text and as JSON: programs, resident arrays and the peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reprise.rl.preflight.fit import Fit, Measured
from reprise.rl.preflight.memory import FIX

COLUMNS = ("program", "arguments", "temporaries", "extra", "compiler")


def lines_of(fit: Fit) -> Iterator[str]:
    """Yield the report of a fit line by line; all sizes are per device."""
    target = fit.target
    peak_bytes = fit.peak_bytes
    yield (
        f"{target.name}: {target.count} devices of {_gb(target.device_bytes)} GB; "
        f"{fit.num_programs} programs, {fit.num_whole_model} of them run the whole model; "
        f"{len(fit.measured)} compiled"
    )
    if fit.depths is not None:
        a, b = fit.depths
        yield (
            f"figures are extrapolated from models of {a} and {b} layers (--layers=all: none are), "
            "those of gradients under Trainer.remat=layer:N from N and 2N"
        )
    yield ""
    yield from _table(fit.measured)
    yield ""
    for part, arrays in fit.held.items():
        for name, size in arrays.items():
            yield f"stays         {part}: {name:36s} {_gb(size):>9s} GB"
    if fit.evaluation_bytes:
        yield f"evaluation    on training devices, in turn: {_gb(fit.evaluation_bytes):>14s} GB"
    for name, (held_bytes, one) in fit.groups.items():
        extra_bytes = max(0, one.extra_bytes)
        yield (
            f"peak          {name}: {_gb(held_bytes)} GB stay, {_gb(extra_bytes)} GB extra in "
            f"{one.program.name}: {_gb(held_bytes + extra_bytes)} GB"
        )
    share = peak_bytes / target.device_bytes
    yield f"{'fits' if fit.fits else 'does not fit'}: {_gb(peak_bytes)} GB, {share:.0%} of a device"


def lines_of_sizes(sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield values for the sizes set to "auto", as lines of a configuration."""
    if sizes:
        yield "values for the sizes of 'auto':"
    for name, size in sizes.items():
        yield f"{name} = {size}"


def _table(measured: Sequence[Measured]) -> Iterator[str]:
    width = max(len(one.program.name) for one in measured)
    row = f"{{:{width}s}} {{:>10s}} {{:>11s}} {{:>8s}} {{:>10s}}"
    yield row.format(*COLUMNS)
    for one in sorted(measured, key=lambda m: -m.extra_bytes):
        figures = one.figures
        yield row.format(
            one.program.name,
            _gb(figures.argument_bytes),
            "refused" if figures.refused else _gb(figures.temporary_bytes),
            _gb(max(0, one.extra_bytes)),
            "" if figures.compiler_s is None else f"{1000 * figures.compiler_s:.2f} ms",
        )
        if figures.refused:
            yield f"  {figures.refused}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f}"


def refusal(fit: Fit) -> str:
    """Return the error message for a run that does not fit."""
    name, peak_bytes, one = fit.peak
    return (
        f"expected a run that fits {_gb(fit.target.device_bytes)} GB of a device of "
        f"{fit.target.name}, got {_gb(peak_bytes)} GB, for {name} with {one.program.name}: {FIX}, "
        "or name a larger target"
    )


def as_json(fit: Fit) -> dict[str, Any]:
    """Return the figures of the report."""
    return {
        "fits": fit.fits,
        "peak_bytes": fit.peak_bytes,
        "device_bytes": fit.target.device_bytes,
        "programs": fit.num_programs,
        "whole_model_programs": fit.num_whole_model,
        "target": fit.target.name,
        "devices": fit.target.count,
        "depths": fit.depths,
        "held_bytes": fit.held,
        "peak_program": fit.peak[2].program.name,
        "compiled": [_program(one) for one in fit.measured],
    }


def _program(one: Measured) -> dict[str, Any]:
    return {
        "part": one.program.part,
        "name": one.program.name,
        "needed_bytes": one.figures.needed_bytes,
        "held_bytes": one.program.held_bytes,
        **dataclasses.asdict(one.figures),
    }
