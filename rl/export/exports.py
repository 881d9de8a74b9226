"""Exports from a run: the policy with tokenizer and model card, or the drafter, at any step.

A rename replaces the whole policy folder. Exports only read the run, which may still be running.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from reprise.models.config import trained_specs, with_adapters
from reprise.models.decoder.transformer import Params
from reprise.models.folder import held
from reprise.models.formats import hf, hf_files
from reprise.models.text import tokenizer_files
from reprise.models.text.tokenizer import copy_files
from reprise.rl.checkpoint import reader
from reprise.rl.checkpoint.reader import NoWholeCheckpointError
from reprise.rl.export import model_card
from reprise.rl.export.model_card import Form, History
from reprise.rl.learner.optimizer import SavedArrays
from reprise.rl.metrics.writer import read_metrics
from reprise.rl.runtime.run_files import CHECKPOINTS, DRAFTER, METRICS_FILE, POLICY
from reprise.rl.settings import identity
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import Inputs
from reprise.rl.settings.run_folder import read_launches, today
from reprise.spec.eagle.files import Engine
from reprise.spec.verification.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dtype of exported weights, and the maximum size of a weight file."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    max_shard_bytes: int = hf.MAX_SHARD_BYTES


def check_target(target: Path, *, force: bool) -> None:
    """Raise ValueError unless `target` is new, empty, or with `force` a policy folder."""
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
    """Raise ValueError if the export would overwrite the policy or checkpoints that it reads."""
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
    """Write the parameters of a run to `target`; `source` is the run folder and the step.

    Raises OSError, and ValueError for a damaged row of metrics.
    """
    layout = layout or Layout()
    run, step = source
    rows = read_metrics(run) if (run / METRICS_FILE).is_file() else []
    rows = [row for row in rows if row["step"] <= step]
    history = History(run.absolute().name, step, rows, read_launches(run))
    form = _form(inputs, layout)
    card = model_card.of_run(config, model_card.read_base(inputs.policy), history, form)
    generation = generation_settings(config.sampling, inputs.model.eos_token_ids)
    template = inputs.tokenizer.chat_template if config.task.chat_template else None
    _write(target, inputs, params, card, layout, generation, template)


def write_policy(inputs: Inputs, params: Params, target: Path, layout: Layout) -> None:
    """Write a policy to `target`, unchanged except for layout. Raises OSError or ValueError."""
    card = model_card.of_policy(model_card.read_base(inputs.policy), _form(inputs, layout))
    _write(target, inputs, params, card, layout, {})


def generation_settings(sampling: SamplingConfig, ends: Sequence[int]) -> dict[str, Any]:
    """Return `transformers` settings that sample and end responses as the run did.

    `ends` are the end tokens of the policy. top_k is written even if off, since the default is 50.
    Stop strings are left out, since `generate` takes them only together with a tokenizer.
    """
    settings: dict[str, Any] = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        settings |= {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    if sampling.stop_ids:
        settings["eos_token_id"] = list(dict.fromkeys([*ends, *sampling.stop_ids]))
    return settings


def _form(inputs: Inputs, layout: Layout) -> Form:
    words = inputs.tokenizer
    prints_day = "strftime_now" in words.chat_template
    return Form(inputs.model, layout.dtype, words.has_chat_template, today(), prints_day)


def _write(
    target: Path,
    inputs: Inputs,
    params: Params,
    card: str,
    layout: Layout,
    generation: dict[str, Any],
    chat_template: str | None = None,
) -> None:
    with hf_files.replacing(target) as path, held(path) as folder:
        for name in tokenizer_files.NAMES:  # files of an old tokenizer would be read
            folder.remove(name, missing_ok=True)
        options = dataclasses.asdict(layout)
        hf.write_into(path, inputs.model, params, generation=generation, **options)
        copy_files(inputs.policy, path, chat_template)
        folder.replace(model_card.CARD, card)


@dataclasses.dataclass(frozen=True)
class Exported:
    """An exported drafter: description, training steps, checkpoint folder and warnings."""

    text: str
    num_steps: int
    source: Path
    warnings: tuple[str, ...]


def write_drafter(
    config: TrainConfig,
    inputs: Inputs,
    run: Path,
    target: Path,
    policy: Params | None = None,
    engine: Engine = "sglang",
) -> Exported:
    """Write the drafter of a run to `target`; a run that has just finished passes its `policy`.

    Without `policy`, drafter checkpoints may be older or newer than run checkpoints (after a kill).
    The drafter with the most training steps is exported, as a resumed run would also continue from
    that state. The embedding and head are from the policy in the newest run checkpoint, or else
    from the finished policy. Raises NoWholeCheckpointError, StructureMismatchError, and the errors
    of `drafter_folder.write`.
    """
    from reprise.rl.assembly.drafter_run import open_drafter
    from reprise.rl.drafter_training import export as drafter_folder
    from reprise.spec.eagle_training.training import DrafterState

    start = open_drafter(config, inputs)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), start.params)
    state: Any = DrafterState(shapes, (), jax.ShapeDtypeStruct((), "int32"))  # type: ignore[arg-type]
    states = []
    problems = []
    try:
        own = reader.restore(run / DRAFTER, state, subset=True)
        states.append((own.arrays, run / DRAFTER, own.warnings))
    except NoWholeCheckpointError as error:
        if policy is not None:
            raise
        problems.append(str(error))
    if policy is None:
        shared = dataclasses.replace(trained_specs(inputs.model), layers=(), final_norm_D=None)
        shared = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), shared)
        whole = SavedArrays(None, shared, (), drafter=state)  # type: ignore[arg-type]
        try:
            both = reader.restore(run / CHECKPOINTS, whole, subset=True)
            states.append((both.arrays.drafter, run / CHECKPOINTS, both.warnings))
            policy = both.arrays.params
            if (lora := inputs.model.lora) is not None:
                then = both.host.get("contents", {})
                identity.check_policy(both.step, then, inputs.policy, is_base=True)
                base = hf.load_pretrained(inputs.policy)[1]
                policy = with_adapters(dataclasses.replace(base, layers=()), policy, lora)
        except NoWholeCheckpointError as error:
            problems.append(str(error))
            if (run / POLICY).is_dir():
                policy = hf.load_pretrained(run / POLICY)[1]
    if not states:
        raise NoWholeCheckpointError("\n".join(problems), {})
    trained, source, warnings = max(
        states, key=lambda found: int(found[0].step)
    )  # ties: drafter checkpoint
    drafter = dataclasses.replace(start, params=trained.params)
    text = drafter_folder.write(
        target,
        drafter,
        inputs.model,
        policy,
        inputs.policy,
        config.drafter_training.variant,
        engine,
    )
    return Exported(text, int(trained.step), source, warnings)
