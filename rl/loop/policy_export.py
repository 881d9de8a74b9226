"""Export of a policy to a Hugging Face folder: weights, tokenizer, settings and a model card.

Nothing is written but the folder, which comes into its place at once. A run is only read, and may
be going on meanwhile.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from models import hf, hf_files
from models.folder import held
from models.params import Params
from models.tokenizer import copy_files, is_own_file
from rl.loop import legs, model_card
from rl.loop.experiment import Inputs, TrainConfig
from rl.loop.model_card import Form, History
from rl.metrics.writer import Row, read_metrics
from rl.runtime.run_files import CHECKPOINTS, METRICS_FILE
from spec.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """The type of exported weights, and the most bytes of one of their files."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    max_shard_bytes: int = hf.MAX_SHARD_BYTES


def check_target(target: Path, *, force: bool) -> None:
    """Raise ValueError unless `target` is new, or empty, or with `force` a policy's folder."""
    if not target.is_symlink() and not target.exists():
        return
    if target.is_symlink() or not target.is_dir():
        kind = "link" if target.is_symlink() else "file"
        raise ValueError(f"expected a folder to write to, got the {kind} {target}: choose another")
    if not any(target.iterdir()):
        return
    if not (target / hf_files.CONFIG).is_file():
        raise ValueError(
            f"expected a new folder, got {target}, which holds something else than a policy: "
            "choose another"
        )
    if not force:
        raise ValueError(
            f"expected a new folder, got {target}, which holds a policy: choose another, or "
            "replace it with --force"
        )


def check_apart(target: Path, policy: Path, run: Path | None = None) -> None:
    """Raise ValueError where the export would be written over, or into, what it reads."""
    place = target.resolve()
    if place == policy.resolve():
        raise ValueError(f"--output {target} is the policy that is read: choose another folder")
    if run is not None and place.is_relative_to((run / CHECKPOINTS).resolve()):
        raise ValueError(f"--output {target} is among the run's checkpoints: choose another folder")


def write_checkpoint(
    config: TrainConfig,
    inputs: Inputs,
    params: Params,
    source: tuple[Path, int],
    target: Path,
    layout: Layout | None = None,
) -> None:
    """Write a run's parameters to `target`; `source` is the run's folder and the step.

    Raises OSError, and ValueError for a damaged row of metrics.
    """
    layout, (run, step) = layout or Layout(), source
    history = History(run.absolute().name, step, _rows(run, step), legs.read(run))
    base = model_card.base_of(inputs.policy)
    form = _form(inputs, layout)
    if config.task.chat == "none":
        form = dataclasses.replace(form, has_chat_template=False)
    card = model_card.of_run(config, base, history, form)
    generation = generation_settings(config.sampling, inputs.model.eos_token_ids)
    _write(target, inputs, params, card, layout, generation)


def write_policy(inputs: Inputs, params: Params, target: Path, layout: Layout) -> None:
    """Write a policy to `target` as it is, in another layout. Raises OSError or ValueError."""
    card = model_card.of_policy(model_card.base_of(inputs.policy), _form(inputs, layout))
    _write(target, inputs, params, card, layout, {})


def generation_settings(sampling: SamplingConfig, ends: Sequence[int]) -> dict[str, Any]:
    """Return the settings by which `transformers` draws, and ends, as a run did.

    `ends` are the end tokens of the policy. top-k is written where it is off too: it is 50 where a
    folder says nothing. Stop strings are left out, since `generate` takes them with a tokenizer
    only.
    """
    settings: dict[str, Any] = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        settings |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    if sampling.stop_ids:
        settings["eos_token_id"] = list(dict.fromkeys([*ends, *sampling.stop_ids]))
    return settings


def _rows(run: Path, step: int) -> list[Row]:
    if not (run / METRICS_FILE).is_file():
        return []
    return [row for row in read_metrics(run) if row["step"] <= step]


def _form(inputs: Inputs, layout: Layout) -> Form:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Form(inputs.model, layout.dtype, inputs.tokenizer.has_chat_template, today)


def _write(
    target: Path,
    inputs: Inputs,
    params: Params,
    card: str,
    layout: Layout,
    generation: dict[str, Any],
) -> None:
    with hf_files.replacing(target) as path, held(path) as folder:
        for name in folder.names():  # of an older export: another tokenizer's files would be read
            if is_own_file(name):
                folder.remove(name)
        hf.write_into(
            path,
            inputs.model,
            params,
            dtype=layout.dtype,
            max_shard_bytes=layout.max_shard_bytes,
            generation=generation,
        )
        copy_files(inputs.policy, path)
        folder.replace(model_card.CARD, card)
