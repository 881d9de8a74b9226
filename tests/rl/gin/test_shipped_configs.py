"""Every configuration that ships loads, opens its inputs, and says what it is for."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from reprise.models.formats import hf
from reprise.rl.ablation.grid import AblationRun, cells
from reprise.rl.gin.loader import dump, load
from reprise.rl.preflight import memory
from reprise.rl.settings.checks import check_sections
from reprise.rl.settings.config import PolicyConfig, TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.settings.unused import unused_settings
from reprise.rl.simulation.config import SimulateRun

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").rglob("*.gin"))
SCHEMAS = {"ablations": AblationRun, "sim": SimulateRun}  # by folder; others train
HEADER = ("Command:", "Cost:", "Expect:")


def header(path: Path) -> str:
    """The comment lines at the top."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(lines[:end])


def stand_in(folder: Path) -> Path:
    """The shipped policy with room for as many positions as Qwen3 has: for one to be fetched."""
    shutil.copytree(ROOT / "policies" / "tiny", folder)
    shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape["max_position_embeddings"] = 40_960
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return folder


def with_stand_in(config):
    """Return the configuration with a drafter as wide as the stand-in for the policy."""
    if not (config.drafter.directory or "").startswith("downloads/"):
        return config
    one = str(ROOT / "policies/countdown_drafter")
    drafter = dataclasses.replace(config.drafter, directory=one)
    return dataclasses.replace(config, drafter=drafter)


PUBLISHED = {  # rows of what configurations expect in downloads/
    "gsm8k/main/train-00000-of-00001.parquet": {"question": "2+2?", "answer": "2+2=4\n#### 4"},
    "math/data/train-00000-of-00001.parquet": {
        "problem": "Compute $1/2$.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "It is $\\boxed{\\frac12}$.",
    },
}


def publish(folder: Path) -> None:
    """Write data sets as they come from the hub."""
    for name, row in PUBLISHED.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        for split in ("train", "test"):
            rows = pyarrow.Table.from_pylist([row] * 40)
            parquet.write_table(rows, path.with_name(path.name.replace("train", split)))


@pytest.mark.parametrize("path", sorted((ROOT / "configs/ablations").glob("*.gin")), ids=str)
def test_every_variant_of_an_ablation_is_a_configuration(path, tmp_path):
    found = cells([path], [], tmp_path)
    grid = load(AblationRun, [path]).ablation
    shape = dataclasses.replace(hf.check(ROOT / "policies/tiny"), max_positions=40_960)
    assert len(found) == len(grid.variants) * len(grid.seeds) > 2
    for cell in found:
        saved = tmp_path / "config.gin"
        saved.write_text(dump(cell.config))
        assert load(TrainConfig, [saved]) == cell.config
        check_sections(with_stand_in(cell.config), shape)
    assert len({dump(cell.config) for cell in found}) == len(found)


def test_the_default_configuration_exists():
    assert ROOT / "configs" / "tiny_cpu.gin" in CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.relative_to(ROOT).as_posix())
class TestConfig:
    def test_its_header_says_what_it_is_the_command_and_what_to_expect(self, path):
        text = header(path)
        assert [word for word in HEADER if word not in text] == []
        assert len(text.splitlines()[0]) > 10, "the first line says what it is"

    def test_its_inputs_open_and_it_reruns_from_what_a_run_writes_down(
        self, path, tmp_path, monkeypatch
    ):
        schema = SCHEMAS.get(path.parent.name, TrainConfig)
        config = load(schema, [path])
        saved = tmp_path / "config.gin"
        saved.write_text(dump(config))
        assert load(schema, [saved]) == config
        if schema is SimulateRun:
            return
        assert schema is not TrainConfig or unused_settings(config) == []
        monkeypatch.chdir(tmp_path)  # paths of shipped files are found from anywhere
        if config.policy.directory.startswith("downloads/"):
            policy = PolicyConfig(str(stand_in(tmp_path / "policy")))
            config = dataclasses.replace(config, policy=policy)
            config = with_stand_in(config)
            publish(tmp_path / "downloads")
        inputs = open_inputs(config)
        assert len(inputs.task) >= config.rollout.prompts_per_step
        assert memory.estimate(config, inputs.model, memory.Devices()).total_bytes > 0


def test_all_of_rhymerl_is_on_in_its_configuration():
    config = load(TrainConfig, [ROOT / "configs/histopipe_tiny.gin"], [])
    assert config.speculation.budget == "aimd" and config.speculation.sources == ("histospec",)
    assert config.sched.policy == "histopipe" and config.sched.measures_rounds, "the second tier"
