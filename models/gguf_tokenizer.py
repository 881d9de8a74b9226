"""The tokenizer in a GGUF file, as the files of a Hugging Face folder.

A file of byte-level BPE has tokens, merges and the name of a way to cut text before merging
(`tokenizer.ggml.pre`). What each name means is known from the tokenizer.json of models that bear
it; another name is refused, since tokens of wrong cuts are valid, and worse. A file of
SentencePiece has tokens and scores, which say what is merged first. `tokenizers` is imported when
first used.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NoReturn

import numpy as np

from models.gguf_header import Header, printed
from models.gguf_policy import token_id, tokens_of

MAX_ADDED = 2**16  # tokens that are no text: the largest vocabularies have thousands
# SentencePiece: tokens have about 16 characters; the pairs that make a token are all tried.
MAX_PIECE_CHARACTERS, MAX_VOCABULARY_CHARACTERS = 128, 2**24
_TYPES = {"normal": 1, "unknown": 2, "control": 3, "user_defined": 4, "unused": 5, "byte": 6}
_SPECIAL = (_TYPES["unknown"], _TYPES["control"])
_SPACE = "▁"
_OWN_TOKENIZER = (
    "give the model's own: python -m models.gguf FILE FOLDER --tokenizer FOLDER_OF_TOKENIZER"
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class _Rules:
    """A way to cut text before merging; the `pattern` None is GPT-2's.

    With `whole_words` a piece that is a token is not merged, but taken as it is.
    """

    pattern: str | None = None
    single_digits: bool = False
    composed: bool = False  # characters are composed first (NFC)
    whole_words: bool = False
    begins: bool = False  # with the first token, where the file does not say


_LLAMA3 = _Rules(f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}", whole_words=True, begins=True)
_RULES = {
    "gpt-2": _Rules(),
    "smollm": _Rules(single_digits=True),
    "qwen2": _Rules(f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}", composed=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """The ids of all tokens by their text; which are plain text, and which are added.

    `added` says of each whether it is special; `named` has the texts of bos_token, eos_token, ….
    """

    ids: dict[str, int]
    plain: tuple[str, ...]
    added: dict[str, bool]
    named: dict[str, str]


def files(header: Header) -> dict[str, str]:
    """Return the content of tokenizer.json and tokenizer_config.json by their names.

    Raises ValueError as `parts` does.
    """
    backend, settings = parts(header)
    return {
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }


def parts(header: Header) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer of the `tokenizers` library and the settings of tokenizer_config.json.

    Raises ValueError for a kind of tokenizer that is not known, and for a damaged one.
    """
    from tokenizers import AddedToken

    kind = header.metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        _fail(
            header,
            "expected tokenizer.ggml.model 'gpt2' (byte-level BPE) or 'llama' (SentencePiece), got "
            f"{printed(kind)}; other tokenizers are not read from GGUF files",
            _OWN_TOKENIZER,
        )
    vocabulary = _vocabulary(header)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **vocabulary.named,
        "clean_up_tokenization_spaces": False,
    }
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            _fail(header, f"expected tokenizer.chat_template as text, got {printed(template)}")
        settings["chat_template"] = template
    make = _byte_level if kind == "gpt2" else _sentencepiece
    backend = make(header, vocabulary)
    backend.add_tokens(
        [
            AddedToken(text, special=special, normalized=False)
            for text, special in vocabulary.added.items()
        ]
    )
    return backend, settings


def _vocabulary(header: Header) -> _Vocabulary:
    tokens, types = tokens_of(header)
    named = {
        f"{theirs}_token": tokens[i]
        for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (i := token_id(header, ours)) is not None
    }
    ids, plain, added = dict[str, int](), list[str](), dict[str, bool]()
    for i, (text, kind) in enumerate(zip(tokens, types.tolist(), strict=True)):
        if kind == _TYPES["unused"] and text == f"[PAD{i}]" and text not in named.values():
            continue  # llama.cpp's name for a row of the embedding that has no token
        if text in ids:
            _fail(header, f"expected every token once, got {printed(text)} twice")
        ids[text] = i
        if kind in _SPECIAL or kind == _TYPES["user_defined"]:
            added[text] = kind in _SPECIAL
        elif kind == _TYPES["normal"]:
            plain.append(text)
    if len(added) > MAX_ADDED or not all(added):
        _fail(header, f"expected at most {MAX_ADDED} added tokens with a text, got {len(added)}")
    return _Vocabulary(ids, tuple(plain), added, named)


def _byte_level(header: Header, vocabulary: _Vocabulary) -> Any:
    """Return a byte-level BPE with the rules of its name."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    name = header.metadata.get("tokenizer.ggml.pre")
    rules = _RULES.get(name) if isinstance(name, str) else None
    if rules is None:
        _fail(
            header,
            f"expected tokenizer.ggml.pre as one of {', '.join(_RULES)}, got {printed(name)}: how "
            "its text is cut is not known here",
            _OWN_TOKENIZER,
        )
    merges = _merges(header, vocabulary.ids)
    backend = Backend(models.BPE(vocabulary.ids, merges, ignore_merges=rules.whole_words))
    cuts: list[Any] = []
    if rules.single_digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(rules.pattern), behavior="isolated"))
    use_own = rules.pattern is None
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_own))
    backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    if rules.composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    around = _around(header, vocabulary, begins=rules.begins)
    bytes_again = processors.ByteLevel(trim_offsets=False)
    backend.post_processor = processors.Sequence([bytes_again, *around])
    return backend


def _merges(header: Header, ids: dict[str, int]) -> list[tuple[str, str]]:
    lines = header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        _fail(header, f"expected tokenizer.ggml.merges as a list of texts, got {printed(lines)}")
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        if not (left in ids and right in ids and left + right in ids):
            _fail(
                header,
                "expected merges of two tokens to a third, all in the vocabulary, got "
                f"{printed(line)}",
            )
        merges.append((left, right))
    return merges


def _sentencepiece(header: Header, vocabulary: _Vocabulary) -> Any:
    """Return a BPE on characters with spaces as ▁, in the form of Llama 2's tokenizer.json.

    Characters without a token become bytes. A space is put before every piece of text, and
    taken away again, unless the file says otherwise.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, normalizers, processors

    merges = _scored_merges(header, vocabulary)
    unknown = vocabulary.named.get("unk_token")
    backend = Backend(
        models.BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    texts: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(header, "add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        texts.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(texts)
    if around := _around(header, vocabulary, begins=True):
        backend.post_processor = processors.Sequence(around)
    return backend


def _scored_merges(header: Header, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, those of the highest score first."""
    scores = header.metadata.get("tokenizer.ggml.scores")
    tokens, _ = tokens_of(header)
    if not isinstance(scores, np.ndarray) or scores.dtype.kind != "f":
        _fail(header, f"expected tokenizer.ggml.scores as numbers, got {printed(scores)}")
    if len(scores) != len(tokens) or not np.isfinite(scores).all():
        _fail(
            header,
            f"expected a finite score for each of {len(tokens)} tokens, got {printed(scores)} in "
            "tokenizer.ggml.scores",
        )
    longest = max(map(len, vocabulary.plain), default=0)
    total = sum(map(len, vocabulary.plain))
    if longest > MAX_PIECE_CHARACTERS or total > MAX_VOCABULARY_CHARACTERS:
        _fail(
            header,
            f"expected tokens of at most {MAX_PIECE_CHARACTERS} characters, and "
            f"{MAX_VOCABULARY_CHARACTERS} of all, got {longest} and {total}",
        )
    plain, ids = set(vocabulary.plain), vocabulary.ids
    ranked = []
    for text in vocabulary.plain:
        score = float(scores[ids[text]])
        for i in range(1, len(text)):
            left, right = text[:i], text[i:]
            if left in plain and right in plain:
                ranked.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _around(header: Header, vocabulary: _Vocabulary, *, begins: bool) -> list[Any]:
    """Return the rule that puts the first and last token around a whole text, where asked."""
    from tokenizers import processors

    wanted = {}
    for name, default in (("bos", begins), ("eos", False)):
        is_asked, key = _flag(header, f"add_{name}_token", default), f"{name}_token"
        wanted[name] = [vocabulary.named[key]] if is_asked and key in vocabulary.named else []
    if not any(wanted.values()):
        return []
    one = [*wanted["bos"], "$A", *wanted["eos"]]
    two = [*one, *(f"{piece}:1" for piece in [*wanted["bos"], "$B", *wanted["eos"]])]
    ends = [(text, vocabulary.ids[text]) for text in dict.fromkeys(wanted["bos"] + wanted["eos"])]
    try:
        return [processors.TemplateProcessing(single=one, pair=two, special_tokens=ends)]
    except ValueError as error:
        _fail(header, f"expected plain first and last tokens, got {printed(ends)} ({error})")


def _flag(header: Header, name: str, default: bool) -> bool:
    value = header.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        _fail(header, f"expected tokenizer.ggml.{name} as true or false, got {printed(value)}")
    return value


def _fail(header: Header, problem: str, mend: str = "convert the model again") -> NoReturn:
    raise ValueError(f"{header.path}: the tokenizer cannot be read: {problem}; {mend}")
