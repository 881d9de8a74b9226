"""Hostile folders of policies and of drafters: wrong entries, lying headers, bombs, code, links."""

from __future__ import annotations

import difflib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reprise.rl.settings.inputs import open_policy
from reprise.spec.eagle import files as eagle_files
from tests.hostile.config_cases import change, check
from tests.hostile.watch import CANARY, Case, Wrong

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1.5, 10**9, 10**18, 10**400),
    *(float("nan"), float("inf"), -1e308, 1e-320),
    *("", "x", "false", "\x1b[2J", "\ud800", [], [{}], [[]], {}, {"a": []}, [None], ["x"] * 3),
    *([10**9], {"rope_type": "llama3"}, {"rope_type": [], "rope_theta": "x"}, "x" * 10_000),
)  # fmt: skip
CONFIG_KEYS = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "rope_theta"),
    *("rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "use_sliding_window"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "layer_types", "quantization_config"),
    *("partial_rotary_factor", "dtype", "torch_dtype", "auto_map", "tokenizer_class"),
)
DRAFTER_KEYS = (
    *("eagle_config", "draft_vocab_size", "bias", "reprise", "target_hidden_size", "is_causal"),
    *("eagle_aux_hidden_state_layer_ids", "logit_scale"),
)
TEMPLATES = (
    "{{ 'a' * 10**10 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ ().__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch ../" + CANARY + "') }}",
    "{{ messages.append.__self__.__class__.__mro__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '%s' % messages.__class__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('true') }}",
    "{% for",
    "{{ raise_exception('\x1b[2J') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ lipsum(n=10**7) }}",
    "{{ 1 / 0 }}",
    "{{ undefined.a.b }}",
    "{% set x = namespace(v=[1]) %}{% for i in range(60) %}{% set x.v = [x.v, x.v] %}{% endfor %}"
    "{{ x.v }}",
    "",
    "\ud800",
)
EVIL = f"import os; os.system('touch ../{CANARY}')\n"
Edit = Callable[[Path], object]


def edit_json(path: Path, change_it: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    change_it(content)
    path.write_text(json.dumps(content))


def entry(file: str, key: str, value: Any) -> Edit:
    return lambda folder: edit_json(folder / file, lambda content: content.update({key: value}))


def with_template(template: str) -> Edit:
    return entry("tokenizer_config.json", "chat_template", template)


def with_pattern(pattern: str) -> Edit:
    def spoil(content: dict) -> None:
        content["pre_tokenizer"]["pattern"] = {"Regex": pattern}

    return lambda folder: edit_json(folder / "tokenizer.json", spoil)


def write(file: str, content: bytes | str) -> Edit:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / file).write_bytes(data)


def header(change_it: Callable[[dict], object], length: int | None = None) -> Edit:
    """The header of the weights as `change_it` leaves it, with a length that may lie."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        content = json.loads(data[8 : 8 + size])
        change_it(content)
        text = json.dumps(content).encode()
        claimed = len(text) if length is None else length
        path.write_bytes(claimed.to_bytes(8, "little") + text + data[8 + size :])

    return edit


def link(file: str, target: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.symlink(target, folder / file)

    return edit


def by_hand() -> Iterator[tuple[str, Edit, bool]]:
    """(name, what is done to a copy of a good folder, whether it must be refused)."""
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    for layers in (10**6, 10**9, 2**31, 10**18):
        yield f"{layers} layers", entry("config.json", "num_hidden_layers", layers), True
    for file in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        for name, text in {"deep": deep, "list": "[]", "empty": "", "bytes": b"\xff\xfe"}.items():
            only_read = file != "model.safetensors.index.json"
            yield f"{file} {name}", write(file, text), only_read
    for value in (5, None, [], {}, "..", "/dev/zero", "a\0b", "../model.safetensors", "\ud800"):
        index = json.dumps({"weight_map": {"model.norm.weight": value}})

        def only_index(folder: Path, index: str = index) -> None:
            (folder / "model.safetensors").unlink()
            (folder / "model.safetensors.index.json").write_text(index)

        yield f"weight_map to {value!r}", only_index, True
    for length in (0, 1, 10**9, 2**63, 2**64 - 1):
        yield f"a header of {length} bytes", header(lambda c: None, length), True
    yield "a tensor with terminal codes", header(lambda c: c.update({"\x1b[2J": _tensor()})), True
    yield "a tensor of a huge shape", header(_huge), True
    yield "weights of zeros without end", link("model.safetensors", "/dev/zero"), True
    yield "a link to nowhere", link("model.safetensors", "nowhere"), True
    yield "config.json linked to a device", link("config.json", "/dev/zero"), True
    for name in (
        "pytorch_model.bin",
        "model.pkl",
        "modeling_x.py",
        "tokenization_x.py",
        "setup.py",
    ):
        yield f"{name} beside", write(name, EVIL), False
    module = f"{CANARY}--modeling.Model"
    for file in ("config.json", "tokenizer_config.json"):
        yield (
            f"auto_map in {file}",
            entry(file, "auto_map", {"AutoTokenizer": [module, module]}),
            False,
        )


def _tensor() -> dict:
    return {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def _huge(content: dict) -> None:
    next(iter(content.values()))["shape"] = [2**40, 2**40]


def tokenizers() -> Iterator[tuple[str, Edit, bool]]:
    for template in TEMPLATES:
        yield f"template {template[:40]!r}", with_template(template), False
    for pattern in ("(a+)+$", "((1+)+)+=", "((", "[^\\s\\S]", "(?=(1+))\\1=", ""):
        yield f"pattern {pattern!r}", with_pattern(pattern), False
    for value in ({}, {"a": 2**40}, {"a": -1}, [], None, {"": 0}):

        def spoil(content: dict, value: Any = value) -> None:
            content["model"]["vocab"] = value

        yield f"vocabulary {value!r}", lambda f, s=spoil: edit_json(f / "tokenizer.json", s), False
    for name in ("os.system", "../x", f"{CANARY}.Tokenizer", 5, None, [], "LlamaTokenizer"):
        edit = entry("tokenizer_config.json", "tokenizer_class", name)
        yield f"tokenizer_class {name!r}", edit, False


def entries(
    file: str, keys: tuple[str, ...], draw: random.Random
) -> Iterator[tuple[str, Edit, bool]]:
    while True:
        key, value = draw.choice(keys), draw.choice(VALUES)
        yield f"{file}: {key} = {str(value)[:40]!r}", entry(file, key, value), False


def damage(files: tuple[str, ...], draw: random.Random) -> Iterator[tuple[str, Edit, bool]]:
    """Files with random damage, the head of the weights more often than the rest."""
    while True:
        file, seed = draw.choice(files), draw.random()

        def edit(folder: Path, file: str = file, seed: float = seed) -> None:
            path = folder / file
            data = path.read_bytes()
            head = 200 if file.endswith(".safetensors") else len(data)
            path.write_bytes(change(data[:head], random.Random(seed)) + data[head:])

        yield f"{file} damaged", edit, False


# --- another reading than the good folder's ----------------------------------------------


def is_explained(good: Any, ours: Any) -> bool:
    """Return whether JSON may be meant: values are of the good one's kinds, and names not misspelt.

    A value that is absent or null has its default, which is documented, also if a cut removed it.
    """
    if good is None or ours is None:
        return True
    if isinstance(good, dict) and isinstance(ours, dict):
        lost = good.keys() - ours.keys()
        known = {*good, *CONFIG_KEYS, *DRAFTER_KEYS}
        misspelt = any(difflib.get_close_matches(k, lost, 1, 0.9) for k in ours.keys() - known)
        return not misspelt and all(is_explained(good.get(k), ours[k]) for k in ours)
    number = type(good) in (int, float) and type(ours) in (int, float)
    return number or type(good) is type(ours)


def compare(good: Path, ours: Path, reading: Callable[[Path], Any]) -> None:
    """Raise Wrong if a folder reads as another than the good one for no reason that it gives."""
    if reading(ours) == reading(good):
        return
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        if (good / name).is_file() and (ours / name).is_file():
            content = json.loads((ours / name).read_text())
            if not is_explained(json.loads((good / name).read_text()), content):
                raise Wrong(f"{name} is read as something else: {content}"[:300])


def policy_reading(folder: Path) -> tuple[Any, ...]:
    _, model, words = open_policy(str(folder))
    ids = words.encode_prompt("1+1=2")
    return model, words.eos_token_ids, words.specials, words.chat_template, ids, words.decode(ids)


def policy_case(name: str, edit: Edit, refused: bool, tiny: Path) -> Case:
    good = tiny.parent / "policy"

    def run(folder: Path) -> None:
        policy = Path(shutil.copytree(good, folder / "policy"))
        edit(policy)
        check(tiny, f"Policy.directory={str(policy)!r}")
        compare(good, policy, policy_reading)

    return Case(f"policy: {name}", run, refused)


LEARNED = ("Speculation.sources=('learned',)", "Speculation.budget='fixed:3'", "Engine.max_nodes=4")


def drafter_case(name: str, edit: Edit, refused: bool, tiny: Path, drafter: Path) -> Case:
    def run(folder: Path) -> None:
        ours = Path(shutil.copytree(drafter, folder / "drafter"))
        edit(ours)
        model = check(tiny, *LEARNED, f"Drafter.directory={str(ours)!r}").model
        compare(drafter, ours, lambda folder: eagle_files.check(folder, model))

    return Case(f"drafter: {name}", run, refused)
