"""Text to token ids and back, with the ids that Hugging Face gives.

`load` reads a local folder or GGUF file and wraps `transformers`' tokenizer: no hub, no remote
code. transformers and tokenizers are imported when first used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from models import chat_template as chat_templates
from models import hf_files, tokenizer_files
from models.config import ModelConfig
from models.folder import Folder
from models.hf import end_ids
from models.hf_files import escaped, is_gguf, optional_json, shown
from models.tokenizer_files import RULES, SETTINGS, VOCABULARIES

_PLAIN_CLASS = "PreTrainedTokenizerFast"


@dataclasses.dataclass(frozen=True, eq=False)
class TokenBytes:
    """The UTF-8 of token i is `bytes_N[starts[i] : starts[i + 1]]`; uint8 [N], int64 [V + 1].

    Special tokens are written out. If a tokenizer strips the space before the first token of a
    text, the token has it here. A text occurs in a response if its UTF-8 does.
    """

    bytes_N: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, token: int) -> bytes:
        return self.bytes_N[self.starts[token] : self.starts[token + 1]].tobytes()

    @functools.cached_property
    def _texts(self) -> set[bytes]:
        return {self.of(i) for i in range(len(self))}

    def min_tokens(self, text: str) -> int | None:
        """Return the fewest tokens whose joined text contains `text`; None if none can."""
        goal = text.encode()
        if any(goal in token for token in self._texts):
            return 1
        n = len(goal)  # the first token may start before the text, and the last end after it
        heads = {token[:k] for token in self._texts for k in range(1, min(n, len(token)) + 1)}
        tails = {token[-k:] for token in self._texts for k in range(1, min(n, len(token)) + 1)}
        fewest = [0, *(1 if goal[:j] in tails else n + 1 for j in range(1, n + 1))]
        for i in range(n):
            for j in range(i + 1, n + 1):
                if goal[i:j] in (heads if j == n else self._texts):
                    fewest[j] = min(fewest[j], fewest[i] + 1)
        return fewest[n] if fewest[n] <= n else None


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary, its end tokens and its chat template.

    `vocab_size` is the largest id + 1, added tokens included. `eos_token_ids` are the tokenizer's
    end token and generation_config.json's: a chat turn may end in another than a text.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    has_chat_template: bool
    backend: Any = dataclasses.field(repr=False)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without adding special tokens; ValueError if that fails."""
        with _as_value_error(f"the tokenizer cannot encode {shown(text, 40)}"):
            if any("\ud800" <= character <= "\udfff" for character in set(text)):
                raise ValueError("expected whole characters, got half of a surrogate pair")
            return list(self.backend.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of ids, spaces unchanged; ValueError if the tokenizer's rules fail."""
        tokens = [int(i) for i in ids]
        with _as_value_error(f"the tokenizer cannot decode {shown(tokens, 40)}"):
            return str(
                self.backend.decode(
                    tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
                )
            )

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """The text of every token, for the search for stop strings."""
        with _as_value_error("the tokenizer cannot decode its tokens"):
            return bytes_of_tokens(self.backend, self.vocab_size)

    @functools.cached_property
    def chat_template(self) -> str:
        """The source of the chat template, or an empty text; ValueError if it is ambiguous."""
        if not self.has_chat_template:
            return ""
        with _as_value_error("the tokenizer's chat template cannot be used"):
            return str(self.backend.get_chat_template())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of a conversation of `{"role", "content"}` in the tokenizer's template.

        `variables` are other variables of the template, such as `enable_thinking=False`. Raises
        ValueError without a template, if it fails or exceeds a bound, and for reserved variables.
        """
        if not self.has_chat_template:
            raise ValueError(
                "expected a tokenizer with a chat template, got one without: add a "
                "chat_template.jinja (or the key in tokenizer_config.json), or use plain prompts"
            )
        specials = self.backend.special_tokens_map
        chat_templates.check_variables(variables, specials)
        text = chat_templates.SHARED.render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **specials,
            **variables,
        )
        return self.encode(text)


def load(directory: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder or GGUF file; FileNotFoundError or ValueError."""
    path = Path(directory)
    if is_gguf(path):
        backend, ends = _from_gguf(path)
    else:
        backend = _from_folder(path)
        ends = end_ids(optional_json(path / hf_files.GENERATION), str(path))
    with _as_value_error(f"{path}: the tokenizer cannot be used"):
        ids = backend.get_vocab().values()
        own, pad = backend.eos_token_id, backend.pad_token_id
        has_chat_template = bool(backend.chat_template)
    if not ids:
        raise ValueError(
            f"{path}: expected a tokenizer with a vocabulary, got one without any token: copy "
            "tokenizer.json from where the policy came from"
        )
    return Tokenizer(
        vocab_size=max(ids) + 1,
        eos_token_ids=tuple(dict.fromkeys([*([] if own is None else [int(own)]), *ends])),
        pad_token_id=None if pad is None else int(pad),
        has_chat_template=has_chat_template,
        backend=backend,
    )


def copy_files(source: Path, target: Path) -> None:
    """Copy a tokenizer's vocabulary, settings and chat template from a folder or GGUF file."""
    folder = Folder(target)
    if is_gguf(source):
        from models import gguf_header, gguf_tokenizer

        header = gguf_header.read(source)
        if gguf_tokenizer.is_known(header):
            rules, settings = gguf_tokenizer.parts(header)
            folder.replace(RULES, rules.to_str())
            folder.replace(SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
            return
        source = source.parent
    for name in tokenizer_files.present(source):
        folder.replace(name, (source / name).read_bytes())


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise ValueError unless every id has a row in the policy's embedding, which may be padded."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer does not fit the policy: expected ids below the policy's vocab_size="
            f"{config.vocab_size}, got ids up to {tokenizer.vocab_size - 1}; use the tokenizer of "
            "the policy's own folder, or a policy whose embedding covers it"
        )


def _from_folder(folder: Path) -> Any:
    hf_files.require_folder(folder)
    if not any(hf_files.has_file(folder / name) for name in VOCABULARIES):
        names = sorted(path.name for path in folder.iterdir())
        raise FileNotFoundError(
            f"no tokenizer in {folder}: expected tokenizer.json (and tokenizer_config.json), got "
            f"{names[:12]}; copy them from where the policy came from"
        )
    tokenizer_files.check(folder)
    return open_folder(folder)


def open_folder(folder: Path) -> Any:
    """Return transformers' tokenizer of a folder that `tokenizer_files.check` has found good."""
    # A folder that names no family of tokenizers means its tokenizer.json literally. If config.json
    # says qwen2, AutoTokenizer takes that family's class and ignores the file's rules.
    named = optional_json(folder / SETTINGS).get("tokenizer_class")
    is_plain = (folder / RULES).is_file() and named in (_PLAIN_CLASS, "TokenizersBackend")
    loader = loader_class(_PLAIN_CLASS if is_plain else "AutoTokenizer")
    with _as_value_error(f"transformers cannot read the tokenizer in {folder}"):
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _from_gguf(path: Path) -> tuple[Any, tuple[int, ...]]:
    """Return a GGUF file's tokenizer and end tokens; files next to it replace an unknown kind."""
    from models import gguf, gguf_header, gguf_tokenizer

    header = gguf_header.read(path)
    ends = gguf.end_tokens(header)
    if gguf_tokenizer.is_known(header) or not (path.parent / RULES).is_file():
        rules, settings = gguf_tokenizer.parts(header)
        with _as_value_error(f"transformers cannot read the tokenizer in {path}"):
            return loader_class(settings.pop("tokenizer_class"))(
                tokenizer_object=rules, **settings
            ), ends
    backend, (tokens, _) = _from_folder(path.parent), gguf.tokens_of(header)
    for text, i in backend.get_vocab().items():
        if i < len(tokens) and tokens[i] != text:
            header.fail(
                f"expected {path.parent / RULES} to have its tokens, got {shown(text)} as token "
                f"{i}, which is {shown(tokens[i])}",
                "copy the tokenizer.json of the file's model",
            )
    return backend, ends


def loader_class(name: str) -> Any:
    """Import a class of transformers by its name."""
    # transformers prints advice about a missing torch at import; none of its models is used here
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return getattr(transformers, name)  # loads this class only; AutoTokenizer loads all families


@contextlib.contextmanager
def _as_value_error(problem: str) -> Iterator[None]:
    """Raise any error of a tokenizer, panics of its Rust code included, as a ValueError."""
    try:
        yield
    except BaseException as error:
        panicked = type(error).__module__ == "pyo3_runtime"
        if not (panicked or isinstance(error, Exception)):
            raise
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{problem}: {kind}{escaped(str(error), 300)}") from error


def bytes_of_tokens(backend: Any, vocab_size: int) -> TokenBytes:
    """Return the text of every token of a transformers tokenizer."""
    ids = list(range(vocab_size))
    anchor = _anchor(backend, ids)
    # after another token: at the start of a text some tokenizers drop a space
    texts = _decoded(backend, [[*anchor, i] for i in ids])
    before = _decoded(backend, [anchor])[0]
    raw = backend.convert_ids_to_tokens(ids)
    pieces = [_bytes(t, before, r) for t, r in zip(texts, raw, strict=True)]
    starts = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    return TokenBytes(np.frombuffer(b"".join(pieces), np.uint8), starts)


def _decoded(backend: Any, sequences: list[list[int]]) -> list[str]:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return [str(text) for text in backend.batch_decode(sequences, **options)]


def _anchor(backend: Any, ids: Sequence[int]) -> list[int]:
    """Return a token of whole characters, or none."""
    special = set(backend.all_special_ids)
    for i in ids:
        if i not in special and (text := _decoded(backend, [[i]])[0]).strip() and text.isascii():
            return [i]
    return []


def _bytes(text: str, before: str, raw: str | None) -> bytes:
    text = text.removeprefix(before)
    if "\ufffd" not in text or raw is None:
        return text.encode()
    # a part of a character: <0xE2>, or a letter for each byte
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", raw):
        return bytes([int(byte[1], 16)])
    letters = _bytes_of_letters()
    if all(letter in letters for letter in raw):
        return bytes(letters[letter] for letter in raw)
    return text.encode()


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """Return the byte of each of GPT-2's letters: itself if printable, else from 256 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): b for i, b in enumerate(others)}
