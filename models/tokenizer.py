"""Text to token ids and back, with the ids that Hugging Face would give.

`load` reads a local folder and wraps `transformers`' own tokenizer: no hub, no
remote code. `save_character_tokenizer` writes such a folder for a vocabulary of
single characters. transformers and tokenizers are imported when first used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from models import chat_template as chat_templates
from models import gguf_header, gguf_policy, gguf_tokenizer
from models.config import ModelConfig
from models.folder import Folder
from models.gguf_header import Header
from models.hf_config import escaped, ids_of, shown
from models.hf_files import read_json
from models.token_text import TokenBytes, token_bytes

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

# Any one of these holds a vocabulary; tokenizer.json is what the shipped models have.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary, its end tokens and its chat template.

    `vocab_size` counts added tokens too: it is the largest id + 1.
    `eos_token_ids` are the tokenizer's own end token and those of the folder's
    generation_config.json, since a chat turn may end in another than a text does.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    has_chat_template: bool
    backend: Any = dataclasses.field(repr=False)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text; no special token is added.

        Raises ValueError for text with half a surrogate pair, and where the tokenizer's own
        rules fail.
        """
        with _as_value_error(f"the tokenizer cannot encode {shown(text, 40)}"):
            if any("\ud800" <= character <= "\udfff" for character in set(text)):
                raise ValueError("expected whole characters, got half of a surrogate pair")
            return list(self.backend.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of ids, with spaces as they are, and special tokens only on request.

        Raises ValueError where the tokenizer's own rules fail.
        """
        tokens = [int(i) for i in ids]
        with _as_value_error(f"the tokenizer cannot decode {shown(tokens, 40)}"):
            return str(
                self.backend.decode(
                    tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
                )
            )

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """The text of every token, by which stop strings are found."""
        with _as_value_error("the tokenizer cannot decode its tokens"):
            return token_bytes(self.backend, self.vocab_size)

    @functools.cached_property
    def chat_template(self) -> str:
        """The source of the chat template; empty where there is none.

        Raises ValueError where it cannot be chosen.
        """
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

        `variables` are other variables of the template, such as `enable_thinking=False`.
        Raises ValueError where the tokenizer has no template, where it fails or exceeds
        the bounds of models/chat_template.py, and for variables that it has already.
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
    """Load the tokenizer of a local Hugging Face folder, or of a GGUF file.

    Raises FileNotFoundError where the folder or its vocabulary is missing, and
    ValueError where transformers cannot read it.
    """
    folder = Path(directory)
    if gguf_header.is_gguf(folder):
        header = gguf_header.read(folder)
        return _wrapped(folder, _gguf_backend(header), gguf_policy.end_tokens(header))
    _require_files(folder)
    return _wrapped(folder, _backend(folder), _generation_eos(folder))


def copy_files(source: Path, target: Path) -> None:
    """Copy a tokenizer's vocabulary, settings and chat template from one folder to another.

    The source may be a GGUF file, whose tokenizer is written as a folder has it.
    """
    folder = Folder(target)
    if gguf_header.is_gguf(source):
        for name, text in gguf_tokenizer.files(gguf_header.read(source)).items():
            folder.replace(name, text)
        return
    for file in source.iterdir():
        if is_own_file(file.name):
            folder.replace(file.name, file.read_bytes())


def is_own_file(name: str) -> bool:
    """Return whether a file of a Hugging Face folder belongs to its tokenizer."""
    named = "token" in name or name.startswith(("chat_template", "vocab", "merges"))
    return named and name.endswith((".json", ".jinja", ".model", ".txt"))


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise ValueError unless every id of the tokenizer has a row in the policy's embedding.

    A policy with more rows than the tokenizer has ids is fine: many are padded.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer does not fit the policy: expected ids below the policy's vocab_size="
            f"{config.vocab_size}, got ids up to {tokenizer.vocab_size - 1}; use the tokenizer of "
            "the policy's own folder, or a policy whose embedding covers it"
        )


def save_character_tokenizer(
    directory: str | os.PathLike[str],
    characters: Iterable[str],
    chat_template: str | None = None,
    extra_specials: Sequence[str] = (),
) -> None:
    """Write a tokenizer with one id per character, readable by `load` and by transformers.

    Ids: `<pad>` 0, `<eos>` 1, `<unk>` 2, then `extra_specials`, then the characters
    in their order (repeats are dropped). A character outside becomes `<unk>`. Any
    text of the characters comes back unchanged. `chat_template` is Jinja source.
    Raises ValueError for an entry that is not one character, or for none.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    letters = list(dict.fromkeys(characters))
    wrong = [c for c in letters if len(c) != 1]
    if wrong or not letters:
        raise ValueError(f"expected one or more single characters, got {wrong or 'none'}")
    specials = [PAD, EOS, UNK, *extra_specials]
    vocabulary = {token: i for i, token in enumerate([*specials, *letters])}
    if len(vocabulary) != len(specials) + len(letters):
        raise ValueError(
            f"special tokens {specials} must differ from one another and from characters"
        )
    backend = Backend(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", settings)


def _wrapped(where: Path, backend: Any, ends: tuple[int, ...]) -> Tokenizer:
    own = [] if backend.eos_token_id is None else [int(backend.eos_token_id)]
    ids = backend.get_vocab().values()
    if not ids:
        raise ValueError(
            f"{where}: expected a tokenizer with a vocabulary, got one without any token: copy "
            "tokenizer.json from where the policy came from"
        )
    return Tokenizer(
        vocab_size=max(ids) + 1,
        eos_token_ids=tuple(dict.fromkeys([*own, *ends])),
        pad_token_id=None if backend.pad_token_id is None else int(backend.pad_token_id),
        has_chat_template=bool(backend.chat_template),
        backend=backend,
    )


def _require_files(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected a local tokenizer folder, got {str(folder)!r}, which is not a directory: "
            "models are not downloaded here; fetch it first, for example: "
            "hf download Qwen/Qwen3-0.6B --local-dir downloads/Qwen3-0.6B"
        )
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        found = sorted(p.name for p in folder.iterdir())
        raise FileNotFoundError(
            f"no tokenizer in {folder}: expected tokenizer.json (and tokenizer_config.json), got "
            f"{found[:12]}; copy them from where the policy came from"
        )


def _backend(folder: Path) -> Any:
    # A folder that names no family of tokenizers means its tokenizer.json as it stands. Where
    # config.json says qwen2, AutoTokenizer takes that family's class and the file's rules are lost.
    generic = (folder / "tokenizer.json").is_file() and _read_json(
        folder / "tokenizer_config.json"
    ).get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    # each is loaded on its own; AutoTokenizer brings all families along
    loader = _of_transformers("PreTrainedTokenizerFast" if generic else "AutoTokenizer")
    with _as_value_error(f"transformers cannot read the tokenizer in {folder}"):
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _gguf_backend(header: Header) -> Any:
    rules, settings = gguf_tokenizer.parts(header)
    loader = _of_transformers(settings.pop("tokenizer_class"))
    with _as_value_error(f"transformers cannot read the tokenizer in {header.path}"):
        return loader(tokenizer_object=rules, **settings)


def _of_transformers(name: str) -> Any:
    # transformers prints advice about a missing torch at import; we use none of its models.
    silence = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(silence)
    os.environ[silence] = "1"
    try:
        import transformers

        return getattr(transformers, name)
    finally:
        if before is None:
            del os.environ[silence]
        else:
            os.environ[silence] = before


@contextlib.contextmanager
def _as_value_error(problem: str) -> Iterator[None]:
    """Raise any error of a tokenizer, which may be of many types, as a ValueError of `problem`.

    Panics of its Rust code (a regular expression that backtracks without end) are no Exceptions.
    """
    try:
        yield
    except BaseException as error:
        panicked = type(error).__module__ == "pyo3_runtime"
        if not (panicked or isinstance(error, Exception)):
            raise
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{problem}: {kind}{escaped(str(error), 300)}") from error


def _generation_eos(folder: Path) -> tuple[int, ...]:
    return ids_of(_read_json(folder / "generation_config.json").get("eos_token_id"), str(folder))


def _read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty where there is no file."""
    return read_json(path) if path.is_file() else {}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
