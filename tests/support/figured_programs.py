"""Programs of a run whose figures are made up instead of compiled."""

from reprise.rl.preflight import fit
from reprise.rl.preflight.fit import Figures


def figured(monkeypatch, temporary_bytes):
    """Return the programs that are asked for; `temporary_bytes(program)` are what each needs."""
    asked = []

    def figures(program, target):
        asked.append(program)
        temporaries = temporary_bytes(program)
        return Figures(argument_bytes=program.held_bytes, temporary_bytes=temporaries)

    monkeypatch.setattr(fit, "compiled_figures", figures)
    return asked
