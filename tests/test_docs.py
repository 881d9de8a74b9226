"""README and docs/ against the code: commands run, diffs apply, names and figures are current."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
from command_runs import call_main

from docs import generate, older, prose, results_page
from reprise.models.formats import hf
from reprise.rl.commands import export, train
from reprise.rl.gin.loader import help_on
from reprise.rl.metrics.eval_metrics import EvalResponse, set_metrics
from reprise.rl.settings.config import TrainConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += [ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = ("models", "spec", "sched", "rl")
README = PAGES[0].read_text(encoding="utf-8")
GAP = "…"  # what differs from message to message, or from name to name


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language; "" is that of commands and output."""
    found = re.findall(r"^```(.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [body for name, body in found if name == language]


@pytest.fixture
def printed(monkeypatch, capsys) -> Callable[..., str]:
    """Returns what a call prints that is made in a folder."""

    def made(folder: Path, call: Callable[..., object], *arguments: object) -> str:
        monkeypatch.chdir(folder)
        capsys.readouterr()
        assert call(*arguments) in (0, None)
        return capsys.readouterr().out

    return made


def dry_run(command: str) -> int:
    """Run a shown training command with --dry_run."""
    words = re.findall(r"(?:'[^']*'|\S)+", command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "rl.train"]
    arguments = [word.replace("'", "") for word in words[3:] if word != "--dry_run"]
    return call_main(train.main, *arguments, "--dry_run")


# --- what is shown runs ---------------------------------------------------------------


@pytest.mark.slow
def test_the_readme_example_passes_a_dry_run(tmp_path, printed):
    (question,) = blocks(README, "json")
    (reward,) = blocks(README, "python")
    (command,) = [b for b in blocks(README, "") if "rewards.py" in b]
    (tmp_path / "questions.jsonl").write_text(question)
    (tmp_path / "rewards.py").write_text(reward)
    assert "# ok" in printed(tmp_path, dry_run, command)


@pytest.mark.slow
def test_getting_started_works_as_it_stands(tmp_path, printed):
    """All but the training itself, which the page's own output came from."""
    text = page("getting_started.md")
    questions, reward, use = blocks(text, "python")
    (settings,) = [b for b in blocks(text, "") if b.startswith("Task.specs")]
    (command,) = [b for b in blocks(text, "") if b.rstrip().endswith("--dry_run")]
    (tmp_path / "rewards.py").write_text(reward)
    (tmp_path / "own.gin").write_text(settings)
    printed(tmp_path, exec, questions, {})
    assert "# examples      64" in printed(tmp_path, dry_run, command)
    assert "runs/own/policy" in use
    answer = printed(ROOT, exec, use.replace("runs/own/policy", "policies/tiny"), {})
    assert "####" in answer, "the policy answers what it was taught"


@pytest.mark.slow
def test_the_page_of_a_real_model_works_as_it_stands(tmp_path, printed):
    """Up to training: the policy that ships stands in for the one that is downloaded."""
    text = page("real_model.md")
    questions, reward, _ = blocks(text, "python")
    (settings,) = [b for b in blocks(text, "") if b.startswith("Task.specs")]
    (command,) = [b for b in blocks(text, "") if b.rstrip().endswith("--dry_run")]
    (tmp_path / "rewards.py").write_text(reward)
    (tmp_path / "own.gin").write_text(settings + 'Policy.directory = "policies/tiny"\n')
    printed(tmp_path, exec, questions, {})
    plan = printed(tmp_path, dry_run, command)
    assert "# examples      400" in plan and "are in the training set" not in plan
    assert len((tmp_path / "unseen.jsonl").read_text().splitlines()) == 64
    (exported,) = [b.split()[3:] for b in blocks(text, "") if b.startswith("python -m rl.export")]
    assert export.command_line().parse_args(exported).step == "best"


@pytest.mark.slow
def test_the_pages_of_the_python_api_work_as_they_stand(tmp_path, printed):
    pages = [page("python_api.md"), page("turns_and_tools.md")]
    text = "\n".join(block for one in pages for block in blocks(one, "python"))
    shown = printed(ROOT, exec, text.replace("runs/own", str(tmp_path)), {})
    assert [line.split(":")[0] for line in shown.splitlines()] == ["step 0", "step 1", "step 2"]
    assert hf.load_pretrained(tmp_path / "policy")[0].architecture == "qwen3"


def test_the_diff_of_the_page_on_models_applies_and_passes_its_check(tmp_path):
    """The other pages are a file and a flag: tests/rl/run/test_loop_user_files.py runs these."""
    for name in ("reprise", *CODE):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    text = page("add_a_model.md")
    (diff,), (check,) = blocks(text, "diff"), blocks(text, "python")
    alone = ["git", "apply", "--check", "-"]
    subprocess.run(alone, cwd=ROOT, input=diff, text=True, check=True)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=diff, text=True, check=True)
    command = [sys.executable, "-c", check]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


# --- generated pages ------------------------------------------------------------------


@pytest.mark.parametrize("name", generate.PAGES)
def test_generated_pages_are_current(name):
    if name == generate.OLDER and (reason := older.no_git()):
        pytest.skip(reason)
    assert page(name) == generate.PAGES[name](), "fix: python -m docs.generate"


def test_every_result_file_has_a_row():
    used = {row["file"] for row, _ in results_page.rows()}
    assert used == {path.name for path in results_page.RESULTS.glob("*.json")}


def test_every_row_names_its_command_and_the_code_that_it_measures():
    for row, _ in results_page.rows():
        if "removed_after" not in row:
            paths = older.paths_of(results_page.table(), row["file"], row)
            assert paths and [path for path in paths if not (ROOT / path).exists()] == []
    for measure in results_page.table()["measure"]:
        module, *part = measure["command"].removeprefix("python -m ").split()
        path = ROOT / module.replace(".", "/")
        source = (path / "__main__.py") if path.is_dir() else path.with_suffix(".py")
        assert all(f'"{word}"' in source.read_text(encoding="utf-8") for word in part), measure


def test_rows_of_changed_code_leave_the_results(monkeypatch):
    measured = [row for row, _ in results_page.rows() if "removed_after" not in row]
    chosen = next(row for row in measured if len(row["values"]) == 1)
    path = older.paths_of(results_page.table(), chosen["file"], chosen)[0]
    line = f"| {chosen['what']} |"
    pages = results_page.results, results_page.history
    for changed, shown in (({}, [True, False]), ({chosen["file"]: [path]}, [False, True])):
        monkeypatch.setattr(results_page, "older_by_file", lambda changed=changed: changed)
        assert [line in make() for make in pages] == shown
    assert f"older than `{path}` |" in results_page.history()


def test_a_row_that_names_its_figures_has_a_line_for_each():
    row = {"what": "kills: 9 of 10; in order, or not", "values": ["a", "b"], "show": "{}"}
    first, second = results_page.one_by_one({**row, "goal": ["", ">= 3"]})
    assert (first["what"], first["values"], first["goal"]) == ("kills: 9 of 10", ["a"], [])
    assert (second["what"], second["show"]) == ("… in order, or not", "{}")
    assert second["goal"] == [">= 3"]
    whole = {**row, "what": "kills"}
    assert results_page.one_by_one(whole) == [whole]


def test_situations_of_changed_code_leave_the_readme(monkeypatch):
    situations = results_page.table()["situation"]
    marked = [one for one in situations if one.get("readme")]
    assert 3 <= len(marked) <= 6
    chosen = marked[0]
    path = older.paths_of(results_page.table(), chosen["file"])[0]
    for changed, shown in (({}, len(marked)), ({one["file"]: [path] for one in marked}, 0)):
        monkeypatch.setattr(results_page, "older_by_file", lambda changed=changed: changed)
        text = results_page.readme()
        table = text.partition(results_page.BEGIN)[2].partition(results_page.END)[0]
        assert len(re.findall(r"^\| (?!your run)", table, re.MULTILINE)) == shown
    rows = {row["file"] for row, _ in results_page.rows()}
    assert {one["file"] for one in situations} <= rows, "a situation needs a row of its file"


def test_code_has_changed_unless_only_comments_have(tmp_path, monkeypatch):
    def git(*arguments):
        name = "-c", "user.name=x", "-c", "user.email=x@x"
        done = subprocess.run(
            ["git", *name, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def changed(text, file):
        file.write_text(text)
        older.has_changed.cache_clear()
        older.file_has_changed.cache_clear()
        return older.has_changed(commit, "room")

    monkeypatch.setattr(older, "ROOT", tmp_path)
    file = tmp_path / "room" / "a.py"
    file.parent.mkdir()
    file.write_text('"""A."""\nfrom spec import a\n\n\ndef f():\n    """F."""\n    return 1\n')
    settings = file.with_name("a.gin")
    settings.write_text("# A\nRun.steps = 1\n")
    assert older.no_git() == "this copy is not a git repository"
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=x")
    commit = git("rev-parse", "HEAD")
    assert older.no_git() == ""
    assert not changed("# B\n\nRun.steps = 1  # one\n", settings)
    renamed = '"""B."""\nfrom reprise.spec.room import a\ndef f():  # one\n    return (1)\n'
    assert not changed(renamed, file)
    assert changed("# A\nRun.steps = 2\n", settings)
    settings.write_text("# A\nRun.steps = 1\n")
    assert changed('"""A."""\nfrom spec import a\n\n\ndef f():\n    """F."""\n    return 2\n', file)
    assert changed('"""A."""\nfrom spec import b\n\n\ndef f():\n    """F."""\n    return 1\n', file)
    assert older.has_changed("0" * 40, "room") and not older.has_changed(commit, "other")
    file.write_text('"""A."""\nfrom spec import a\n\n\ndef f():\n    """F."""\n    return 1\n')
    (tmp_path / "other").mkdir()
    git("mv", "room/a.py", "other/b.py")
    older._names_at.cache_clear()
    assert not older.has_changed(commit, "other/b.py"), "it has moved"
    older.has_changed.cache_clear()
    assert older.has_changed(commit, "room")


def test_met_and_missed_are_computed():
    row = {"what": "x", "kind": "measured", "file": "speculation.json", "show": "{:.2f}"}
    value = results_page.value_at(
        json.loads((results_page.RESULTS / row["file"]).read_text(encoding="utf-8")),
        "history_ratio",
    )
    for goal, mark in ((f">= {value - 0.1}", "met"), (f">= {value + 0.1}", "**missed**")):
        cells = results_page.cells({**row, "values": ["history_ratio"], "goal": [goal]})
        assert cells[4] == mark


def test_the_readme_and_the_architecture_are_short():
    assert len(README.splitlines()) <= 100
    assert len(page("architecture.md").splitlines()) <= 400


# --- names ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_paths_that_pages_name_exist(path):
    text = re.sub(r"```diff\n.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    tops = "models|spec|sched|rl|configs|tests|docs|benchmarks|policies|notebooks"
    named = {ROOT / name for name in re.findall(rf"\b((?:{tops})/[\w/]*(?:/|\.\w+))", text)}
    named |= {path.parent / link for link in re.findall(r"\]\(([^)#:]+)[)#]", text)}
    made = {ROOT / "docs" / "_build"}
    assert [str(p) for p in sorted(named) if not p.exists() and p not in made] == []


def test_every_setting_is_set_by_a_configuration_or_named_on_a_page():
    """A setting that neither shows is a constant; most are set by a configuration that ships."""
    hints = typing.get_type_hints(TrainConfig)
    names = {
        f"{hint.__name__.removesuffix('Config')}.{field.name}"
        for hint in hints.values()
        for field in dataclasses.fields(hint)
    }
    configs = [p.read_text(encoding="utf-8") for p in (ROOT / "configs").rglob("*.gin")]
    lines = [line.partition("#")[0] for text in configs for line in text.splitlines()]
    pages = [p.read_text(encoding="utf-8") for p in PAGES if p.name != "configuration.md"]
    pages += [p.read_text(encoding="utf-8") for p in (ROOT / "notebooks").glob("*.ipynb")]

    def named_in(texts: list[str]) -> set[str]:
        return names & set(re.findall(r"\b[A-Z]\w*\.\w+\b", "\n".join(texts)))

    unset = names - named_in(lines)
    assert sorted(unset - named_in(pages)) == []
    assert len(unset) <= 55, "it only falls"


def test_headings_that_pages_link_to_exist():
    def anchors(path: Path) -> set[str]:
        headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return {
            re.sub(r"[^\w\- ]", "", text).strip().lower().replace(" ", "-") for text in headings
        }

    missing = []
    for path in PAGES:
        for link, anchor in re.findall(
            r"\]\(([^)#:]*)#([^)]+)\)", path.read_text(encoding="utf-8")
        ):
            if anchor not in anchors(path.parent / link if link else path):
                missing.append(f"{path.name}: {link}#{anchor}")
    assert missing == []


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_modules_that_pages_name_exist(path):
    text = path.read_text(encoding="utf-8")
    added = set(re.findall(r"^\+\+\+ b/(\S+)\.py$", text, re.MULTILINE))
    missing = []
    for name in re.findall(rf"`((?:{'|'.join(CODE)}|benchmarks)(?:\.\w+)+)", text):
        parts = name.split(".")
        places = [ROOT.joinpath(*parts[:n]) for n in range(len(parts), 0, -1)]
        found = [p for p in places if p.is_dir() or p.with_suffix(".py").is_file()]
        leaf = len(parts) - (len(found[0].relative_to(ROOT).parts) if found else 0)
        file = (
            (found[0] / "__init__.py" if found[0].is_dir() else found[0].with_suffix(".py"))
            if found
            else None
        )
        source = file.read_text(encoding="utf-8") if file and file.is_file() else ""
        inside = leaf == 0 or re.search(rf"\b{parts[-leaf]}\b", source)
        if not (found and inside) and "/".join(parts) not in added:
            missing.append(name)
    assert missing == []


def test_tests_that_the_architecture_names_exist():
    """As `path/test_x.py::test_name`, or `test_x.py::test_begins_with_…`."""
    missing = []
    for line in page("architecture.md").splitlines():
        files: list[str] = []
        for path, test in re.findall(r"`([\w/]+\.py)?(?:::)?(test_\w+)?(?:_?…)?`", line):
            if path:
                files = [
                    p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob(Path(path).name)
                ]
            if test and not any(f"def {test}" in text for text in files):
                missing.append(f"{path}::{test}")
    assert missing == []


def test_the_architecture_has_every_room():
    text = page("architecture.md")
    rooms = {p.parent.relative_to(ROOT).as_posix() for p in ROOT.glob("[rs]*/*/__init__.py")}
    rooms = {room for room in rooms if room.partition("/")[0] in CODE}
    named = set(re.findall(r"\b[rs]\w+/\w+", text))
    assert rooms and rooms - named == set()


def test_the_architecture_has_every_source_and_budget():
    from reprise.rl.speculation.config import SOURCES

    text = page("architecture.md")
    names = [*SOURCES, "off", "fixed:K", "goodput", "aimd", "bandit"]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_tree_of_the_contributors_has_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tree,) = [b for b in blocks(text, "") if b.startswith("models/")]
    shown: set[str] = set()
    top = ""
    for line in tree.splitlines():
        names = re.findall(r"(?:^|(?<=\s))([\w/]+)/(?=\s|$)", line[:30])
        if not line.startswith(" "):
            top, nested = names[0], []
            shown |= set(names)
        else:
            nested = names
        shown |= {f"{top}/{name}" for name in nested}
    rooms = {
        p.parent.relative_to(ROOT).as_posix() for name in CODE for p in ROOT.glob(f"{name}/*/*.py")
    }
    assert rooms - shown == set(), "rooms that the tree leaves out"
    assert [name for name in shown if not (ROOT / name).is_dir()] == []


def test_every_setting_has_a_sentence():
    sections = [s for command in generate.COMMANDS for s in help_on(generate.schema_of(command))]
    bare = [f"{s.name}.{f.name}" for s in sections for f in s.fields if not f.doc.endswith(".")]
    assert sections and bare == []


def test_settings_that_pages_name_exist():
    known = set()
    for command in generate.COMMANDS:
        for section in help_on(generate.schema_of(command)):
            known |= {f"{section.name}.{field.name}" for field in section.fields}
    sections = {name.partition(".")[0] for name in known}
    for path in PAGES:
        if path.name == "CHANGELOG.md":  # names former settings too
            continue
        text = path.read_text(encoding="utf-8")
        named = {f"{s}.{f}" for s, f in re.findall(r"\b([A-Z]\w+)\.([a-z]\w+)\b", text)}
        wrong = {n for n in named - known if n.partition(".")[0] in sections}
        assert wrong == set(), path.name


# --- messages and metrics -------------------------------------------------------------


@functools.cache
def trees() -> list[ast.Module]:
    paths = (path for name in CODE for path in (ROOT / name).rglob("*.py"))
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


@functools.cache
def string_literals() -> set[str]:
    """Return every string of the code, with `…` for the values in f-strings."""
    found = set()
    for tree in trees():
        pieces = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                values = [v.value if isinstance(v, ast.Constant) else GAP for v in node.values]
                found.add("".join(map(str, values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set() if id(node) in pieces else {node.value}
    return found


def test_messages_of_the_troubleshooting_page_are_those_of_the_code():
    messages = re.findall(r"^> `(.*)`$", page("troubleshooting.md"), re.MULTILINE)
    literals = string_literals()
    assert len(messages) > 20
    assert [m for m in messages if not any(m in literal for literal in literals)] == []


PREFIXES = (
    "ahead bandit batch clip_ratio completions correction critic distill diversity drafter "
    "drafting dynamic_sampling episodes perf ratio reward rewards rollout sampling spec update "
    "weights workers"
).split()


def test_the_metrics_page_has_every_metric():
    cells = re.findall(r"^\| (`.*?) \|", page("metrics.md"), re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    pattern = re.compile(rf"(?:{'|'.join(PREFIXES)})(?:/[a-z_0-9{GAP}]+)+")
    written = {text for text in string_literals() if pattern.fullmatch(text)}
    generic = {"drafter/…"}  # spelled out on the page
    assert written - documented - generic == set(), "not on the page"
    apart = ("drafter/", "eval/")
    fixed = {name for name in documented if "/" in name and not name.startswith(apart)}
    other = {"time/…", "emission_kl/…"}
    assert fixed - written - other == set(), "not in the code"


def test_the_metrics_page_has_every_figure_of_an_evaluation():
    cells = re.findall(r"^\| (`eval/.*?) \|", page("metrics.md"), re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    found = set_metrics([EvalResponse(0, 1.0, True, 1, False, False)], 1, (1,))
    figures = {n.replace("@1", "@K") for n in found if not n.endswith(("_low", "_high"))}
    in_sets = {f"eval/NAME/{name}" for name in figures | {"seen_in_training"}}
    assert documented == in_sets | {"eval/mean_reward", "eval/pass@K"}


# --- prose of docstrings --------------------------------------------------------------

OPENINGS = ("Of ", "Those ", "The same ", "What ", "Who ", "How ", "Whether ", "So many ")


def test_docstrings_say_what_a_thing_is_or_does():
    """None begins in a way that cannot stand alone."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {
        ast.get_docstring(node) or ""
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    }
    assert len(docs) > 1000 and not [doc for doc in docs if doc.startswith(OPENINGS)]


def test_the_prose_lint_counts_phrases_and_names():
    text = '''"""What was begun, where there is a device."""
first = 1
def told(asked): # those of a page
    """Return the sum."""
    most_found = asked
'''
    counts = prose.count(text, "x.py")
    assert counts.num_words == 15 and counts.num_names == 4
    assert [f.text for f in counts.phrases] == ["What was", "begun", "where there", "those of"]
    assert [f.text for f in counts.names] == ["told", "asked", "most_found"]


def test_the_prose_lint_finds_markers_that_are_too_frequent():
    plain = {"a.py:1": "Return the number of rows. " * 400}
    assert prose.dialect(plain) == ({}, [])
    rare = {**plain, "b.py:3": "It has so many of them, at once."}
    assert prose.dialect(rare)[0].keys() == {
        r"\b(?:so|as) many\b",
        r"\bof (?:it|them)\b",
        r"\bat once\b",
    }
    rates, places = prose.dialect({**plain, "c.py:7": "the batch's rows " * 20})
    assert [found.place for found in places] == ["c.py:7"] * 20 and round(*rates.values()) == 10
