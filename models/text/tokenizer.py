"""Conversion of text to token ids and back, by the tokenizer.json of a policy.

`load` reads a local folder or GGUF file, without a hub or remote code. The rules of tokenizer.json
apply whatever class a folder names, because `transformers` rebuilds some classes and drops rules.
`tokenizers` is imported on first use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprise.models.config import ModelConfig
from reprise.models.folder import Folder
from reprise.models.formats import hf_files
from reprise.models.formats.hf_entries import end_ids, refuse_misspelt
from reprise.models.formats.hf_files import escaped, is_gguf, optional_json, shown
from reprise.models.text import chat_template as chat_templates
from reprise.models.text import tokenizer_files
from reprise.models.text.tokenizer_files import RULES, SETTINGS

if TYPE_CHECKING:
    from reprise.models.text.token_bytes import TokenBytes

_SPECIALS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 2**20
_SPECIALS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_NAMES = {*_SPECIALS, "add_bos_token", "add_eos_token", "added_tokens_decoder", "chat_template"}


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary, its end tokens and its chat template.

    `vocab_size` is the largest id + 1, including added tokens. `eos_token_ids` are the end tokens
    of the tokenizer and of generation_config.json: a chat turn may end with another token than a
    text. `specials` are the texts of bos_token, eos_token, …, for templates. `day` is the day that
    templates print; None means today. `rules` is the Tokenizer of `tokenizers`.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    specials: Mapping[str, str]
    chat_template: str
    rules: Any = dataclasses.field(repr=False)
    day: datetime.date | None = None

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    @functools.cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """The id of every token."""
        return self.rules.get_vocab()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without adding special tokens; ValueError if that fails."""
        return list(self._encoded(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text after the special tokens that start every text, such as BOS.

        An end token that the tokenizer appends to texts is left out. Raises as `encode`.
        """
        encoded = self._encoded(text, add_special_tokens=True)
        added = encoded.special_tokens_mask
        pairs = list(zip(encoded.ids, added, strict=True))
        first = [i for i, _ in itertools.takewhile(lambda pair: pair[1], pairs)]
        own = [i for i, is_added in pairs if not is_added]
        return [*first, *own] if own and own[: len(first)] != first else own

    def _encoded(self, text: str, *, add_special_tokens: bool) -> Any:
        with _as_value_error(f"the tokenizer cannot encode {shown(text, 40)}"):
            if any("\ud800" <= character <= "\udfff" for character in set(text)):
                raise ValueError("expected whole characters, got half of a surrogate pair")
            return self.rules.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Iterable[int], skip_ends: bool = True) -> str:
        """Return the text of ids, including special tokens and spaces; ValueError if rules fail.

        With `skip_ends`, an end token at the end is left out. Any other token is text that the
        policy wrote, including padding and unknown tokens.
        """
        tokens = [int(i) for i in ids]
        if skip_ends and tokens and tokens[-1] in self.eos_token_ids:
            tokens.pop()
        with _as_value_error(f"the tokenizer cannot decode {shown(tokens, 40)}"):
            return str(self.rules.decode(tokens, skip_special_tokens=False))

    @functools.cached_property
    def token_bytes(self) -> TokenBytes:
        """The text of every token, for the search for stop strings."""
        from reprise.models.text.token_bytes import bytes_of_tokens

        with _as_value_error("the tokenizer cannot decode its tokens"):
            return bytes_of_tokens(self.rules, self.vocab_size)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **variables: Any,
    ) -> list[int]:
        """Return the ids of a conversation of `{"role", "content"}` in the chat template.

        `tools` are JSON schemas of functions. `variables` are other template variables, such as
        `enable_thinking=False`. Raises ValueError without a template, for tools that the template
        does not show, if the template fails or exceeds a limit, and for reserved variables.
        """
        return self.encode(
            self.render_chat_template(messages, add_generation_prompt, tools=tools, **variables)
        )

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        **variables: Any,
    ) -> str:
        """Return the text of a conversation in the chat template, as `apply_chat_template`."""
        if not self.has_chat_template:
            raise ValueError(
                "expected a tokenizer with a chat template, got one without: set "
                "Task.chat_template, add a chat_template.jinja to the policy, or use plain prompts"
            )
        chat_templates.check_variables(variables, self.specials)
        if tools and "tools" not in self.chat_template:
            raise ValueError(
                "tools: expected a chat template that shows tools, got one that does not: leave "
                "the tools out, or describe them in a message"
            )
        return chat_templates.SHARED.render(
            self.chat_template,
            messages,
            self.day,
            add_generation_prompt=add_generation_prompt,
            **({"tools": list(tools)} if tools else {}),
            **self.specials,
            **variables,
        )

    @functools.cached_property
    def chat_marks(self) -> frozenset[str]:
        """The tokens that mark turns in the chat template; a mark within a text would end its turn.

        Marks are end tokens, special tokens that the template names, and the added tokens that the
        template prints around a user message (DeepSeek's are not special).
        """
        if not self.has_chat_template:
            return frozenset()
        question, _ = self._example
        named = {text for name, text in self.specials.items() if name in self.chat_template}
        return frozenset(
            token.content
            for i, token in self.rules.get_added_tokens_decoder().items()
            if (token.content.strip() and token.content in question)
            or i in self.eos_token_ids
            or (token.special and (token.content in named or token.content in self.chat_template))
        )

    def is_rendered(self, text: str) -> bool:
        """Return whether a text is a conversation in the chat template, up to the answer.

        Such a text starts with a mark, and finishes as the template does before a response.
        """
        if not text.startswith(tuple(self.chat_marks)):
            return False
        question, prompt = self._example
        end = prompt.removeprefix(question).strip()
        return bool(end) and text.rstrip().endswith(end)

    @functools.cached_property
    def _example(self) -> tuple[str, str]:
        """A question in the template, without and with the start of the answer."""
        chat = [{"role": "user", "content": "?"}]
        render = functools.partial(
            chat_templates.SHARED.render, self.chat_template, chat, self.day, **self.specials
        )
        try:
            return render(add_generation_prompt=False), render(add_generation_prompt=True)
        except ValueError:  # the template may require a system message, or variables
            return "", ""


def load(directory: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder or GGUF file; FileNotFoundError or ValueError."""
    path = Path(directory)
    if is_gguf(path):
        rules, settings, ends = _from_gguf(path)
    else:
        rules, settings = _from_folder(path)
        ends = end_ids(optional_json(path / hf_files.GENERATION), str(path))
    ids = rules.get_vocab().values()
    if not ids:
        raise ValueError(
            f"{path}: expected a tokenizer with a vocabulary, got one without any token: copy "
            "tokenizer.json from where the policy came from"
        )
    specials = _specials(settings, path)
    for name in ("bos_token", "eos_token"):
        if name in specials and rules.token_to_id(specials[name]) is None:
            raise ValueError(
                f"{path}: expected {name} as a token of tokenizer.json, got "
                f"{shown(specials[name])}: copy both from where the policy came from"
            )
    own = rules.token_to_id(specials.get("eos_token", ""))
    _apply_add_bos(rules, specials.get("bos_token", ""), settings, path)
    return Tokenizer(
        vocab_size=max(ids) + 1,
        eos_token_ids=tuple(dict.fromkeys([*([] if own is None else [own]), *ends])),
        pad_token_id=rules.token_to_id(specials.get("pad_token", "")),
        specials=specials,
        chat_template=_chat_template(settings, path),
        rules=rules,
    )


def fitted(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the config of a policy with the end tokens of its tokenizer, and the unused ids.

    Raises ValueError as `check_vocabulary`.
    """
    check_vocabulary(tokenizer, config)
    ends = tuple(dict.fromkeys((*config.eos_token_ids, *tokenizer.eos_token_ids)))
    ids = sorted({-1, *tokenizer.vocabulary.values(), *ends, config.vocab_size})
    unused = tuple((a + 1, b) for a, b in itertools.pairwise(ids) if b > a + 1)
    return dataclasses.replace(config, eos_token_ids=ends, unused_ids=unused)


def copy_files(source: Path, target: Path, chat_template: str | None = None) -> None:
    """Copy the vocabulary, settings and chat template of a tokenizer from a folder or GGUF file.

    A `chat_template` replaces the copied template.
    """
    folder = Folder(target)
    _copy_files(source, folder)
    if chat_template is not None:
        settings = json.loads(folder.read(SETTINGS)) if folder.exists(SETTINGS) else {}
        settings.pop("chat_template", None)
        folder.replace(SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        folder.replace(TEMPLATE_FILE, chat_template)


def _copy_files(source: Path, folder: Folder) -> None:
    if is_gguf(source):
        from reprise.models.formats import gguf_header
        from reprise.models.text import gguf_tokenizer

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
    """Raise ValueError unless every id has a row in the embedding, which may be padded."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer does not fit the policy: expected ids below the policy's vocab_size="
            f"{config.vocab_size}, got ids up to {tokenizer.vocab_size - 1}; use the tokenizer of "
            "the policy's own folder, or a policy whose embedding covers it"
        )


def _from_folder(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer in tokenizer.json, whatever class the folder names, and the settings."""
    hf_files.require_folder(folder)
    if not hf_files.has_file(folder / RULES):
        names = sorted(path.name for path in folder.iterdir())
        raise FileNotFoundError(
            f"no tokenizer in {folder}: expected tokenizer.json (and tokenizer_config.json), got "
            f"{names[:12]}; copy them from where the policy came from, or write them with "
            "AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers"
        )
    tokenizer_files.check(folder)
    settings = optional_json(folder / SETTINGS)
    refuse_misspelt(settings, str(folder / SETTINGS), _NAMES)
    if "added_tokens_decoder" not in settings:  # older folders name tokens in another file
        settings |= optional_json(folder / _SPECIALS_FILE)
    if hf_files.has_file(folder / TEMPLATE_FILE):
        settings["chat_template"] = read_template(folder / TEMPLATE_FILE)
    return open_rules(folder), settings


def open_rules(folder: Path) -> Any:
    """Open the tokenizer.json of a folder after `tokenizer_files.check` has tried it."""
    from tokenizers import Tokenizer as Rules

    with _as_value_error(f"cannot read the tokenizer in {folder}"):
        rules = Rules.from_file(str(folder / RULES))
    rules.no_truncation()  # length limits in the file were for training
    rules.no_padding()
    return rules


def _from_gguf(path: Path) -> tuple[Any, dict[str, Any], tuple[int, ...]]:
    """Return the tokenizer, settings and end tokens of a GGUF file.

    Tokenizer files next to it are used if the kind of its tokenizer is unknown.
    """
    from reprise.models.formats import gguf, gguf_header
    from reprise.models.text import gguf_tokenizer

    header = gguf_header.read(path)
    ends = gguf.end_tokens(header)
    if gguf_tokenizer.is_known(header) or not (path.parent / RULES).is_file():
        rules, settings = gguf_tokenizer.parts(header)
        return rules, settings, ends
    rules, settings = _from_folder(path.parent)
    tokens, _ = gguf.tokens_of(header)
    for text, i in rules.get_vocab().items():
        if i < len(tokens) and tokens[i] != text:
            header.fail(
                f"expected {path.parent / RULES} to have its tokens, got {shown(text)} as token "
                f"{i}, which is {shown(tokens[i])}",
                "copy the tokenizer.json of the file's model",
            )
    return rules, settings, ends


def _specials(settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the texts of the named special tokens."""
    result = {}
    for name in _SPECIALS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text:
            result[name] = text
        elif value not in (None, ""):
            raise ValueError(f"{path}: expected {name} as the text of a token, got {shown(value)}")
    return result


def _apply_add_bos(rules: Any, bos: str, settings: Mapping[str, Any], path: Path) -> None:
    """Let add_bos_token in the settings, if present, decide about BOS, as transformers does."""
    adds = settings.get("add_bos_token")
    bos_id = rules.token_to_id(bos)
    if not isinstance(adds, bool | None):
        raise ValueError(f"{path}: expected add_bos_token as true or false, got {shown(adds)}")
    if adds is None or (bos_id is None and adds):
        return
    from tokenizers import processors

    around, specials = ([bos, "$A"], [(bos, bos_id)]) if adds else (["$A"], [])
    rules.post_processor = processors.TemplateProcessing(single=around, special_tokens=specials)


def _chat_template(settings: Mapping[str, Any], path: Path) -> str:
    """Return the source of the chat template, "" without one; ValueError if it is ambiguous."""
    found = settings.get("chat_template")
    found = "" if found is None else found
    if isinstance(found, list):
        named = {x.get("name"): x.get("template") for x in found if isinstance(x, dict)}
        if "default" not in named:
            raise ValueError(
                f"{path}: expected a chat template named default, got {shown(list(named))}: choose "
                "one with Task.chat_template"
            )
        found = named["default"]
    if not isinstance(found, str):
        raise ValueError(f"{path}: expected the text of a chat template, got {shown(found)}")
    return found


def read_template(file: Path) -> str:
    """Return the chat template in a file. Raises OSError or ValueError."""
    if (size := file.stat().st_size) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"{file}: expected at most {MAX_TEMPLATE_BYTES} bytes, got {size}")
    return file.read_text(encoding="utf-8")


@contextlib.contextmanager
def _as_value_error(problem: str) -> Iterator[None]:
    """Raise any error of a tokenizer, including panics of its Rust code, as a ValueError."""
    try:
        yield
    except BaseException as error:
        panicked = type(error).__module__ == "pyo3_runtime"
        if not (panicked or isinstance(error, Exception)):
            raise
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"{problem}: {kind}{escaped(str(error), 300)}") from error
