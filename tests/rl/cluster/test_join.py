"""What processes are told before they run together."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from reprise.rl.cluster import join
from reprise.rl.cluster.config import ClusterConfig, check
from reprise.rl.cluster.processes import ALONE
from reprise.rl.runtime.run_files import code_digest


def test_one_process_joins_nothing() -> None:
    assert join.join(ClusterConfig(), dict) is ALONE


@pytest.mark.parametrize("text", ["host", "host:", ":80", "host:0", "host:70000", "host:x1"])
def test_an_address_is_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match='expected coordinator = "HOST:PORT" or "auto"'):
        ClusterConfig("spmd", text)


def test_addresses() -> None:
    config = ClusterConfig("spmd", "[::1]:80")
    assert (config.host, config.port) == ("::1", 80)
    assert (ClusterConfig("spmd", "node-7:8476").host) == "node-7"


def test_each_process_is_told_which_it_is() -> None:
    with pytest.raises(ValueError, match=r"needs Cluster\.num_processes and"):
        check(ClusterConfig("spmd", "a:1", num_processes=2))
    with pytest.raises(ValueError, match="0 … Cluster.num_processes − 1, got 2 of 2"):
        check(ClusterConfig("spmd", "a:1", 2, 2))
    check(ClusterConfig("spmd", "a:1", 2, 1))
    check(ClusterConfig("spmd"))  # jax finds out


def test_on_cpus_programs_are_compiled_by_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loads them waits in other collectives than those that compile them."""
    set_to: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **_: None)
    join._initialize(ClusterConfig("spmd", "127.0.0.1:1", 2, 1))
    assert "cpu" in jax.config.jax_platforms
    assert set_to["jax_enable_compilation_cache"] is False


def test_the_first_difference_between_processes_is_named() -> None:
    one = {"configuration": "a = 1\nb = 2\n", "version of jax": "0.10.2"}
    assert join.mismatch([one, dict(one)]) is None
    other = one | {"configuration": "a = 1\nb = 3\n"}
    assert join.mismatch([one, one, other]) == (
        "expected the same configuration in all processes, got b = 3 in process 2 and b = 2 in "
        "process 0: start all of them alike"
    )
    assert "got 0.11.0 in process 1 and 0.10.2 in process 0" in str(
        join.mismatch([one, one | {"version of jax": "0.11.0"}])
    )


def test_identity_sees_weights_and_code(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 * 2**20))
    before = join.identity_of("a = 1\n", {join.POLICY: str(tmp_path)})
    assert before == join.identity_of("a = 1\n", {join.POLICY: str(tmp_path)})
    weights.write_bytes(bytes(3 * 2**20 - 1) + b"1")  # the end of a large file
    after = join.identity_of("a = 1\n", {join.POLICY: str(tmp_path)})
    assert [name for name in before if before[name] != after[name]] == [
        "contents of Policy.directory"
    ]
    (tmp_path / "models").mkdir()
    code = [code_digest(tmp_path)]
    (tmp_path / "models" / "x.py").write_text("1")
    assert code_digest(tmp_path) != code[0]


@pytest.mark.parametrize("name", ["scorers", "history_workers"])
def test_scorers_and_history_workers_need_ray(name: str) -> None:
    assert getattr(ClusterConfig("ray", **{name: 2}), name) == 2
    for kind in ("local", "spmd"):
        with pytest.raises(ValueError, match=rf'expected kind = "ray" with them, got \'{kind}\''):
            ClusterConfig(kind, **{name: 2})
    with pytest.raises(ValueError, match="0 or more, got -1"):
        ClusterConfig("ray", **{name: -1})
