"""The files of a tokenizer: only files of the folder are read; rules that run away are ended."""

import json
import os
import shutil
from pathlib import Path

import pytest

from policies.make.characters import save_character_tokenizer
from reprise.models.child import Child
from reprise.models.formats import hf
from reprise.models.text import tokenizer, tokenizer_files

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def folder(tmp_path):
    save_character_tokenizer(tmp_path / "folder", "ab")
    return tmp_path / "folder"


def put(path, kind):
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("name", tokenizer_files.NAMES)
def test_a_file_that_is_there_and_is_none_is_an_error(folder, name, kind):
    put(folder / name, kind)
    with pytest.raises(ValueError, match=f"{name}: expected a file, got"):
        tokenizer.load(folder)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_policy_s_file_that_is_none_is_an_error(tmp_path, name, kind):
    policy = Path(shutil.copytree(next(GOLDEN.glob("qwen3*/")), tmp_path / "policy"))
    put(policy / name, kind)
    with pytest.raises(ValueError, match=f"{name}: expected a file, got"):
        hf.check(policy)


def test_links_lead_nowhere_but_to_the_blobs_of_a_cache(folder, tmp_path):
    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert tokenizer.load(snapshot).encode("ab")
    (tmp_path / "secret.json").write_text("{}")
    (snapshot / "added_tokens.json").symlink_to("../../../secret.json")
    with pytest.raises(ValueError, match="added_tokens.json: .*got a link to .*secret.json"):
        tokenizer.load(snapshot)


def test_a_copy_has_files_of_known_names_alone(folder, tmp_path):
    (folder / "token.txt").write_text("secret")
    (folder / "tokenizer_secret.json").mkdir()
    (tmp_path / "copy").mkdir()
    tokenizer.copy_files(folder, tmp_path / "copy")
    assert {path.name for path in (tmp_path / "copy").iterdir()} <= set(tokenizer_files.NAMES)
    assert tokenizer.load(tmp_path / "copy").encode("ab") == tokenizer.load(folder).encode("ab")


def test_files_that_are_large_in_all_are_refused(folder, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "MAX_BYTES", 2**20)
    with open(folder / "added_tokens.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="at most 1,048,576 bytes in all, .*added_tokens.json"):
        tokenizer.load(folder)


def growing(kind, character):
    rule = {"type": "Replace", "pattern": {"Regex": character}, "content": "aa"}
    inner = {"normalizer": "normalizers", "decoder": "decoders"}[kind]
    return {kind: {"type": "Sequence", inner: [rule] * 40}}


@pytest.mark.parametrize("kind", ["normalizer", "decoder"])
def test_rules_that_run_away_end_in_a_child(folder, monkeypatch, kind):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | growing(kind, ".")))
    child = Child("reprise.models.text.tokenizer_files", 2**28, 5)
    monkeypatch.setattr(tokenizer_files, "_child", child)
    with pytest.raises(ValueError, match="folder: expected a tokenizer that is read, encodes"):
        tokenizer.load(folder)


def test_a_tokenizer_is_tried_once(folder, monkeypatch):
    tokenizer.load(folder)
    monkeypatch.setattr(tokenizer_files, "_child", None)
    tokenizer.load(folder)
    (folder / "added_tokens.json").write_text("{}")
    with pytest.raises(AttributeError):
        tokenizer.load(folder)


def spoilt(folder, change):
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def panic(content):
    everywhere = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [everywhere, {"type": "NFKC"}]}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda content: content["model"]["vocab"].update(a=2**31), "ids of at most 1,048,576"),
        (lambda content: content["model"].update(byte_falback=1), "in model, got .*byte_falback"),
        (panic, "cannot read the tokenizer in .*index out of bounds"),
    ],
)
def test_a_vocabulary_or_rules_of_no_use_are_an_error(folder, change, error):
    spoilt(folder, change)
    with pytest.raises(ValueError, match=error):
        tokenizer.load(folder)


def test_a_text_that_fails_hides_none_that_runs_away(folder, monkeypatch):
    spoilt(folder, lambda content: content["model"].update(unk_token="absent"))
    tokenizer.load(folder)  # it has no tokens for most of the page
    spoilt(folder, lambda content: content.update(growing("normalizer", "a")))
    child = Child("reprise.models.text.tokenizer_files", 2**28, 5)
    monkeypatch.setattr(tokenizer_files, "_child", child)
    with pytest.raises(ValueError, match="folder: expected a tokenizer that is read, encodes"):
        tokenizer.load(folder)
