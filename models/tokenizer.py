"""Text to token ids and back, with the ids that Hugging Face gives.

`load` reads a local folder and wraps `transformers`' tokenizer: no hub, no remote code.
`save_character_tokenizer` writes such a folder for a vocabulary of single characters. transformers
and tokenizers are imported when first used.
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
from models import hf_files
from models.config import ModelConfig
from models.folder import Folder
from models.hf_config import end_ids
from models.hf_files import escaped, is_gguf, shown
from models.token_text import TokenBytes, token_bytes

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
# Any one of these holds a vocabulary; the shipped models have tokenizer.json.
_VOCABULARY_FILES = (_FILE, "tokenizer.model", "vocab.json", "vocab.txt")
_PLAIN_CLASS = "PreTrainedTokenizerFast"


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary, its end tokens and its chat template.

    `vocab_size` is the largest id + 1, added tokens included. `eos_token_ids` are the tokenizer's
    end token and those of generation_config.json: a chat turn may end in another than a text.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    has_chat_template: bool
    backend: Any = dataclasses.field(repr=False)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without adding special tokens.

        Raises ValueError for text with half a surrogate pair, and if the tokenizer's rules fail.
        """
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
        """The text of every token, in which stop strings are searched."""
        with _as_value_error("the tokenizer cannot decode its tokens"):
            return token_bytes(self.backend, self.vocab_size)

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
        ValueError without a template, if it fails or exceeds the bounds of models/chat_template.py,
        and for variables that are set already.
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

    Raises FileNotFoundError if the folder or its vocabulary is missing, and ValueError if
    transformers cannot read it.
    """
    path = Path(directory)
    if is_gguf(path):
        backend, ends = _from_gguf(path)
    else:
        backend, ends = (
            _from_folder(path),
            end_ids(_optional_json(path / hf_files.GENERATION), str(path)),
        )
    ids = backend.get_vocab().values()
    if not ids:
        raise ValueError(
            f"{path}: expected a tokenizer with a vocabulary, got one without any token: copy "
            "tokenizer.json from where the policy came from"
        )
    own = [] if backend.eos_token_id is None else [int(backend.eos_token_id)]
    return Tokenizer(
        vocab_size=max(ids) + 1,
        eos_token_ids=tuple(dict.fromkeys([*own, *ends])),
        pad_token_id=None if backend.pad_token_id is None else int(backend.pad_token_id),
        has_chat_template=bool(backend.chat_template),
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
            folder.replace(_FILE, rules.to_str())
            folder.replace(_SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
            return
        source = source.parent
    for file in source.iterdir():
        if is_own_file(file.name):
            folder.replace(file.name, file.read_bytes())


def is_own_file(name: str) -> bool:
    """Return whether a file of a Hugging Face folder belongs to its tokenizer."""
    named = "token" in name or name.startswith(("chat_template", "vocab", "merges"))
    return named and name.endswith((".json", ".jinja", ".model", ".txt"))


def check_vocabulary(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise ValueError unless every id of the tokenizer has a row in the policy's embedding.

    More rows than ids are fine: many embeddings are padded.
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

    Ids: `<pad>` 0, `<eos>` 1, `<unk>` 2, then `extra_specials`, then the distinct characters in
    their order. Other characters become `<unk>`. `chat_template` is Jinja source. Raises ValueError
    for an entry that is not one character, or for none.
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
    backend.save(str(folder / _FILE))
    settings = {
        "tokenizer_class": _PLAIN_CLASS,
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    hf_files.write_json(folder / _SETTINGS, settings)


def _from_folder(folder: Path) -> Any:
    hf_files.require_folder(folder)
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        names = sorted(path.name for path in folder.iterdir())
        raise FileNotFoundError(
            f"no tokenizer in {folder}: expected tokenizer.json (and tokenizer_config.json), got "
            f"{names[:12]}; copy them from where the policy came from"
        )
    # A folder that names no family of tokenizers means its tokenizer.json literally. If config.json
    # says qwen2, AutoTokenizer takes that family's class and ignores the file's rules.
    named = _optional_json(folder / _SETTINGS).get("tokenizer_class")
    is_plain = (folder / _FILE).is_file() and named in (_PLAIN_CLASS, "TokenizersBackend")
    loader = _class(_PLAIN_CLASS if is_plain else "AutoTokenizer")
    with _as_value_error(f"transformers cannot read the tokenizer in {folder}"):
        return loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def _from_gguf(path: Path) -> tuple[Any, tuple[int, ...]]:
    """Return a GGUF file's tokenizer and end tokens; files next to it replace an unknown kind."""
    from models import gguf, gguf_header, gguf_tokenizer

    header = gguf_header.read(path)
    ends = gguf.end_tokens(header)
    if gguf_tokenizer.is_known(header) or not (path.parent / _FILE).is_file():
        rules, settings = gguf_tokenizer.parts(header)
        with _as_value_error(f"transformers cannot read the tokenizer in {path}"):
            return _class(settings.pop("tokenizer_class"))(tokenizer_object=rules, **settings), ends
    backend, (tokens, _) = _from_folder(path.parent), gguf.tokens_of(header)
    for text, i in backend.get_vocab().items():
        if i < len(tokens) and tokens[i] != text:
            header.fail(
                f"expected {path.parent / _FILE} to have its tokens, got {shown(text)} as token "
                f"{i}, which is {shown(tokens[i])}",
                "copy the tokenizer.json of the file's model",
            )
    return backend, ends


def _class(name: str) -> Any:
    # transformers prints advice about a missing torch at import; none of its models is used here
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return getattr(transformers, name)  # loads this class only; AutoTokenizer loads all families


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


def _optional_json(path: Path) -> dict[str, Any]:
    return hf_files.read_json(path) if path.is_file() else {}
