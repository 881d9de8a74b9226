"""The tokenizer in a GGUF file, as the files of a Hugging Face folder.

A file holds tokens, merges and the name of a way to cut text before merging (`tokenizer.ggml.pre`).
What each name means is known from the tokenizer.json of the models that bear it; another name is
refused, since tokens of wrong cuts are valid, and worse. `tokenizers` is imported when first used.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NoReturn

from models.gguf_header import Header
from models.gguf_policy import token_id, tokens_of
from models.hf_config import shown

RULES, SETTINGS = "tokenizer.json", "tokenizer_config.json"
MAX_ADDED = 2**16  # tokens that are no text: the largest vocabularies have thousands
_TYPES = {"normal": 1, "unknown": 2, "control": 3, "user_defined": 4, "unused": 5, "byte": 6}
_SPECIAL = (_TYPES["unknown"], _TYPES["control"])
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


def files(header: Header) -> dict[str, str]:
    """Return the content of tokenizer.json and tokenizer_config.json by their names.

    Raises ValueError for a kind of tokenizer that is not known, and for a damaged one.
    """
    rules = _rules(header)
    tokens, types = tokens_of(header)
    named = {
        f"{theirs}_token": tokens[i]
        for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (i := token_id(header, ours)) is not None
    }
    vocabulary: dict[str, int] = {}
    added: list[tuple[str, bool]] = []
    for i, (text, kind) in enumerate(zip(tokens, types.tolist(), strict=True)):
        if kind == _TYPES["unused"] and text == f"[PAD{i}]" and text not in named.values():
            continue  # llama.cpp's name for a row of the embedding that has no token
        if text in vocabulary:
            _fail(header, f"expected every token once, got {shown(text)} twice")
        vocabulary[text] = i
        if kind in _SPECIAL or kind == _TYPES["user_defined"]:
            added.append((text, kind in _SPECIAL))
    if len(added) > MAX_ADDED or not all(text for text, _ in added):
        _fail(header, f"expected at most {MAX_ADDED} added tokens with a text, got {len(added)}")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "clean_up_tokenization_spaces": False,
    }
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            _fail(header, f"expected tokenizer.chat_template as text, got {shown(template)}")
        settings["chat_template"] = template
    backend = _backend(vocabulary, _merges(header, vocabulary), added, rules)
    backend.post_processor = _ends(header, named, vocabulary, rules)
    return {
        RULES: backend.to_str(),
        SETTINGS: json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }


def _rules(header: Header) -> _Rules:
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        _fail(
            header,
            f"expected tokenizer.ggml.model 'gpt2' (byte-level BPE), got {shown(kind)}; other "
            "tokenizers are not read from GGUF files",
            _OWN_TOKENIZER,
        )
    name = header.metadata.get("tokenizer.ggml.pre")
    rules = _RULES.get(name) if isinstance(name, str) else None
    if rules is None:
        _fail(
            header,
            f"expected tokenizer.ggml.pre as one of {', '.join(_RULES)}, got {shown(name)}: how "
            "its text is cut is not known here",
            _OWN_TOKENIZER,
        )
    return rules


def _merges(header: Header, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    lines = header.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        _fail(header, f"expected tokenizer.ggml.merges as a list of texts, got {shown(lines)}")
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            _fail(
                header,
                "expected merges of two tokens to a third, all in the vocabulary, got "
                f"{shown(line)}",
            )
        merges.append((left, right))
    return merges


def _backend(
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    added: list[tuple[str, bool]],
    rules: _Rules,
) -> Any:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE(vocabulary, merges, ignore_merges=rules.whole_words))
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
    backend.add_tokens(
        [AddedToken(text, special=special, normalized=False) for text, special in added]
    )
    return backend


def _ends(header: Header, named: dict[str, str], vocabulary: dict[str, int], rules: _Rules) -> Any:
    """Return the rule that puts the first and last token around a whole text, where asked."""
    from tokenizers import processors

    wanted = {}
    for name, default in (("bos", rules.begins), ("eos", False)):
        key = f"tokenizer.ggml.add_{name}_token"
        value = header.metadata.get(key, default)
        if not isinstance(value, bool):
            _fail(header, f"expected {key} as true or false, got {shown(value)}")
        wanted[name] = [named[f"{name}_token"]] if value and f"{name}_token" in named else []
    byte_level = processors.ByteLevel(trim_offsets=False)
    if not any(wanted.values()):
        return byte_level
    one = [*wanted["bos"], "$A", *wanted["eos"]]
    two = [*one, *(f"{piece}:1" for piece in [*wanted["bos"], "$B", *wanted["eos"]])]
    ends = [(text, vocabulary[text]) for text in dict.fromkeys(wanted["bos"] + wanted["eos"])]
    try:
        around = processors.TemplateProcessing(single=one, pair=two, special_tokens=ends)
    except ValueError as error:
        _fail(header, f"expected plain first and last tokens, got {shown(ends)} ({error})")
    return processors.Sequence([byte_level, around])


def _fail(header: Header, problem: str, mend: str = "convert the model again") -> NoReturn:
    raise ValueError(f"{header.path}: the tokenizer cannot be read: {problem}; {mend}")
