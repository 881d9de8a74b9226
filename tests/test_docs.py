"""What README and docs/ show: it runs as it stands, and what it names is there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text(encoding="utf-8")
RATIO = re.compile(r"(\d+\.\d+)×")


@pytest.mark.slow
def test_the_python_of_the_readme_runs_as_it_stands():
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    command = [sys.executable, "-c", snippet]
    text = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert text.count("####") == 4, "the policy answers what it was taught"
    assert "#### 5" in text, "2 + 3"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_pages_name_are_there(page):
    text = page.read_text(encoding="utf-8")
    named = {ROOT / name for name in re.findall(r"configs/[\w/]+\.gin|tests/[\w/]+\.py", text)}
    named |= {page.parent / link for link in re.findall(r"\]\(([^)#:]+)\)", text)}
    assert named
    assert [path for path in sorted(named) if not path.exists()] == []


def result_rows() -> Iterator[tuple[str, str, str, str, Path]]:
    """(kind, figure, goal, mark, file) of each row of docs/results.md."""
    file = ""
    for line in (ROOT / "docs" / "results.md").read_text(encoding="utf-8").splitlines():
        if not line.startswith("|") or line.startswith(("|---", "| what |")):
            continue
        cells = (cell.strip() for cell in re.split(r"(?<!\\)\|", line[1:-1]))
        _, kind, figure, goal, mark, named = cells
        file = named.strip("`") or file  # a row without one is of the file above it
        yield kind, figure, goal, mark, ROOT / "benchmarks" / "results" / file


def test_every_result_says_its_kind_whether_it_meets_its_goal_and_its_file():
    rows = list(result_rows())
    assert {kind for kind, *_ in rows} == {"measured", "projected", "simulated"}
    assert {mark for *_, mark, _ in rows} == {"met", "missed", ""}
    assert all((goal == "report") == (mark == "") for _, _, goal, mark, _ in rows)
    assert [file for *_, file in rows if not file.is_file()] == []


def numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)):
        yield float(value)


def test_every_ratio_of_the_results_is_a_number_of_its_file():
    for kind, figure, _, _, file in result_rows():
        found = list(numbers(json.loads(file.read_text(encoding="utf-8"))))
        for ratio in RATIO.findall(figure):
            digits = len(ratio.partition(".")[2])
            near = [x for x in found if abs(x - float(ratio)) <= 0.5001 * 10**-digits]
            assert near, f"{file.name}: no {kind} {ratio}"


def test_the_readme_shows_ratios_of_the_results_only():
    ratios = set(RATIO.findall(README))
    shown = {ratio for _, figure, *_ in result_rows() for ratio in RATIO.findall(figure)}
    assert ratios and ratios <= shown
