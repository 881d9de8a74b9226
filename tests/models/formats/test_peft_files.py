"""Adapters of peft: log-probs equal peft's, every other kind is refused by the entry's name.

The goldens in tests/golden/adapters were saved and computed by peft; see make_goldens.py.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from reprise.models.config import LoraShape, with_adapters
from reprise.models.decoder import lora, transformer
from reprise.models.formats import hf, peft_files

GOLDEN = Path(__file__).parents[2] / "golden"
BASE = GOLDEN / "qwen3_untied"
TARGETS = {"plain": ("attention", "mlp"), "rslora": ("attention",)}


def shape(name="plain", rank=4, alpha=8.0):
    config = hf.check(BASE)
    return dataclasses.replace(config, lora=LoraShape(rank, alpha, TARGETS[name]))


def edited(folder, name="plain", **changes):
    """Return a copy of a golden adapter with other entries in its adapter_config.json."""
    copy = Path(shutil.copytree(GOLDEN / "adapters" / name, folder / "adapter"))
    path = copy / peft_files.CONFIG
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))
    return copy


@pytest.mark.parametrize("name", ["plain", "rslora"])
@pytest.mark.parametrize("rank, alpha", [(4, 8.0), (6, 5.0)])
def test_log_probs_are_those_of_peft(name, rank, alpha):
    """Also in a policy of a larger rank and another scale, where A and B are filled with 0."""
    config = shape(name, rank, alpha)
    _, base = hf.load_pretrained(BASE, dtype=jnp.float32)
    adapter = peft_files.read(GOLDEN / "adapters" / name, config)
    params = with_adapters(base, adapter, config.lora)
    with np.load(GOLDEN / "adapters" / name / "golden.npz") as stored:
        tokens_BT, wanted = stored["tokens"], jax.nn.log_softmax(stored["logits"])
    with jax.default_matmul_precision("highest"):
        found = jax.nn.log_softmax(transformer.logits(config, params, tokens_BT))
        plain = jax.nn.log_softmax(transformer.logits(hf.check(BASE), base, tokens_BT))
    assert np.abs(found - wanted).max() < 1e-4
    assert np.abs(plain - wanted).max() > 0.1  # the adapter matters


def test_a_scale_is_read_by_hand(tmp_path):
    """B is multiplied by peft's scale over the policy's, in float64 here."""
    stored = load_file(GOLDEN / "adapters" / "rslora" / peft_files.WEIGHTS)
    up_OR = stored["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    for changes, scale in (({}, 6 / 2), ({"use_rslora": False}, 6 / 4), ({"lora_alpha": 3}, 3 / 2)):
        shutil.rmtree(tmp_path / "adapter", ignore_errors=True)
        read = peft_files.read(edited(tmp_path, "rslora", **changes), shape("rslora"))
        wanted = up_OR.astype(np.float64) * scale / (8.0 / 4)
        np.testing.assert_allclose(read.layers[0].query_QD.up_OR, wanted, rtol=1e-6)


KINDS = (
    *({"peft_type": "LOHA"}, {"peft_type": "absent"}, {"task_type": "SEQ_CLS"}, {"bias": "all"}),
    *({"bias": "lora_only"}, {"use_dora": True}, {"lora_bias": True}, {"fan_in_fan_out": True}),
    *({"alpha_pattern": {"q_proj": 64}}, {"rank_pattern": {"q_proj": 8}}, {"use_qalora": True}),
    *({"modules_to_save": ["lm_head"]}, {"exclude_modules": ["lm_head"]}, {"exclude_modules": "k"}),
    *({"layers_to_transform": [0]}, {"layers_to_transform": 0}, {"layers_pattern": ["layers"]}),
    *({"init_lora_weights": kind} for kind in ("pissa", "pissa_niter_4", "olora", "corda")),
    *({"init_lora_weights": kind} for kind in ("loftq", "lora_ga", "new", 1, None)),
    *({"loftq_config": {"loftq_bits": 4}}, {"corda_config": {"cache_file": None}}),
    *({"lora_ga_config": {"direction": "ArB2r"}}, {"velora_config": {"scale": 2.0}}),
    *({"megatron_config": {"layers": 2}}, {"layer_replication": [[0, 2], [1, 2]]}),
    *({"trainable_token_indices": [3]}, {"target_parameters": ["mlp.weight"]}),
    *({"alora_invocation_tokens": [1]}, {"arrow_config": {"top_k": 3}}, {"use_bdlora": {"n": 1}}),
    *({"kasa_config": {"beta": 1}}, {"monteclora_config": {"n": 1}}, {"ensure_weight_tying": True}),
    *({"of_a_later_peft": 2}, {"enable_lora": [True]}, {"use_dora": 0}, {"use_dora": "false"}),
)


@pytest.mark.parametrize("change", KINDS, ids=json.dumps)
def test_another_kind_is_refused_by_name(tmp_path, change):
    folder, (name,) = edited(tmp_path, **change), change
    with pytest.raises(ValueError, match=rf"adapter_config.json: expected {name} to be"):
        peft_files.read(folder, shape())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": "4"}, "expected r of 1 to 4, got '4'"),
        ({"r": True}, "expected r of 1 to 4, got True"),
        ({"r": 5}, r"got 5; fix: open the policy with a Policy.lora_rank of at least"),
        ({"lora_alpha": 0}, "expected lora_alpha above 0"),
        ({"lora_alpha": 10**400}, "expected lora_alpha above 0"),
        ({"lora_alpha": "absent"}, "expected lora_alpha above 0 and up to 1,000,000, got None"),
        ({"use_rslora": 1}, "expected use_rslora of true or false, got 1"),
        ({"target_modules": ["q_proj"]}, "target_modules to name the modules that have tensors"),
        ({"target_modules": None}, "target_modules .*got None"),
        ({"target_modules": r".*(q|k|v|o)_proj"}, "target_modules"),
        ({"target_modules": [7]}, "target_modules"),
        ({"target_modules": ["down_proj", "gate_proj", "lm_head"]}, "target_modules"),
        ({"target_modules": ["_proj"]}, "target_modules"),
    ],
)
def test_ranks_scales_and_modules_are_checked(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        peft_files.read(edited(tmp_path, **change), shape())


@pytest.mark.parametrize(
    "change",
    [
        {"target_modules": "all-linear"},
        {"lora_dropout": 0.3, "revision": "main", "inference_mode": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False, "of_a_later_peft": None, "another": False, "third": {}},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"target_modules": [f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qkvo"]
         + ["mlp.gate_proj", "1.mlp.up_proj", "0.mlp.up_proj", "down_proj"]},
    ],
)  # fmt: skip
def test_entries_that_change_no_product_are_accepted(tmp_path, change):
    wanted = peft_files.read(GOLDEN / "adapters" / "plain", shape())
    jax.tree.map(
        np.testing.assert_array_equal, peft_files.read(edited(tmp_path, **change), shape()), wanted
    )


def test_tensors_beside_the_adapters_are_refused(tmp_path):
    folder = edited(tmp_path)
    weights = load_file(folder / peft_files.WEIGHTS)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    save_file(weights | {name: np.ones(48, np.float32)}, folder / peft_files.WEIGHTS)
    with pytest.raises(ValueError, match="surplus: .*lora_magnitude_vector"):
        peft_files.read(folder, shape())


def test_a_scale_beyond_float32_is_refused(tmp_path):
    folder = edited(tmp_path, lora_alpha=1e6)
    weights = load_file(folder / peft_files.WEIGHTS)
    large = {name: x * np.float32(1e36) if "lora_B" in name else x for name, x in weights.items()}
    save_file(large, folder / peft_files.WEIGHTS)
    with pytest.raises(ValueError, match="leaves float32's range"):
        peft_files.read(folder, shape())


def test_ranks_that_are_zero_are_not_written(tmp_path):
    """The scale stays: the folder's own r and alpha have it, and it is read back bit for bit."""
    config = shape(rank=8, alpha=24.0)
    whole = lora.init(config, jax.random.key(0))
    whole = jax.tree.map(lambda x: x + 0.01, whole)
    for rank in (3, 8, 1):
        adapter = lora.cut_to(whole, rank, ("attention",))
        peft_files.write(tmp_path / "adapter", config, adapter, "base")
        content = json.loads((tmp_path / "adapter" / peft_files.CONFIG).read_text())
        assert (content["r"], content["lora_alpha"]) == (rank, 3.0 * rank)
        read = peft_files.read(tmp_path / "adapter", config)
        jax.tree.map(np.testing.assert_array_equal, read, adapter)
    nothing = lora.no_adapters(config, jnp.float32)
    peft_files.write(tmp_path / "adapter", config, nothing, "base")
    assert json.loads((tmp_path / "adapter" / peft_files.CONFIG).read_text())["r"] == 1


def test_the_base_of_an_adapter(tmp_path):
    assert peft_files.read_base(GOLDEN / "adapters" / "plain") == peft_files.Base("qwen3_untied")
    assert peft_files.read_base(edited(tmp_path, base_model_name_or_path=3)).name == "3"
    config = shape()
    adapter = lora.init(config, jax.random.key(0))
    peft_files.write(tmp_path / "adapter", config, adapter, "a/b", "0123")
    assert peft_files.read_base(tmp_path / "adapter") == peft_files.Base("a/b", "0123")
    peft_files.write(tmp_path / "adapter", config, adapter, "a/b")
    assert peft_files.read_base(tmp_path / "adapter") == peft_files.Base("a/b")
