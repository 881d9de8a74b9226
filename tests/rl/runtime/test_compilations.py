"""The count of programs that jax makes: a new one is counted, a known one is not."""

import jax

from reprise.rl.runtime import compilations


def test_only_a_new_program_is_counted():
    step = jax.jit(lambda x: x + 1)
    before = compilations.num_programs()
    step(1.0)
    first = compilations.num_programs()
    step(2.0)
    assert first > before and compilations.num_programs() == first
