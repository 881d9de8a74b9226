"""Arrays that live at a program's peak, counted by hand."""

import jax
import jax.numpy as jnp

from rl.targets.hlo import parse
from rl.targets.live import Live, largest_live

HEAD = "ENTRY %main (a: f32[64]) -> f32[64] {\n"
A = '  %a = f32[64]{0} parameter(0), metadata={op_name="params.a"}\n'  # 256 bytes


def live(*lines, before=""):
    return largest_live(parse(before + HEAD + A + "".join(f"  {x}\n" for x in lines) + "}\n"))


def test_an_array_lives_until_it_is_last_read():
    peak, found = live(
        "%b = f32[128]{0} dot(%a)",
        "%c = f32[32]{0} dot(%b)",
        "%d = f32[256]{0} dot(%c)",
        "ROOT %e = f32[64]{0} dot(%d)",
    )
    # a, d and e at the end; with b it would be 1,792
    assert peak == 256 + 1024 + 256
    assert found[0] == Live("d", "f32[256]", 1, 1024)
    assert Live("params.a", "f32[64]", 1, 256) in found


def test_a_result_takes_the_place_of_an_operand_that_nobody_reads_later():
    lines = (
        "%b = f32[128]{0} dot(%a)",
        "%c = f32[128]{0} add(%b, %b)",
        "ROOT %d = f32[1]{0} dot(%c)",
    )
    assert live(*lines)[0] == 256 + 512 + 4
    read_later = *lines[:2], "ROOT %d = f32[1]{0} dot(%c, %b)"
    assert live(*read_later)[0] == 256 + 2 * 512 + 4


def test_views_and_tuples_take_nothing_and_keep_what_they_hold():
    peak, _ = live(
        "%b = f32[128]{0} dot(%a)",
        "%t = (f32[128]{0}, f32[64]{0}) tuple(%b, %a)",
        "%g = f32[128]{0} get-tuple-element(%t), index=0",
        "%v = f32[8,16]{1,0} bitcast(%g)",
        "%c = f32[1000]{0} dot(%a)",
        "ROOT %d = f32[1]{0} dot(%v, %c)",
    )
    assert peak == 256 + 512 + 4000 + 4


def test_a_loop_adds_what_its_body_needs():
    body = (
        "%body (p: (f32[64])) -> (f32[64]) {\n  %p = (f32[64]{0}) parameter(0)\n"
        "  %x = f32[64]{0} get-tuple-element(%p), index=0\n  %y = f32[500]{0} dot(%x)\n"
        "  %z = f32[64]{0} dot(%y)\n  ROOT %t = (f32[64]{0}) tuple(%z)\n}\n\n"
    )
    peak, found = live(
        "%b = f32[64]{0} dot(%a)",
        "%in = (f32[64]{0}) tuple(%b)",
        "%w = (f32[64]{0}) while(%in), condition=%body, body=%body",
        "ROOT %o = f32[64]{0} get-tuple-element(%w), index=0",
        before=body,
    )
    assert peak == 256 + 256 + 2000 + 256  # a, what goes around, y and z
    assert found[0].shape == "f32[500]"


def test_what_runs_beside_others_counts_once():
    peak, _ = live(
        "%s = (f32[64]{0}, f32[256]{0}) all-gather-start(%a)",
        "ROOT %d = f32[256]{0} all-gather-done(%s)",
    )
    assert peak == 256 + 1024
    peak, _ = live(
        "%s = (f32[64]{0:S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%a)",
        "%c = f32[64]{0:S(1)} copy-done(%s)",
        "ROOT %d = f32[2]{0} dot(%c)",
    )
    assert peak == 256 + 8  # the copy lies beside the core


def test_results_take_the_place_of_donated_arguments():
    lines = "%b = f32[64]{0} add(%a, %a)", "ROOT %c = f32[64]{0} multiply(%b, %b)"
    assert live(*lines)[0] == 2 * 256
    header = "HloModule jit_f, input_output_alias={ {}: (0, {}, may-alias) }\n\n"
    assert live(*lines, before=header)[0] == 256


def test_copies_have_the_name_of_what_they_copy():
    _, found = live("%c = f32[64]{0} copy(%a)", "ROOT %d = f32[2]{0} dot(%c)")
    assert [one.name for one in found] == ["params.a", "copy of params.a", "d"]


def test_names_that_differ_in_numbers_count_together():
    lines = [
        f'%b.{i} = f32[10]{{0}} dot(%a), metadata={{op_name="layers[{i}].up"}}' for i in (0, 1)
    ]
    _, found = live(*lines, "ROOT %d = f32[2]{0} dot(%b.0, %b.1)")
    assert Live("layers[#].up", "f32[10]", 2, 80) in found


def test_the_peak_of_a_compiled_program_lies_within_what_its_compiler_says():
    step = jax.jit(lambda x: jnp.linalg.norm(jnp.sin(x @ x) @ x.T))
    compiled = step.lower(jax.ShapeDtypeStruct((96, 96), "float32")).compile()
    memory = compiled.memory_analysis()
    peak, found = largest_live(parse(compiled.as_text()))
    most = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert memory.argument_size_in_bytes < peak <= most
    assert found[0].num_bytes == 96 * 96 * 4
