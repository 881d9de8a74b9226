"""Small tokenizers of several kinds of rules, made with the `tokenizers` library."""

from __future__ import annotations

import json


def byte_level():
    """A byte-level vocabulary: all bytes, a few pairs, and a special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ã", "©"), ("ð", "Ł")]
    vocabulary = {w: i for i, w in enumerate([*letters, *("".join(m) for m in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


def metaspace():
    """Words with ▁ for a space, which is left out at the beginning, and bytes as <0xC3>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "▁", "a", "b", "▁a", "ab", *(f"<0x{i:02X}>" for i in range(256))]
    vocabulary = {w: i for i, w in enumerate(words)}
    backend = Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("a", "b")], byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def with_digits():
    """Byte-level, but digits are split one by one, as in SmolLM2 and Granite."""
    from tokenizers import pre_tokenizers

    backend = byte_level()
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    backend.model = merging(backend.model, ("1", "2"))
    return backend


def merging(model, *pairs):
    """The same vocabulary and merges, with more of them."""
    from tokenizers import models

    content = json.loads(model.__getstate__())
    for pair in pairs:
        content["vocab"]["".join(pair)] = 10_000 + len(content["vocab"])
    merges = [*map(tuple, content["merges"]), *pairs]
    return models.BPE(content["vocab"], merges)


def normalizing():
    """NFKC and lower case, a prefix space, added tokens that strip, and one that is no special."""
    from tokenizers import AddedToken, normalizers, pre_tokenizers

    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.add_tokens(
        [AddedToken("<tool>", lstrip=True, rstrip=True), AddedToken("ab", rstrip=True)]
    )
    backend.add_special_tokens([AddedToken("<think>", lstrip=True)])
    backend.enable_truncation(4)  # as files of embedding models have it
    return backend


def save(folder, backend, **settings):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
