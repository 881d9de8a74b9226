"""Hostile bodies for a server: what no client sends, drawn by a seeded generator."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from reprise.rl.http import wire

POSTED = (
    *("create_session", "session_heartbeat", "create_model", "get_info", "load_weights"),
    *("optim_step", "save_weights", "save_weights_for_sampler", "create_sampling_session"),
    *("asample", "retrieve_future", "weights_info", "telemetry", "forward_backward"),
)
FIELDS = (
    *("session_id", "model_id", "seq_id", "base_model", "lora_config", "model_seq_id", "path"),
    *("adam_params", "sampling_session_id", "prompt", "sampling_params", "num_samples"),
    *("request_id", "tinker_path", "optimizer", "sampling_session_seq_id", "ttl_seconds"),
    *("user_metadata", "overwrite", "prompt_logprobs", "model_path"),
)
TEXTS = ("", "x", "../../etc/passwd", "tinker://../weights/x", "\0", "é" * 99, "\ud800")
NUMBERS = (True, -1, 0, 2**31, 2**63, 2**200, 10**400, 0.5, 1e308, 5e-324)
NUMBERS += (float("nan"), float("inf"))
OBJECTS: tuple[Any, ...] = (
    *({}, {"chunks": 3}, {"chunks": [{"tokens": [-1]}]}, {"chunks": [{"tokens": [2**31]}]}),
    *({"rank": "4"}, {"rank": 4, "seed": -1}, {"learning_rate": "x"}, {"learning_rate": 10**400}),
    *({"a": {"b": {}}}, {"temperature": 10**400}, {"top_k": 2**40}, {"stop": [[1]]}),
    *({"k": "x" * 20_000}, [], [[]], [1, "a"], [None] * 50),
)


def value(rng: random.Random) -> Any:
    """Return a value of some type, near or far from one that is expected."""
    return rng.choice([None, *TEXTS, *NUMBERS, *OBJECTS])


def body(rng: random.Random, known: Mapping[str, Any]) -> bytes:
    """Return fields of the protocol with wrong values; some bodies are cut, nested, or no JSON."""
    fields = {name: value(rng) for name in rng.sample(FIELDS, rng.randrange(len(FIELDS)))}
    fields |= {name: x for name, x in known.items() if rng.random() < 0.6}
    data = json.dumps(fields).encode()
    kind = rng.randrange(60)
    if kind < 10:
        return data[: rng.randrange(len(data))]
    if kind < 20:
        return rng.randbytes(rng.randrange(300))
    if kind < 30:
        return b"[" * rng.choice([10, 100_000]) + data
    if kind == 30:
        return b'{"a": [' + b"[]," * rng.choice([10, 2**20]) + b"1], " + data[1:]
    if kind == 31:
        return b'{"user_metadata": {"a": "' + b"x" * rng.choice([10, 2**21]) + b'"}, ' + data[1:]
    if kind == 32:
        return json.dumps(fields).encode(rng.choice(["utf-16", "utf-32"]))
    return data


def message(rng: random.Random, run: str) -> bytes:
    """Return a training request, most of which are wrong."""
    sent = wire.make(
        "ForwardBackwardRequest",
        model_id=rng.choice([run, "other", "../x"]),
        seq_id=rng.choice([-1, 0, 1, 2**31 - 1]),
        loss_fn=rng.choice(["cross_entropy", "ppo", "custom", "\0"]),
    )
    for _ in range(rng.randrange(3)):
        datum = sent.data.add()
        datum.model_input.add().encoded_text.tokens = rng.randbytes(rng.randrange(40))
        if rng.random() < 0.3:
            datum.model_input.add().image.SetInParent()
        tensor = datum.loss_fn_inputs[rng.choice(["target_tokens", "weights", "x"])]
        tensor.dtype, tensor.dense = rng.randrange(5), rng.randbytes(rng.randrange(40))
        tensor.shape.extend(rng.choices([-1, 0, 1, 2, 2**60], k=rng.randrange(3)))
        if rng.random() < 0.3:
            tensor.sparse_csr.values = rng.randbytes(8)
            tensor.sparse_csr.crow_indices = rng.randbytes(rng.choice([0, 8, 16]))
    sent.loss_fn_config["clip_low_threshold"] = rng.choice([0.1, 1e308, float("nan")])
    data: bytes = sent.SerializeToString()
    kind = rng.randrange(40)
    if kind < 8:
        return data[: len(data) // 2] + b"\xff"
    if kind == 8:
        return data + b"\x1a\x00" * rng.choice([10, 2**20])
    return data


def request(rng: random.Random, known: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return a path and a hostile body for it; `known` are names that the server knows."""
    path = rng.choice(POSTED)
    is_message = path == "forward_backward"
    return path, message(rng, known["model_id"]) if is_message else body(rng, known)
