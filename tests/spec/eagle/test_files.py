"""Drafters in engines' folders: exact round trips, foreign folders, saves that fail."""

import builtins
import dataclasses
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_folders import (
    DRAFTERS,
    IDS,
    POLICY,
    V,
    assert_same,
    drafter_of,
    edit_config,
    edit_weights,
    foreign,
    policy_params,
    weights,
)
from safetensors.numpy import load_file

from reprise.models.decoder import transformer
from reprise.models.formats import hf
from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.model import EagleWeights


@pytest.fixture(autouse=True)
def full_precision():
    # Accelerators multiply float32 in fewer bits unless told otherwise.
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_policy", [False, True])
@pytest.mark.parametrize("name", DRAFTERS)
def test_saving_and_loading_again_is_bitwise_equal(name, with_policy, dtype, tmp_path):
    drafter = drafter_of(**DRAFTERS[name], dtype=dtype)
    policy = policy_params() if with_policy else None
    eagle_files.save(tmp_path / "out", drafter, POLICY, policy)
    assert eagle_files.check(tmp_path / "out", POLICY) == drafter.config
    # Who the head belongs to does not depend on the policy at hand: training has moved it on.
    for at_hand in (None, policy_params(seed=9)):
        assert_same(eagle_files.load(tmp_path / "out", POLICY, at_hand), drafter)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]  # no temporary folder left
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == dtype


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_drafter_of_any_policy_comes_back(architecture, tied, tmp_path):
    policy = dataclasses.replace(
        POLICY,
        architecture=architecture,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        tied_embeddings=tied,
    )
    config = eagle.config_for(policy, "eagle")
    drafter = EagleWeights(config, weights(eagle.param_specs(config)))
    eagle_files.save(tmp_path / "out", drafter, policy, policy_params(tied=tied))
    assert_same(eagle_files.load(tmp_path / "out", policy), drafter)


# Folders that other programs wrote.


@pytest.mark.parametrize(("dtype", "prefix"), [("float32", ""), ("bfloat16", "model.")])
@pytest.mark.parametrize("name", [name for name in DRAFTERS if "all of it" not in name])
def test_a_foreign_folder_gives_the_same_drafter(name, prefix, dtype, tmp_path):
    policy = policy_params(dtype=dtype)
    drafter = drafter_of(**DRAFTERS[name], dtype=dtype)
    eagle_files.save(tmp_path, drafter, POLICY, policy)
    ids_U = np.arange(V) if drafter.draft_ids_U is None else drafter.draft_ids_U
    head_UD = np.ascontiguousarray(np.asarray(policy.head_VD)[ids_U])
    edit_weights(tmp_path, lambda t: t.setdefault("lm_head.weight", head_UD))
    foreign(tmp_path, dtype, prefix)
    assert_same(eagle_files.load(tmp_path, POLICY, policy), drafter)
    # With no policy at hand the head in the file is the drafter's own, and the same numbers.
    alone = eagle_files.load(tmp_path, POLICY)
    assert alone.config.own_head and eagle_files.check(tmp_path, POLICY) == alone.config
    own = drafter.params.head_UD
    np.testing.assert_array_equal(alone.params.head_UD, head_UD if own is None else own)
    params = dataclasses.replace(alone.params, head_UD=own)
    assert_same(dataclasses.replace(alone, config=drafter.config, params=params), drafter)


def test_a_rounded_copy_of_the_policys_head_is_the_policys(tmp_path):
    policy = policy_params()
    eagle_files.save(tmp_path, drafter_of("eagle3", IDS), POLICY, policy)
    foreign(tmp_path, np.float16)
    assert eagle_files.load(tmp_path, POLICY, policy).params.head_UD is None
    other = eagle_files.load(tmp_path, POLICY, policy_params(seed=9))
    assert other.config.own_head
    np.testing.assert_array_equal(
        np.asarray(other.params.head_UD),
        load_file(tmp_path / "model.safetensors")["lm_head.weight"],
    )


def test_an_own_head_that_starts_as_the_policys_stays_its_own(tmp_path):
    drafter, policy = drafter_of("eagle3", own_head=True), policy_params()
    drafter = dataclasses.replace(
        drafter, params=dataclasses.replace(drafter.params, head_UD=policy.head_VD)
    )
    eagle_files.save(tmp_path, drafter, POLICY, policy)
    assert_same(eagle_files.load(tmp_path, POLICY, policy), drafter)


def test_defaults_of_a_foreign_folder(tmp_path):
    drafter = drafter_of("eagle3", fc_bias=True)
    eagle_files.save(tmp_path, drafter, POLICY, None)
    foreign(tmp_path)
    edit_config(
        tmp_path,
        bias="absent",
        draft_vocab_size="absent",
        target_hidden_size="absent",
        eagle_config="absent",
        eagle_aux_hidden_state_layer_ids="absent",
        architectures=["Eagle3LlamaForCausalLM"],
    )
    assert_same(eagle_files.load(tmp_path, POLICY), drafter)  # layers 1, n/2 − 1, n − 4
    edit_config(tmp_path, bias=False)
    with pytest.raises(ValueError, match=r"surplus: fc.bias"):
        eagle_files.check(tmp_path, POLICY)


@pytest.mark.parametrize(
    ("ids", "layers"),
    [
        ([2, 5, 7], (1, 4, 6)),  # inputs
        ([1, 4, 6], (1, 4, 6)),  # the first is 1: outputs
        ([3, 4, 10], (2, 3, 9)),
    ],
)
def test_layer_ids_of_foreign_folders(ids, layers, tmp_path):
    eagle_files.save(tmp_path, drafter_of("eagle3"), POLICY, None)
    foreign(tmp_path)
    edit_config(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    assert eagle_files.check(tmp_path, POLICY).feature_layers == layers
    edit_config(tmp_path, eagle_config="absent", eagle_aux_hidden_state_layer_ids=ids)
    assert eagle_files.check(tmp_path, POLICY).feature_layers == layers


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        ([0, 2, 2, 8, 16], r"among the policy's 0 … 19, got 4 \+ d2t\[4\] = 20"),
        ([-1, 2, 2, 8, 15], r"got 0 \+ d2t\[0\] = -1"),
        ([0, 2, 1, 8, 15], "ascending draft tokens, each once, got 3 and then 3 at 2"),
        ([0, 2, 2, 8, 1], "got 11 and then 5 at 4"),
        (
            [0, 3, 4, 11, 15],
            "expected t2d to mark the 5 tokens that d2t gives, got 5 marked, 3 of them",
        ),
    ],
)
def test_maps_that_lead_nowhere(d2t, message, tmp_path):
    eagle_files.save(tmp_path, drafter_of("eagle3", IDS), POLICY, None)
    edit_weights(tmp_path, lambda t: t.update({"d2t": np.array(d2t)}))
    eagle_files.check(tmp_path, POLICY)  # headers alone do not tell
    with pytest.raises(ValueError, match=message) as caught:
        eagle_files.load(tmp_path, POLICY)
    assert str(caught.value).startswith(str(tmp_path))


def test_no_pickle_is_opened(tmp_path, monkeypatch):
    drafter, opened = drafter_of(), []
    eagle_files.save(tmp_path, drafter, POLICY, None)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    really_open = io.open

    def noting(path, *args, **kwargs):
        opened.append(Path(path).name)
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr(io, "open", noting)
    monkeypatch.setattr(builtins, "open", noting)
    assert_same(eagle_files.load(tmp_path, POLICY), drafter)  # passed over
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="only torch files .pytorch_model.bin., which are"):
        eagle_files.load(tmp_path, POLICY)
    assert "config.json" in opened and "pytorch_model.bin" not in opened


# Saving.


def test_a_drafter_replaces_a_drafter(tmp_path):
    eagle_files.save(tmp_path / "out", drafter_of("eagle3", IDS), POLICY, policy_params())
    (tmp_path / "out/README.md").write_text("kept")
    new = drafter_of(seed=2)
    eagle_files.save(tmp_path / "out", new, POLICY, policy_params(), max_shard_bytes=500)
    assert_same(eagle_files.load(tmp_path / "out", POLICY), new)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "out/model.safetensors").exists()
    assert (tmp_path / "out/README.md").read_text() == "kept"


def test_a_policy_is_not_overwritten(tmp_path):
    policy_config = dataclasses.replace(POLICY, num_layers=1)
    policy = weights(transformer.param_specs(policy_config))
    hf.save_pretrained(tmp_path / "out", policy_config, policy)
    config = eagle.config_for(policy_config, "eagle")
    drafter = EagleWeights(config, weights(eagle.param_specs(config)))
    with pytest.raises(ValueError, match="new folder or a drafter's.*Qwen3ForCausalLM"):
        eagle_files.save(tmp_path / "out", drafter, policy_config, policy)
    assert hf.load_pretrained(tmp_path / "out")[0] == policy_config
    with pytest.raises(ValueError, match="unknown architecture.*Qwen3ForCausalLM"):
        eagle_files.load(tmp_path / "out", policy_config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: dataclasses.replace(d, draft_ids_U=None), "draft_ids_U of 5 tokens"),
        (lambda d: dataclasses.replace(d, draft_ids_U=IDS[:4]), "draft_ids_U of 5 tokens"),
        (lambda d: dataclasses.replace(d, draft_ids_U=IDS[::-1]), "ascending draft tokens"),
        (lambda d: dataclasses.replace(d, draft_ids_U=IDS + 1), "0 … 19, got 4 .* = 20"),
        (
            lambda d: dataclasses.replace(
                d, params=dataclasses.replace(d.params, fc_bias_D=jnp.zeros(8))
            ),
            "expected 12 tensors, got a tree of another structure with 13",
        ),
        (
            lambda d: dataclasses.replace(
                d, params=dataclasses.replace(d.params, final_norm_D=jnp.ones(9))
            ),
            r"norm.weight has shape \[9\], expected \[8\]",
        ),
    ],
)
def test_parts_that_do_not_fit_are_not_saved(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        eagle_files.save(tmp_path / "out", change(drafter_of("eagle3", IDS)), POLICY, None)
    assert not list(tmp_path.iterdir())
