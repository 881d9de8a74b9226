"""Save and load drafters in folders that serving engines read, without pickle or a hub.

A folder holds the drafter weights and, for engines that need them, copies of the policy embedding
and, in `eagle3`, of the policy head rows for the draft tokens. The layouts are
`LlamaForCausalLMEagle` (design `eagle`; fc reads the embedding, then the hidden state) and
`LlamaForCausalLMEagle3` (`eagle3`), as SGLang and vLLM read them. Draft token i is policy token
i + d2t[i]; t2d marks these policy tokens.

Two lists name the layers of `eagle3`. vLLM reads `eagle_aux_hidden_state_layer_ids`, which counts
*inputs*: id j is the output of layer j − 1, our `feature_layers` + 1. The default of both engines
is 2, n/2, n − 3. SGLang reads the list in `eagle_config`, which counts *outputs* for Llama and
Qwen, so SGLang adds 1. (For other policies SGLang adds 1 only if the first id is 1; `parse` reads
foreign folders by this rule.) Properties without an entry in the engines are under `reprise`, which
may be missing.

For `eagle`, both engines take the head from the policy and do not map draft tokens. There, vLLM
rejects an fc bias; SGLang always has an fc bias, random if the folder has none, so `save` writes
zeros unless the engine is vLLM. For `eagle3`, both engines take exactly three layers.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from reprise.models.config import ModelConfig
from reprise.models.decoder import transformer
from reprise.models.formats import hf, hf_entries, hf_files
from reprise.models.formats.hf_files import Entry, Stored, shown
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import Design, EagleConfig
from reprise.spec.eagle.model import EagleParams, EagleWeights

OURS = "reprise"
Engine = Literal["sglang", "vllm"]
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
OFFSETS = "d2t"
MEMBERS = "t2d"
_FC_BIAS = "fc.bias"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

ARCHITECTURES: dict[Design, str] = {
    "eagle": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
}
_DESIGNS: dict[str, Design] = {
    **{name: design for design, name in ARCHITECTURES.items()},
    "EagleLlamaForCausalLM": "eagle",  # names in vLLM
    "Eagle3LlamaForCausalLM": "eagle3",
}
_LAYER_PREFIX: dict[Design, str] = {"eagle": "layers.0.", "eagle3": "midlayer."}

# Values that the model in spec/eagle/model.py needs; an absent entry has the same value.
_FIXED_OPTIONS: dict[str, Any] = {
    "model_type": "llama",
    "qkv_bias": False,
    "is_causal": True,
    "logit_scale": 1.0,
    "add_para_norm": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "norm_output": False,
    "fc_norm": False,
    "parallel_drafting": False,
}
# Config entries that are read in addition to policy entries.
_NAMES = {"draft_vocab_size", "bias", "target_hidden_size", "eagle_config", OURS, _LAYER_IDS}
_NAMES |= _FIXED_OPTIONS.keys()


def entries(config: EagleConfig) -> list[Entry]:
    """Return the tensors of the drafter weights in the order of the leaves of `EagleParams`."""
    specs = eagle.param_specs(config)
    prefix = _LAYER_PREFIX[config.design]
    names = {
        "fc_DE": "fc.weight",
        "fc_bias_D": _FC_BIAS,
        "embedding_norm_D": prefix + "input_layernorm.weight",
        "feature_norm_D": prefix + "hidden_norm.weight",
        "final_norm_D": "norm.weight",
        "head_UD": HEAD,
    }
    own = {f: None if getattr(specs, f) is None else name for f, name in names.items()}
    return hf_files.entries_of(EagleParams(layer=hf.layer_names(specs.layer, prefix), **own), specs)


def companions(config: EagleConfig) -> dict[str, Entry]:
    """Return the additional tensors: copies from the policy, vocabulary map, zeros for SGLang."""
    V = config.layer.vocab_size
    D = config.layer.d_model
    U = config.num_draft_ids
    tensors = {EMBEDDING: Entry(EMBEDDING, (V, D), ("vocab", "embed"))}
    if config.design == "eagle" and not config.fc_bias:
        tensors[_FC_BIAS] = Entry(_FC_BIAS, (D,), ("embed",))
    if not config.own_head:
        tensors[HEAD] = Entry(HEAD, (U, D), ("vocab", "embed"))
    if config.draft_vocab_size:
        tensors[OFFSETS] = Entry(OFFSETS, (U,), (None,), dtypes=("I64", "I32"))
        tensors[MEMBERS] = Entry(MEMBERS, (V,), (None,), dtypes=("BOOL",))
    return tensors


def ids_of(offsets_U: np.ndarray, vocab_size: int, where: str) -> np.ndarray:
    """Return the draft tokens i + d2t[i], int32 [U]; raise ValueError if out of range or order."""
    ids_U = np.arange(len(offsets_U)) + offsets_U.astype(np.int64)
    outside_U = (ids_U < 0) | (ids_U >= vocab_size)
    if outside_U.any():
        i = int(np.argmax(outside_U))
        raise ValueError(
            f"{where}: expected draft tokens among the policy's 0 … {vocab_size - 1}, got {i} + "
            f"d2t[{i}] = {ids_U[i]}; give the policy the drafter was made for"
        )
    falls_U = np.diff(ids_U) <= 0
    if falls_U.any():
        i = int(np.argmax(falls_U))
        raise ValueError(
            f"{where}: expected ascending draft tokens, each once, got {ids_U[i]} and then "
            f"{ids_U[i + 1]} at {i + 1}; d2t holds differences i + d2t[i], not tokens: export again"
        )
    return ids_U.astype(np.int32)


def render(config: EagleConfig, policy: ModelConfig, dtype: str, variant: str) -> dict[str, Any]:
    """Return the contents of config.json; `dtype` names the weight dtype."""
    ids = list(config.feature_layers)
    content, _ = hf.render_config(config.layer, dtype)
    content |= {
        "architectures": [ARCHITECTURES[config.design]],
        "bias": config.fc_bias,
        "draft_vocab_size": config.num_draft_ids,
    }
    if ids:  # SGLang reads the first of the two lists, vLLM the second
        content |= {
            "target_hidden_size": policy.d_model,
            "eagle_config": {_LAYER_IDS: ids, "use_aux_hidden_state": True},
            _LAYER_IDS: [i + 1 for i in ids],
        }
    ours = {
        "variant": variant,
        "num_policy_layers": policy.num_layers,
        "own_head": config.own_head,
    }
    return {**content, OURS: ours}


def parse(
    content: Mapping[str, Any], policy: ModelConfig, present: Collection[str], where: str
) -> EagleConfig:
    """Return the `EagleConfig` of a config.json for a policy; `present` holds the tensor names.

    Tensor names decide properties that config.json leaves out: the fc bias, a separate head, a map.
    `where` names the folder in errors. Raises ValueError for an unknown architecture, an
    unsupported option, a missing or malformed entry, or a drafter of another policy.
    """
    design = design_of(content, where)
    ours = _object(content, OURS, where)
    if ours:
        own_head = ours.get("own_head")
        if not isinstance(own_head, bool):
            raise ValueError(
                f"{where}: expected {OURS}.own_head as true or false, got {shown(own_head)}: "
                f"write it, or leave {OURS} out whole"
            )
    wide = design == "eagle3"
    aux = _object(content, "eagle_config", where)
    options = {
        **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer"), wide),
        "use_last_layernorm": wide,
        "use_mtp_layernorm": False,
        "norm_before_fc": False,
    }
    hf_entries.refuse_misspelt(content, where, _NAMES)
    hf_entries.refuse_misspelt(aux, f"{where}: eagle_config", {*options, _LAYER_IDS})
    hf.refuse_options(content, where, _FIXED_OPTIONS)
    hf.refuse_options(aux, f"{where}: eagle_config", options)
    if content.get("num_hidden_layers") != 1:
        raise ValueError(
            f"{where}: expected num_hidden_layers=1, got "
            f"{shown(content.get('num_hidden_layers'))}: "
            "drafters of more layers are not implemented; use one of a single layer"
        )
    layer = hf.parse_config({**content, "architectures": ["LlamaForCausalLM"]}, {}, where)
    _refuse_other_policy(content, ours, layer, policy, where)
    size = hf_entries.read_entry(content, "draft_vocab_size", "size", where, layer.vocab_size)
    all_tokens = size == layer.vocab_size and OFFSETS not in present
    try:
        return EagleConfig(
            design,
            dataclasses.replace(
                layer, tied_embeddings=False, unused_ids=policy.unused_ids if all_tokens else ()
            ),
            _feature_layers(content, aux, bool(ours), policy, where) if wide else (),
            0 if all_tokens else size,
            fc_bias=hf_entries.read_entry(content, "bias", "flag", where, _FC_BIAS in present),
            own_head=bool(ours.get("own_head", HEAD in present)),
        )
    except ValueError as error:
        message = str(error)
        raise ValueError(message if message.startswith(where) else f"{where}: {message}") from error


def design_of(content: Mapping[str, Any], where: str) -> Design:
    """Return the design that `architectures` names; raise ValueError for an unknown name."""
    names = content.get("architectures")
    design = _DESIGNS.get(names[0]) if hf_entries.is_one_name(names) else None
    if design is None:
        raise ValueError(
            f"{where}: unknown architecture: expected one of {sorted(_DESIGNS)}, got "
            f"{shown(names)}; other drafters are not supported"
        )
    return design


def _object(content: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    value = content.get(name)
    if not isinstance(value, Mapping | None):
        raise ValueError(f"{where}: expected {name} as an object, got {shown(value)}")
    return value or {}


def _refuse_other_policy(
    content: Mapping[str, Any],
    ours: Mapping[str, Any],
    layer: ModelConfig,
    policy: ModelConfig,
    where: str,
) -> None:
    width = content.get("target_hidden_size")
    facts = {
        "hidden_size": (layer.d_model, policy.d_model),
        "target_hidden_size": (policy.d_model if width is None else width, policy.d_model),
        "vocab_size": (layer.vocab_size, policy.vocab_size),
    }
    if ours:
        facts["num_policy_layers"] = (ours.get("num_policy_layers"), policy.num_layers)
    if content.get("tie_word_embeddings"):
        facts["tie_word_embeddings"] = (True, policy.tied_embeddings)
    wrong = [
        f"{name}={shown(got)} (expected {wanted})"
        for name, (got, wanted) in facts.items()
        if got != wanted
    ]
    if wrong:
        raise ValueError(
            f"{where}: a drafter of another policy: {', '.join(wrong)}; give the policy that it "
            "was trained for, or train one for this policy"
        )


def _feature_layers(
    content: Mapping[str, Any],
    aux: Mapping[str, Any],
    inputs: bool,
    policy: ModelConfig,
    where: str,
) -> tuple[int, ...]:
    """Return the feature layers.

    With `inputs`, the ids are in the list of vLLM and count inputs. Otherwise, the first id decides
    whether ids count inputs or outputs.
    """
    n = policy.num_layers
    place = content if inputs or aux.get(_LAYER_IDS) is None else aux
    ids = place.get(_LAYER_IDS)
    if ids is None:
        if n < 8:
            raise ValueError(
                f"{where}: expected {_LAYER_IDS} in eagle_config, got none, and the usual layers "
                f"2, n/2, n − 3 are not three of a policy of {n}: write them"
            )
        return eagle.config_for(policy, "eagle3").feature_layers
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError(f"{where}: expected {_LAYER_IDS} as a list of numbers, got {shown(ids)}")
    shift = 1 if inputs or ids[0] != 1 else 0
    layers = tuple(i - shift for i in ids)
    if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= n:
        raise ValueError(
            f"{where}: expected ascending {_LAYER_IDS} among {shift} … {n - 1 + shift} for a "
            f"policy of {n} layers, got {shown(ids)}; give the policy that the drafter was "
            "trained for"
        )
    return layers


def save(
    directory: str | os.PathLike[str],
    drafter: EagleWeights,
    policy_config: ModelConfig,
    policy: transformer.Params | None,
    *,
    variant: str = "",
    engine: Engine = "sglang",
    max_shard_bytes: int = 2_000_000_000,
) -> None:
    """Write a drafter that `load` restores bit for bit and that `engine` can read.

    With `policy`, the policy embedding and (eagle3) head rows are written too; engines need them,
    but `load` does not. `variant` records how the drafter was trained (empty: the design). The
    folder is written under another name and renamed, so that a killed process never leaves half a
    drafter. Raises ValueError if parameters do not fit the config, or if the folder holds another
    model.
    """
    config = drafter.config
    own = entries(config)
    tree = jax.tree.structure(eagle.param_specs(config))
    leaves: list[Any] = list(hf_files.fitting_leaves(drafter.params, own, tree))
    extra = _companions(drafter, policy, engine)
    beside = [companions(config)[name] for name in extra]
    leaves += hf_files.fitting_leaves(list(extra.values()), beside, jax.tree.structure([*extra]))
    dtype = jnp.dtype(drafter.params.fc_DE.dtype).name
    content = render(config, policy_config, dtype, variant or config.design)
    _refuse_other_model(Path(directory))
    with hf_files.replacing(directory) as folder:
        hf_files.write_tensors(folder, [*own, *beside], leaves, max_shard_bytes)
        hf_files.write_json(folder / hf_files.CONFIG, content)


def load(
    directory: str | os.PathLike[str],
    policy_config: ModelConfig,
    policy: transformer.Params | None = None,
) -> EagleWeights:
    """Read a drafter of a policy; each tensor keeps its dtype.

    A folder written by `save` states whether the drafter has a separate head. In other folders, a
    head is separate unless it equals the head rows of `policy`, cast to the dtype in the folder.
    Raises FileNotFoundError or ValueError as `check` does, and ValueError for an invalid vocabulary
    map.
    """
    folder = Path(directory)
    config, stored, is_foreign = _checked(folder, policy_config)
    ids_U = _draft_ids(folder, stored, policy_config.vocab_size)
    if config.own_head and is_foreign and policy is not None:
        shared = eagle.frozen(policy, None if ids_U is None else jnp.asarray(ids_U))
        head_UD = hf_files.read_tensor(stored[HEAD])
        policy_UD = jax.device_get(shared.head_UD)
        is_own = not np.array_equal(np.asarray(policy_UD).astype(head_UD.dtype), head_UD)
        config = dataclasses.replace(config, own_head=is_own)
    if not config.fc_bias and _FC_BIAS in stored and hf_files.read_tensor(stored[_FC_BIAS]).any():
        raise ValueError(
            f"{folder}: expected zeros in {_FC_BIAS} of a drafter without: export again"
        )
    arrays = hf_files.read_tensors(entries(config), stored)
    tree = jax.tree.structure(eagle.param_specs(config))
    return EagleWeights(config, tree.unflatten(arrays), ids_U)


def check(directory: str | os.PathLike[str], policy_config: ModelConfig) -> EagleConfig:
    """Return the shape of the drafter in a folder, from config.json and the tensor headers.

    A head in a foreign folder counts as a separate head. Raises FileNotFoundError for a missing
    folder or file, and ValueError for a drafter of another policy and for anything unknown,
    unsupported, missing, surplus or of the wrong shape or type.
    """
    return _checked(Path(directory), policy_config)[0]


def _checked(folder: Path, policy: ModelConfig) -> tuple[EagleConfig, dict[str, Stored], bool]:
    """Return the config, tensors by unprefixed name, and whether another program wrote them."""
    content = hf_files.read_config(folder)
    design_of(content, str(folder))
    stored: dict[str, Stored] = {}
    for name, at in hf_files.headers(folder).items():
        short = name.removeprefix("model.")
        if short in stored:
            raise ValueError(
                f"{folder}: expected {short} once, got it with and without the prefix 'model.': "
                "export again"
            )
        stored[short] = at
    config = parse(content, policy, stored.keys(), str(folder))
    beside = companions(config).items()
    present = [entry for name, entry in beside if name in stored or name == OFFSETS]
    hint = f"config.json and the weights must be of one {config.design} drafter"
    hf_files.refuse_mismatch(folder, [*entries(config), *present], stored, hint)
    return config, stored, not content.get(OURS)


def _companions(
    drafter: EagleWeights, policy: transformer.Params | None, engine: Engine
) -> dict[str, np.ndarray | jax.Array]:
    """Return the tensors to write in addition to the drafter weights, by name."""
    config = drafter.config
    ids_U = drafter.draft_ids_U
    if (0 if ids_U is None else len(ids_U)) != config.draft_vocab_size:
        raise ValueError(f"expected draft_ids_U of {config.draft_vocab_size} tokens (None: 0)")
    tensors: dict[str, np.ndarray | jax.Array] = {}
    if engine == "sglang" and config.design == "eagle" and not config.fc_bias:
        tensors[_FC_BIAS] = np.zeros(config.layer.d_model, drafter.params.fc_DE.dtype)
    if ids_U is not None:
        tensors[OFFSETS] = ids_U.astype(np.int64) - np.arange(len(ids_U))
        ids_of(tensors[OFFSETS], config.layer.vocab_size, "draft_ids_U")
        tensors[MEMBERS] = np.isin(np.arange(config.layer.vocab_size), ids_U)
    if policy is not None:
        shared = eagle.frozen(policy, None if ids_U is None else jnp.asarray(ids_U))
        tensors[EMBEDDING] = shared.embedding_VD
        if config.design == "eagle3" and not config.own_head:  # vLLM rejects a head in `eagle`
            tensors[HEAD] = shared.head_UD
    return tensors


def _draft_ids(folder: Path, stored: dict[str, Stored], vocab_size: int) -> np.ndarray | None:
    if OFFSETS not in stored:
        return None
    ids_U = ids_of(hf_files.read_tensor(stored[OFFSETS]), vocab_size, str(folder))
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
        design_of(hf_files.read_json(folder / hf_files.CONFIG), str(folder))
    except ValueError as error:
        raise ValueError(
            f"expected a new folder or a drafter's to save to, got one that holds something else "
            f"({error}): give another folder"
        ) from error
