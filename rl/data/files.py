"""The files that a task path names, sorted: a file, a folder, a pattern, or a saved data set.

Links to folders are followed if a path names them, never in a search.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from reprise.models.hints import download_hint
from reprise.rl.data.rows import read_json
from reprise.rl.runtime.run_files import resolve_path

SUFFIXES = {"parquet": ".parquet", "jsonl": ".jsonl", "json": ".json", "datasets": ".arrow"}
FORMATS = tuple(SUFFIXES)
COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")

MAX_FILES = 100_000  # of a task
MAX_ENTRIES = 200_000  # of the folders that are searched
MAX_JSON_BYTES = 2**24  # of a file that describes a saved data set

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_NAMES = {name: split for split, names in _SPLITS.items() for name in names}
Files = tuple[str, tuple[Path, ...]]  # a format (a key of SUFFIXES), and the files of a task


def find(target: str, split: str | None, formats: Sequence[str], skip: str = "") -> Files:
    """Return the files of `target`, in the first of the `formats` that has files.

    Without a `split`, a folder with files of several splits gives `train`. A search leaves out
    names with `skip`. Raises FileNotFoundError or ValueError, which list the files that are present
    instead.
    """
    path = resolve_path(target)  # RuntimeError for an unknown user
    if path.is_dir():
        return _in_folder(path, split, formats, skip)
    if not path.is_file():
        if any(character in target for character in "*["):
            return formats[0], _matching(path, split, skip)
        hint = download_hint(target, is_dataset=True)
        hint = f"; data sets are not downloaded here, fetch it first: {hint}" if hint else ""
        raise FileNotFoundError(f"there is no file or folder {path} (from {Path.cwd()}){hint}")
    if path.suffix in COMPRESSED:
        raise ValueError(f"{path} is compressed: unpack it first, rows are read by their position")
    for form in ("parquet", "datasets"):
        if path.suffix == SUFFIXES[form] and form not in formats:
            raise ValueError(f"{path} is a {path.suffix[1:]} file: write {form}:{path}")
    named = [form for form in formats if path.name.endswith(SUFFIXES[form])]
    return [*named, *formats][0], _select_split([path], path.parent, split, True)


def digest(paths: Sequence[Path]) -> str:
    """Return a hash of names, sizes and contents; for a large file, of blocks spread over it."""
    block = 2**16
    blocks = max(4, 1024 // max(1, len(paths)))
    result = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            result.update(f"{path.name}\0{size}\0".encode(errors="surrogateescape"))
            for i in range(min(blocks, -(-size // block))):
                spread = i * (size - block) // (blocks - 1)
                file.seek(i * block if size <= blocks * block else spread)
                result.update(file.read(block))
    return result.hexdigest()


# --- folders and patterns ---------------------------------------------------------------


def _in_folder(folder: Path, split: str | None, formats: Sequence[str], skip: str) -> Files:
    if "datasets" in formats and _is_saved(folder):
        return "datasets", _saved(folder, split)
    suffixes = {form: SUFFIXES[form] for form in formats if form != "datasets"}
    files = _sorted(_expand(folder, ("**", "*"), skip), tuple(suffixes.values()))
    for form, suffix in suffixes.items():
        if paths := [path for path in files if path.name.endswith(suffix)]:
            return form, _select_split(paths, folder, split)
    hint = ""
    if _is_saved(folder):
        hint = f"; datasets:{folder} reads what save_to_disk has written"
    elif any(path.suffix in COMPRESSED for path in folder.iterdir()):
        hint = "; unpack compressed files first: rows are read by their position"
    wanted = ", ".join(suffixes.values())
    what = f"{wanted} files" if wanted else "data set of datasets.save_to_disk"
    raise FileNotFoundError(f"no {what} in the folder {folder}; there {_content(folder)}{hint}")


def _matching(pattern: Path, split: str | None, skip: str) -> tuple[Path, ...]:
    num_plain = [any(c in part for c in "*[") for part in pattern.parts].index(True)
    base = Path(*pattern.parts[:num_plain])
    matches = _expand(base, pattern.parts[num_plain:], skip) if base.is_dir() else ()
    if not (paths := _sorted(matches)):
        raise FileNotFoundError(f"no file matches {pattern}; in {base} there {_content(base)}")
    return _select_split(paths, base, split, True)


def _expand(base: Path, parts: Sequence[str], skip: str) -> Iterator[Path]:
    """Yield matches of `parts`, hidden names as in a shell; `**` is any folders, without links."""
    num_seen = 0
    level = [base]
    for number, part in enumerate(parts):
        following: list[Path] = []
        while level:
            folder = level.pop()
            if part == "**":
                following.append(folder)
            for entry in os.scandir(folder):
                num_seen += 1
                if num_seen > MAX_ENTRIES:
                    raise ValueError(f"{base}: more than {MAX_ENTRIES:,} files: name a part")
                is_hidden = entry.name.startswith(".") and not part.startswith(".")
                if is_hidden or (skip and skip in entry.name.lower()):
                    continue
                path = Path(entry.path)
                is_folder = entry.is_dir(follow_symlinks=part != "**")
                if part == "**":
                    level += [path] * is_folder
                elif fnmatch.fnmatchcase(entry.name, part):
                    if number == len(parts) - 1:
                        yield path
                    elif is_folder:
                        following.append(path)
        level = following


def _sorted(paths: Iterable[Path], suffixes: tuple[str, ...] = ("",)) -> list[Path]:
    """Return the files among `paths` with one of the suffixes, sorted."""
    wanted = (path for path in paths if path.name.endswith(suffixes) and not path.is_dir())
    files = list(islice(wanted, MAX_FILES + 1))
    if missing := [path for path in files if not path.is_file()]:
        raise ValueError(
            f"{missing[0]}: expected a file, got a link to nothing, a pipe or a device: copy it "
            "again, or remove it"
        )
    if len(files) > MAX_FILES:
        raise ValueError(f"more than {MAX_FILES:,} files: join them to fewer")
    return sorted(files)


def _select_split(
    paths: Sequence[Path], below: Path, split: str | None, is_named: bool = False
) -> tuple[Path, ...]:
    """Return the files of a split, by default `train`, or all files if the user named them."""
    names = {path: _split_name(path, below) for path in paths}
    splits = sorted({name for name in names.values() if name is not None})
    if split is None:
        if is_named or len(set(names.values())) == 1:
            return tuple(paths)
        if "train" not in splits:
            raise ValueError(f"{below} has the splits {_listing(splits)}: choose with ?split=")
        return tuple(path for path in paths if names[path] == "train")
    wanted = _SPLIT_NAMES.get(split.lower(), split)
    chosen = tuple(p for p in paths if names[p] == wanted or split.lower() in _parts(p.name))
    if not chosen:
        has = _listing(splits) if splits else f"none in {_listing([p.name for p in paths])}"
        raise FileNotFoundError(f"no file of the split {split!r} in {below}; splits there: {has}")
    return chosen


def _split_name(path: Path, below: Path) -> str | None:
    """Return the split in the name of a file, or of a folder between `below` and the file."""
    for part in reversed(path.relative_to(below).parts):
        for name in _parts(part):
            if name in _SPLIT_NAMES:
                return _SPLIT_NAMES[name]
    return None


def _parts(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.lower())


def _content(folder: Path) -> str:
    if not folder.is_dir():
        return "is no such folder"
    names = sorted(islice((path.name for path in folder.iterdir()), 1000))
    return f"is {_listing(names)}" if names else "is nothing"


def _listing(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


# --- what datasets.save_to_disk writes --------------------------------------------------


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _saved(folder: Path, split: str | None) -> tuple[Path, ...]:
    """Return the shards of a Dataset, or of one split of a DatasetDict."""
    if (folder / "dataset_dict.json").is_file():
        names = _names(folder, _load(folder / "dataset_dict.json").get("splits"))
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
    if isinstance(entries, list):
        entries = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    paths = [folder / name for name in _names(folder, entries)]
    if missing := [path for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"{missing[0]}, which state.json names, is not there")
    return tuple(paths)


def _names(folder: Path, names: Any) -> list[str]:
    """Return `names` if all are plain entry names, since a path could lead elsewhere.

    Raises ValueError otherwise.
    """
    if not isinstance(names, list) or not names:
        raise ValueError(f"{folder}: expected names of splits or data files, got {names!r:.80}")
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"{folder}: expected names of files in this folder, got {name!r:.80}")
    return names


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: was it written by save_to_disk?")
    value = read_json(path, MAX_JSON_BYTES, "a JSON object")
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
