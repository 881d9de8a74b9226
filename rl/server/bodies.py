"""Validated fields of JSON bodies; data, settings and results of protocol-buffer bodies."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from reprise.rl.http import wire
from reprise.rl.python.api import LOSSES, Adam, Datum, LossSettings, Output, Sample, complete
from reprise.spec.config import SamplingConfig

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
INPUTS = {"target_tokens", "weights", "logprobs", "advantages"}
RATIO_MASK = "sequence_ratio_mask"  # for gspo, in place of weights
BOUNDS = {"clip_low_threshold": "low", "clip_high_threshold": "high"}
SETTINGS = BOUNDS | {"beta": "beta"}
MAX_SAMPLES = 1024
MAX_TTL_S = 100 * 366 * 86_400  # a hundred years, since listings only show dates up to 9999
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)
MAX_METADATA_BYTES = 2**14
SHORT = {"attn": "attention", "mlp": "mlp", "unembed": "head"}  # parts of a policy, by short names
_REQUIRED: Any = object()


class Unknown(Exception):
    """The requested object does not exist."""


def field(body: Mapping[str, Any], name: str, kind: type[T], default: Any = _REQUIRED) -> T:
    """Return a field of a JSON object. Raises ValueError if it is missing or has another type."""
    value = body.get(name, default)
    if value is _REQUIRED:
        raise ValueError(f"expected the field {name!r}")
    if value is None and default is None:
        return value  # type: ignore[return-value]
    if type(value) is not kind:
        raise ValueError(f"{name}: expected {kind.__name__}, got {value!r:.100}")
    return value


def number(
    body: Mapping[str, Any],
    name: str,
    default: Any = _REQUIRED,
    low: float = 0,
    high: float = 2**62,
    kind: type[int] | type[float] = int,
) -> Any:
    """Return an integer or float from `low` to `high`. Raises ValueError.

    All numbers of JSON bodies are read here. Bounds are checked before an integer, which may have
    thousands of digits, becomes a float.
    """
    value = body.get(name, default)
    if value is None and default is None:
        return None
    is_number = type(value) is int or (kind is float and type(value) is float)
    if not is_number:
        return field(body, name, kind, default)  # raises, since missing or of another type
    if not low <= value <= high:  # also rejects NaN
        raise ValueError(f"{name}: expected {low} to {high}, got {value!r:.50}")
    return kind(value)


def ttl_s(body: Mapping[str, Any]) -> int | None:
    """Return the lifetime of a checkpoint in seconds, or None for ever. Raises ValueError."""
    found: int | None = number(body, "ttl_seconds", None, high=MAX_TTL_S)
    return found


def check_name(text: str) -> str:
    """Return `text` if it is a valid name for a checkpoint. Raises ValueError."""
    if not NAME.fullmatch(text):
        raise ValueError(
            f"expected a name of letters, digits, '.', '_' and '-' (at most 128), got {text!r:.150}"
        )
    return text


def texts(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a request as texts, since clients read only texts.

    Raises ValueError.
    """
    metadata = field(body, "user_metadata", dict, None) or {}
    found = {str(key): str(value) for key, value in metadata.items()}
    if (size := len(json.dumps(found))) > MAX_METADATA_BYTES:
        raise ValueError(
            f"user_metadata: expected {MAX_METADATA_BYTES:,} bytes at most, got {size:,}"
        )
    return found


# -- sampling ------------------------------------------------------------------------------


def prompt_ids(prompt: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens of a prompt of text chunks. Raises ValueError."""
    ids = list[int]()
    for chunk in field(prompt, "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise ValueError("expected chunks of text: this policy reads neither images nor sound")
        ids += _ids(field(chunk, "tokens", list), "tokens")
    return tuple(ids)


def parse_sampling(
    params: Mapping[str, Any], prompt_tokens: int, max_tokens: int
) -> SamplingConfig:
    """Return the sampling settings of a request. Raises ValueError."""
    room = max_tokens - prompt_tokens
    if room < 1:
        raise ValueError(
            f"expected a prompt of fewer than {max_tokens} tokens, got {prompt_tokens}"
        )
    wanted = number(params, "max_tokens", None)
    stop = params.get("stop")
    top_k = number(params, "top_k", -1, low=-1, high=MAX_INT32)
    strings = tuple[str, ...]()
    ids = tuple[int, ...]()
    if isinstance(stop, str):
        strings = (stop,)
    elif isinstance(stop, list) and stop and all(type(x) is int for x in stop):
        ids = tuple(_ids(stop, "stop"))
    elif isinstance(stop, list) and stop and all(type(x) is str for x in stop):
        strings = tuple(stop)
    elif stop is not None:
        raise ValueError(
            f"stop: expected a string, strings or token ids, got {stop!r:.100}; a response always "
            "ends with an end token of the policy"
        )
    return SamplingConfig(
        number(params, "temperature", 1.0, high=MAX_FLOAT32, kind=float),
        0 if top_k == -1 else top_k,
        number(params, "top_p", 1.0, high=1, kind=float),
        room if wanted is None else wanted,
        stop_ids=ids,
        stop=strings,
    )


def _ids(values: Sequence[Any], name: str) -> list[int]:
    if any(type(x) is not int or not 0 <= x < 2**31 for x in values):
        raise ValueError(f"{name}: expected token ids")
    return list(values)


def sampled(samples: Sequence[Sample], prompt_logprobs: np.ndarray | None) -> bytes:
    """Return responses as a message."""
    response = wire.make("SampleResponse")
    for sample in samples:
        response.sequences.add(
            stop_reason=wire.LENGTH if sample.is_truncated else wire.STOP,
            tokens=wire.int32_bytes(sample.token_ids),
            logprobs=wire.float32_bytes(sample.logprobs),
        )
    if prompt_logprobs is not None:  # the first token has no log-prob
        response.prompt_logprobs = wire.float32_bytes([math.nan, *prompt_logprobs])
    data: bytes = response.SerializeToString()
    return data


# -- training ------------------------------------------------------------------------------


def parse_operation(body: bytes) -> Any:
    """Return the model and the number of a ForwardBackwardRequest. Raises ValueError."""
    return wire.parse("Operation", body)


def parse_datum(message: Any, loss: str) -> Datum:
    """Return the datum in a message. Raises ValueError."""
    parts = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise ValueError("expected chunks of text: this policy reads neither images nor sound")
        parts.append(wire.int32s(chunk.encoded_text.tokens))
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    inputs = {name: wire.array(tensor) for name, tensor in message.loss_fn_inputs.items()}
    known = INPUTS - {"weights"} | {RATIO_MASK} if loss == "gspo" else INPUTS
    if LOSSES[loss].has_bounds:
        known = known | BOUNDS.keys()
    if unknown := sorted(inputs.keys() - known):
        raise ValueError(
            f"loss_fn_inputs: expected {', '.join(sorted(known))}, got {unknown[0]!r:.100}"
        )
    for name in ("target_tokens", *known & {RATIO_MASK}):
        if name not in inputs:
            raise ValueError(f"loss_fn_inputs: expected {name}")
    if loss == "gspo":
        inputs["weights"] = np.asarray(inputs[RATIO_MASK] != 0, np.float32)
    targets = inputs.pop("target_tokens")
    if targets.ndim != 1:
        raise ValueError(f"target_tokens: expected one for each token, got shape {targets.shape}")
    return Datum(
        tokens,
        targets,
        weights=inputs.get("weights"),
        logprobs=inputs.get("logprobs"),
        advantages=inputs.get("advantages"),
        low=inputs.get("clip_low_threshold"),
        high=inputs.get("clip_high_threshold"),
    )


def loss_settings(message: Any) -> LossSettings:
    """Return the settings of a loss. Raises ValueError for settings that the loss does not read."""
    defaults = complete(message.loss_fn, None)
    known = [name for name, field in SETTINGS.items() if getattr(defaults, field) is not None]
    values = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        values[name] = value.text or value.number
    if unknown := sorted(values.keys() - known):
        reads = f"{', '.join(known) or 'nothing'} for {message.loss_fn}"
        raise ValueError(f"loss_fn_config: expected {reads}, got {unknown[0]!r:.100}")
    if any(not isinstance(x, float) or not math.isfinite(x) for x in values.values()):
        raise ValueError("loss_fn_config: expected finite numbers")
    given = {SETTINGS[name]: x for name, x in values.items()}
    return complete(message.loss_fn, LossSettings(**given))


def trained(output: Output) -> bytes:
    """Return the result of a pass as a message."""
    record = wire.make("ArrayRecord", num_datums=len(output.logprobs))
    record.fields["logprobs"].CopyFrom(wire.batched(output.logprobs))
    message = wire.make("ForwardBackwardOutput", loss_fn_output_type="ArrayRecord")
    message.loss_fn_outputs.append(record)
    message.metrics["loss:sum"] = output.loss
    data: bytes = message.SerializeToString()
    return data


def parse_adam(body: Mapping[str, Any]) -> Adam:
    """Return the settings of an optimizer step. Raises ValueError."""
    if body.get("optimizer_params") is not None:
        raise ValueError("expected adam_params: this server has AdamW alone")
    params = field(body, "adam_params", dict)

    def positive(name: str, default: float, high: float = MAX_FLOAT32) -> float:
        value: float = number(params, name, default, high=high, kind=float)
        return value

    clip = number(params, "grad_clip_norm", 0.0, low=-MAX_FLOAT32, high=MAX_FLOAT32, kind=float)
    rate = positive("learning_rate", 1e-4)
    eps = positive("eps", 1e-12)
    b1 = positive("beta1", 0.9, high=1)
    b2 = positive("beta2", 0.95, high=1)
    decay = positive("weight_decay", 0.0)
    if b1 == 1 or b2 == 1:
        raise ValueError("adam_params: expected betas below 1")
    return Adam(rate, b1, b2, eps, decay, clip if clip > 0 else math.inf)
