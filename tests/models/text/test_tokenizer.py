"""Token ids match tokenizer.json; character tokenizers round-trip; errors say how to fix inputs."""

import dataclasses
import datetime
import json
import random
import runpy
from pathlib import Path

import pytest
from token_rules import byte_level, metaspace, normalizing, save, with_digits

from policies.make.characters import save_character_tokenizer
from reprise.models.config import ModelConfig
from reprise.models.text import chat_template
from reprise.models.text import tokenizer as tokenizers_of_ours

CHARACTERS = "abcdefghij 0123456789+-=*\n\té漢🙂"
CHARACTER_TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"

CHAT = runpy.run_path(str(Path(__file__).parents[2] / "golden" / "chat_cases.py"))


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
    # transformers chooses a class by config.json's model_type, and for qwen2 drops spaces here.
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
    for name in ("documents", "eos_token", "conversation"):
        with pytest.raises(ValueError, match=f"'{name}', which is set already"):
            loaded.apply_chat_template(chat, **{name: 1})


def test_tools_reach_a_chat_template_that_shows_them(tmp_path):
    chat = [{"role": "user", "content": "a"}]
    for template, fails in (("{{ tools[0].name }}", False), ("{{ messages[0].content }}", True)):
        save_character_tokenizer(tmp_path, "ab", template)
        loaded = tokenizers_of_ours.load(tmp_path)
        if fails:
            with pytest.raises(ValueError, match="expected a chat template that shows tools"):
                loaded.apply_chat_template(chat, tools=[{"name": "b"}])
        else:
            ids = loaded.apply_chat_template(chat, tools=[{"name": "b"}])
            assert loaded.decode(ids) == "b"


def test_ids_of_conversations_are_those_of_the_file(chatml_folder):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    ours = tokenizers_of_ours.load(chatml_folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(chatml_folder)
    file = Tokenizer.from_file(str(chatml_folder / "tokenizer.json"))
    rng = random.Random(1)
    for _ in range(100):
        messages, prompt = CHAT["conversation"](rng), rng.random() < 0.5
        ids = ours.apply_chat_template(messages, add_generation_prompt=prompt)
        text = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert ids == file.encode(text, add_special_tokens=False).ids
        assert ids.count(1) == len(messages) + prompt  # <|im_start|> is one token a turn
        assert ours.decode(ids, skip_ends=False) == text
        assert ours.encode(text) == ids


def test_texts_in_the_chat_template_are_known(chatml_folder, characters):
    chatml = tokenizers_of_ours.load(chatml_folder)
    assert {"<|im_start|>", "<|im_end|>"} <= chatml.chat_marks
    chat = [{"role": "user", "content": "2+3"}]
    ids = [chatml.apply_chat_template(chat, add_generation_prompt=x) for x in (False, True)]
    asked, prompt = (chatml.decode(one, skip_ends=False) for one in ids)
    assert chatml.is_rendered(prompt) and chatml.is_rendered(prompt.rstrip())
    for text in (asked, f"{prompt}5", f"2+3 {prompt}", "2+3", ""):
        assert not chatml.is_rendered(text)
    assert characters.chat_marks == {"<eos>"} and not characters.is_rendered("a\n")


@pytest.mark.parametrize("is_special", [True, False])
def test_marks_are_the_tokens_around_turns(tmp_path, is_special):
    """DeepSeek's marks are added tokens, but not special ones; <think> is for messages too."""
    turn = "{% if m.role == 'user' %}<U>{{ m.content }}{% endif %}"
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}{{# <think> #}}"
    template += "{% if add_generation_prompt %}<A>{% endif %}"
    save_character_tokenizer(tmp_path, "ab<>UAthink? ", template)
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    first, number = rules["added_tokens"][0], len(rules["model"]["vocab"])
    for i, (text, special) in enumerate([("<U>", is_special), ("<A>", True), ("<think>", False)]):
        rules["added_tokens"] += [{**first, "id": number + i, "content": text, "special": special}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    words = tokenizers_of_ours.load(tmp_path)
    assert {"<U>", "<A>"} <= words.chat_marks and "<think>" not in words.chat_marks
    assert words.is_rendered("<U>ab<A>") and not words.is_rendered("<U>ab<A>b")


def test_a_template_that_refuses_the_example_still_has_marks(tmp_path):
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}<eos>"
    save_character_tokenizer(tmp_path, "ab", template)
    words = tokenizers_of_ours.load(tmp_path)
    assert "<eos>" in words.chat_marks and not words.is_rendered("<eos>a")


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


# --- rules of files ---


TEXTS = (
    *("What is 1234567 plus 98?\n", "12", " 2024", "world's", "a\n\n  b", "e\u0301", "", "ab ab"),
    *("<think> x </think>", "x <tool> ab  <end>y", "é😀", "  lead", "<|end|>", "Ａb"),
)
CLASSES = (
    *("GPT2Tokenizer", "LlamaTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "GemmaTokenizer"),
    *("T5TokenizerFast", "NoSuchTokenizer", "PreTrainedTokenizerFast", None),
)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("make", [byte_level, metaspace, with_digits, normalizing])
def test_ids_are_those_of_the_file_whatever_class_is_named(make, name, tmp_path):
    from tokenizers import Tokenizer

    named = {} if name is None else {"tokenizer_class": name}
    backend = make()
    backend.add_special_tokens(["<end>"])
    folder = save(tmp_path, backend, **named, eos_token="<end>", pad_token="[PAD]")
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    ours, file = tokenizers_of_ours.load(folder), Tokenizer.from_file(f"{folder}/tokenizer.json")
    file.no_truncation()
    assert ours.vocabulary == file.get_vocab() and ours.pad_token_id is None
    for text in TEXTS:
        ids = file.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_ends=False) == file.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("around", "settings", "first"),
    [
        (["<s>", "$A"], {}, ["<s>"]),
        (["<s>", "$A", "<end>"], {}, ["<s>"]),  # nothing after an end token
        (["$A", "<end>"], {}, []),
        (["<s>", "<s>", "$A"], {}, ["<s>", "<s>"]),
        (["$A"], {"add_bos_token": True}, ["<s>"]),
        (["<s>", "$A"], {"add_bos_token": False}, []),
        (["<s>", "$A"], {"add_bos_token": True}, ["<s>"]),
        (None, {}, []),
    ],
)
def test_a_prompt_begins_as_the_tokenizer_s_own_call_begins_once(around, settings, first, tmp_path):
    from tokenizers import processors

    backend = byte_level()
    backend.add_special_tokens(["<s>"])
    if around is not None:
        specials = [(x, backend.token_to_id(x)) for x in ("<s>", "<end>")]
        backend.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=specials
        )
    folder = save(tmp_path, backend, bos_token="<s>", eos_token="<end>", **settings)
    ours = tokenizers_of_ours.load(folder)
    first = [backend.token_to_id(x) for x in first]
    for text in ("ab ab", "12", "a<end>b"):
        assert ours.encode_prompt(text) == [*first, *ours.encode(text)]
        assert ours.rules.encode(text).ids[: len(first)] == first
    begun = "<s>" * len(first) + "ab"
    assert ours.encode_prompt(begun) == ours.encode(begun) == [*first, *ours.encode("ab")]
    assert ours.encode_prompt("") == []


def test_all_special_tokens_but_the_end_are_in_the_text(tmp_path):
    backend = byte_level()
    backend.add_special_tokens(["<think>", "#", "<pad>", "<unk>", "<turn>"])
    folder = save(
        tmp_path, backend, eos_token={"content": "<end>"}, pad_token="<pad>", unk_token="<unk>"
    )
    turn = backend.token_to_id("<turn>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [turn]}))
    ours = tokenizers_of_ours.load(folder)
    text = "<think>a<pad>b<unk># é<turn>c<pad><end>"
    ids = ours.encode(f"{text}<turn>")
    assert ours.decode(ids) == text
    assert ours.decode(ids[:-1]) == text.removesuffix("<end>")
    assert ours.decode(ids[:-2]) == text.removesuffix("<end>")  # cut off: it ends in padding
    assert ours.decode(ids, skip_ends=False) == f"{text}<turn>"
    assert ours.decode([*ids, *ours.encode("漢")[:1]]) == f"{text}<turn>\ufffd"
    assert ours.decode([]) == ""


def test_ids_without_a_token_are_named_but_for_ends(tmp_path):
    backend = with_digits()  # the id of "12" is above 10,000, all others are below 300
    ours = tokenizers_of_ours.load(save(tmp_path, backend, eos_token="<end>"))
    top, end = ours.vocabulary["12"], ours.vocabulary["<end>"]
    config = dataclasses.replace(tiny_config(top + 9), eos_token_ids=(top + 4,))
    found = tokenizers_of_ours.fitted(config, ours)
    assert found.eos_token_ids == (top + 4, end)
    unused = {i for start, stop in found.unused_ids for i in range(start, stop)}
    assert unused == set(range(top + 9)) - {*ours.vocabulary.values(), top + 4}
    assert found.unused_ids[-2:] == ((top + 1, top + 4), (top + 5, top + 9))
    whole = tokenizers_of_ours.load("policies/tiny")
    assert tokenizers_of_ours.fitted(tiny_config(whole.vocab_size), whole).unused_ids == ()


def test_templates_print_the_day_of_the_run(tmp_path):
    template = "{{ strftime_now('%d %b %Y, %H:%M') }} {{ messages[0].content }}"
    save_character_tokenizer(tmp_path, "abcdefghij 0123456789,:DeNov", template)
    loaded = dataclasses.replace(tokenizers_of_ours.load(tmp_path), day=datetime.date(2025, 11, 9))
    ids = loaded.apply_chat_template([{"role": "user", "content": "ab"}])
    assert loaded.decode(ids) == "09 Nov 2025, 00:00 ab"


def test_another_template_takes_the_place_of_the_copied_one(tmp_path):
    save_character_tokenizer(tmp_path / "from", "ab", "{{ 'a' }}")
    (tmp_path / "to").mkdir()
    tokenizers_of_ours.copy_files(tmp_path / "from", tmp_path / "to", "{{ 'b' }}")
    assert tokenizers_of_ours.load(tmp_path / "to").chat_template == "{{ 'b' }}"
    assert "chat_template" not in (tmp_path / "to" / "tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}], "named default, got .*'rag'.*Task.chat_template"),
        (5, "the text of a chat template, got 5"),
        (0, "the text of a chat template, got 0"),
    ],
)
def test_of_several_templates_the_default_one_counts(template, found, tmp_path):
    folder = save(tmp_path, byte_level(), chat_template=template)
    if found == "d":
        assert tokenizers_of_ours.load(folder).chat_template == found
        return
    with pytest.raises(ValueError, match=found):
        tokenizers_of_ours.load(folder)


def test_a_folder_of_another_kind_of_vocabulary_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    with pytest.raises(FileNotFoundError, match="expected tokenizer.json.*save_pretrained"):
        tokenizers_of_ours.load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"eos_token": "<ent>"}, "expected eos_token as a token of tokenizer.json, got '<ent>'"),
        ({"bos_token": "<s>"}, "expected bos_token as a token of tokenizer.json, got '<s>'"),
        ({"eos__token": "<end>"}, "tokenizer_config.json: expected eos_token, got eos__token"),
        ({"eos_token": 0}, "expected eos_token as the text of a token, got 0"),
        ({"eos_token": {}}, "expected eos_token as the text of a token, got {}"),
        ({"add_bos_token": "false"}, "expected add_bos_token as true or false, got 'false'"),
    ],
)
def test_special_tokens_that_none_can_be_are_refused(settings, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        tokenizers_of_ours.load(save(tmp_path, byte_level(), **settings))
