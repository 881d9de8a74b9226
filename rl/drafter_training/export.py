"""Folders of trained drafters."""

from __future__ import annotations

import shlex
from pathlib import Path

import jax

from reprise.models.config import ModelConfig
from reprise.models.decoder.transformer import Params
from reprise.models.formats import hf_files
from reprise.models.hints import program
from reprise.models.text.tokenizer import copy_files
from reprise.spec.eagle import files as eagle_files
from reprise.spec.eagle.config import EagleConfig
from reprise.spec.eagle.files import Engine
from reprise.spec.eagle.model import EagleWeights

SGLANG = "SGLang 0.5.6 to 0.5.23"
VLLM = "vLLM 0.32"  # the layout follows their sources


def check_target(folder: Path) -> None:
    """Raise ValueError if `folder` holds anything but a drafter that this module exported."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise ValueError(f"expected a folder to write to, got the file {folder}")
    config = folder / hf_files.CONFIG
    if not config.is_file() or eagle_files.OURS not in hf_files.read_json(config):
        raise ValueError(
            f"expected a new folder, or that of a drafter exported before, got {folder}, which "
            "holds something else: give another folder"
        )


def write(
    folder: Path,
    drafter: EagleWeights,
    model: ModelConfig,
    policy: Params | None,
    tokenizer: Path,
    variant: str,
    engine: Engine = "sglang",
) -> str:
    """Write a drafter of the policy `model` with the tokenizer, and return a description.

    The embedding and head of `policy` are copied for serving engines, unless it is None.
    """
    eagle_files.save(folder, drafter, model, policy, variant=variant, engine=engine)
    copy_files(tokenizer, folder)
    config = drafter.config
    size = sum(leaf.size for leaf in jax.tree.leaves(drafter.params))
    some = "all" if drafter.draft_ids_U is None else f"{len(drafter.draft_ids_U):,} of"
    text = f"{config.design}, {size:,} parameters, {some} {model.vocab_size:,} tokens"
    return f"{text}; {engines(config, engine)}"


def engines(config: EagleConfig, engine: Engine) -> str:
    """Return which serving engines load the folder of a drafter, with their versions."""
    if config.design == "eagle3":
        if len(config.feature_layers) != 3:
            return "no engine loads it: the policy has fewer than four layers"
        return f"for {SGLANG} and {VLLM}"
    if engine == "sglang":
        return f"for {SGLANG} (for {VLLM}: --engine=vllm)"
    if config.draft_vocab_size:
        return "no engine loads it: vLLM refuses a draft vocabulary in this design"
    return f"for {VLLM} (for {SGLANG}: --engine=sglang)"


def start_command(folder: Path, gin_file: Path | None = None) -> str:
    """Return the command of a run that starts from the drafter, with a config file if given."""
    command = program("train").split()
    if gin_file is not None:  # the new run gets a new folder
        command += [f"--gin_file={gin_file}", "--gin.Run.directory=None"]
    return shlex.join([*command, f"--gin.Drafter.directory={folder}"])
