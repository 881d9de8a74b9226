"""Hugging Face folders: logits equal transformers', round trips are exact, errors name the thing.

The goldens in tests/golden were computed by transformers; see make_goldens.py.
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

from reprise.models.config import Llama3RopeScaling, MeshConfig, ModelConfig
from reprise.models.config import num_params as count_params
from reprise.models.decoder import transformer
from reprise.models.formats import hf, hf_files
from reprise.models.sharding import make_mesh

LOGITS = jax.jit(transformer.logits, static_argnums=0)
GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("*.npz"))
LLAMA3 = Llama3RopeScaling(8.0, 1.0, 4.0, 16)


@pytest.fixture(autouse=True)
def full_precision():
    # Accelerators multiply float32 in fewer bits unless told otherwise.
    with jax.default_matmul_precision("highest"):
        yield


def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as stored:
        return stored["tokens"], stored["logits"]


def copy_of(name, folder):
    return Path(shutil.copytree(GOLDEN / name, folder / name))


def edit_config(folder, **changes):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def assert_same(got, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True),
        got,
        expected,
    )


def test_the_goldens_cover_what_is_supported():
    configs = [hf.check(GOLDEN / name) for name in CASES]
    assert {(c.architecture, c.tied_embeddings) for c in configs} == {
        (a, tied) for a in ("llama", "qwen2", "qwen3") for tied in (False, True)
    }
    assert sum(c.head_dim != c.d_model // c.num_heads for c in configs) >= 3
    assert (GOLDEN / "qwen2_untied" / hf_files.INDEX).is_file()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name):
    tokens, expected = golden(name)
    config, params = hf.load_pretrained(GOLDEN / name, dtype=jnp.float32)
    got = LOGITS(config, params, tokens)
    assert np.abs(np.asarray(got) - expected).max() <= 1e-4


def test_config_of_a_folder():
    assert hf.check(GOLDEN / "llama3_untied") == ModelConfig(
        architecture="llama",
        vocab_size=64,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_ff=40,
        rope_theta=10_000.0,
        rope_scaling=LLAMA3,
        norm_eps=1e-5,
        max_positions=128,
        bos_token_id=1,
        eos_token_ids=(2, 3),
    )
    assert hf.check(GOLDEN / "qwen2_tied").qkv_bias
    assert hf.check(GOLDEN / "qwen3_tied").qk_norm


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("max_shard_bytes", [2_000_000_000, 20_000])
def test_saving_and_loading_again_is_bitwise_equal(name, max_shard_bytes, tmp_path):
    config, params = hf.load_pretrained(GOLDEN / name)
    hf.save_pretrained(tmp_path / "out", config, params, max_shard_bytes=max_shard_bytes)
    again_config, again = hf.load_pretrained(tmp_path / "out")
    assert again_config == config
    assert_same(again, params)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_bytes == 20_000)
    assert (len(files) > 1) == (tmp_path / "out" / hf_files.INDEX).is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]  # no temporary folder left
    assert {p.stat().st_mode for p in files} == {(tmp_path / "out/config.json").stat().st_mode}
    # The same names and numbers as transformers wrote, in whatever files they lie.
    theirs = {k: v for p in (GOLDEN / name).glob("*.safetensors") for k, v in load_file(p).items()}
    ours = {k: v for p in files for k, v in load_file(p).items()}
    assert_same(ours, theirs)


def test_old_form_of_config_reads_the_same(tmp_path):
    folder = copy_of("llama3_untied", tmp_path)
    rope = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    absent = dict.fromkeys(("rope_parameters", "dtype", "head_dim", "architectures"), "absent")
    edit_config(folder, **absent, torch_dtype="float32", rope_theta=10_000, rope_scaling=rope)
    config, params = hf.load_pretrained(folder)
    assert config == hf.check(GOLDEN / "llama3_untied")
    hf.save_pretrained(tmp_path / "out", config, params)  # both forms are written
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["dtype"] == saved["torch_dtype"] == "float32"
    assert saved["rope_theta"] == saved["rope_parameters"]["rope_theta"] == 10_000.0
    assert saved["rope_scaling"]["rope_type"] == saved["rope_parameters"]["rope_type"] == "llama3"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 3]}


def test_end_tokens_of_generation_config_go_first(tmp_path):
    folder = copy_of("qwen3_tied", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6], "pad_token_id": 7}')
    config = hf.check(folder)
    assert config.eos_token_ids == (5, 6)
    assert config.pad_token_id == 7
    (folder / "generation_config.json").unlink()
    assert hf.check(folder).eos_token_ids == (2,)


def test_dtype_casts_every_tensor():
    _, params = hf.load_pretrained(GOLDEN / "qwen2_tied")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    _, wide = hf.load_pretrained(GOLDEN / "qwen2_tied", dtype=jnp.float32)
    assert_same(wide, jax.tree.map(lambda x: x.astype(jnp.float32), params))


def test_a_tensor_that_is_split_over_devices_is_read_in_parts(monkeypatch):
    whole, read_tensor = [], hf_files.Stored.read
    expected = hf.load_pretrained(GOLDEN / "qwen2_untied")[1]

    def noted(stored, file):
        whole.append(stored.name)
        return read_tensor(stored, file)

    monkeypatch.setattr(hf_files.Stored, "read", noted)
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    params = hf.load_pretrained(GOLDEN / "qwen2_untied", mesh)[1]
    assert_same(params, expected)
    leaves = jax.tree.leaves(params)
    kept_whole = [x for x in leaves if x.is_fully_replicated]
    assert 0 < len(whole) == len(kept_whole) < len(leaves)  # and once for all devices


def test_saving_over_a_folder_keeps_its_tokenizer_and_drops_stale_weights(tmp_path):
    config, params = hf.load_pretrained(GOLDEN / "qwen3_tied")
    out = tmp_path / "deep" / "out"
    hf.save_pretrained(out, config, params, max_shard_bytes=20_000)
    (out / "tokenizer.json").write_text("{}")
    hf.save_pretrained(out, config, params)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_a_save_that_fails_leaves_the_old_policy(tmp_path, monkeypatch):
    config, params = hf.load_pretrained(GOLDEN / "qwen3_tied")
    hf.save_pretrained(tmp_path / "out", config, params)

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(hf_files, "write_json", full)
    with pytest.raises(OSError, match="disk full"):
        hf.save_pretrained(tmp_path / "out", config, jax.tree.map(jnp.zeros_like, params))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert_same(hf.load_pretrained(tmp_path / "out")[1], params)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_that_are_not_finite_are_neither_read_nor_written(
    tmp_path, monkeypatch, dtype, value
):
    config, params = hf.load_pretrained(GOLDEN / CASES[0], dtype=jnp.dtype(dtype))
    bad = dataclasses.replace(params, final_norm_D=params.final_norm_D.at[-1].set(value))
    hf.save_pretrained(tmp_path, config, params)
    hf.load_pretrained(tmp_path)
    with pytest.raises(hf_files.WeightsError, match="model.norm.weight has values that are not"):
        hf.save_pretrained(tmp_path, config, bad)
    with monkeypatch.context() as patch:
        patch.setattr(hf_files, "finite", lambda array, name: array)
        hf.save_pretrained(tmp_path, config, bad)
    with pytest.raises(hf_files.WeightsError, match="safetensors: model.norm.weight has values"):
        hf.load_pretrained(tmp_path)


def test_rounding_to_infinity_is_not_written(tmp_path):
    config, params = hf.load_pretrained(GOLDEN / CASES[0], dtype=jnp.float32)
    large = dataclasses.replace(params, final_norm_D=params.final_norm_D.at[0].set(3.4e38))
    (tmp_path / "a").mkdir()
    hf.write_into(tmp_path / "a", config, large)
    (tmp_path / "b").mkdir()
    with pytest.raises(hf_files.WeightsError, match="not finite"):
        hf.write_into(tmp_path / "b", config, large, dtype="bfloat16")


def test_parameters_that_do_not_fit_are_not_saved(tmp_path):
    config, params = hf.load_pretrained(GOLDEN / "qwen3_tied")
    other, _ = hf.load_pretrained(GOLDEN / "qwen3_untied")
    with pytest.raises(ValueError, match="expected 25 tensors"):
        hf.save_pretrained(tmp_path / "out", other, params)
    wide = dataclasses.replace(params, final_norm_D=jnp.ones(33))
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \[33\], expected \[32\]"):
        hf.save_pretrained(tmp_path / "out", config, wide)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has qkv_bias=False"):
        hf.render_config(dataclasses.replace(config, qkv_bias=True), "float32")


# What the config.json of published models says, as far as it matters here.
PUBLISHED = {
    "Llama-3.2-1B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "Qwen2.5-0.5B-Instruct": {
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 21,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.mark.parametrize(
    ("name", "head_dim", "num_params"),
    [  # counts by the models' cards: 1.24B, 0.49B; Qwen3: tests/rl/preflight/test_command.py
        ("Llama-3.2-1B-Instruct", 64, 1_235_814_400),
        ("Qwen2.5-0.5B-Instruct", 64, 494_032_768),
    ],
)
def test_published_configs_are_read(name, head_dim, num_params):
    config = hf.parse_config(PUBLISHED[name], {}, name)
    assert config.head_dim == head_dim
    assert count_params(config) == num_params
    rendered, generation = hf.render_config(config, "bfloat16")
    assert hf.parse_config(rendered, generation, name) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "unknown architecture.*MixtralForCausalLM"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "unknown rope type.*'linear'"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor.*None"),
        ({"rope_scaling": {"rope_typ": "llama3"}}, "of type default, .* got .*'rope_typ'"),
        ({"rope_scaling": {"factor": 8.0}}, "of type default, .* got .*'factor'"),
        ({"rope_scaling": ""}, "the rope parameters as an object, got ''"),
        ({"rope_parameters": []}, "the rope parameters as an object, got \\[\\]"),
        ({"layer_types": 0}, "layer_types=0 .expected 'full_attention'"),
        ({"architectures": ""}, "unknown architecture"),
        (
            {"rms_norm_eps": "absent", "rms_norm_epz": 1e-5},
            "expected rms_norm_eps, got rms_norm_epz",
        ),
        ({"use_slidingwindow": True}, "expected use_sliding_window, got use_slidingwindow"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": "absent"}, "hidden_size.*None"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers.*'two'"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads=3"),
        ({"architectures": [{}]}, r"unknown architecture.*\[\{\}\]"),
        ({"bos_token_id": [1]}, r"bos_token_id as a token id or null, got \[1\]"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings as true or false, .* got 'false'"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps.*got 1000"),
        ({"rope_scaling": {"rope_theta": float("nan")}}, "rope_theta.*got nan"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                }
            },
            "low_freq_factor is not below high",
        ),
        ({"head_dim": 0}, "head_dim as a whole number from 1 to 2147483647, got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers of at most the 21 tensors"),
        ({"hidden_act": "\x1b[2J" + "a" * 10**6}, r"hidden_act='\\x1b\[2Ja+… \(1000"),
    ],
)
def test_unsupported_configs_are_named(changes, message, tmp_path):
    folder = copy_of("llama3_untied", tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        hf.check(folder)


@pytest.mark.parametrize("ids", [1.5, [True], {}, "x"])
def test_end_tokens_are_token_ids(ids, tmp_path):
    folder = copy_of("llama3_untied", tmp_path)
    edit_config(folder, eos_token_id=ids)
    (folder / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="eos_token_id as a number or a list"):
        hf.check(folder)


def test_qwen_must_say_its_kv_heads(tmp_path):
    folder = copy_of("qwen3_untied", tmp_path)
    edit_config(folder, num_key_value_heads="absent")
    with pytest.raises(ValueError, match="num_key_value_heads"):
        hf.check(folder)


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path):
    folder = copy_of("llama3_untied", tmp_path)

    def spoil(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
        tensors["model.norm.weight"] = np.ones(31, np.float32)
        tensors["model.layers.0.input_layernorm.weight"] = np.ones(32, np.int8)

    edit_weights(folder, spoil)
    with pytest.raises(ValueError) as caught:
        hf.load_pretrained(folder)
    message = str(caught.value)
    assert "missing tensor: model.layers.1.mlp.up_proj.weight" in message
    assert "surplus: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.norm.weight has shape [31], expected [32]" in message
    assert "input_layernorm.weight is of type I8, expected one of F32" in message


def test_a_tied_folder_may_repeat_its_embedding_as_the_head(tmp_path):
    folder = copy_of("llama3_tied", tmp_path)
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    config, params = hf.load_pretrained(folder)  # a duplicate is tolerated
    assert config.tied_embeddings and params.head_VD is None
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings=false to use it"):
        hf.load_pretrained(folder)
    edit_config(folder, tie_word_embeddings=False)
    assert hf.load_pretrained(folder)[1].head_VD is not None
    edit_weights(folder, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="missing tensor: lm_head.weight; set tie_word_embeddings"):
        hf.check(folder)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="not downloaded"):
        hf.check(tmp_path / "Qwen" / "Qwen3-0.6B")
    with pytest.raises(FileNotFoundError, match="no config.json"):
        hf.check(tmp_path)
    folder = copy_of("qwen2_untied", tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003.safetensors, which is not"):
        hf.check(folder)
    (folder / hf_files.INDEX).unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="model.safetensors or .*torch files .pytorch_mode"):
        hf.check(folder)


def test_damaged_files_are_named(tmp_path):
    folder = copy_of("qwen3_tied", tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors .* is not a whole safetensors file"):
        hf.check(folder)
    weights.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="git-lfs"):
        hf.check(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        hf.check(folder)


@pytest.mark.parametrize("name", [5, None, {}, "a\0b", "..", "/etc/hosts", "../secret.safetensors"])
def test_an_index_names_files(name, tmp_path):
    folder = copy_of("qwen2_untied", tmp_path)
    index = json.loads((folder / hf_files.INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / hf_files.INDEX).write_text(json.dumps(index))
    with pytest.raises((ValueError, FileNotFoundError), match="names"):
        hf.check(folder)


def test_a_header_may_not_name_a_tensor_twice(tmp_path):
    folder = copy_of("qwen3_tied", tmp_path)
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip()
    entry = json.dumps(json.loads(header)["model.norm.weight"])
    header = header[:-1] + f',"model.norm.weight":{entry}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    with pytest.raises(ValueError, match="every name once in its header, got 'model.norm.weight'"):
        hf.check(folder)


def test_json_that_is_nested_too_deeply_or_too_large_is_named(tmp_path, monkeypatch):
    folder = copy_of("qwen3_tied", tmp_path)
    (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ValueError, match="recursion"):
        hf.check(folder)
    monkeypatch.setattr(hf_files, "MAX_JSON_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1000 bytes of JSON"):
        hf.check(folder)


def test_names_from_files_are_escaped_in_errors(tmp_path):
    folder = copy_of("qwen3_tied", tmp_path)
    edit_weights(folder, lambda tensors: tensors.update({"\x1b[2J\u202e": np.zeros(1)}))
    with pytest.raises(ValueError, match=r"surplus: \\x1b\[2J\\u202e") as caught:
        hf.check(folder)
    assert str(caught.value).isprintable()
