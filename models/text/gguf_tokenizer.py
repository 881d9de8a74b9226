"""The tokenizer in a GGUF file, built with the `tokenizers` library.

A file with byte-level BPE has tokens, merges and the name of a rule that splits text before merging
(`tokenizer.ggml.pre`); unknown names are refused. A SentencePiece file has tokens and scores, which
order the merges.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from reprise.models.formats.gguf import token_id, tokens_of
from reprise.models.formats.gguf_header import Header
from reprise.models.formats.hf_files import shown

MAX_ADDED = 2**16  # added tokens; the largest vocabularies have thousands
# SentencePiece tokens have about 16 characters; every split of a token is tried as a merge.
MAX_PIECE_CHARACTERS = 128
MAX_VOCABULARY_CHARACTERS = 2**24
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5  # token types
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class _Split:
    """A rule that splits text before merging; `pattern` None is the rule of GPT-2.

    With `whole_words` a piece that is a token is not merged. `adds_bos` is the default of
    add_bos_token.
    """

    pattern: str | None = None
    single_digits: bool = False
    composed: bool = False  # characters are composed first (NFC)
    whole_words: bool = False
    adds_bos: bool = False


_LLAMA3 = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_REST}"
_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(single_digits=True),
    "qwen2": _Split(f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_REST}", composed=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3"), _Split(_LLAMA3, whole_words=True, adds_bos=True)
    ),
}


def is_known(header: Header) -> bool:
    """Return whether the rules of the file to split and merge text are implemented."""
    kind, split = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    return kind == "llama" or (kind == "gpt2" and split in list(_SPLITS))


def parts(header: Header) -> tuple[Any, dict[str, Any]]:
    """Return a `tokenizers` tokenizer and the content of tokenizer_config.json, or ValueError."""
    from tokenizers import AddedToken

    kind, split = (header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if not is_known(header):
        header.fail(
            "expected tokenizer.ggml.model 'llama' (SentencePiece), or 'gpt2' (byte-level BPE) "
            f"with tokenizer.ggml.pre as one of {', '.join(_SPLITS)}, got {shown(kind)} and "
            f"{shown(split)}",
            "put tokenizer.json and tokenizer_config.json of its model next to the file",
        )
    tokens, types = tokens_of(header)
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named_ids = {f"{name}_token": token_id(header, theirs) for name, theirs in names.items()}
    named = {name: tokens[i] for name, i in named_ids.items() if i is not None}
    ids: dict[str, int] = {}
    added = []
    for i, (text, token_type) in enumerate(zip(tokens, types, strict=True)):
        if token_type == _UNUSED and text == f"[PAD{i}]" and text not in named.values():
            continue  # the name in llama.cpp for an embedding row without a token
        if text in ids:
            header.fail(f"expected every token once, got {shown(text)} twice")
        ids[text] = i
        if token_type in (_UNKNOWN, _CONTROL, _USER_DEFINED):
            is_special = token_type != _USER_DEFINED
            added.append(AddedToken(text, special=is_special, normalized=False))
    if len(added) > MAX_ADDED or not all(token.content for token in added):
        header.fail(f"expected at most {MAX_ADDED} added tokens with a text, got {len(added)}")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "clean_up_tokenization_spaces": False,
    }
    if (template := header.get("tokenizer.chat_template", str)) is not None:
        settings["chat_template"] = template
    backend = (_byte_level if kind == "gpt2" else _sentencepiece)(header, ids, named)
    backend.add_tokens(added)
    return backend, settings


def _byte_level(header: Header, ids: dict[str, int], named: dict[str, str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = _SPLITS[header.metadata["tokenizer.ggml.pre"]]
    lines = header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        header.fail(f"expected tokenizer.ggml.merges as a list of texts, got {shown(lines)}")
    merges = []
    for line in lines:
        left, _, right = str(line).partition(" ")
        if not (left in ids and right in ids and left + right in ids):
            header.fail(
                "expected merges of two tokens to a third, all in the vocabulary, got "
                f"{shown(line)}"
            )
        merges.append((left, right))
    backend = Tokenizer(models.BPE(ids, merges, ignore_merges=split.whole_words))
    splits: list[Any] = []
    if split.single_digits:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        splits.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    if split.composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    _add_ends(backend, header, ids, named, adds_bos=split.adds_bos)
    return backend


def _sentencepiece(header: Header, ids: dict[str, int], named: dict[str, str]) -> Any:
    """Return a BPE on characters with spaces as ▁, as in tokenizer.json of Llama 2.

    Characters without a token become bytes. By default encoding adds a space before every text, and
    decoding removes it.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = named.get("unk_token")
    merges = _scored_merges(header, ids)
    backend = Tokenizer(
        models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    before: list[Any] = [normalizers.Replace(" ", _SPACE)]
    after: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.get("tokenizer.ggml.add_space_prefix", bool, True):
        before.insert(0, normalizers.Prepend(_SPACE))
        after.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(before)
    backend.decoder = decoders.Sequence(after)
    _add_ends(backend, header, ids, named, adds_bos=True)
    return backend


def _scored_merges(header: Header, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of text tokens that form another token, the highest score first."""
    scores: Any = header.metadata.get("tokenizer.ggml.scores")
    tokens, types = tokens_of(header)
    is_scores = isinstance(scores, list) and len(scores) == len(tokens)
    if not (is_scores and all(type(x) is float and math.isfinite(x) for x in scores)):
        header.fail(
            f"expected a finite score for each of {len(tokens)} tokens in tokenizer.ggml.scores, "
            f"got {shown(scores)}"
        )
    texts = {text: i for text, i in ids.items() if types[i] == _NORMAL}
    max_length = max(map(len, texts), default=0)
    total = sum(map(len, texts))
    if max_length > MAX_PIECE_CHARACTERS or total > MAX_VOCABULARY_CHARACTERS:
        header.fail(
            f"expected tokens of at most {MAX_PIECE_CHARACTERS} characters, and "
            f"{MAX_VOCABULARY_CHARACTERS} of all, got {max_length} and {total}"
        )
    ranked = []
    for text, token in texts.items():
        for i in range(1, len(text)):
            left = text[:i]
            right = text[i:]
            if left in texts and right in texts:
                ranked.append((-scores[token], texts[left], texts[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_ends(
    backend: Any, header: Header, ids: dict[str, int], named: dict[str, str], *, adds_bos: bool
) -> None:
    """Make the tokenizer add the first and the last token around a text, as the file says."""
    from tokenizers import processors

    first, last = (
        [named[key]]
        if header.get(f"tokenizer.ggml.add_{key}", bool, default) and key in named
        else []
        for key, default in (("bos_token", adds_bos), ("eos_token", False))
    )
    if not first + last:
        return
    around = [*first, "$A", *last]
    specials = [(text, ids[text]) for text in dict.fromkeys(first + last)]
    try:
        backend.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=specials
        )
    except ValueError as error:
        header.fail(f"expected plain first and last tokens, got {shown(specials)} ({error})")
