"""Each shape of policy or engine is compiled anew: tests share those of tests/support/shapes.py."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
MOST = 12


def test_engines_have_few_shapes():
    """Policies and engines that are written out in files that run engines."""
    for name in ("ModelConfig", "EngineConfig"):
        found = {}
        for path in TESTS.rglob("*.py"):
            text = path.read_text("utf-8")
            calls = ast.walk(ast.parse(text)) if "from reprise.rl.engine" in text else ()
            for node in calls:
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
                    if len(node.args) + len(node.keywords) > 2:
                        found[ast.unparse(node)] = path.relative_to(TESTS).as_posix()
        assert len(found) <= MOST, f"use those of tests/support/shapes.py: {found}"
