"""A simulated device by which times can be told by hand."""

from __future__ import annotations

from reprise.sched.simulator.roofline import Accelerator, Efficiency, Instance, ModelShape

# rounds of exactly 1 s, and so is the pass of a prompt; copies take next to nothing
STEADY = Instance(
    Accelerator("steady", 1e30, 1e30, 1e6, 1e30, 1e30),
    ModelShape("none", 0.0, 0.0, 1, 1.0, 0.0, 0),
    1,
    Efficiency(1, 1, 1.0, 0, 1),
)
