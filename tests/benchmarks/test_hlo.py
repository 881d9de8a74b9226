"""Programs as XLA prints them: sizes of arrays, collectives in loops."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.hlo import (
    bytes_of,
    collectives_of,
    decisions,
    kernels,
    parse,
    waiting_conditionals,
)

TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4,8]{1,0})->f32[16,8]}

FileNames
1 "step.py"

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], /*index=1*/f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %r = f32[4,8]{1,0} all-reduce(%v), channel_id=1, replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %r)
}

%cond (p.1: (s32[], f32[4,8])) -> pred[] {
  %p.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: f32[4,8]) -> f32[16,8] {
  %a = f32[4,8]{1,0} parameter(0), metadata={op_name="params.a"}
  %zero = s32[] constant(0)
  %in = (s32[], f32[4,8]{1,0}) tuple(%zero, %a)
  %loop = (s32[], f32[4,8]{1,0}) while(%in), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %k = f32[4,8]{1,0} custom-call(%out), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/attend/pallas_call"}
  %s = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%k), channel_id=2, dimensions={0}
  ROOT %d = f32[16,8]{1,0} all-gather-done(%s)
}
"""  # noqa: E501


def test_collectives_are_counted_as_often_as_their_loops_run():
    module = parse(TEXT)
    assert collectives_of(module) == {
        "all-reduce": 3 * 4 * 8 * 4,
        "all-gather": 16 * 8 * 4,
    }
    once = parse(TEXT.replace('{"known_trip_count":{"n":"3"}}', "{}"))
    assert collectives_of(once)["all-reduce"] == 128


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("f32[3,5]{1,0}", 60),
        ("pred[7]{0}", 7),
        ("s4[10]{0}", 5),
        ("f8e4m3fn[10]{0}", 10),
        ("f32[]", 4),
        ("bf16[4,2,128]{2,1,0:T(8,128)(2,1)}", 4 * 8 * 128 * 2),  # 2 heads in a tile of 8
        ("bf16[4,2,128]{1,2,0:T(8,128)(2,1)}", 4 * 128 * 128 * 2),  # heads are minor here
        ("s32[100]{0:T(128)S(1)}", 512),  # in the memory beside the core
    ],
)
def test_arrays_have_the_bytes_of_whole_tiles(text, num_bytes):
    lines = f"ENTRY %main (a: f32[]) -> f32[] {{\n  ROOT %x = {text} parameter(0)\n}}"
    [[one]] = parse(lines).computations.values()
    assert one.num_bytes == num_bytes


def test_a_compiled_programs_collectives_are_those_that_its_shardings_ask_for():
    mesh = Mesh(jax.devices()[:4], ("x",))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), ()))
    step = jax.jit(lambda x: jnp.sin(x), out_shardings=whole)
    compiled = step.lower(jax.ShapeDtypeStruct((8, 16), "float32", sharding=split)).compile()
    assert collectives_of(parse(compiled.as_text())) == {"all-gather": 8 * 16 * 4}


FUSED = """HloModule jit_step

%sliced (a: f32[100,8], i: s32[]) -> f32[2,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %some = f32[2,8]{1,0} dynamic-slice(%a, %i, %z), dynamic_slice_sizes={2,8}
  ROOT %twice = f32[2,8]{1,0} add(%some, %some)
}

%put (old: f32[100,8], new: f32[2,8], i.1: s32[]) -> f32[100,8] {
  %old = f32[100,8]{1,0} parameter(0)
  %new = f32[2,8]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %z.1 = s32[] constant(0)
  ROOT %all = f32[100,8]{1,0} dynamic-update-slice(%old, %new, %i.1, %z.1)
}

%small (x: f32[2,8]) -> f32[2,8] {
  %x = f32[2,8]{1,0} parameter(0)
  ROOT %x2 = f32[2,8]{1,0} negate(%x)
}

%large (y: f32[2,8]) -> f32[2,8] {
  %y = f32[2,8]{1,0} parameter(0)
  %y2 = f32[2,8]{1,0} negate(%y)
  ROOT %y3 = f32[2,8]{1,0} negate(%y2)
}

ENTRY %main (a.1: f32[100,8], i.2: s32[], yes: pred[]) -> f32[100,8] {
  %a.1 = f32[100,8]{1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  %yes = pred[] parameter(2)
  %f = f32[2,8]{1,0} fusion(%a.1, %i.2), kind=kLoop, calls=%sliced
  %c = f32[2,8]{1,0} conditional(%yes, %f, %f), true_computation=%large, false_computation=%small
  %k = f32[2,8]{1,0} custom-call(%c, %a.1), custom_call_target="mosaic_gpu_v2"
  ROOT %g = f32[100,8]{1,0} fusion(%a.1, %k, %i.2), kind=kLoop, calls=%put
}
"""


def test_bytes_are_those_that_instructions_use():
    def of_kernel(one, by_name):
        assert [by_name[name].num_bytes for name in one.operands] == [64, 3200]
        return 10_000

    slice_, update = 64 + 4 + 64, 4 + 64 + 64  # read, index, written; of the array in place nothing
    assert bytes_of(parse(FUSED), of_kernel) == slice_ + 2 * 64 + 10_000 + update
    of_conditional = bytes_of(parse(FUSED), of_kernel, lambda one: one.opcode == "conditional")
    assert of_conditional == 2 * 64


def test_loops_of_unknown_length_and_conditionals_are_counted():
    def planted(x, n):
        def some(i, x):  # twice in each of three known iterations
            for _ in range(2):
                x = jax.lax.cond(x.sum() > 0, lambda x: x * jnp.sin(x), lambda x: x - 1, x)
            return x

        x = jax.lax.fori_loop(0, 3, some, x)
        return jax.lax.while_loop(lambda x: x.sum() < n, lambda x: jnp.cos(x) + x, x)

    text = jax.jit(planted).lower(jnp.ones(8), 100.0).compile().as_text()
    assert decisions(parse(text)) == {"unknown_loops": 1, "conditionals": 6}
    assert decisions(parse(TEXT)) == {"unknown_loops": 0, "conditionals": 0}


def test_conditionals_outside_of_command_buffers_are_counted():
    thunks = """000: kCommandBuffer [source | next=009 (1)]
    001: kKernel [source | sink]
    002: kConditional [prev=001 (1)]
009: kWhile [prev=000 (1)]
    condition:
    000: kCommandBuffer [source | sink]
        057: kConditional [prev=052 (1)]
            000: kKernel [source | sink]
    058: kConditional [prev=057 (1)]
        000: kConditional [source | sink]
060: kConditional [prev=009 (1)]
"""
    assert waiting_conditionals(thunks) == 3
    assert waiting_conditionals("") == 0


def test_kernels_of_loops_and_branches_are_counted_and_copies_are_not():
    thunks = """000: kCommandBuffer [source | next=009 (1)]
    001: kCustomKernel [source       | next=002 (1)] loop_pad_fusion grid: [8192, 1, 1]
    002: kCopy         [prev=001 (1) | next=003 (1)] kCopy
    003: kCustomCall   [prev=002 (1) | sink        ] kCustomCall
009: kWhile [prev=000 (1)]
condition:
    010: kKernel [source | sink] kKernelOfTheCondition
  body:
    011: kConditional [source | sink]
        000: kKernel [source | sink]
kKernel: no line of a thunk
"""
    assert kernels(thunks) == 4
    assert kernels("") == 0
