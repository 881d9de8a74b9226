"""Contents of a drafter's folder, the forward pass from it by hand, errors by name."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from eagle_folders import (
    DRAFTERS,
    IDS,
    POLICY,
    assert_same,
    drafter_of,
    edit_config,
    edit_weights,
    foreign,
    forward,
    forward_by_hand,
    policy_params,
    sequence,
    weights,
)
from safetensors.numpy import load_file

from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.model import EagleWeights


@pytest.fixture(autouse=True)
def full_precision():
    # Accelerators multiply float32 in fewer bits unless told otherwise.
    with jax.default_matmul_precision("highest"):
        yield


# What engines find in a folder.

LAYER_SHAPES = {
    "self_attn.o_proj.weight": (8, 24),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
    "post_attention_layernorm.weight": (8,),
}


def test_tensors_of_eagle(tmp_path):
    drafter, policy = drafter_of(fc_bias=True), policy_params()
    eagle_files.save(tmp_path / "out", drafter, POLICY, policy)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {name: array.shape for name, array in tensors.items()} == {
        "fc.weight": (8, 16),
        "fc.bias": (8,),
        "layers.0.self_attn.q_proj.weight": (24, 8),
        "layers.0.self_attn.k_proj.weight": (12, 8),
        "layers.0.self_attn.v_proj.weight": (12, 8),
        **{f"layers.0.{name}": shape for name, shape in LAYER_SHAPES.items()},
        "embed_tokens.weight": (20, 8),  # no head: SGLang passes one over, vLLM refuses it
    }
    np.testing.assert_array_equal(tensors["fc.weight"], np.asarray(drafter.params.fc_DE))
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], policy.embedding_VD)
    content = json.loads((tmp_path / "out/config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLMEagle"]
    assert (content["bias"], content["num_hidden_layers"], content["head_dim"]) == (True, 1, 6)
    assert (content["hidden_size"], content["vocab_size"]) == (8, 20)
    assert "eagle_config" not in content
    assert content["reprise"] == {"variant": "eagle", "num_policy_layers": 10, "own_head": False}


def test_an_fc_without_a_bias_has_zeros_for_sglang_and_nothing_for_vllm(tmp_path):
    drafter = drafter_of()
    for engine, bias in (("sglang", [0.0] * 8), ("vllm", None)):
        eagle_files.save(tmp_path / engine, drafter, POLICY, policy_params(), engine=engine)
        tensors = load_file(tmp_path / engine / "model.safetensors")
        assert (tensors["fc.bias"].tolist() if "fc.bias" in tensors else None) == bias
        assert_same(eagle_files.load(tmp_path / engine, POLICY), drafter)
    edit_weights(tmp_path / "sglang", lambda t: t["fc.bias"].__setitem__(3, 0.5))
    with pytest.raises(ValueError, match="expected zeros in fc.bias"):
        eagle_files.load(tmp_path / "sglang", POLICY)


@pytest.mark.parametrize("num_layers", [4, 5, 7, 8])
def test_the_layers_of_small_policies_come_back(num_layers, tmp_path):
    """vLLM's list is inputs, whatever the first id of SGLang's."""
    policy = dataclasses.replace(POLICY, num_layers=num_layers)
    config = eagle.config_for(policy, "eagle3")
    drafter = EagleWeights(config, weights(eagle.param_specs(config)))
    eagle_files.save(tmp_path, drafter, policy, policy_params())
    assert len(config.feature_layers) == 3
    assert eagle_files.check(tmp_path, policy).feature_layers == config.feature_layers
    content = json.loads((tmp_path / "config.json").read_text())
    outputs = content["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert outputs == list(config.feature_layers) and outputs[-1] < num_layers - 1
    assert content["eagle_aux_hidden_state_layer_ids"] == [i + 1 for i in outputs]


def test_tensors_of_eagle3(tmp_path):
    policy = policy_params()
    eagle_files.save(tmp_path / "out", drafter_of("eagle3", IDS), POLICY, policy, variant="hass")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {name: array.shape for name, array in tensors.items()} == {
        "fc.weight": (8, 24),
        "midlayer.self_attn.q_proj.weight": (24, 16),
        "midlayer.self_attn.k_proj.weight": (12, 16),
        "midlayer.self_attn.v_proj.weight": (12, 16),
        **{f"midlayer.{name}": shape for name, shape in LAYER_SHAPES.items()},
        "midlayer.input_layernorm.weight": (8,),
        "midlayer.hidden_norm.weight": (8,),
        "norm.weight": (8,),
        "embed_tokens.weight": (20, 8),
        "lm_head.weight": (5, 8),
        "d2t": (5,),
        "t2d": (20,),
    }
    # Tokens 0, 3, 4, 11, 19 less their places 0 … 4.
    np.testing.assert_array_equal(tensors["d2t"], np.array([0, 2, 2, 8, 15]), strict=True)
    marked = [i in (0, 3, 4, 11, 19) for i in range(20)]
    np.testing.assert_array_equal(tensors["t2d"], np.array(marked), strict=True)
    np.testing.assert_array_equal(
        tensors["lm_head.weight"], np.asarray(policy.head_VD)[[0, 3, 4, 11, 19]]
    )
    content = json.loads((tmp_path / "out/config.json").read_text())
    assert content["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (content["draft_vocab_size"], content["target_hidden_size"]) == (5, 8)
    # Outputs of layers 1, 4 and 6 of ten (SGLang's list) go into layers 2, 5 and 7 (vLLM's).
    assert content["eagle_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "use_aux_hidden_state": True,
    }
    assert content["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert content["reprise"]["variant"] == "hass"


def test_without_the_policy_only_what_the_drafter_owns_is_written(tmp_path):
    eagle_files.save(tmp_path / "a", drafter_of(), POLICY, None)
    assert not {"embed_tokens.weight", "lm_head.weight"} & {
        *load_file(tmp_path / "a/model.safetensors")
    }
    eagle_files.save(tmp_path / "b", drafter_of(own_head=True), POLICY, None)
    head = load_file(tmp_path / "b/model.safetensors")["lm_head.weight"]
    np.testing.assert_array_equal(
        head, np.asarray(drafter_of(own_head=True).params.head_UD), strict=True
    )


def test_the_head_of_a_tied_policy_is_its_embedding(tmp_path):
    policy = policy_params(tied=True)
    eagle_files.save(tmp_path / "out", drafter_of("eagle3", IDS), POLICY, policy)
    tensors = load_file(tmp_path / "out/model.safetensors")
    np.testing.assert_array_equal(
        tensors["lm_head.weight"], tensors["embed_tokens.weight"][[0, 3, 4, 11, 19]]
    )


@pytest.mark.parametrize(
    ("name", "T"),
    [("eagle, fc bias", 1), ("eagle3, few tokens", 1)] + [(name, 6) for name in DRAFTERS],
)
def test_stored_tensors_mean_what_engines_take_them_for(name, T, tmp_path):
    drafter, policy = drafter_of(**DRAFTERS[name]), policy_params()
    eagle_files.save(tmp_path, drafter, POLICY, policy)
    tokens_T, hidden_TW, positions_T = sequence(T)
    expected = forward_by_hand(tmp_path, policy, tokens_T, hidden_TW, positions_T)
    got = forward(eagle_files.load(tmp_path, POLICY), policy, tokens_T, hidden_TW, positions_T)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    assert got[1].shape == (T, drafter.config.num_draft_ids)


# What is refused.


@pytest.mark.parametrize(
    ("design", "changes", "message"),
    [
        ("eagle", {"architectures": ["LlamaForCausalLM"]}, r"unknown architecture.*LlamaForC"),
        ("eagle", {"architectures": "absent"}, "unknown architecture.*None"),
        ("eagle", {"model_type": "qwen2"}, "model_type='qwen2'"),
        ("eagle", {"add_para_norm": True}, "add_para_norm=True"),
        ("eagle", {"logit_scale": 0.5}, "logit_scale=0.5"),
        ("eagle", {"logit_scalf": 0.5}, "expected logit_scale, got logit_scalf"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_stat": 0}}, "got use_aux_hidden_stat:"),
        ("eagle", {"eagle_config": {"use_last_layernorm": True}}, "use_last_layernorm=True"),
        ("eagle3", {"norm_before_residual": True}, "norm_before_residual=True"),
        ("eagle3", {"norm_before_fc": True}, "norm_before_fc=True"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ("eagle3", {"eagle_config": [1]}, r"eagle_config as an object, got \[1\]"),
        ("eagle", {"num_hidden_layers": 2}, "num_hidden_layers=1, got 2.*single layer"),
        ("eagle", {"vocab_size": 21}, r"another policy: vocab_size=21 \(expected 20\).*train one"),
        ("eagle", {"hidden_size": 10}, r"another policy: hidden_size=10 \(expected 8\)"),
        ("eagle3", {"target_hidden_size": 16}, r"another policy: target_hidden_size=16"),
        ("eagle", {"tie_word_embeddings": True}, r"tie_word_embeddings=True \(expected False\)"),
        ("eagle3", {"draft_vocab_size": 21}, "draft_vocab_size up to the policy's 20, got 21"),
        (
            "eagle3",
            {"draft_vocab_size": 0},
            "draft_vocab_size as a whole number .*, got 0",
        ),
        ("eagle3", {"draft_vocab_size": 6}, r"d2t has shape \[5\], expected \[6\]"),
        ("eagle", {"reprise": [1]}, r"reprise as an object, got \[1\]"),
        ("eagle", {"reprise": {"own_head": 1}}, "own_head as true or false, got 1"),
        ("eagle", {"bias": "false"}, "bias as true or false, without quotes, got 'false'"),
        (
            "eagle3",
            {"eagle_config": {}, "eagle_aux_hidden_state_layer_ids": []},
            "as a list of numbers, got \\[\\]",
        ),
    ],
)
def test_unsupported_configs_are_named(design, changes, message, tmp_path):
    eagle_files.save(tmp_path, drafter_of(design, IDS), POLICY, None)
    edit_config(tmp_path, **changes)
    for read in (eagle_files.check, eagle_files.load):
        with pytest.raises(ValueError, match=message) as caught:
            read(tmp_path, POLICY)
        assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"d_model": 16}, r"hidden_size=8 \(expected 16\)"),
        ({"vocab_size": 30}, r"vocab_size=20 \(expected 30\)"),
        ({"num_layers": 12}, r"num_policy_layers=10 \(expected 12\); give the policy"),
    ],
)
@pytest.mark.parametrize("design", ["eagle", "eagle3"])
def test_a_drafter_of_another_policy_is_refused(design, policy, message, tmp_path):
    eagle_files.save(tmp_path, drafter_of(design), POLICY, None)
    other = dataclasses.replace(POLICY, **policy)
    with pytest.raises(ValueError, match=f"a drafter of another policy: .*{message}"):
        eagle_files.check(tmp_path, other)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([2, 5, 11], r"among 1 … 10 for a policy of 10 layers, got \[2, 5, 11\]"),
        ([0, 5, 7], r"among 1 … 10"),
        ([1, 5, 10], r"among 0 … 9"),
        ([5, 2, 7], "expected ascending"),
        ([2, 2, 7], "expected ascending"),
        ([2, 5], r"fc.weight has shape \[8, 24\], expected \[8, 16\]"),
        ([2, "5"], "as a list of numbers"),
        (7, "as a list of numbers"),
        ([], "as a list of numbers"),
    ],
)
def test_layer_ids_that_do_not_fit_the_policy(ids, message, tmp_path):
    eagle_files.save(tmp_path, drafter_of("eagle3"), POLICY, None)
    foreign(tmp_path)
    edit_config(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    with pytest.raises(ValueError, match=message):
        eagle_files.check(tmp_path, POLICY)


def test_a_small_policy_needs_layer_ids(tmp_path):
    small = dataclasses.replace(POLICY, num_layers=4)
    config = eagle.config_for(small, "eagle3")
    assert config.feature_layers == (0, 1, 2)
    drafter = EagleWeights(config, weights(eagle.param_specs(config)))
    eagle_files.save(tmp_path, drafter, small, None)
    assert_same(eagle_files.load(tmp_path, small), drafter)
    edit_config(tmp_path, eagle_config="absent", eagle_aux_hidden_state_layer_ids="absent")
    with pytest.raises(ValueError, match="got none.*of a policy of 4: write them"):
        eagle_files.check(tmp_path, small)


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path):
    eagle_files.save(tmp_path, drafter_of("eagle3", IDS), POLICY, policy_params())

    def spoil(tensors):
        del tensors["midlayer.mlp.up_proj.weight"], tensors["d2t"]
        tensors["midlayer.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
        tensors["norm.weight"] = np.ones(9, np.float32)
        name = "midlayer.mlp.gate_proj.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)
        tensors["t2d"] = tensors["t2d"].astype(np.int8)
        tensors["midlayer.hidden_norm.weight"] = np.ones(8, np.float64)
        tensors["lm_head.weight"] = np.ones((20, 8), np.float32)

    edit_weights(tmp_path, spoil)
    with pytest.raises(ValueError) as caught:
        eagle_files.load(tmp_path, POLICY)
    message = str(caught.value)
    assert "missing tensors: midlayer.mlp.up_proj.weight, d2t" in message
    assert "surplus: midlayer.self_attn.q_proj.bias" in message
    assert "norm.weight has shape [9], expected [8]" in message
    assert "midlayer.mlp.gate_proj.weight has shape [8, 12], expected [12, 8]" in message
    assert "t2d is of type I8, expected one of BOOL" in message
    assert "midlayer.hidden_norm.weight is of type F64, expected one of F32" in message
    assert "lm_head.weight has shape [20, 8], expected [5, 8]" in message
    assert message.endswith("config.json and the weights must be of one eagle3 drafter")


def test_a_norm_before_attention_is_another_design(tmp_path):
    eagle_files.save(tmp_path, drafter_of(), POLICY, None)
    name = "layers.0.input_layernorm.weight"
    edit_weights(tmp_path, lambda t: t.update({name: np.ones(8, np.float32)}))
    with pytest.raises(ValueError, match=f"surplus: {name}.*of one eagle drafter"):
        eagle_files.check(tmp_path, POLICY)


def test_a_tensor_with_and_without_prefix_is_refused(tmp_path):
    eagle_files.save(tmp_path, drafter_of(), POLICY, None)
    edit_weights(tmp_path, lambda t: t.update({"model.fc.weight": t["fc.weight"]}))
    with pytest.raises(ValueError, match=r"expected fc.weight once.*'model\.'"):
        eagle_files.check(tmp_path, POLICY)
