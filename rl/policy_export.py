"""Export of a policy to a Hugging Face folder: weights, tokenizer, settings and a model card.

The folder is replaced at once. The run is only read, and may still be running.
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
from rl import legs, model_card
from rl.config import Inputs, TrainConfig
from rl.metrics.writer import read_metrics
from rl.model_card import Form, History
from rl.runtime.run_files import CHECKPOINTS, METRICS_FILE
from spec.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """The type of exported weights, and the largest size of one of their files."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    max_shard_bytes: int = hf.MAX_SHARD_BYTES


def check_target(target: Path, *, force: bool) -> None:
    """Raise ValueError unless `target` is new, empty, or with `force` a policy's folder."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        kind = "link" if target.is_symlink() else "file"
        raise ValueError(f"expected a folder to write to, got the {kind} {target}: choose another")
    if not target.exists() or not any(target.iterdir()):
        return
    if not (target / hf_files.CONFIG).is_file():
        raise ValueError(
            f"expected a new folder, got {target}, which holds something other than a policy: "
            "choose another"
        )
    if not force:
        raise ValueError(
            f"expected a new folder, got {target}, which holds a policy: choose another, or "
            "replace it with --force"
        )


def check_apart(target: Path, policy: Path, run: Path | None = None) -> None:
    """Raise ValueError if the export would overwrite the policy or the checkpoints it reads."""
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
    rows = read_metrics(run) if (run / METRICS_FILE).is_file() else []
    rows = [row for row in rows if row["step"] <= step]
    history = History(run.absolute().name, step, rows, legs.read(run))
    form = _form(inputs, layout)
    if config.task.chat == "none":
        form = dataclasses.replace(form, has_chat_template=False)
    card = model_card.of_run(config, model_card.read_base(inputs.policy), history, form)
    generation = generation_settings(config.sampling, inputs.model.eos_token_ids)
    _write(target, inputs, params, card, layout, generation)


def write_policy(inputs: Inputs, params: Params, target: Path, layout: Layout) -> None:
    """Write a policy to `target` as it is, in another layout. Raises OSError or ValueError."""
    card = model_card.of_policy(model_card.read_base(inputs.policy), _form(inputs, layout))
    _write(target, inputs, params, card, layout, {})


def generation_settings(sampling: SamplingConfig, ends: Sequence[int]) -> dict[str, Any]:
    """Return the `transformers` settings that sample, and end responses, as the run did.

    `ends` are the policy's end tokens. top_k is written even if it is off, since its default is
    50. Stop strings are left out: `generate` takes them only together with a tokenizer.
    """
    settings: dict[str, Any] = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        settings |= {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    if sampling.stop_ids:
        settings["eos_token_id"] = list(dict.fromkeys([*ends, *sampling.stop_ids]))
    return settings


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
        for name in filter(is_own_file, folder.names()):  # another tokenizer's would be read
            folder.remove(name)
        options = dataclasses.asdict(layout)
        hf.write_into(path, inputs.model, params, generation=generation, **options)
        copy_files(inputs.policy, path)
        folder.replace(model_card.CARD, card)
