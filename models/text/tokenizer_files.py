"""The files of a tokenizer in a Hugging Face folder: names, limits, and a trial in a child process.

A tokenizer.json is a program of rules. A file of 4 KB can take all memory, or run without end in
code that no signal interrupts. So a child process (`models.child`) tries each new tokenizer first.
"""

from __future__ import annotations

import hashlib
import json
import os
import string
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from reprise.models.child import Child, ChildEnded, serve
from reprise.models.formats.hf_files import escaped, has_file

RULES = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
NAMES = (  # only RULES is required; the other files of a folder are exported with it
    *(RULES, "tokenizer.model", "vocab.json", "vocab.txt", SETTINGS, "merges.txt"),
    *("added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
)
MAX_BYTES = 64 * 2**20  # of all files together
MAX_ID = 2**20  # of a token; lists have an entry for every id up to the largest
MEMORY_BYTES = 2**31
DEADLINE_S = 20  # a large vocabulary takes a second of an idle core
_tried = set[bytes]()  # hashes of the files of good tokenizers
_child = Child("reprise.models.text.tokenizer_files", MEMORY_BYTES, DEADLINE_S)


def present(folder: Path) -> list[str]:
    """Return the names of the tokenizer files in a folder.

    Raises ValueError if a name is a folder, a pipe or a broken link, if a link leaves the folder,
    and if the files are too large: an export copies them.
    """
    names = [name for name in NAMES if has_file(folder / name)]
    home = folder.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":  # of a Hugging Face cache, with links to blobs as files
        allowed.append(home.parents[1] / "blobs")
    for name in names:
        target = (folder / name).resolve()
        if not any(target.is_relative_to(place) for place in allowed):
            raise ValueError(
                f"{folder / name}: expected a file of this folder, got a link to {target}: an "
                "export would copy it; put the file itself in its place"
            )
    sizes = {name: (folder / name).stat().st_size for name in names}
    if (total := sum(sizes.values())) > MAX_BYTES:
        raise ValueError(
            f"{folder}: expected files of a tokenizer of at most {MAX_BYTES:,} bytes in all, got "
            f"{total:,} (most in {max(sizes, key=sizes.__getitem__)}): copy them again"
        )
    return names


def check(folder: Path) -> None:
    """Try a tokenizer in a child process, once for each content of its files.

    Raises ValueError as `present` does, if the tokenizer cannot be opened, if its rules panic, and
    if the trial exceeds the limits. Texts without tokens fail later, when they are encoded.
    """
    digest = hashlib.sha256()
    for name in present(folder):
        content = (folder / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    if digest.digest() in _tried:
        return
    try:
        problem = _child.call(os.fsencode(folder.absolute()))
    except ChildEnded as error:
        raise ValueError(
            f"{folder}: expected a tokenizer that is read, encodes and decodes a page of text "
            f"within {DEADLINE_S} s and {MEMORY_BYTES // 2**20} MiB, but its process ended: copy "
            "the tokenizer's files from where the policy came from"
        ) from error
    if problem:  # the library prints details, which are discarded
        raise ValueError(problem[0].decode())
    _tried.add(digest.digest())


# --- in the child ---------------------------------------------------------------------


def _prepare() -> Callable[[bytes], Iterable[bytes]]:
    from tokenizers import Tokenizer

    def use(request: bytes) -> list[bytes]:
        folder = os.fsdecode(request)
        try:
            path = os.path.join(folder, RULES)
            rules = Tokenizer.from_file(path)
            ids = sorted(rules.get_vocab().values())
            if ids and ids[-1] > MAX_ID:
                raise ValueError(f"expected ids of at most {MAX_ID:,}, got {ids[-1]:,}")
            _refuse_unread(rules, path)
            # try each text separately: a text that fails must not hide a text that runs forever
            for text in (_PAGE, *_PAGE.splitlines()):
                try:
                    rules.decode(rules.encode(text, add_special_tokens=False).ids)
                except MemoryError:
                    raise
                except Exception:  # the tokenizer has no tokens for this text
                    continue
            rules.decode_batch([[i] for i in ids])
        except MemoryError:
            raise
        except BaseException as error:  # also a panic of the Rust code
            return [f"cannot read the tokenizer in {folder}: {escaped(str(error), 300)}".encode()]
        return []

    return use


def _refuse_unread(rules: Any, path: str) -> None:
    """Raise ValueError for model settings that the library ignores, such as misspelt names."""
    with open(path, encoding="utf-8") as file:
        given = json.load(file)["model"]
    if unread := sorted(given.keys() - json.loads(rules.to_str())["model"].keys()):
        raise ValueError(f"expected settings of {given.get('type')} in model, got {unread[:8]}")


_RUNS = "\n".join(character * 64 for character in string.printable)
_PAGE = f"{string.printable}\nThe answer to 12 + 34 is 46. Ça va? Что? 你好，世界 ١٢٣ 😀\n{_RUNS}"

if __name__ == "__main__":
    serve(_prepare)
