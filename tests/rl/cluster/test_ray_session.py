"""Ray is asked for, or not there at all; what is started listens to this host alone."""

import ast
import socket

import pytest
from processes import launch

from reprise.rl.cluster.ray_session import RayProblem, open_ray
from reprise.rl.runtime.waits import ROOT


def test_ray_is_imported_by_its_own_room_alone_and_only_when_it_is_asked_for():
    found = set()
    for path in ROOT.joinpath("rl").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "ray" for name in names):
                found.add(path.relative_to(ROOT / "rl").parts[0])
                assert node not in tree.body, f"{path}:{node.lineno}"
    assert found == {"cluster"}


@pytest.mark.fault
def test_an_address_where_nobody_listens_is_a_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with (
        pytest.raises(RayProblem, match=rf"at Cluster.address='127.0.0.1:{port}', and nobody ans"),
        open_ray(f"127.0.0.1:{port}", 1, 5.0),
    ):
        pass


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parity
def test_programs_give_the_tokens_of_one_engine_though_one_is_killed(tmp_path):
    """In mid-rollout: a worker, whose successor comes late, and one that drafts for others.

    They listen to this host.
    """
    [outcome] = launch("ray_tasks:everything", 1, tmp_path, join=False, limit_s=600)
    assert outcome.result["accepted_tokens"] > 0
    assert outcome.result["starts"] == 2
