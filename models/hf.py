"""Policies in and out of Hugging Face folders: config.json and safetensors.

Weights are streamed tensor by tensor, each straight onto its shards. Hugging Face
stores a linear layer as [out, in], we as [in, out]; everything else is the same
numbers under another name. `check` reads headers only. No pickle, no hub.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import hf_config
from models.config import ModelConfig
from models.sharding import fitting_sharding
from models.transformer import Layer, Params, param_specs

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LAYER_NAMES = {
    "attention_norm_D": "input_layernorm.weight",
    "query_DQ": "self_attn.q_proj.weight",
    "key_DP": "self_attn.k_proj.weight",
    "value_DP": "self_attn.v_proj.weight",
    "output_QD": "self_attn.o_proj.weight",
    "mlp_norm_D": "post_attention_layernorm.weight",
    "gate_DF": "mlp.gate_proj.weight",
    "up_DF": "mlp.up_proj.weight",
    "down_FD": "mlp.down_proj.weight",
    "query_bias_Q": "self_attn.q_proj.bias",
    "key_bias_P": "self_attn.k_proj.bias",
    "value_bias_P": "self_attn.v_proj.bias",
    "query_norm_h": "self_attn.q_norm.weight",
    "key_norm_h": "self_attn.k_norm.weight",
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DTYPES = ("F32", "BF16", "F16")  # by safetensors' names


@dataclasses.dataclass(frozen=True)
class _Entry:
    """One tensor: its Hugging Face name and shape, and how it lies in `Params`."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    transposed: bool


@dataclasses.dataclass(frozen=True)
class _Stored:
    """What a safetensors header says of a tensor."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


def load_pretrained(
    directory: str | os.PathLike[str], mesh: Mesh | None = None, dtype: Any = None
) -> tuple[ModelConfig, Params]:
    """Read a policy; with a mesh every tensor goes straight onto its shards.

    `dtype` None keeps each tensor's own. Host memory holds one tensor at a time.
    A tied folder may carry an lm_head that equals its embedding. Raises
    FileNotFoundError or ValueError as `check` does, and ValueError for a tied
    folder whose lm_head differs.
    """
    folder = Path(directory)
    config, stored = _checked(folder)
    _refuse_other_head(config, stored)
    entries, tree = _entries(config)
    arrays: dict[str, jax.Array] = {}
    for path in sorted({stored[entry.name].path for entry in entries}):
        with _open(path) as file:
            for entry in entries:
                if stored[entry.name].path == path:
                    arrays[entry.name] = _place(file.get_tensor(entry.name), entry, mesh, dtype)
    return config, tree.unflatten([arrays[entry.name] for entry in entries])


def check(directory: str | os.PathLike[str]) -> ModelConfig:
    """The config of a folder whose tensors all have the right names, shapes and types.

    Reads config.json and the headers of the safetensors files, no weights. Raises
    FileNotFoundError for a missing folder or file, ValueError for anything in them
    that is unknown, unsupported, missing, surplus or of the wrong shape.
    """
    return _checked(Path(directory))[0]


def save_pretrained(
    directory: str | os.PathLike[str],
    config: ModelConfig,
    params: Params,
    *,
    max_shard_bytes: int = 2_000_000_000,
) -> None:
    """Write a policy that `load_pretrained` and `transformers` read, bit for bit.

    The folder is written beside its place and renamed into it, so that a killed
    process never leaves half a policy. Other files of an existing folder (its
    tokenizer) are kept. Raises ValueError where the parameters do not fit the config.
    """
    entries, tree = _entries(config)
    leaves = _fitting_leaves(params, config, entries, tree)
    target = Path(directory).absolute()
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"expected a folder to write to, got the file {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        if target.exists():
            shutil.copytree(target, partial, ignore=_own_files, copy_function=_link, symlinks=True)
        partial.mkdir(exist_ok=True)
        _write_weights(partial, entries, leaves, max_shard_bytes)
        hf, generation = hf_config.render(config, jnp.dtype(leaves[0].dtype).name)
        _write_json(partial / "config.json", hf)
        _write_json(partial / "generation_config.json", generation)
        _swap(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _entries(config: ModelConfig) -> tuple[list[_Entry], Any]:
    """Every tensor of a policy in the order of the leaves of `Params`, and the tree's shape."""
    specs = param_specs(config)

    def layer_names(i: int, layer: Layer) -> Layer:
        names = {
            field: None if getattr(layer, field) is None else f"model.layers.{i}.{name}"
            for field, name in _LAYER_NAMES.items()
        }
        return Layer(**names)

    names = Params(
        embedding_VD=_EMBEDDING,
        layers=tuple(layer_names(i, layer) for i, layer in enumerate(specs.layers)),
        final_norm_D="model.norm.weight",
        head_DV=None if specs.head_DV is None else _HEAD,
    )
    leaves, tree = jax.tree.flatten(specs)
    entries = []
    for name, spec in zip(jax.tree.leaves(names), leaves, strict=True):
        transposed = len(spec.shape) == 2 and name != _EMBEDDING
        shape = spec.shape[::-1] if transposed else spec.shape
        entries.append(_Entry(name, shape, spec.axes, transposed))
    return entries, tree


def _checked(folder: Path) -> tuple[ModelConfig, dict[str, _Stored]]:
    if not folder.is_dir():
        raise FileNotFoundError(
            f"expected a local Hugging Face folder, got {str(folder)!r}, which is not a directory: "
            "models are not downloaded here; fetch it first and give its path"
        )
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no config.json in {folder}: give the folder that holds it")
    generation = folder / "generation_config.json"
    config = hf_config.parse(
        _read_json(folder / "config.json"),
        _read_json(generation) if generation.is_file() else {},
        str(folder),
    )
    stored = _headers(folder)
    _refuse_mismatch(folder, config, stored)
    return config, stored


def _headers(folder: Path) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for path in _weight_files(folder):
        with _open(path) as file:
            for name in file.keys():
                if name in stored:
                    raise ValueError(
                        f"{folder}: {name} is in {stored[name].path.name} and {path.name}"
                    )
                view = file.get_slice(name)
                stored[name] = _Stored(path, tuple(view.get_shape()), view.get_dtype())
    return stored


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        found = sorted(p.name for p in folder.iterdir())
        pickled = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
        why = (
            f"only torch files ({pickled[0]}), which are pickles and not read"
            if pickled
            else found[:12]
        )
        raise FileNotFoundError(
            f"no weights in {folder}: expected {WEIGHTS} or {INDEX}, got {why}; "
            "save the policy with safetensors"
        )
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX} has no weight_map: copy the index again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX} names {name!r}: expected a file of the same folder")
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / INDEX} names {name}, which is not there: expected {len(names)} weight "
                "files; copy the missing one"
            )
    return [folder / name for name in names]


def _refuse_mismatch(folder: Path, config: ModelConfig, stored: Mapping[str, _Stored]) -> None:
    """One error for all tensors that are missing, surplus, or of the wrong shape or type."""
    expected = {entry.name: entry.shape for entry in _entries(config)[0]}
    if config.tied_embeddings and _HEAD in stored:
        expected[_HEAD] = expected[_EMBEDDING]  # tolerated; its values are compared on loading
    missing = [name for name in expected if name not in stored]
    # Some old exports carry the rotary frequencies, which follow from the config.
    surplus = [n for n in stored if n not in expected and not n.endswith("rotary_emb.inv_freq")]
    wrong = [
        f"{name} has shape {list(stored[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    wrong += [
        f"{name} is of type {stored[name].dtype}, expected one of {', '.join(_DTYPES)}"
        for name in expected
        if name in stored and stored[name].dtype not in _DTYPES
    ]
    problems = (
        [_some(f"missing {'tensor' if len(missing) == 1 else 'tensors'}", missing)]
        if missing
        else []
    )
    problems += [_some("surplus", surplus)] if surplus else []
    problems += [_some("wrong", wrong)] if wrong else []
    if problems:
        hint = (
            "set tie_word_embeddings if the head is the embedding"
            if missing == [_HEAD]
            else "config.json and the weights must come from one export"
        )
        raise ValueError(
            f"{folder}: the weights do not fit config.json: {'; '.join(problems)}; {hint}"
        )


def _some(title: str, items: list[str], most: int = 6) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{title}: {', '.join(items[:most])}{more}"


def _refuse_other_head(config: ModelConfig, stored: Mapping[str, _Stored]) -> None:
    if not (config.tied_embeddings and _HEAD in stored):
        return
    tensors = []
    for name in (_EMBEDDING, _HEAD):
        with _open(stored[name].path) as file:
            tensors.append(file.get_tensor(name))
    if not np.array_equal(*tensors):
        raise ValueError(
            f"{stored[_HEAD].path}: config.json says tie_word_embeddings, so lm_head.weight was "
            "expected absent or equal to the embedding, got another tensor; set "
            "tie_word_embeddings=false to use it"
        )


def _place(host: np.ndarray, entry: _Entry, mesh: Mesh | None, dtype: Any) -> jax.Array:
    """A stored tensor in our layout and type, on its shards."""
    host = host.T if entry.transposed else host
    host = host if dtype is None else host.astype(jnp.dtype(dtype), copy=False)
    if mesh is None:
        return jnp.asarray(host)
    sharding = fitting_sharding(mesh, host.shape, entry.axes)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _fitting_leaves(
    params: Params, config: ModelConfig, entries: list[_Entry], tree: Any
) -> list[jax.Array]:
    leaves, got = jax.tree.flatten(params)
    if got != tree:
        raise ValueError(
            f"the parameters are not those of the config: expected {len(entries)} tensors in "
            f"{config.num_layers} layers (tied_embeddings={config.tied_embeddings}), got "
            f"{len(leaves)} in {len(params.layers)}: save them with the config they were made with"
        )
    for entry, leaf in zip(entries, leaves, strict=True):
        shape = leaf.shape[::-1] if entry.transposed else leaf.shape
        if tuple(shape) != entry.shape:
            raise ValueError(
                f"{entry.name} has shape {list(shape)}, expected {list(entry.shape)}: save the "
                "parameters with the config they were made with"
            )
    return leaves


def _write_weights(
    folder: Path, entries: list[_Entry], leaves: list[jax.Array], max_shard_bytes: int
) -> None:
    """One file, or several of at most `max_shard_bytes` (one tensor may exceed it) and an index."""
    from safetensors.numpy import save_file

    shards: list[list[int]] = [[]]
    filled_bytes, total_bytes = 0, 0
    for i, leaf in enumerate(leaves):
        size_bytes = math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
        if shards[-1] and filled_bytes + size_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(i)
        filled_bytes += size_bytes
        total_bytes += size_bytes
    weight_map = {}
    for n, shard in enumerate(shards, start=1):
        file = WEIGHTS if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for i in shard:
            host = np.asarray(jax.device_get(leaves[i]))
            # safetensors writes a transposed view's memory as it lies, hence the copy.
            tensors[entries[i].name] = np.ascontiguousarray(
                host.T if entries[i].transposed else host
            )
            weight_map[entries[i].name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
        # safetensors makes files that only their owner reads; follow the folder instead.
        (folder / file).chmod(folder.stat().st_mode & 0o666)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        _write_json(folder / INDEX, index)


def _own_files(_: str, names: list[str]) -> list[str]:
    """Those files of a folder that saving writes anew, or that would be stale beside it."""
    own = {"config.json", "generation_config.json", INDEX}
    return [n for n in names if n in own or (n.startswith("model") and n.endswith(".safetensors"))]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # no hard links on this file system
        shutil.copy2(source, target)


def _swap(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)  # killed here: both policies are whole, under their other names
    partial.rename(target)
    shutil.rmtree(old)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(str(path), framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file: {error}; copy "
            "it again (a clone without git-lfs leaves small text files in their place)"
        ) from error
    with file:
        yield file


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
