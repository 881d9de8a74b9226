"""Tokenizers in GGUF files: the ids of Hugging Face's own files, and refusals in a sentence."""

import itertools
import random
import runpy
from pathlib import Path

import gguf_by_hand as by_hand
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers

from policies.make.characters import save_character_tokenizer
from reprise.models.config import ModelConfig
from reprise.models.text import tokenizer

CHAT = runpy.run_path(str(Path(__file__).parents[2] / "golden" / "chat_cases.py"))
CONFIG = ModelConfig("llama", 300, 4, 1, 2, 1, 2, 4, tied_embeddings=True)
WORDS = by_hand.byte_vocabulary(CONFIG.vocab_size)
KEY = "tokenizer.ggml."


@pytest.fixture
def written(tmp_path):
    """Writes a file with the vocabulary, changed so; returns its path."""

    def write(name="a.gguf", **changes):
        metadata = WORDS | {KEY + key: value for key, value in changes.items()}
        by_hand.write(tmp_path / name, CONFIG, by_hand.random_weights(CONFIG), metadata=metadata)
        return tmp_path / name

    return write


def texts(seed, count):
    rng = random.Random(seed)
    ranges = [(32, 126), (9, 13), (48, 57), (0xA0, 0x24F), (0x300, 0x36F), (0x660, 0x669)]
    ranges += [(0x4E00, 0x4FFF), (0x1F600, 0x1F64F), (0x2000, 0x200F), (0xBC, 0xBE)]
    parts = [" ", "  ", "\n", "\n\n", "'s", "'LL", "the", " the", "1234567", "abab", "<|im_end|>"]
    for _ in range(count):
        some = [chr(rng.randint(*rng.choice(ranges))) for _ in range(6)] + rng.choices(parts, k=4)
        rng.shuffle(some)
        yield "".join(some)


def test_the_tokenizer_of_a_file(written):
    words = tokenizer.load(written())
    assert words.eos_token_ids == (2, 0)  # <|im_end|> by the metadata, <|endoftext|> by its name
    assert words.pad_token_id == 0
    assert words.vocab_size == 3 + 256 + 8  # rows of the embedding without a token are none
    assert words.decode(words.encode(" the abab 12\n\n")) == " the abab 12\n\n"
    ids = words.apply_chat_template([{"role": "user", "content": "the"}])
    assert ids.count(1) == 2 and ids.count(2) == 1
    assert words.decode(ids) == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"


def test_files_next_to_it_replace_an_unknown_tokenizer(written, tmp_path):
    (tmp_path / "known").mkdir()
    tokenizer.copy_files(written(), tmp_path / "known")
    path = written(pre="unheard-of")
    with pytest.raises(ValueError, match="and 'unheard-of'.* next to the file"):
        tokenizer.load(path)
    for file in (tmp_path / "known").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = tokenizer.load(path)
    assert words.encode(" the 12") == tokenizer.load(written("b.gguf")).encode(" the 12")
    assert words.eos_token_ids == (2, 0)
    (tmp_path / "out").mkdir()
    tokenizer.copy_files(path, tmp_path / "out")
    assert tokenizer.load(tmp_path / "out").encode(" the 12") == words.encode(" the 12")
    save_character_tokenizer(tmp_path, "abc")
    with pytest.raises(ValueError, match="to have its tokens, got .*copy the tokenizer.json of"):
        tokenizer.load(path)


def test_copied_files_load_the_same(written, tmp_path):
    path = written()
    (tmp_path / "folder").mkdir()
    tokenizer.copy_files(path, tmp_path / "folder")
    ours, copied = tokenizer.load(path), tokenizer.load(tmp_path / "folder")
    assert copied.specials == ours.specials
    for text in texts(seed=3, count=100):
        assert copied.encode(text) == ours.encode(text)
    rng = random.Random(1)
    for _ in range(50):
        messages, prompt = CHAT["conversation"](rng), rng.random() < 0.5
        ids = ours.apply_chat_template(messages, add_generation_prompt=prompt)
        assert ids == copied.apply_chat_template(messages, add_generation_prompt=prompt)


# What tokenizer.json of the models that bear the name says: SmolLM2, GPT-2, Qwen2.5, Llama 3.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern):
    from tokenizers import Regex

    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


THEIRS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "qwen2": split(QWEN2),
    "llama-bpe": split(LLAMA3),
}


@pytest.mark.parametrize("pre", THEIRS)
def test_text_is_cut_as_the_models_own_files_say(pre, written):
    theirs = pre_tokenizers.Sequence(THEIRS[pre])
    backend: Backend = tokenizer.load(written(pre=pre)).rules
    composed = isinstance(backend.normalizer, normalizers.NFC)
    assert composed == (pre == "qwen2")
    for text in texts(seed=2, count=300):
        assert backend.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
    others = [THEIRS[name] for name in THEIRS if name != pre]
    for other in others:  # the texts tell the rules apart
        sequence = pre_tokenizers.Sequence(other)
        assert any(
            sequence.pre_tokenize_str(text) != theirs.pre_tokenize_str(text)
            for text in texts(seed=2, count=300)
        )


def test_whole_texts_begin_as_the_file_says(written):
    def first(path):
        return tokenizer.load(path).rules.encode("the").ids[0] == 1

    assert first(written("a.gguf", pre="llama-bpe"))  # as Llama 3's own tokenizer does
    assert not first(written("b.gguf", pre="llama-bpe", add_bos_token=False))
    assert first(written("c.gguf", add_bos_token=True)) and not first(written("d.gguf"))
    assert tokenizer.load(written("c.gguf", add_bos_token=True)).encode("the")[0] != 1


TOKENS, TYPES = WORDS[KEY + "tokens"], WORDS[KEY + "token_type"]
REFUSED = {
    "another cut": (
        {"pre": "deepseek-llm"},
        "pre as one of gpt-2, .*got 'gpt2' and 'deepseek-llm'",
    ),
    "another kind": ({"model": "rwkv"}, "'gpt2' .*got 'rwkv' and .*next to the file"),
    "no scores": ({"model": "llama"}, "score for each of 300 tokens in .*scores, got None"),
    "a score of nothing": (
        {"model": "llama", "scores": [float("nan")] * 300},
        "finite score for each of 300",
    ),
    "a long piece": (
        {
            "model": "llama",
            "scores": [0.5] * 300,
            "tokens": [*TOKENS[:20], "a" * 200, *TOKENS[21:]],
        },
        "tokens of at most 128 characters, .* got 200",
    ),
    "no merges": ({"merges": None}, "merges as a list of texts, got None"),
    "an unknown merge": ({"merges": ["q q"]}, "all in the vocabulary, got 'q q'"),
    "a token twice": ({"tokens": TOKENS[:-1] + ["a"]}, "every token once, got 'a' twice"),
    "too few types": (
        {"token_type": TYPES[:-1]},
        "token_type as 300 whole numbers, .* and 291 more",
    ),
    "an id beyond": ({"eos_token_id": 300}, "eos_token_id below the 300 tokens .*got 300"),
    "an empty control": ({"tokens": ["", *TOKENS[1:]]}, "added tokens with a text"),
    "a template": ({"add_bos_token": "yes"}, "add_bos_token of type bool, got 'yes'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_or_unknown_tokenizer_is_refused(case, written):
    changes, message = REFUSED[case]
    path = written(**changes)
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# SentencePiece


def pieces(seed):
    """Tokens, types and scores: each piece is made of two others, and scores fall with its length.

    Characters and their bytes as Llama 2 has them; a space is ▁.
    """
    rng = random.Random(seed)
    texts = list("▁abcde1é\n")
    found = dict.fromkeys(texts)
    while len(found) < 60:
        found[rng.choice(list(found)) + rng.choice(list(found))] = None
    made = [text for text in found if text not in texts]
    rng.shuffle(made)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *made, *texts]
    types = [2, by_hand.CONTROL, by_hand.CONTROL] + [6] * 256 + [1] * (len(made) + len(texts))
    scores = [0.0] * 259 + [-float(i) for i in range(len(made) + len(texts))]
    return tokens, types, scores


def llama_cpp_ids(text, tokens, scores):
    """llama.cpp's own rule: the adjacent pair whose token has the highest score, leftmost first."""
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [a + b for a, b in itertools.pairwise(symbols)]
        known = [i for i, pair in enumerate(pairs) if pair in ids]
        if not known:
            break
        best = max(known, key=lambda i: (scores[ids[pairs[i]]], -i))
        symbols[best : best + 2] = [pairs[best]]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return found


@pytest.fixture
def sentencepiece(tmp_path):
    def write(seed, name="a.gguf", **changes):
        tokens, types, scores = pieces(seed)
        given = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": types}
        given |= {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
        metadata = {KEY + key: value for key, value in (given | changes).items()}
        config = ModelConfig("llama", len(tokens), 4, 1, 2, 1, 2, 4, tied_embeddings=True)
        path = tmp_path / name
        by_hand.write(path, config, by_hand.random_weights(config), metadata=metadata)
        return path, tokens, scores

    return write


@pytest.mark.parametrize("seed", range(3))
def test_sentencepiece_gives_the_ids_of_llama_cpp(seed, sentencepiece):
    path, tokens, scores = sentencepiece(seed)
    words, draw = tokenizer.load(path), random.Random(seed)
    assert words.eos_token_ids == (2,)
    longer = 0
    for _ in range(200):
        parts = [*"abcde1é漢🙂  \n\t", *(token.replace("▁", " ") for token in tokens[259:])]
        text = "".join(draw.choices(parts, k=draw.randint(1, 15)))
        expected = llama_cpp_ids(text, tokens, scores)
        assert words.encode(text) == expected
        assert words.decode(expected) == text
        longer += any(len(tokens[i]) > 2 for i in expected if i > 258)
    assert longer > 100  # tokens of several merges


def test_sentencepiece_begins_as_llama_2_does(sentencepiece):
    path, tokens, _ = sentencepiece(0)
    words = tokenizer.load(path)
    assert words.rules.encode("a").ids[0] == 1 and words.encode("a")[0] != 1
    assert words.encode("</s>a")[:1] == [2]
    path, _, _ = sentencepiece(0, "b.gguf", add_space_prefix=False, add_bos_token=False)
    words = tokenizer.load(path)
    assert words.rules.encode("a").ids == words.encode("a") == [tokens.index("a")]
    assert words.decode(words.encode(" a")) == " a"


def test_more_tokens_than_rows_do_not_fit(tmp_path):
    config = ModelConfig("llama", 200, 4, 1, 2, 1, 2, 4, tied_embeddings=True)
    metadata = by_hand.byte_vocabulary(0)
    path = tmp_path / "a.gguf"
    by_hand.write(path, config, by_hand.random_weights(config), metadata=metadata)
    from reprise.models.formats import hf

    with pytest.raises(ValueError, match="vocab_size=200, got ids up to 266"):
        tokenizer.check_vocabulary(tokenizer.load(path), hf.check(path))
