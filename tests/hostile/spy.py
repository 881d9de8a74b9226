"""A pair of reward functions for a worker: what did those between them execute or write?

`begin` and `seen` stand before and behind the functions that are watched. Python's audit
events say what happened. What a module executes while it is imported is no answer's doing,
and sympy compiles functions of its own for polynomials, from templates: both do not count.
"""

import functools
import os
import sys

EXECUTIONS = {"exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"}
EXECUTIONS |= {"subprocess.Popen", "socket.connect", "pickle.find_class", "ctypes.dlopen"}
WRITES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod"}
WRITES |= {"os.truncate", "shutil.rmtree"}
_watching = False
_executions: list[str] = []
_writes: list[str] = []


def _hook(event, arguments):
    if not _watching:
        return
    is_write = event in WRITES or (event == "open" and _for_writing(arguments))
    if not (is_write or event in EXECUTIONS) or _importing() or _is_sympys(event, arguments):
        return
    (_writes if is_write else _executions).append(f"{event} {arguments[0]!r}"[:200])


def _importing():
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _is_sympys(event, arguments):
    """The functions that sympy.polys.monomials builds for each number of variables."""
    if event == "compile":
        source = arguments[0]
        text = source.decode() if isinstance(source, bytes) else source
        return text in _monomial_functions()
    if event == "exec":  # of what was compiled, and judged, a moment before
        caller = sys._getframe(2).f_code
        return caller.co_filename.endswith("monomials.py") and caller.co_name == "_build"
    return False


@functools.cache
def _monomial_functions():
    global _watching
    from sympy.polys.monomials import MonomialOps

    texts: set[str] = set()
    was, _watching = _watching, False

    class Listed(MonomialOps):
        def _build(self, code, name):
            texts.add(code)

    for num_variables in range(30):
        ops = Listed(num_variables)
        for name in ("mul", "pow", "mulpow", "ldiv", "div", "lcm", "gcd"):
            getattr(ops, name)()
    _watching = was
    return texts


def _for_writing(arguments):
    _, mode, flags = arguments
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


sys.addaudithook(_hook)


def begin(completions, **columns):
    global _watching
    _executions.clear()
    _writes.clear()
    _watching = True
    return [None]


def seen(completions, **columns):
    """Executions, and a million for each write; all of them are printed."""
    global _watching
    _watching = False
    for what in _executions + _writes:
        print(f"{completions[0][:80]!r}: {what}", file=sys.stderr)
    return [len(_executions) + 1e6 * len(_writes)]


def planted(completions, **columns):
    """A scorer that does what none may: the spy has to see it."""
    if completions[0] == "evaluate":
        import sympy

        return [float(sympy.Number("2"))]  # by way of its parse_expr
    if completions[0] == "write":
        with open(os.devnull, "w") as file:
            file.write("x")
    return [1.0]
