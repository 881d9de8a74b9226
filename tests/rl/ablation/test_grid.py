"""The runs of a grid, and the grids that are refused."""

import pytest

from reprise.rl.ablation.grid import AblationConfig, cells, checked_examples, folder_name
from reprise.rl.gin.loader import ConfigError, dump


def test_every_variant_with_every_seed_seed_by_seed(grid, tmp_path):
    found = cells([grid], ["Run.steps=2"], tmp_path / "runs")
    assert [(c.name, c.seed) for c in found] == [
        ("plain", 0), ("lenient 1", 0), ("plain", 3), ("lenient 1", 3)
    ]  # fmt: skip
    assert found[3].folder == tmp_path / "runs" / "lenient_1-3"
    assert found[3].config.reuse.mode == "lenient:1" and found[3].config.run.seed == 3
    assert found[3].config.run.steps == 2
    assert found[3].config.run.directory == str(found[3].folder)
    assert found[0].config.reuse.mode == "off"
    assert not any(c.is_started or c.is_done or c.steps_done for c in found)


def test_faulty_variants_are_named_before_anything_runs(grid, tmp_path):
    text = grid.read_text()
    for bad, words in (
        ("Reuse.mod = 'off'", "variant 'lenient 1': .*no field Reuse.mod"),
        ("Reuse.mode = 'most'", "variant 'lenient 1': .*mode must be one of"),
    ):
        grid.write_text(text.replace("Reuse.mode = 'lenient:1'", bad))
        with pytest.raises(ConfigError, match=words):
            cells([grid], [], tmp_path / "runs")
    grid.write_text(text.replace("Reuse.mode = 'lenient:1'", "Sampling.temperature = 0.0"))
    with pytest.raises(ConfigError, match="variant 'lenient 1': Sampling.temperature.* is 0"):
        checked_examples(cells([grid], [], tmp_path / "runs"))


def test_a_folder_of_one_run_is_refused(grid, tmp_path):
    with pytest.raises(ConfigError, match="expected none, .*--gin.Ablation.directory"):
        cells([grid], ["Run.directory='here'"], tmp_path / "runs")


def test_a_folder_with_a_run_of_another_configuration_is_refused(grid, tmp_path):
    cell = cells([grid], [], tmp_path / "runs")[1]
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.gin").write_text(dump(cell.config))
    assert cells([grid], [], tmp_path / "runs")[1].is_started
    with pytest.raises(ConfigError, match="holds a run of another configuration"):
        cells([grid], ["Run.steps=9"], tmp_path / "runs")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"variants": ()}, "one variant and one seed"),
        ({"variants": (("a", ()),), "seeds": ()}, "one variant and one seed"),
        ({"variants": (("a", ()), ("a", ()))}, "variants must differ"),
        ({"variants": (("a b", ()), ("a/b", ()))}, "differ in letters and digits"),
        ({"variants": (("a", ()),), "seeds": (1, 1)}, "seeds must differ"),
    ],
)
def test_bad_grids_are_named(fields, words):
    with pytest.raises(ValueError, match=words):
        AblationConfig(**fields)


def test_names_stay_inside_the_folder():
    assert [folder_name(n) for n in ("e^0.5", "../../up", "..", "")] == ["e_0.5", "up", "_", "_"]
