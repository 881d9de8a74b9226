"""The files that a task's path names: one file, a folder, a glob, or a saved data set.

Invariant: files come in sorted order, so that the same files give the same examples.
Links to folders are followed where a path names them, never while looking around.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

SUFFIXES = {"jsonl": ".jsonl", "parquet": ".parquet", "json": ".json", "datasets": ".arrow"}

MOST_FILES = 100_000  # of a task
MOST_ENTRIES = 200_000  # of folders that are looked through for them
MOST_JSON_BYTES = 2**24  # of a file that describes a saved data set

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words}


@dataclasses.dataclass(frozen=True)
class Found:
    """The files of one task, all of one format (a key of SUFFIXES)."""

    format: str
    paths: tuple[Path, ...]


@dataclasses.dataclass(frozen=True)
class Search:
    """A description of the files that a task may have, and of where they lie.

    `formats`: what it may hold, the likeliest first. `places`: where in a folder published
    data lies. `deep`: in subfolders too. `skip`: no file with this word in its name.
    """

    formats: tuple[str, ...]
    places: tuple[str, ...] = ()
    deep: bool = False
    skip: str | None = None


def find(target: str, split: str | None, search: Search) -> Found:
    """Return the files that `target` names, those of `split` alone where one is asked for.

    A folder whose files are of several splits gives `train` where none is asked for. Raises
    FileNotFoundError or ValueError, which say what is there instead.
    """
    path = Path(target).expanduser()  # RuntimeError: ~nobody
    if path.is_file():
        _refuse_others(path, search)
        own = next((f for f in search.formats if path.name.endswith(SUFFIXES[f])), None)
        return Found(own or search.formats[0], _of_split([path], path.parent, split, asked=True))
    if path.is_dir():
        return _in_folder(path, split, search)
    if any(character in target for character in "*["):
        return _matching(path, split, search)
    raise FileNotFoundError(f"there is no file or folder {path} (from {Path.cwd()})")


def _refuse_others(path: Path, search: Search) -> None:
    """Raise ValueError for a file that is certainly of another format."""
    if path.suffix in (".gz", ".zst", ".bz2", ".xz", ".zip"):
        raise ValueError(f"{path} is compressed: unpack it first, rows are read by their position")
    for form in ("parquet", "datasets"):
        if path.suffix == SUFFIXES[form] and form not in search.formats:
            raise ValueError(f"{path} is a {path.suffix[1:]} file: write {form}:{path}")


def digest(paths: Sequence[Path]) -> str:
    """Return a hash of names, sizes and contents; of a large file, of blocks spread over it.

    A change in a large file that keeps its size may be between two blocks.
    """
    block, blocks = 2**16, max(4, 1024 // max(1, len(paths)))
    found = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found.update(f"{path.name}\0{size}\0".encode(errors="surrogateescape"))
            for i in range(min(blocks, -(-size // block))):
                file.seek(
                    i * block if size <= blocks * block else i * (size - block) // (blocks - 1)
                )
                found.update(file.read(block))
    return found.hexdigest()


def split_of(path: Path, below: Path) -> str | None:
    """Return the split that a file's name, or a folder's between, says it belongs to."""
    parts = path.relative_to(below).parts if path.is_relative_to(below) else (path.name,)
    for part in reversed(parts):
        for word in _words(part):
            if word in _SPLIT_OF:
                return _SPLIT_OF[word]
    return None


# --- folders and globs ------------------------------------------------------------------


def _in_folder(folder: Path, split: str | None, search: Search) -> Found:
    for place in (folder, *(folder / name for name in search.places)):
        if "datasets" in search.formats and _is_saved(place):
            return Found("datasets", _saved(place, split))
        for form in search.formats:
            if form != "datasets" and (paths := _listed(place, SUFFIXES[form], search)):
                return Found(form, _of_split(paths, place, split))
    wanted = ", ".join(SUFFIXES[form] for form in search.formats if form != "datasets")
    mend = ""
    if _is_saved(folder):
        mend = f"; datasets:{folder} reads what save_to_disk has written"
    elif any(name.endswith(".gz") for name in _names(folder)):
        mend = "; unpack what is compressed first: rows are read by their position"
    what = f"{wanted} files" if wanted else "data set of datasets.save_to_disk"
    raise FileNotFoundError(f"no {what} in the folder {folder}; there {_there(folder)}{mend}")


def _listed(folder: Path, suffix: str, search: Search) -> list[Path]:
    """The folder's own files; else those of `data` or of folders that are splits."""
    if not folder.is_dir():
        return []
    if search.deep:
        return _sorted(_expand(folder, ("**", "*")), suffix, search.skip)
    if paths := _sorted(folder.iterdir(), suffix, search.skip):
        return paths
    inner = [p for p in folder.iterdir() if p.name == "data" or p.name.lower() in _SPLIT_OF]
    return _sorted((p for f in inner if f.is_dir() for p in f.iterdir()), suffix, search.skip)


def _matching(pattern: Path, split: str | None, search: Search) -> Found:
    plain = [any(c in part for c in "*[") for part in pattern.parts].index(True)
    base = Path(*pattern.parts[:plain])
    found = _expand(base, pattern.parts[plain:]) if base.is_dir() else ()
    paths = _sorted(found, "", search.skip)
    if not paths:
        raise FileNotFoundError(f"no file matches {pattern}; in {base} there {_there(base)}")
    return Found(search.formats[0], _of_split(paths, base, split, asked=True))


def _expand(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield what matches `parts` below a folder; `**` is any number of folders, links left out."""
    seen, level = 0, [base]
    for number, part in enumerate(parts):
        following: list[Path] = []
        while level:
            folder = level.pop()
            if part == "**":
                following.append(folder)
            for entry in os.scandir(folder):
                seen += 1
                if seen > MOST_ENTRIES:
                    raise ValueError(f"{base}: more than {MOST_ENTRIES:,} files: name a part")
                path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=part != "**")
                if part == "**":
                    level += [path] * is_folder
                elif fnmatch.fnmatchcase(entry.name, part):
                    if number == len(parts) - 1:
                        yield path
                    elif is_folder:
                        following.append(path)
        level = following


def _sorted(found: Iterable[Path], suffix: str, skip: str | None) -> list[Path]:
    wanted = (
        path
        for path in found
        if path.name.endswith(suffix)
        and not path.name.startswith(".")
        and not (skip and skip in path.name.lower())
        and path.is_file()
    )
    paths = list(islice(wanted, MOST_FILES + 1))
    if len(paths) > MOST_FILES:
        raise ValueError(f"more than {MOST_FILES:,} files: join them to fewer")
    return sorted(paths)


def _of_split(
    paths: Sequence[Path], below: Path, split: str | None, asked: bool = False
) -> tuple[Path, ...]:
    """Return the files of a split; none asked for: train's, where files name their splits.

    Files that are `asked` for by name are not chosen among.
    """
    names = {path: split_of(path, below) for path in paths}
    said = {name for name in names.values() if name is not None}
    if split is None:
        if asked or len({*names.values()}) == 1:
            return tuple(paths)
        if "train" not in said and said:
            raise ValueError(
                f"{below} has the splits {_listing(sorted(said))}: choose with ?split="
            )
        return tuple(path for path in paths if not said or names[path] == "train")
    wanted = _SPLIT_OF.get(split.lower(), split)
    found = tuple(p for p in paths if names[p] == wanted or split.lower() in _words(p.name))
    if not found:
        has = _listing(sorted(said)) if said else f"none in {_listing([p.name for p in paths])}"
        raise FileNotFoundError(f"no file of the split {split!r} in {below}; splits there: {has}")
    return found


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _names(folder: Path) -> list[str]:
    return sorted(islice((path.name for path in folder.iterdir()), 1000))


def _there(folder: Path) -> str:
    if not folder.is_dir():
        return "is no such folder"
    return f"is {_listing(_names(folder))}" if _names(folder) else "is nothing"


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


# --- what datasets.save_to_disk writes --------------------------------------------------


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _saved(folder: Path, split: str | None) -> tuple[Path, ...]:
    """Return the shards of a Dataset, or of one split of a DatasetDict."""
    if (folder / "dataset_dict.json").is_file():
        splits = _load(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list) or not splits:
            raise ValueError(f"{folder / 'dataset_dict.json'}: names no splits")
        names = [_plain_name(name, folder) for name in splits]
        chosen = split or ("train" if "train" in names else names[0])
        if chosen not in names or (split is None and "train" not in names and len(names) > 1):
            raise ValueError(f"{folder} has the splits {_listing(names)}: choose with ?split=")
        return _saved(folder / chosen, None)
    state = _load(folder / "state.json")
    if split not in (None, state.get("_split"), folder.name):
        raise ValueError(f"{folder} is one data set (split {state.get('_split')!r}), not {split!r}")
    if state.get("_indices_data_files"):
        raise ValueError(
            f"{folder} keeps its order in files of its own, as old versions of datasets did: "
            "save it again with flatten_indices().save_to_disk"
        )
    entries = state.get("_data_files")
    if not isinstance(entries, list):
        raise ValueError(f"{folder / 'state.json'}: names no data files")
    found = [
        folder / _plain_name(entry.get("filename") if isinstance(entry, dict) else None, folder)
        for entry in entries
    ]
    if missing := [path for path in found if not path.is_file()]:
        raise FileNotFoundError(f"{missing[0]}, which state.json names, is not there")
    return tuple(found)


def _plain_name(name: Any, folder: Path) -> str:
    """Return the name of something in the folder; refuses paths that lead elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{folder}: expected names of files in this folder, got {name!r:.80}")
    return name


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_JSON_BYTES + 1)
        if len(text) > MOST_JSON_BYTES:
            raise ValueError(f"expected at most {MOST_JSON_BYTES:,} bytes")
        found = json.loads(text)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is not there: was it written by save_to_disk?") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found
