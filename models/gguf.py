"""`python -m models.gguf`: a GGUF file as a Hugging Face folder, with its tokenizer.

    python -m models.gguf SmolLM2-135M-Instruct.Q4_1.gguf downloads/smollm2
    python -m models.gguf FILE FOLDER --dtype bfloat16 --tokenizer FOLDER_OF_TOKENIZER

Runs read GGUF files as they are; a folder loads faster, and other programs can read it. All weights
are in memory at once. With --tokenizer the files of another folder are taken, for models whose
tokenizer cannot be read from GGUF.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from models import gguf_header, hf, tokenizer
from models.folder import replace_file
from models.gguf_header import Header
from models.params import num_params


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m models.gguf",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a GGUF file of Llama or Qwen")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what is written")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights"
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", type=Path, help="take this folder's tokenizer"
    )
    return parser


def convert(file: Path, folder: Path, dtype: str = "float32", words: Path | None = None) -> str:
    """Write a GGUF file as a Hugging Face folder, and return what it holds in a few words.

    Everything but the weights is checked before anything is written. Raises FileNotFoundError or
    ValueError for what cannot be read, and OSError for what cannot be written.
    """
    if not gguf_header.is_gguf(file):
        raise ValueError(f"expected a GGUF file, got {file}, which is none: name the file itself")
    config = hf.check(file)
    source = file if words is None else words
    tokenizer.check_vocabulary(tokenizer.load(source), config)
    config, params = hf.load_pretrained(file, dtype=dtype)
    hf.save_pretrained(folder, config, params)
    tokenizer.copy_files(source, folder)
    if not (folder / "README.md").exists():
        replace_file(folder / "README.md", _card(gguf_header.read(file)))
    return f"{config.architecture}, {num_params(config):,} parameters, {dtype}"


def _card(header: Header) -> str:
    """Return a README.md that keeps the licence that the file names, where it is a plain name."""
    licence = header.metadata.get("general.license")
    known = isinstance(licence, str) and re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,40}", licence)
    front = f"---\nlicense: {licence}\n---\n\n" if known else ""
    return f"{front}A GGUF file as a Hugging Face folder, written by `python -m models.gguf`.\n"


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        held = convert(args.file, args.folder, args.dtype, args.tokenizer)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.folder}: {held}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
