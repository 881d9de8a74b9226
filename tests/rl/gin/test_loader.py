"""Configuration: what binds, what is refused and with which words, and that dumps rerun."""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.rl.ablation.grid import AblationRun
from reprise.rl.drafter_training.offline import OfflineConfig
from reprise.rl.gin import loader as config_lib
from reprise.rl.gin.command_line import config_parser, parse_command_line, split_overrides
from reprise.rl.gin.loader import ConfigError, describe, dump, load
from reprise.rl.runtime import run_files
from reprise.rl.runtime.run_files import resolve_path
from reprise.rl.settings.config import TrainConfig
from reprise.rl.simulation.config import SimulateRun


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Where a run lives.

    Second paragraph.
    """

    directory: str = "runs/default"
    steps: int = 100
    """The number of training steps,
    of a run.
    """
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    temperature: float = 1.0
    top_k: int | None = None
    buckets: tuple[int, ...] = (16, 32)
    stop_words: tuple[str, ...] = ()
    greedy: bool = False
    draw: Literal["cdf", "gumbel"] = "cdf"

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be at least 0")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    task: str
    epochs: int = 1


@dataclasses.dataclass(frozen=True)
class Schema:
    run: RunConfig
    rollout: RolloutConfig


@dataclasses.dataclass(frozen=True)
class SchemaWithData:
    run: RunConfig = RunConfig(steps=7)
    data: DataConfig = dataclasses.field(default_factory=lambda: DataConfig(task="gcd", epochs=3))

    def __post_init__(self) -> None:
        if self.run.steps < self.data.epochs:
            raise ValueError(f"steps={self.run.steps} must be at least epochs={self.data.epochs}")


@dataclasses.dataclass(frozen=True)
class Required:
    data: DataConfig


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*overrides: str, files: tuple[Path, ...] = (), schema: type = Schema) -> str:
    with pytest.raises(ConfigError) as caught:
        load(schema, files, overrides)
    return str(caught.value)


def file_refusal(tmp_path: Path, text: str) -> str:
    return refusal(files=(write(tmp_path / "bad.gin", text),))


# --- what binds -------------------------------------------------------------------------


def test_defaults_alone():
    assert load(Schema) == Schema(RunConfig(), RolloutConfig())
    assert load(SchemaWithData) == SchemaWithData(RunConfig(steps=7), DataConfig("gcd", 3))
    changed = load(SchemaWithData, (), ["Data.task=lcm"])
    assert changed.data == DataConfig("lcm", 3)  # the schema's default stays for the rest


def test_later_files_win_and_overrides_win_over_files(tmp_path):
    first = write(tmp_path / "a.gin", "Run.steps = 1\nRun.steps = 2\nRollout.temperature = 0.5\n")
    second = write(tmp_path / "b.gin", "Run:\n  steps = 3  # a block\n  directory = 'x'\n")
    assert load(Schema, [first]).run.steps == 2
    assert load(Schema, [first, second]).run == RunConfig(directory="x", steps=3)
    assert load(Schema, [second, first], ["Run.steps=4"]).run.steps == 4
    assert load(Schema, [first, second]).rollout.temperature == 0.5


def test_values_of_every_type(tmp_path):
    file = write(
        tmp_path / "a.gin",
        "Rollout.temperature = 2\nRollout.top_k = 5\nRollout.buckets = [\n  8,  # small\n  9]\n"
        "Rollout.stop_words = ('a' 'b',)\nRollout.greedy = True\nRollout.draw = 'gumbel'\n"
        "Run.name = None",
    )
    got = load(Schema, [file]).rollout
    assert got == RolloutConfig(2.0, 5, (8, 9), ("ab",), True, "gumbel")
    assert type(got.temperature) is float and type(got.buckets) is tuple


def test_include_is_relative_to_the_including_file(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "base.gin", "Run.steps = 5\nRun.name = 'base'\n")
    child = write(tmp_path / "sub" / "child.gin", "include '../base.gin'\nRun.name = 'child'\n")
    monkeypatch.chdir("/")
    assert load(Schema, [child]).run == RunConfig(steps=5, name="child")


def test_include_finds_what_a_command_line_would(tmp_path, monkeypatch):
    for module in (config_lib, run_files):
        monkeypatch.setattr(module, "PROJECT_ROOT", tmp_path / "project")
    (tmp_path / "project" / "configs").mkdir(parents=True)
    write(tmp_path / "project" / "configs" / "base.gin", "Run.steps = 5\n")
    (tmp_path / "mine").mkdir()
    own = write(tmp_path / "mine" / "own.gin", "include 'configs/base.gin'\n")
    assert load(Schema, [own]).run.steps == 5
    (tmp_path / "mine" / "configs").mkdir()
    write(tmp_path / "mine" / "configs" / "base.gin", "Run.steps = 7\n")
    assert load(Schema, [own]).run.steps == 7, "a file beside it comes first"


def test_macros_go_by_value_and_the_last_value_counts(tmp_path):
    file = write(tmp_path / "a.gin", "N = 3\nM = %N\nRun.steps = %M\nRollout.buckets = (%N, 4)\n")
    got = load(Schema, [file])
    assert (got.run.steps, got.rollout.buckets) == (3, (3, 4))
    got = load(Schema, [file], ["N=6"])
    assert (got.run.steps, got.rollout.buckets) == (6, (6, 4))


@pytest.mark.parametrize("text", ["runs/a", "a", "2024-01-01", "a=b", "~/x y", "(1", "it's"])
def test_a_bare_word_of_the_command_line_is_a_string(text):
    assert load(Schema, (), [f"Run.directory={text}"]).run.directory == text


def test_overrides_use_the_grammar_of_gin():
    got = load(
        Schema, (), ["Run.name=None", "Run.directory='q'", "Rollout.draw=gumbel", "Run.steps=-3"]
    )
    assert got.run == RunConfig("q", -3, None) and got.rollout.draw == "gumbel"
    assert load(Schema, (), ["Run.directory=''"]).run.directory == ""
    assert load(Schema, (), ["WHERE=runs/b", "Run.directory=%WHERE"]).run.directory == "runs/b"


# --- what is refused --------------------------------------------------------------------


def test_unknown_names_are_told_with_the_nearest_match_and_the_place(tmp_path):
    message = file_refusal(tmp_path, "\nRollout.temprature = 1.0\n")
    assert f"{tmp_path}/bad.gin:2: no field Rollout.temprature." in message
    assert "Did you mean Rollout.temperature?" in message
    assert "temperature, top_k, buckets, stop_words, greedy, draw" in message
    message = refusal("Rolout.temperature=1")
    assert "no section Rolout. Did you mean Rollout? Sections: Rollout, Run" in message
    assert "Did you mean Rollout.greedy?" in refusal("Sampler.greedy=True")
    assert "Did you mean Run.steps?" in refusal("Rollout.steps=3")
    assert "Did you mean Rollout.top_k?" in refusal("Rollout.tk=3"), "by its initials"
    assert "Did you mean Rollout.greedy?" in refusal("Runs.greedy=True"), "not Run, without it"


def test_a_forgotten_section_does_not_pass_as_a_macro(tmp_path):
    message = file_refusal(tmp_path, "steps = 3\n")
    assert "bad.gin:1: steps has no section" in message and "Did you mean Run.steps?" in message


@pytest.mark.parametrize(
    ("override", "expected", "got"),
    [
        ("Run.steps=True", "int", "bool True"),
        ("Run.steps='1'", "int", "str '1'"),
        ("Run.steps=None", "int", "NoneType None"),
        ("Run.steps=many", "int", "str 'many'"),
        ("Rollout.temperature='0.5'", "float", "str '0.5'"),
        ("Rollout.greedy=1", "bool", "int 1"),
        ("Rollout.top_k=1.5", "int or None", "float 1.5"),
        ("Rollout.buckets=(1, True)", "tuple of int", "tuple (1, True)"),
        ("Rollout.stop_words={'a': 1}", "tuple of str", "dict {'a': 1}"),
        ("Rollout.draw=gumbl", "one of 'cdf', 'gumbel'", "str 'gumbl'"),
    ],
)
def test_wrong_types(override, expected, got):
    message = refusal(override)
    name = override.partition("=")[0]
    assert f"{name}: expected {expected}, got {got}." in message
    assert f"For example {name} = " in message


def test_the_example_given_is_itself_accepted():
    for override in ["Run.steps='x'", "Rollout.top_k='x'", "Rollout.buckets=1", "Run.name=1"]:
        example = refusal(override).partition("For example ")[2]
        load(Schema, (), [example])
    assert "Did you mean gumbel?" in refusal("Rollout.draw=gumbl")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("Run.steps = \n", 1, "parse"),
        ("Run.steps = (1,\n", None, ""),
        ("Run.directory = runs\n", 1, "strings need quotes: 'runs'"),
        ("Run.directory = 'a\n", 1, ""),
        ("import os\n", 1, "`import os`"),
        ("Run.steps = @os.getpid()\n", 1, "@os.getpid: references to code are not allowed"),
        ("eval/Run.steps = 1\n", 1, "scopes"),
        ("Run.steps = %STEPS\nSTEP = 3\n", 1, "no macro %STEPS. Did you mean %STEP?"),
        ("A = %B\nB = %A\nRun.steps = %A\n", 2, "defined by itself"),
        ("include 'none.gin'\n", 1, "none.gin does not exist"),
        ("include 'bad.gin'\n", None, "includes itself"),
    ],
)
def test_bad_files_name_the_line(tmp_path, text, line, words):
    message = file_refusal(tmp_path, text)
    assert "bad.gin" in message and words in message
    if line:
        assert f"bad.gin:{line}: " in message


def test_missing_files_and_malformed_overrides(tmp_path):
    assert "none.gin does not exist" in refusal(files=(Path("none.gin"),))
    near = refusal(files=(Path("configs/epochs_tini.gin"),))
    assert near.endswith("Did you mean configs/epochs_tiny.gin?")
    assert "is a directory" in refusal(files=(tmp_path,))
    assert "UTF-8" in refusal(files=(_binary(tmp_path),))
    for override in ("Run.steps", "Run.steps=", "=3", "Run steps=3", "a.b.c=1"):
        assert "expected Section.field=value" in refusal(override)


def _binary(tmp_path: Path) -> Path:
    path = tmp_path / "binary.gin"
    path.write_bytes(b"\xff\xfe\x00")
    return path


def test_a_section_that_refuses_its_values_is_named_with_the_place(tmp_path):
    message = file_refusal(tmp_path, "Rollout.top_k = 3\n\nRollout.temperature = -1.0\n")
    assert message.startswith("Rollout: temperature=-1.0 must be at least 0")
    assert "Rollout.temperature is set at" in message and "bad.gin:3" in message
    assert "top_k" not in message
    assert "must be at least epochs=3" in refusal("Run.steps=1", schema=SchemaWithData)


def test_required_fields():
    message = refusal(schema=Required)
    assert "Data.task is not set and has no default" in message
    assert load(Required, (), ["Data.task=gcd"]).data.task == "gcd"


def test_includes_are_bounded(tmp_path):
    for i in range(28):  # 2**27 reads, were they all read
        text = f"include 'f{i + 1}.gin'\n" * 2 if i < 27 else "Run.steps = 1\n"
        write(tmp_path / f"f{i}.gin", text)
    assert "included at most 16 deep" in refusal(files=(tmp_path / "f0.gin",))
    assert "at most 64 files" in refusal(files=(tmp_path / "f13.gin",))
    assert load(Schema, [tmp_path / "f23.gin"]).run.steps == 1  # 31 reads
    large = write(tmp_path / "large.gin", "Run.steps = 1\n" * 10_000)
    twice = write(tmp_path / "twice.gin", "include 'large.gin'\n" * 2)
    assert load(Schema, [large]).run.steps == 1
    assert "at most 262144 bytes" in refusal(files=(twice,))
    assert "at most 262144 bytes" in refusal(files=(large, large))


def test_macro_expansion_is_bounded(tmp_path):
    laughs = "m0 = (1, 1, 1, 1, 1, 1, 1, 1, 1, 1)\n" + "".join(
        f"m{i + 1} = (" + f"%m{i}, " * 10 + ")\n" for i in range(10)
    )
    assert "at most 10000 values" in file_refusal(tmp_path, f"{laughs}Rollout.buckets = %m10\n")
    chain = "m0 = 1\n" + "".join(f"m{i + 1} = %m{i}\n" for i in range(5000))
    assert "at most 32 deep" in file_refusal(tmp_path, f"{chain}Run.steps = %m5000\n")


def test_strings_side_by_side_are_bounded(tmp_path):
    assert load(Schema, (), ["Run.name='a' 'b'"]).run.name == "ab"
    assert "strings side by side" in file_refusal(tmp_path, "Run.name = " + "'x' " * 10_000)


def test_half_surrogate_pairs_are_refused(tmp_path):
    message = file_refusal(tmp_path, 'Run.name = "a\\ud800"\n')
    assert "bad.gin:1: expected text of whole characters" in message and message.isprintable()


@settings(max_examples=100, deadline=None)
@given(
    st.text(alphabet=st.sampled_from(list("Run.steps=3 \n\t'\"()[]{}%@,:#-/\\$\x00é")), max_size=40)
)
def test_no_text_fails_in_any_other_way(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzz.gin"
    path.write_text(text, encoding="utf-8", newline="")
    for files, overrides in (([path], []), ([], [text]), ([], [f"Run.steps={text}"])):
        try:
            load(Schema, files, overrides)
        except ConfigError:
            pass


# --- dumps ------------------------------------------------------------------------------

schemas = st.builds(
    Schema,
    st.builds(RunConfig, st.text(), st.integers(), st.none() | st.text()),
    st.builds(
        RolloutConfig,
        st.floats(min_value=0, allow_nan=False),
        st.none() | st.integers(),
        st.lists(st.integers()).map(tuple),
        st.lists(st.text()).map(tuple),
        st.booleans(),
        st.sampled_from(["cdf", "gumbel"]),
    ),
)


@settings(max_examples=100, deadline=None)
@given(schemas)
def test_a_dump_reruns_to_the_same_configuration(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "dump.gin"
    path.write_bytes(dump(config).encode())
    assert load(Schema, [path]) == config


def test_a_dump_holds_every_field_in_sorted_sections():
    assert dump(load(Schema, (), ["Run.name=é\n'", "Rollout.buckets=(1,)"])) == (
        "Rollout.temperature = 1.0\nRollout.top_k = None\nRollout.buckets = (1,)\n"
        "Rollout.stop_words = ()\nRollout.greedy = False\nRollout.draw = 'cdf'\n\n"
        "# Where a run lives.\nRun.directory = 'runs/default'\nRun.steps = 100\n"
        'Run.name = "é\\n\'"\n'
    )


def test_a_dump_refuses_what_it_could_not_read_back():
    with pytest.raises(ConfigError, match="Run.steps: expected int, got float"):
        dump(Schema(RunConfig(steps=1.5), RolloutConfig()))
    with pytest.raises(ConfigError, match="nan"):
        dump(Schema(RunConfig(), RolloutConfig(temperature=float("nan"))))


def test_describe_gives_type_default_and_doc():
    text = describe(Schema)
    assert "Run.steps: int = 100\n      The number of training steps, of a run.\n" in text
    assert "Run.name: str or None = None" in text
    assert "Rollout.draw: one of 'cdf', 'gumbel' = 'cdf'" in text
    assert "    Where a run lives.\n\n    Second paragraph." in text
    assert "Data.task: str required" in describe(Required)


# --- command line -----------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = config_parser("train", None)
    made.add_argument("--dry_run", action="store_true")
    return made


def test_the_command_line_is_split():
    argv = "--gin_file a --dry_run --gin.Run.steps=3 --gin.Run.name -1 --gin_file=b".split()
    arguments, overrides = parse_command_line(parser(), argv, Schema)
    assert arguments.gin_file == ["a", "b"] and arguments.dry_run
    assert overrides == ["Run.steps=3", "Run.name=-1"]
    assert parse_command_line(parser(), [], Schema)[0].gin_file == []
    assert split_overrides(["--", "--gin.A.b=1"]) == ([], ["--", "--gin.A.b=1"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--dryrun"], "unknown argument --dryrun. Did you mean --dry_run?"),
        (["--Run.steps=3"], "Did you mean --gin.Run.steps=3?"),
        (["--steps=3"], "Did you mean --gin.Run.steps=3?"),
        (["--\x1b[2Jx"], r"unknown argument --\x1b[2Jx"),
        (["--gin.Run.steps", "--dry_run"], "--gin.Run.steps has no value"),
        (["stray"], "unknown argument stray"),
        (["--gin", "Run.steps=3"], "Write --gin.Section.field=value"),
    ],
)
def test_unknown_flags_stop_with_the_nearest(argv, words, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(parser(), argv, Schema)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def listed(section: str, capsys) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        parse_command_line(parser(), ["--list", section], Schema)
    printed = capsys.readouterr()
    return caught.value.code or 0, printed.out + printed.err


def test_one_section_is_listed(capsys):
    code, one = listed("Run", capsys)
    assert code == 0 and "Run.steps: int" in one and "Rollout." not in one
    code, every = listed("", capsys)
    assert code == 0 and one.strip() in every and "Rollout." in every
    code, error = listed("run", capsys)
    assert code == 2 and "Did you mean Run?" in error


def test_one_setting_is_listed(capsys):
    code, one = listed("Run.steps", capsys)
    assert code == 0 and one.splitlines() == [
        "  Run.steps: int = 100",
        "      The number of training steps, of a run.",
    ]
    code, error = listed("Run.step", capsys)
    assert code == 2 and "Did you mean Run.steps?" in error


def test_examples_in_errors_work():
    with pytest.raises(ConfigError) as caught:
        load(TrainConfig, [], ["Run.steps="])
    (example,) = re.findall(r"for example (\S+)", str(caught.value))
    assert load(TrainConfig, [], [example]) != load(TrainConfig)
    with pytest.raises(ConfigError) as caught:
        load(AblationRun, [])
    (example,) = re.findall(r"for example, (.*)", str(caught.value))
    assert len(load(AblationRun, [], [example]).ablation.variants) == 2


def test_project_files_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for module in (config_lib, run_files):
        monkeypatch.setattr(module, "PROJECT_ROOT", tmp_path / "project")
    (tmp_path / "project").mkdir()
    write(tmp_path / "project" / "a.gin", "Run.steps = 1\n")
    assert resolve_path("a.gin") == tmp_path / "project" / "a.gin"
    assert load(Schema, ["a.gin"]).run.steps == 1
    write(tmp_path / "a.gin", "Run.steps = 2\n")
    assert load(Schema, ["a.gin"]).run.steps == 2  # the current folder comes first
    assert resolve_path("out/new") == Path("out/new")  # neither exists: to be made here


def test_reading_a_configuration_imports_no_framework():
    code = (
        "import sys\n"
        "for name in ('tensorflow', 'torch', 'jax'): sys.modules[name] = None\n"
        "import reprise.rl.gin.command_line as c\n"
        "assert 'gin' not in sys.modules\n"
        "assert c.split_overrides([]) == ([], [])\n"
        "from reprise.rl.gin.grammar import read_override\n"
        "assert read_override('A.b=(1, 2)').value == (1, 2)\n"
    )
    root = config_lib.PROJECT_ROOT
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


# What a field of text may say: a name from outside, a path, or a grammar of its own (`fixed:K`).
# A field whose values are a closed set is a Literal, so that --list shows them and typos are
# answered with the nearest; whoever adds a field of text puts it here, or gives it a Literal.
TEXTS = {
    *("Run.directory", "Policy.directory", "Drafter.directory", "DraftModel.directory"),
    *("DraftModel.directories", "Distill.teacher"),
    *("Ablation.directory", "Simulate.directory", "Simulate.trace", "SimulatedCluster.profile"),
    *("Task.specs", "Task.system_prompt", "Task.prompt_suffix", "Reward.functions"),
    *("Speculation.budget", "Reuse.mode", "Reuse.schedule", "Algorithm.correction"),
    *("Metrics.wandb_project", "Ablation.variants", "Eval.sets", "Eval.best_by"),
    *("Eval.correct_by", "Task.date", "Task.chat_template"),
    *("Sampling.stop", "Sampling.by_task", "Task.chat_template_kwargs"),
    *("Trainer.remat", "Environment.factory"),
    *("Cluster.coordinator", "Cluster.address"),
}


def _is_text(hint: object) -> bool:
    if typing.get_origin(hint) is Literal:
        return False
    return hint is str or any(map(_is_text, typing.get_args(hint)))


def test_fields_with_a_closed_set_of_values_list_them():
    found = set()
    for schema in (TrainConfig, AblationRun, SimulateRun, OfflineConfig):
        for name, section in config_lib._sections(schema).items():
            fields = (field for field, hint in section.hints.items() if _is_text(hint))
            found |= {f"{name}.{field}" for field in fields}
    assert found == TEXTS


@pytest.mark.parametrize(
    ("override", "schema", "nearest"),
    [
        ("Sched.policy=ser", TrainConfig, "seer"),
        ("Reward.extract=boxd", TrainConfig, "boxed"),
        ("Speculation.sources=('last', 'histroy')", TrainConfig, "history"),
        ("SimulatedCluster.device=H10", SimulateRun, "H100"),
    ],
)
def test_a_typo_in_a_closed_set_is_answered_with_the_nearest(override, schema, nearest):
    with pytest.raises(ConfigError, match=f"Did you mean {nearest}\\?"):
        load(schema, [], [override])
