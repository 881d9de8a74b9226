"""Tiny drafters for folders, folders of other programs, and the forward pass by hand."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from reprise.models.attention import attention
from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.model import EagleWeights

V, D, N = 20, 8, 10
POLICY = ModelConfig(
    "qwen3",
    vocab_size=V,
    d_model=D,
    num_layers=N,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    d_ff=12,
    rope_theta=50_000.0,
    norm_eps=1e-5,
    qk_norm=True,
    max_positions=77,
    bos_token_id=1,
    eos_token_ids=(2, 3),
    pad_token_id=0,
)
IDS = np.array([0, 3, 4, 11, 19], np.int32)


def policy_params(seed=0, dtype=jnp.float32, tied=False):
    """All of a policy that drafters share: no layers."""
    rng = np.random.default_rng(seed)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    return transformer.Params(array(V, D), (), array(D), None if tied else array(V, D))


def weights(specs, seed=1, dtype=jnp.float32):
    """Norms and biases are random too, so that none can stand for another."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 2, dtype), specs)


def drafter_of(design="eagle", ids=None, *, seed=1, dtype=jnp.float32, **changes):
    config = eagle.config_for(POLICY, design, draft_vocab_size=0 if ids is None else len(ids))
    config = dataclasses.replace(config, **changes)
    return EagleWeights(config, weights(eagle.param_specs(config), seed, dtype), ids)


def assert_same(got, expected):
    assert got.config == expected.config
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True),
        got.params,
        expected.params,
    )
    if expected.draft_ids_U is None:
        assert got.draft_ids_U is None
    else:
        np.testing.assert_array_equal(got.draft_ids_U, expected.draft_ids_U, strict=True)


def edit_config(folder, **changes):
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def foreign(folder, dtype=None, prefix="model."):
    """What another program might have written: no entry of ours, a prefix, perhaps rounded."""
    edit_config(folder, reprise="absent")

    def change(tensors):
        for name, array in list(tensors.items()):
            del tensors[name]
            name = name if name in ("d2t", "t2d", "lm_head.weight") else prefix + name
            rounded = dtype is not None and name not in ("d2t", "t2d")
            tensors[name] = array.astype(dtype) if rounded else array

    edit_weights(folder, change)


DRAFTERS = {
    "eagle": {},
    "eagle, fc bias": {"fc_bias": True},
    "eagle, few tokens": {"ids": IDS},
    "eagle, own head, few tokens": {"ids": IDS, "own_head": True, "fc_bias": True},
    "eagle3": {"design": "eagle3"},
    "eagle3, own head": {"design": "eagle3", "own_head": True},
    "eagle3, few tokens": {"design": "eagle3", "ids": IDS},
    "eagle3, own head, few tokens": {"design": "eagle3", "ids": IDS, "own_head": True},
    "eagle3, all of it": {
        "design": "eagle3",
        "ids": IDS,
        "own_head": True,
        "fc_bias": True,
        "feature_layers": (0, 5, 9),
    },
    "eagle3, every token by a map": {
        "design": "eagle3",
        "ids": np.arange(V, dtype=np.int32),
        "draft_vocab_size": V,
    },
}


# The published forward pass, from stored names and [out, in] matrices alone.


def norm_by_hand(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def attend_by_hand(w, prefix, config, x_TE, positions_T):
    """Rotary halves, grouped heads, every token sees itself and those before."""
    T, h = len(x_TE), config["head_dim"]
    H, K = config["num_attention_heads"], config["num_key_value_heads"]

    def project(letter, n):
        return (x_TE @ w[f"{prefix}self_attn.{letter}_proj.weight"].T).reshape(T, n, h)

    angle = positions_T[:, None] * config["rope_theta"] ** (-np.arange(0, h, 2) / h)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def turned(x):
        a, b = x[..., : h // 2], x[..., h // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k, v = turned(project("q", H)), turned(project("k", K)), project("v", K)
    out = np.zeros((T, H, h))
    for t in range(T):
        for head in range(H):
            kv = head // (H // K)
            scores = k[: t + 1, kv] @ q[t, head] / np.sqrt(h)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ v[: t + 1, kv] / weights.sum()
    return out.reshape(T, H * h) @ w[f"{prefix}self_attn.o_proj.weight"].T


def forward_by_hand(folder, policy, tokens_T, hidden_TW, positions_T):
    """Outputs and logits of a stored drafter, in float64; where it has no head, the policy's."""
    config = json.loads((folder / "config.json").read_text())
    w = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
    eps, wide = config["rms_norm_eps"], config["architectures"][0].endswith("3")
    e_TD = w["embed_tokens.weight"][tokens_T]
    if wide:
        prefix = "midlayer."
        x_TD = hidden_TW[:, : 3 * D] @ w["fc.weight"].T + w.get("fc.bias", 0)
        into = [
            norm_by_hand(e_TD, w["midlayer.input_layernorm.weight"], eps),
            norm_by_hand(x_TD, w["midlayer.hidden_norm.weight"], eps),
        ]
        into_TE = np.concatenate(into, -1)
    else:
        prefix = "layers.0."
        both_TE = np.concatenate([e_TD, hidden_TW[:, -D:]], -1)
        into_TE = x_TD = both_TE @ w["fc.weight"].T + w.get("fc.bias", 0)
    x_TD = x_TD + attend_by_hand(w, prefix, config, into_TE, positions_T)
    y_TD = norm_by_hand(x_TD, w[prefix + "post_attention_layernorm.weight"], eps)
    gate_TF = y_TD @ w[prefix + "mlp.gate_proj.weight"].T
    up_TF = y_TD @ w[prefix + "mlp.up_proj.weight"].T
    x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ w[prefix + "mlp.down_proj.weight"].T
    last_TD = norm_by_hand(x_TD, w["norm.weight"], eps) if wide else x_TD
    if "lm_head.weight" in w:
        return x_TD, last_TD @ w["lm_head.weight"].T
    ids_U = np.arange(len(w["d2t"])) + w["d2t"].astype(int) if "d2t" in w else np.arange(V)
    return x_TD, last_TD @ np.asarray(policy.head_VD, np.float64)[ids_U].T


def forward(drafter, policy, tokens_T, hidden_TW, positions_T):
    """The same by spec/eagle/model.py."""

    def look(q_BTHh, k_BTKh, v_BTKh):
        k_BKhT, v_BKTh = k_BTKh.transpose(0, 2, 3, 1), v_BTKh.transpose(0, 2, 1, 3)
        return attention.attend(q_BTHh, k_BKhT, v_BKTh, attention.causal_mask(len(tokens_T)))

    config, params = drafter.config, drafter.params
    shared = eagle.frozen(policy, drafter.draft_ids_U)
    g_BTD = eagle.features(config, params, jnp.asarray(hidden_TW, jnp.float32)[None])
    o_BTD = eagle.layer_outputs(
        config,
        params,
        shared.embedding_VD,
        jnp.asarray(tokens_T)[None],
        g_BTD,
        jnp.asarray(positions_T)[None],
        look,
    )
    return o_BTD[0], eagle.logits(config, params, shared.head_UD, o_BTD)[0]


def sequence(T):
    rng = np.random.default_rng(5)
    W = 4 * D
    return rng.integers(0, V, T), rng.normal(size=(T, W)), np.arange(3, 3 + T)
