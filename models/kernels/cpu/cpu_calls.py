"""Kernels compiled by numba that XLA calls on CPUs, on all cores.

A kernel has parts. Threads of the XLA pool take parts until all are taken. The calling thread waits
for parts that other threads have taken, but never for a thread, because no thread may be free.

Structures of the XLA FFI are words of 8 bytes (xla/ffi/api/c_api.h).
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from reprise.models.kernels.cpu import cpu_sums, cpu_tiles
from reprise.models.kernels.cpu.cpu_sums import fast

# words of a call
EXTENSION = 1
API = 2
CONTEXT = 3
NUM_INPUTS = 7
INPUTS = 9
NUM_OUTPUTS = 12
OUTPUTS = 14
METADATA = 3
METADATA_VERSION = 3  # of the extension that queries the version; of its metadata
API_VERSION = 4
SCHEDULE = 17
NUM_THREADS = 18  # words of the API
KIND = 2
DATA = 3
SIZES = 5  # words of a buffer
FLOAT32 = 11  # a value of KIND
USERS, TAKEN, DONE, PARTS, CALL = range(5)  # words of shared memory
MIN_PRODUCTS = 2**18  # to use several threads

_compiled = dict[str, Any]()  # functions that XLA calls, by kernel
_lock = threading.Lock()  # programs are traced in several threads


def register(name: str, file: str, functions: Callable[[int], tuple[Any, Any]]) -> None:
    """Compile a kernel once, or load it from the numba cache, and register it with XLA.

    `functions` returns the task, which gets the address of shared memory, and the call. Its
    argument is a checksum of the sources, because the numba cache notices changes in only one file.
    """
    with _lock:
        if name not in _compiled:
            _compiled[name] = _register(name, *functions(_stamp(file)))


def _stamp(file: str) -> int:
    files = (__file__, cpu_sums.__file__, cpu_tiles.__file__, file)
    return zlib.crc32(b"".join(Path(f).read_bytes() for f in files))


def _register(name: str, task: Callable[..., Any], call: Callable[..., Any]) -> Any:
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    compiled_task = numba.cfunc("int64(int64)", nopython=True, cache=True)(task)
    llvmlite.binding.add_symbol(f"{name}_task", compiled_task.address)
    compiled = numba.cfunc("int64(voidptr)", nopython=True, cache=True)(call)
    jax.ffi.register_ffi_target(name, capsule(compiled.address, None, None), platform="cpu")
    return compiled_task, compiled


@intrinsic
def _pointer(_typing, address):  # type: ignore[no-untyped-def]
    def code(context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), code


@intrinsic
def _add(_typing, address, value):  # type: ignore[no-untyped-def]
    """Add to a word atomically; return the previous value."""

    def code(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        word = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", word, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


@intrinsic
def _invoke(_typing, function, argument):  # type: ignore[no-untyped-def]
    """Call a function with one pointer argument by its address."""

    def code(_context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        pointer = ir.FunctionType(word, [word]).as_pointer()
        return builder.call(builder.inttoptr(arguments[0], pointer), [arguments[1]])

    return types.int64(types.int64, types.int64), code


def task_of(name: str) -> Any:
    """Return a numba function that returns the address of a kernel task."""

    def code(_context, builder, _signature, _arguments):  # type: ignore[no-untyped-def]
        word = ir.IntType(64)
        function = ir.FunctionType(word, [word])
        task = cgutils.get_or_insert_function(builder.module, function, f"{name}_task")
        return builder.ptrtoint(task, word)

    return intrinsic(lambda _typing: (types.int64(), code))


_malloc = types.ExternalFunction("malloc", types.int64(types.int64))
_free = types.ExternalFunction("free", types.void(types.int64))
_yield = types.ExternalFunction("sched_yield", types.int32())


@fast
def words(address, count):  # type: ignore[no-untyped-def]
    return numba.carray(_pointer(address), count, np.int64)


@fast
def _buffer(call, list_, i):  # type: ignore[no-untyped-def]
    return words(words(call[list_], i + 1)[i], 6)


@fast
def sizes(call, i, rank):  # type: ignore[no-untyped-def]
    """Return the axis sizes of an input, as words."""
    return words(_buffer(call, INPUTS, i)[SIZES], rank)


@fast
def floats(call, i, shape):  # type: ignore[no-untyped-def]
    return numba.carray(_pointer(_buffer(call, INPUTS, i)[DATA]), shape, np.float32)


@fast
def halves(call, i, shape):  # type: ignore[no-untyped-def]
    """Return a bfloat16 input as words of 16 bits."""
    return numba.carray(_pointer(_buffer(call, INPUTS, i)[DATA]), shape, np.uint16)


@fast
def integers(call, i, shape):  # type: ignore[no-untyped-def]
    return numba.carray(_pointer(_buffer(call, INPUTS, i)[DATA]), shape, np.int32)


@fast
def output(call, i, shape):  # type: ignore[no-untyped-def]
    return numba.carray(_pointer(_buffer(call, OUTPUTS, i)[DATA]), shape, np.float32)


@fast
def number_bytes(call, i):  # type: ignore[no-untyped-def]
    """Return the bytes per number of an input: 4 for float32, 2 for bfloat16."""
    return 4 if _buffer(call, INPUTS, i)[KIND] & 0xFFFFFFFF == FLOAT32 else 2


@fast
def input_address(call, i):  # type: ignore[no-untyped-def]
    return _buffer(call, INPUTS, i)[DATA]


@fast
def output_address(call, i):  # type: ignore[no-untyped-def]
    return _buffer(call, OUTPUTS, i)[DATA]


@fast
def is_query(call):  # type: ignore[no-untyped-def]
    """Return whether XLA queries the version; if so, answer with the version of this XLA."""
    if call[EXTENSION] == 0:
        return False
    metadata = words(words(call[EXTENSION], 4)[METADATA], 4)
    metadata[METADATA_VERSION] = words(call[API], 5)[API_VERSION]
    return True


@fast
def begin(call, num_parts, num_products, task):  # type: ignore[no-untyped-def]
    """Return the address of new shared memory, after scheduling pool threads to take parts."""
    address = _malloc(80)
    shared = words(address, 5)
    given = words(address + 40, 5)
    helpers = 0
    if num_products >= MIN_PRODUCTS:
        # size, extension, context, address of the result; the result, 1 without a pool
        given[0] = 32
        given[1] = 0
        given[2] = call[CONTEXT]
        given[3] = address + 72
        given[4] = 1
        _invoke(words(call[API], 19)[NUM_THREADS], address + 40)
        helpers = min(given[4], num_parts) - 1
    shared[USERS] = 2 + helpers
    shared[TAKEN] = 0
    shared[DONE] = 0
    shared[PARTS] = num_parts
    shared[CALL] = call.ctypes.data
    # size, extension, context, function, its argument
    given[0] = 40
    given[1] = 0
    given[2] = call[CONTEXT]
    given[3] = task
    given[4] = address
    for _ in range(helpers):
        _invoke(words(call[API], 18)[SCHEDULE], address + 40)
    return address


def serving(run: Any) -> Any:
    """Return a numba function that runs parts until all are taken, and then leaves.

    `run` gets a call and a part. The function refers to `run` by name, because numba would not
    cache a function that takes it as an argument.
    """

    @fast
    def serve(address):  # type: ignore[no-untyped-def]
        shared = words(address, 5)
        part = _add(address + 8 * TAKEN, 1)
        while part < shared[PARTS]:
            run(words(shared[CALL], 15), part)
            _add(address + 8 * DONE, 1)
            part = _add(address + 8 * TAKEN, 1)
        _leave(address)

    return serve


@fast
def end(address, task):  # type: ignore[no-untyped-def]
    """Take parts too, wait until all parts are done, and leave."""
    _invoke(task, address)
    while _add(address + 8 * DONE, 0) < words(address, 5)[PARTS]:
        _yield()
    _leave(address)


@fast
def _leave(address):  # type: ignore[no-untyped-def]
    """Free the shared memory if no other thread will use it."""
    if _add(address + 8 * USERS, -1) == 1:
        _free(address)
