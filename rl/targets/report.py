"""The report of a preflight: programs, the peak, its largest arrays; as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.targets.fitting import Fit
from rl.targets.hlo import Moved
from rl.targets.measure import Measured
from rl.targets.mends import Mend

GB = 1e9
COLUMNS = ("program", "arguments", "temporaries", "beyond", "collectives", "compiler", "roofline")


def lines_of(fit: Fit) -> Iterator[str]:
    """Yield the report of a fit, all bytes those of one device."""
    target, (_, peak_bytes, at) = fit.target, fit.peak
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
    for part, names in fit.held.items():
        for name, size in names.items():
            yield f"stays         {part}: {name:36s} {_gb(size):>9s} GB"
    for name, (stays, one) in fit.groups.items():
        beyond = max(0, one.beyond_held_bytes)
        yield (
            f"peak          {name}: {_gb(stays)} GB stay, {_gb(beyond)} GB beyond them in "
            f"{one.program.name}: {_gb(stays + beyond)} GB"
        )
    for one in fit.measured:
        kernels = ", ".join(f"{n} × {name}" for name, n in sorted(one.figures.kernels.items()))
        if kernels and one.program.tokens:
            yield f"kernels       {one.program.name}: {kernels}"
    for live in at.figures.live:
        named = f"{live.count:4d} × {live.shape} {live.name}"
        yield f"largest       {_gb(live.num_bytes):>9s} GB  {named}"
    share = peak_bytes / target.device_bytes
    yield f"{'fits' if fit.fits else 'does not fit'}: {_gb(peak_bytes)} GB, {share:.0%} of a device"


def lines_of_sizes(found: Mapping[str, int]) -> Iterator[str]:
    """Yield the sizes that were found, as lines of a configuration."""
    if found:
        yield "found, where the configuration says 'auto':"
    for name, size in found.items():
        yield f"{name} = {size}"


def _table(measured: Sequence[Measured]) -> Iterator[str]:
    width = max(len(one.program.name) for one in measured)
    sizes = f"{{:{width}s}} {{:>10s}} {{:>11s}} {{:>8s}} {{:>20s}} {{:>10s}} {{:>10s}}"
    yield sizes.format(*COLUMNS)
    for one in sorted(measured, key=lambda m: -m.beyond_held_bytes):
        figures = one.figures
        yield sizes.format(
            one.program.name,
            _gb(figures.argument_bytes),
            _gb(figures.temporary_bytes) if not figures.refused else "refused",
            _gb(max(0, one.beyond_held_bytes)),
            _moved(figures.collectives),
            _ms(figures.compiler_s),
            _ms(one.roofline_s),
        )
        if figures.refused:
            yield f"  {figures.refused}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.3f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.2f} ms"


def _moved(found: Mapping[str, Moved]) -> str:
    count = sum(one.count for one in found.values())
    return f"{count}, {_gb(sum(one.num_bytes for one in found.values()))} GB" if count else ""


def refusal(fit: Fit, mends: Sequence[Mend]) -> str:
    """Return the sentence for a run that does not fit."""
    name, peak_bytes, at = fit.peak
    helps = "; ".join(
        f"{one.flag} saves {_gb(one.saved_bytes)} GB"
        + ("" if one.peak_bytes > fit.target.device_bytes else " and fits")
        for one in mends
    )
    return (
        f"expected a run that fits {_gb(fit.target.device_bytes)} GB of a device of "
        f"{fit.target.name}, got {_gb(peak_bytes)} GB, of {name} with {at.program.name}: "
        + (helps or "no single setting saves any: name a larger target, or take a smaller policy")
    )


def as_json(fit: Fit, mends: Sequence[Mend]) -> dict[str, Any]:
    """Return the report's figures; the first four are what a script asks for."""
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
        "largest": [dataclasses.asdict(one) for one in fit.peak[2].figures.live],
        "compiled": [_program(one) for one in fit.measured],
        "helps": [dataclasses.asdict(one) for one in mends],
    }


def _program(one: Measured) -> dict[str, Any]:
    figures = dataclasses.asdict(dataclasses.replace(one.figures, live=()))
    del figures["live"]
    return {
        "part": one.program.part,
        "name": one.program.name,
        "needed_bytes": one.figures.needed_bytes,
        "held_bytes": one.program.held_bytes,
        "roofline_s": one.roofline_s,
        **figures,
    }
