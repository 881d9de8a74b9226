"""Tokenizers of single characters, as the shipped policies and the tests have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from reprise.models.formats import hf_files

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def save_character_tokenizer(
    folder: Path, characters: Iterable[str], chat_template: str | None = None
) -> None:
    """Write a tokenizer of one id per character, for `models.text.tokenizer` and transformers.

    Ids: `<pad>` 0, `<eos>` 1, `<unk>` 2, then the distinct characters in their order. Other
    characters become `<unk>`. `chat_template` is Jinja source.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    specials = [PAD, EOS, UNK]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*specials, *characters]))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    hf_files.write_json(folder / "tokenizer_config.json", settings)
