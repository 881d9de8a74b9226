"""Drafting written out, an entry at a time and in float64; and batches from lists. For tests."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle_training.training_data import DrafterBatch, HiddenStates

POLICY = ModelConfig("qwen3", 13, 8, 4, 4, 2, 6, 16, norm_eps=1e-3, qk_norm=True)


def drafter(design, *, draft_vocab_size=0, seed=0, policy=POLICY, **changes):
    """(config, weights, frozen parts): random, norms and biases too."""
    config = eagle.config_for(policy, design, draft_vocab_size=draft_vocab_size)
    config = dataclasses.replace(config, **changes)
    keys = jax.random.split(jax.random.key(seed), 3)
    params = eagle.init(config, keys[0])
    leaves, tree = jax.tree.flatten(params)
    vectors = jax.random.split(keys[1], len(leaves))
    params = tree.unflatten(
        [
            x + 0.3 * jax.random.normal(k, x.shape) if x.ndim == 1 else x
            for k, x in zip(vectors, leaves, strict=True)
        ]
    )
    weights = transformer.init(policy, keys[2])
    weights = dataclasses.replace(weights, embedding_VD=30 * weights.embedding_VD)
    ids_U = None
    if config.draft_vocab_size:
        chosen = np.random.default_rng(seed).choice(
            policy.vocab_size, config.draft_vocab_size, replace=False
        )
        ids_U = np.sort(chosen).astype(np.int32)
    return config, params, eagle.frozen(weights, ids_U)


def hidden_states(config, num_tokens, prompt_tokens=1, seed=0):
    rng = np.random.default_rng((seed, num_tokens))
    tokens_T = rng.integers(0, config.layer.vocab_size, num_tokens).astype(np.int32)
    states_TW = rng.normal(size=(num_tokens - 1, config.hidden_width)).astype(np.float32)
    return HiddenStates(tokens_T, prompt_tokens, states_TW, 0)


def packed(rows, num_tokens, dtype=np.float32):
    """A batch of rows of `HiddenStates`, each padded to `num_tokens`."""
    W = next(s.hidden_TW.shape[1] for row in rows for s in row)
    B, T = len(rows), num_tokens
    tokens, positions, sequence = (np.zeros((B, T), np.int32) for _ in range(3))
    states, counts = np.zeros((B, T, W), dtype), np.zeros((B, T), bool)
    for b, row in enumerate(rows):
        start = 0
        for number, s in enumerate(row, start=1):
            n = len(s.tokens_T)
            here = slice(start, start + n)
            tokens[b, here], positions[b, here], sequence[b, here] = (
                s.tokens_T,
                np.arange(n),
                number,
            )
            states[b, start : start + n - 1] = s.hidden_TW
            counts[b, here] = (np.arange(n) + 2 < n) & (np.arange(n) + 2 >= s.prompt_tokens)
            start += n
        assert start <= T
    return DrafterBatch(tokens, states, positions, sequence, counts)


# the reference


def as_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def _norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def _rotated(x_h, position, theta):
    half = len(x_h) // 2
    angle = position * theta ** (-np.arange(half) * 2.0 / len(x_h))
    a, b = x_h[:half], x_h[half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])


def entry(config, params, e_D, g_D, position, past):
    """The output of one entry that sees the (keys, values) in `past`, and its own."""
    c, layer = config.layer, params.layer
    fc = params.fc_DE.T
    if config.design == "eagle":
        x = y = np.concatenate([e_D, g_D]) @ fc + (
            0 if params.fc_bias_D is None else params.fc_bias_D
        )
    else:
        x = g_D
        y = np.concatenate(
            [
                _norm(e_D, params.embedding_norm_D, c.norm_eps),
                _norm(g_D, params.feature_norm_D, c.norm_eps),
            ]
        )
    q = (y @ layer.query_QD.T).reshape(c.num_heads, c.head_dim)
    k = (y @ layer.key_PD.T).reshape(c.num_kv_heads, c.head_dim)
    v = (y @ layer.value_PD.T).reshape(c.num_kv_heads, c.head_dim)
    k = np.stack([_rotated(row, position, c.rope_theta) for row in k])
    own, heads = (k, v), []
    for i in range(c.num_heads):
        j = i // (c.num_heads // c.num_kv_heads)
        q_h = _rotated(q[i], position, c.rope_theta)
        scores = np.array([q_h @ keys[j] for keys, _ in [*past, own]]) / np.sqrt(c.head_dim)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        values = [values[j] for _, values in [*past, own]]
        heads.append(sum(w * value for w, value in zip(weights, values, strict=True)))
    x = x + np.concatenate(heads) @ layer.output_DQ.T
    y = _norm(x, layer.mlp_norm_D, c.norm_eps)
    gate = y @ layer.gate_FD.T
    return x + (gate / (1 + np.exp(-gate)) * (y @ layer.up_FD.T)) @ layer.down_DF.T, own


def drafted(config, params, embedding_VD, sequence, num_steps):
    """{(j, t): o^j_t} of one sequence, by drafting from each of its entries; float64 trees."""
    tokens, D = sequence.tokens_T, config.layer.d_model
    states = sequence.hidden_TW.astype(np.float64)
    if config.design == "eagle":
        features = states[:, -D:]
    else:
        features = states[:, :-D] @ params.fc_DE.T
        features = features if params.fc_bias_D is None else features + params.fc_bias_D
    outputs, real = {}, []
    for start in range(len(tokens) - 1):
        o, own = entry(
            config, params, embedding_VD[tokens[start + 1]], features[start], start, real
        )
        real.append(own)
        outputs[0, start] = o
        past = list(real)
        for j in range(1, num_steps):
            t = start + j
            if t + 1 >= len(tokens):
                break
            o, own = entry(config, params, embedding_VD[tokens[t + 1]], o, t, past)
            past.append(own)
            outputs[j, t] = o
    return outputs


def log_softmax(x_U):
    x_U = x_U - x_U.max()
    return x_U - np.log(np.exp(x_U).sum())


def draft_logits(config, params, head_UD, o_D):
    if config.design == "eagle3":
        o_D = _norm(o_D, params.final_norm_D, config.layer.norm_eps)
    return o_D @ head_UD.T


def written_out_loss(config, training, params, frozen, sequences, temperature=1.0):
    """The loss over all of the sequences; `params` and `frozen` are float64 trees."""
    r, D = training.terms, config.layer.d_model
    own_head = frozen.head_UD if params.head_UD is None else params.head_UD
    sums, counts = np.zeros(r.unroll_steps), np.zeros(r.unroll_steps)
    for s in sequences:
        outputs = drafted(config, params, frozen.embedding_VD, s, r.unroll_steps)
        for (j, t), o in outputs.items():
            if not max(s.prompt_tokens, 2) <= t + 2 < len(s.tokens_T):
                continue
            f = s.hidden_TW[t + 1, -D:].astype(np.float64)
            log_p = log_softmax(f @ frozen.head_UD.T / temperature)
            log_q = log_softmax(draft_logits(config, params, own_head, o) / temperature)
            token = -np.exp(log_p) @ log_q
            x = np.abs(o - f)
            feature = np.mean(np.where(x < 1, x * x / 2, x - 0.5))
            sums[j] += r.token_weight * token + r.feature_weight * feature
            counts[j] += 1
    return float(np.sum(r.unroll_decay ** np.arange(r.unroll_steps) * sums / counts))
