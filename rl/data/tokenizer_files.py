"""A tokenizer's files, from the folder of a policy to that of what was trained from it."""

from __future__ import annotations

from pathlib import Path

from models.folder import Folder


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy vocabulary, settings and chat template, if there are any, as they are."""
    folder = Folder(target)
    for file in source.iterdir():
        of_tokenizer = "token" in file.name or file.name.startswith(
            ("chat_template", "vocab", "merges")
        )
        if of_tokenizer and file.suffix in (".json", ".jinja", ".model", ".txt"):
            folder.replace(file.name, file.read_bytes())
