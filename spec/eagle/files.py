"""Save and load drafters in folders that serving engines read (spec/eagle/hf_layout.py).

A folder holds a drafter's own weights and, for engines that need them, copies of the policy's
embedding and, in `eagle3`, of its head's rows of the draft tokens. No pickle, no hub.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import hf_files, transformer
from models.config import ModelConfig
from models.hf_files import Stored
from spec.eagle import hf_layout as eagle_layout
from spec.eagle import model as eagle
from spec.eagle.config import EagleConfig
from spec.eagle.hf_layout import EMBEDDING, HEAD, MEMBERS, OFFSETS
from spec.eagle.model import EagleWeights


def save(
    directory: str | os.PathLike[str],
    drafter: EagleWeights,
    policy_config: ModelConfig,
    policy: transformer.Params | None,
    *,
    variant: str = "",
    max_shard_bytes: int = 2_000_000_000,
) -> None:
    """Write a drafter that `load` returns bit for bit, and that SGLang and vLLM read.

    With `policy` its embedding and (eagle3) its head's rows are written too: engines need them,
    `load` does not. `variant` notes how it was trained; empty: the design. The folder is written
    under another name and renamed, so that a killed process never leaves half a drafter. Raises
    ValueError if parameters do not fit the config, and if the folder holds another model.
    """
    config = drafter.config
    entries, tree = eagle_layout.entries(config), jax.tree.structure(eagle.param_specs(config))
    leaves: list[Any] = list(hf_files.fitting_leaves(drafter.params, entries, tree))
    extra = _companions(drafter, policy)
    beside = [eagle_layout.companions(config)[name] for name in extra]
    leaves += hf_files.fitting_leaves(list(extra.values()), beside, jax.tree.structure([*extra]))
    dtype = jnp.dtype(drafter.params.fc_DE.dtype).name
    content = eagle_layout.render(config, policy_config, dtype, variant or config.design)
    _refuse_other_model(Path(directory))
    with hf_files.replacing(directory) as folder:
        hf_files.write_tensors(folder, [*entries, *beside], leaves, max_shard_bytes)
        hf_files.write_json(folder / hf_files.CONFIG, content)


def load(
    directory: str | os.PathLike[str],
    policy_config: ModelConfig,
    policy: transformer.Params | None = None,
) -> EagleWeights:
    """Read a drafter of a policy; each tensor keeps its type.

    A folder that `save` wrote says whether the head is the drafter's own. In other folders it is,
    unless it equals the rows of `policy`'s, compared in its type. Raises FileNotFoundError or
    ValueError as `check` does, and ValueError for an invalid vocabulary map.
    """
    folder = Path(directory)
    config, stored, is_foreign = _checked(folder, policy_config)
    ids_U = _draft_ids(folder, stored, policy_config.vocab_size)
    if config.own_head and is_foreign and policy is not None:
        shared = eagle.frozen(policy, None if ids_U is None else jnp.asarray(ids_U))
        head_UD, policy_UD = hf_files.read_tensor(stored[HEAD]), jax.device_get(shared.head_UD)
        is_own = not np.array_equal(np.asarray(policy_UD).astype(head_UD.dtype), head_UD)
        config = dataclasses.replace(config, own_head=is_own)
    arrays = hf_files.read_tensors(eagle_layout.entries(config), stored)
    tree = jax.tree.structure(eagle.param_specs(config))
    return EagleWeights(config, tree.unflatten(arrays), ids_U)


def check(directory: str | os.PathLike[str], policy_config: ModelConfig) -> EagleConfig:
    """Return the shape of a folder's drafter, from config.json and the headers of its tensors.

    A head in a foreign folder counts as the drafter's own. Raises FileNotFoundError for a missing
    folder or file, ValueError for a drafter of another policy and for anything unknown,
    unsupported, missing, surplus or of the wrong shape or type.
    """
    return _checked(Path(directory), policy_config)[0]


def _checked(folder: Path, policy: ModelConfig) -> tuple[EagleConfig, dict[str, Stored], bool]:
    """Return config, tensors by names without prefix, and whether another program wrote them."""
    content = hf_files.read_config(folder)
    eagle_layout.design_of(content, str(folder))
    stored: dict[str, Stored] = {}
    for name, at in hf_files.headers(folder).items():
        short = name.removeprefix("model.")
        if short in stored:
            raise ValueError(
                f"{folder}: expected {short} once, got it with and without the prefix 'model.': "
                "export again"
            )
        stored[short] = at
    config = eagle_layout.parse(content, policy, stored.keys(), str(folder))
    companions = eagle_layout.companions(config).items()
    present = [entry for name, entry in companions if name in stored or name == OFFSETS]
    hint = f"config.json and the weights must be of one {config.design} drafter"
    hf_files.refuse_mismatch(folder, [*eagle_layout.entries(config), *present], stored, hint)
    return config, stored, not content.get(eagle_layout.OURS)


def _companions(
    drafter: EagleWeights, policy: transformer.Params | None
) -> dict[str, np.ndarray | jax.Array]:
    """Return the tensors to write in addition to the drafter's weights, by name."""
    config, ids_U = drafter.config, drafter.draft_ids_U
    if (0 if ids_U is None else len(ids_U)) != config.draft_vocab_size:
        raise ValueError(f"expected draft_ids_U of {config.draft_vocab_size} tokens (None: 0)")
    tensors: dict[str, np.ndarray | jax.Array] = {}
    if ids_U is not None:
        tensors[OFFSETS] = ids_U.astype(np.int64) - np.arange(len(ids_U))
        eagle_layout.ids_of(tensors[OFFSETS], config.layer.vocab_size, "draft_ids_U")
        tensors[MEMBERS] = np.isin(np.arange(config.layer.vocab_size), ids_U)
    if policy is not None:
        shared = eagle.frozen(policy, None if ids_U is None else jnp.asarray(ids_U))
        tensors[EMBEDDING] = shared.embedding_VD
        if config.design == "eagle3" and not config.own_head:  # elsewhere vLLM refuses a head
            tensors[HEAD] = shared.head_UD
    return tensors


def _draft_ids(folder: Path, stored: dict[str, Stored], vocab_size: int) -> np.ndarray | None:
    if OFFSETS not in stored:
        return None
    ids_U = eagle_layout.ids_of(hf_files.read_tensor(stored[OFFSETS]), vocab_size, str(folder))
    if MEMBERS in stored:
        members = np.flatnonzero(hf_files.read_tensor(stored[MEMBERS]))
        if not np.array_equal(members, ids_U):
            raise ValueError(
                f"{folder}: expected t2d to mark the {len(ids_U)} tokens that d2t gives, got "
                f"{len(members)} marked, {len(np.intersect1d(members, ids_U))} of them in d2t; "
                "copy both from one export"
            )
    return ids_U


def _refuse_other_model(folder: Path) -> None:
    """Raise ValueError if the folder holds a model that is not a drafter, such as the policy."""
    if not (folder / hf_files.CONFIG).is_file():
        return
    try:
        eagle_layout.design_of(hf_files.read_json(folder / hf_files.CONFIG), str(folder))
    except ValueError as error:
        raise ValueError(
            f"expected a new folder or a drafter's to save to, got one that holds something else "
            f"({error}): give another folder"
        ) from error
