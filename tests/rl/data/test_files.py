"""Which files a path names: folders, globs, splits, saved data sets; and what is told of others."""

import json
import os

import pytest

from reprise.rl.data import files
from reprise.rl.data.files import FORMATS, digest, find

JSONL = ("jsonl",)


def make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return folder


def found(target, split=None, formats=JSONL, below=None, skip=""):
    paths = find(str(target), split, formats, skip)[1]
    return [p.relative_to(below or target).as_posix() for p in paths]


@pytest.mark.parametrize(
    ("there", "split", "wanted"),
    [
        (["b.jsonl", "a.jsonl", ".c.jsonl", "d.txt"], None, ["a.jsonl", "b.jsonl"]),
        (["train.jsonl", "test.jsonl", "more.jsonl"], None, ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], "test", ["test.jsonl"]),
        (
            ["test-1-of-2.jsonl", "test-0-of-2.jsonl"],
            None,
            ["test-0-of-2.jsonl", "test-1-of-2.jsonl"],
        ),
        (["data/train-0.jsonl", "data/dev-0.jsonl"], "validation", ["data/dev-0.jsonl"]),
        (["train/a.jsonl", "test/a.jsonl"], None, ["train/a.jsonl"]),
        (["train/a.jsonl", "test/a.jsonl"], "test", ["test/a.jsonl"]),
        (["easy.jsonl", "hard_questions.jsonl"], "hard", ["hard_questions.jsonl"]),
        (["constrained.jsonl", "latest.jsonl"], None, ["constrained.jsonl", "latest.jsonl"]),
        (["a.jsonl", "x/y/b.jsonl", ".cache/c.jsonl"], None, ["a.jsonl", "x/y/b.jsonl"]),
    ],
)
def test_folders(tmp_path, there, split, wanted):
    assert found(make(tmp_path, *there), split) == wanted


def test_globs_and_files_are_taken_as_named(tmp_path):
    make(
        tmp_path, "x/train-1.jsonl", "x/train-0.jsonl", "x/test-0.jsonl", "y/z/a.jsonl", "a[1].txt"
    )
    assert found(tmp_path / "x/train-*", below=tmp_path) == ["x/train-0.jsonl", "x/train-1.jsonl"]
    assert len(found(tmp_path / "x/*.jsonl", below=tmp_path)) == 3
    assert found(tmp_path / "x/*.jsonl", "test", below=tmp_path) == ["x/test-0.jsonl"]
    assert found(tmp_path / "**/a.jsonl", below=tmp_path) == ["y/z/a.jsonl"]
    assert found(tmp_path / "a[1].txt", below=tmp_path) == ["a[1].txt"]
    assert found(tmp_path / "x/train-[0]*", below=tmp_path) == ["x/train-0.jsonl"]


@pytest.mark.parametrize(
    ("there", "target", "split", "message"),
    [
        (["a.txt", "b.md"], "", None, "no .jsonl files in the folder .*; there is a.txt, b.md"),
        ([], "", None, "there is nothing"),
        (["a.jsonl.gz"], "", None, "unpack compressed files first"),
        (["state.json"], "", None, "datasets:.* reads what save_to_disk"),
        (["a.txt"], "*.jsonl", None, r"no file matches .*\*.jsonl; in .* there is a.txt"),
        (["a.txt"], "x/*.jsonl", None, "in .*x there is no such folder"),
        ([], "x", None, "there is no file or folder"),
        (["test.jsonl", "dev.jsonl"], "", None, "splits test, validation: choose with .split="),
        (
            ["train.jsonl", "dev.jsonl"],
            "",
            "test",
            "no file of the split 'test'.*: train, validation",
        ),
        (["a.jsonl.gz"], "a.jsonl.gz", None, "is compressed: unpack it first"),
        (["a.parquet"], "a.parquet", None, "is a parquet file: write parquet:.*a.parquet"),
        (["a.jsonl"], "a.jsonl", "test", "no file of the split 'test'.*none in a.jsonl"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(tmp_path, there, target, split, message):
    make(tmp_path, *there)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        find(str(tmp_path / target), split, JSONL)


def test_a_data_set_of_the_hub_has_its_command():
    command = "hf download openai/gsm8k --repo-type dataset --local-dir downloads/gsm8k"
    for formats in (("datasets",), FORMATS):
        with pytest.raises(FileNotFoundError, match=f"not downloaded here, .*: {command}"):
            find("openai/gsm8k", None, formats)
    with pytest.raises(FileNotFoundError, match=r"from [^;]*$"):
        find("tests/none", None, JSONL)


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("pattern", ["", "*.jsonl", "**/*.jsonl"])
def test_a_search_leaves_no_unreadable_file_out(tmp_path, kind, pattern):
    make(tmp_path, "a.jsonl")
    path = tmp_path / "b.jsonl"
    path.symlink_to("nowhere") if kind == "link" else os.mkfifo(path)
    with pytest.raises(ValueError, match="b.jsonl: expected a file, got a link to nothing, a pipe"):
        find(str(tmp_path / pattern), None, JSONL)


def test_links_in_a_circle_end(tmp_path):
    make(tmp_path, "a/1.json", "b/2.json")
    (tmp_path / "a" / "round").symlink_to(tmp_path)
    (tmp_path / "b" / "round").symlink_to(tmp_path)
    assert found(tmp_path, None, ("json",)) == ["a/1.json", "b/2.json"]
    assert found(tmp_path / "**/*.json", None, ("json",), below=tmp_path) == [
        "a/1.json",
        "b/2.json",
    ]


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(files, "MAX_ENTRIES", 3)
        make(tmp_path / "x", "1.txt", "2.txt", "a.jsonl")
        assert found(tmp_path / "x" / "*.jsonl", below=tmp_path) == ["x/a.jsonl"]
        make(tmp_path / "x", "3.txt")
        for pattern in ("*.jsonl", "**/*.jsonl"):
            with pytest.raises(ValueError, match="x: more than 3 files: name a part"):
                found(tmp_path / "x" / pattern)
    monkeypatch.setattr(files, "MAX_FILES", 2)
    with pytest.raises(ValueError, match="more than 2 files"):
        find(str(make(tmp_path, "a.jsonl", "b.jsonl", "c.jsonl")), None, JSONL)


@pytest.mark.parametrize(
    ("there", "split", "wanted"),
    [
        (  # the hub's folder of openai/gsm8k
            ["README.md", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"]
            + ["socratic/train-00000-of-00001.parquet"],
            "test",
            ["main/test-00000-of-00001.parquet"],
        ),
        (  # the repository of its authors
            ["grade_school_math/data/train.jsonl", "grade_school_math/data/train_socratic.jsonl"]
            + ["grade_school_math/data/test.jsonl"],
            None,
            ["grade_school_math/data/train.jsonl"],
        ),
        (["train.jsonl", "test.jsonl"], None, ["train.jsonl"]),
        (  # Hendrycks's archive
            ["MATH/train/algebra/1.json", "MATH/train/geometry/7.json", "MATH/test/algebra/2.json"],
            None,
            ["MATH/train/algebra/1.json", "MATH/train/geometry/7.json"],
        ),
        (  # a data set of the hub, by subject
            ["algebra/train-00000-of-00001.parquet", "geometry/train-00000-of-00001.parquet"]
            + ["algebra/test-00000-of-00001.parquet"],
            "test",
            ["algebra/test-00000-of-00001.parquet"],
        ),
        (
            ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
            None,
            ["data/train-00000-of-00001.parquet"],
        ),
    ],
)
def test_published_data_sets_as_they_come(tmp_path, there, split, wanted):
    assert found(make(tmp_path, *there), split, FORMATS, skip="socratic") == wanted


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("state.json", {"_data_files": [{"filename": "../x.arrow"}]}, "files in this folder, got"),
        ("state.json", {"_data_files": [{"filename": "/etc/passwd"}]}, "files in this folder, got"),
        ("state.json", {"_data_files": [{"filename": 3}]}, "files in this folder, got 3"),
        (
            "state.json",
            {"_data_files": [{"filename": "gone.arrow"}]},
            "gone.arrow, which state.json",
        ),
        ("state.json", {"_data_files": 1}, "names of splits or data files, got 1"),
        ("state.json", {"_data_files": [], "_indices_data_files": [{}]}, "flatten_indices"),
        ("state.json", ["list"], "expected a JSON object, got list"),
        ("dataset_dict.json", {"splits": [".."]}, "files in this folder, got '..'"),
        ("dataset_dict.json", {"splits": []}, "names of splits or data files"),
        ("dataset_dict.json", {"splits": ["a", "b"]}, "splits a, b: choose with .split="),
        ("dataset_dict.json", {"splits": ["train"]}, "train/state.json is not there"),
    ],
)
def test_a_saved_data_set_that_lies_is_refused(tmp_path, file, text, message):
    (tmp_path / file).write_text(json.dumps(text))
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        find(str(tmp_path), None, ("datasets",))


def test_a_digest_sees_names_sizes_and_contents(tmp_path):
    path = make(tmp_path, "a.jsonl") / "a.jsonl"
    large = tmp_path / "large"
    large.write_bytes(bytes(2**26 + 2**18))
    first, of_large = digest([path]), digest([large])
    assert digest([path]) == first != digest([large])
    path.write_text("b.jsonl")
    assert digest([path]) != first
    with large.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert digest([large]) != of_large
