"""Token ids equal those of transformers; character tokenizers round-trip; errors say what to do."""

import json
import random
import runpy
from pathlib import Path

import numpy as np
import pytest

from models import chat_template
from models import tokenizer as tokenizers_of_ours
from models.config import ModelConfig
from policies.make.characters import save_character_tokenizer

CHARACTERS = "abcdefghij 0123456789+-=*\n\té漢🙂"
CHARACTER_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"

CHAT = runpy.run_path(str(Path(__file__).parents[1] / "golden" / "chat_cases.py"))


def tiny_config(vocab_size):
    return ModelConfig(
        architecture="llama",
        vocab_size=vocab_size,
        d_model=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        d_ff=8,
    )


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    save_character_tokenizer(folder, CHARACTERS, CHARACTER_TEMPLATE)
    return tokenizers_of_ours.load(folder)


@pytest.fixture(scope="module")
def chatml_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chatml")
    CHAT["save_chatml_tokenizer"](folder)
    return folder


def test_character_text_round_trips(characters):
    rng = random.Random(0)
    texts = ["", " ", "  a  b ", "\n\n\t ", "1 + 2 = 3 , no"[:9], CHARACTERS]
    texts += ["".join(rng.choices(CHARACTERS, k=rng.randint(1, 40))) for _ in range(50)]
    for text in texts:
        ids = characters.encode(text)
        assert len(ids) == len(text)
        assert characters.decode(ids) == text


def test_character_tokenizer_reads_beside_a_policy_config(characters, tmp_path):
    # AutoTokenizer chooses its class by config.json's model_type, and for qwen2 drops spaces here.
    for model_type in ("llama", "qwen2", "qwen3"):
        folder = tmp_path / model_type
        save_character_tokenizer(folder, CHARACTERS)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        loaded = tokenizers_of_ours.load(folder)
        assert loaded.encode(" a b") == characters.encode(" a b")
        assert loaded.decode(loaded.encode(" a\nb ")) == " a\nb "
        assert not loaded.has_chat_template


def test_character_chat_template(characters):
    assert characters.has_chat_template
    ids = characters.apply_chat_template([{"role": "user", "content": "a b"}])
    assert ids == characters.encode("a b\n")


def test_variables_reach_a_chat_template(tmp_path):
    template = "{{ messages[0].content }}{% if deep %}b{% endif %}"
    save_character_tokenizer(tmp_path, "ab", template)
    loaded, chat = tokenizers_of_ours.load(tmp_path), [{"role": "user", "content": "a"}]
    assert [loaded.decode(loaded.apply_chat_template(chat, deep=x)) for x in (True, False)] == [
        "ab",
        "a",
    ]
    for name in ("documents", "eos_token", "tools"):
        with pytest.raises(ValueError, match=f"'{name}', which is set already"):
            loaded.apply_chat_template(chat, **{name: 1})


def test_ids_equal_transformers_over_conversations(chatml_folder):
    from transformers import AutoTokenizer

    ours = tokenizers_of_ours.load(chatml_folder)
    theirs = AutoTokenizer.from_pretrained(chatml_folder)
    rng = random.Random(1)
    for _ in range(100):
        messages, prompt = CHAT["conversation"](rng), rng.random() < 0.5
        ids = ours.apply_chat_template(messages, add_generation_prompt=prompt)
        text = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ids.count(1) == len(messages) + prompt  # <|im_start|> is one token a turn
        assert ours.decode(ids, skip_special=False) == text
        assert ours.encode(text) == ids


def test_end_tokens_come_from_tokenizer_and_generation_config(chatml_folder):
    assert tokenizers_of_ours.load(chatml_folder).eos_token_ids == (2, 0)


def test_no_template_is_an_error_with_a_mend(tmp_path):
    save_character_tokenizer(tmp_path, "ab")
    with pytest.raises(ValueError, match="chat_template.jinja"):
        tokenizers_of_ours.load(tmp_path).apply_chat_template([{"role": "user", "content": "a"}])


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="not downloaded"):
        tokenizers_of_ours.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="expected tokenizer.json"):
        tokenizers_of_ours.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read the tokenizer"):
        tokenizers_of_ours.load(tmp_path)


def test_vocabulary_mismatch_says_both_sizes(characters):
    tokenizers_of_ours.check_vocabulary(characters, tiny_config(characters.vocab_size))
    with pytest.raises(ValueError, match="vocab_size=20.*got ids up to"):
        tokenizers_of_ours.check_vocabulary(characters, tiny_config(20))


def with_template(folder, template):
    save_character_tokenizer(folder, "abcdefghij ", template)
    return tokenizers_of_ours.load(folder)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ raise_exception('\x1b[2J no system') }}", r"TemplateError: \\x1b\[2J no system"),
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{{ 'a' * 10**7 }}", "at most 4194304 characters, got 10000000"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_or_takes_too_much_is_a_value_error(template, message, tmp_path):
    loaded = with_template(tmp_path, template)
    with pytest.raises(ValueError, match=message):
        loaded.apply_chat_template([{"role": "user", "content": "a"}])


def test_endless_templates_are_killed_and_others_render(monkeypatch, tmp_path):
    renderer = chat_template.Renderer(deadline_s=1)
    monkeypatch.setattr(chat_template, "SHARED", renderer)
    bombs = {
        "{% set x = namespace(v=[1]) %}{% for i in range(40) %}{% set x.v = [x.v, x.v] %}"
        "{% endfor %}{{ x.v }}": "MemoryError|within 1 s",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": (
            "within 1 s and 1024 MiB"
        ),
    }
    fine = with_template(tmp_path / "fine", "{{ messages[0].content }}")
    try:
        for template, message in bombs.items():
            bomb = with_template(tmp_path / "bomb", template)
            with pytest.raises(ValueError, match=message):
                bomb.apply_chat_template([{"role": "user", "content": "a"}])
        renderer._deadline_s = 60
        assert fine.apply_chat_template([{"role": "user", "content": "ab"}]) == [3, 4]
    finally:
        renderer.close()


def test_rules_that_fail_are_a_value_error(tmp_path):
    save_character_tokenizer(tmp_path, "ab")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pattern"] = {"Regex": "(a+)+$"}  # backtracks without end
    path.write_text(json.dumps(content))
    loaded = tokenizers_of_ours.load(tmp_path)
    with pytest.raises(ValueError, match="cannot encode 'aaa.*PanicException"):
        loaded.encode("a" * 30 + "b")
    with pytest.raises(ValueError, match="surrogate pair"):
        loaded.encode("a\ud800")


def test_a_tokenizer_without_a_token_is_refused(tmp_path):
    save_character_tokenizer(tmp_path, "ab")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"] |= {"vocab": {}}
    content["added_tokens"] = []
    path.write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(ValueError, match="without any token"):
        tokenizers_of_ours.load(tmp_path)


# --- bytes of tokens ---


def byte_level():
    """A byte-level vocabulary: all bytes, a few pairs, and a special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ã", "©"), ("ð", "Ł")]
    vocabulary = {w: i for i, w in enumerate([*letters, *("".join(m) for m in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def metaspace():
    """Words with ▁ for a space, which is left out at the beginning, and bytes as <0xC3>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

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
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def character_backend(tmp_path):
    save_character_tokenizer(tmp_path, "abé \n")
    return tokenizers_of_ours.load(tmp_path).backend


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "characters"])
def test_the_bytes_of_a_text_s_tokens_are_the_text_s(kind, tmp_path):
    backend = {"byte_level": byte_level, "metaspace": metaspace}.get(
        kind, lambda: character_backend(tmp_path)
    )()
    words = tokenizers_of_ours.bytes_of_tokens(backend, len(backend.get_vocab()))
    text = "b a ab é" if kind == "characters" else "b a ab é 😀"
    ids = backend.encode(text, add_special_tokens=False)
    assert any(words.of(i) == b"\xf0\x9f" or words.of(i) == b"\xf0" for i in ids) == (
        kind != "characters"
    )
    # a space before the first word that a decoder strips is there
    assert b"".join(words.of(i) for i in ids).decode().lstrip() == text


def test_special_tokens_are_written_out():
    backend = byte_level()
    words = tokenizers_of_ours.bytes_of_tokens(backend, len(backend.get_vocab()))
    assert words.of(backend.eos_token_id) == b"<end>"


@pytest.mark.parametrize(
    ("text", "fewest"),
    [
        ("ab", 1),
        ("b", 1),  # inside a token
        ("abab", 2),
        ("babb", 3),  # the end of one token, a whole one, the start of another
        ("é", 2),
        ("éab", 3),
        ("x", None),
        ("abx", None),
    ],
)
def test_the_fewest_tokens_that_hold_a_text(text, fewest):
    pieces = [b"ab", b"bbb", "é".encode()[:1], "é".encode()[1:], b"", b"c"]
    starts = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    words = tokenizers_of_ours.TokenBytes(np.frombuffer(b"".join(pieces), np.uint8), starts)
    assert words.min_tokens(text) == fewest
