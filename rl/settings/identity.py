"""Digests of the files that a run is made of, besides its data; each checkpoint keeps them.

Settings name files, and a file may be overwritten between two launches of a run. `contents` has a
digest of each file by setting and name; `changes` compares digests as settings are compared.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

from reprise.models.text import digests
from reprise.rl.runtime.run_files import PACKAGES, PROJECT_ROOT, resolve_path
from reprise.rl.runtime.user_files import split_user_name
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.run_folder import Change

POLICY = "Policy.directory"
MAX_IMPORTED = 100  # files that one user file imports, directly or not
MAX_SOURCE_BYTES = 2**22
Contents = Mapping[str, str]


def contents(config: TrainConfig, policy: Path) -> dict[str, str]:
    """Return the digest of each file by its setting and name, `Policy.directory/config.json`.

    Data files of `Task` and questions of `Eval` have separate digests. Raises OSError or
    ValueError.
    """
    result = policy_contents(policy)
    for setting in config.user_names:
        result |= user_contents(config, setting)
    drafts = {"Drafter.directory": config.drafter.directory} if config.speculation.learns else {}
    if config.speculation.asks_model:
        models = config.draft_model.each
        drafts |= {f"DraftModel.directory/{k}": one.directory for k, one in enumerate(models)}
    for setting, directory in (drafts | {"Distill.teacher": config.distill.teacher}).items():
        if directory:
            files = digests.digest_policy(resolve_path(directory))
            result |= {f"{setting}/{name}": digest for name, digest in files.items()}
    return result


def user_contents(config: TrainConfig, setting: str) -> dict[str, str]:
    """Return the part of `contents` for the user files of a setting. Raises OSError, ValueError."""
    result = dict[str, str]()
    files_by_name = dict[str, Path]()
    for k, user_name in enumerate(config.user_names.get(setting, ())):
        path, _ = split_user_name(user_name)
        for file in _with_imported(path):
            name = file.relative_to(path.parent).as_posix()
            if files_by_name.setdefault(name, file) != file:
                name = f"{k}/{name}"  # another folder has a file of this name
            result[f"{setting}/{name}"] = digests.digest_file(file)
    return result


def policy_contents(policy: Path) -> dict[str, str]:
    """Return the part of `contents` for the policy. Raises OSError."""
    return {f"{POLICY}/{name}": digest for name, digest in digests.digest_policy(policy).items()}


def changes(then: Contents, now: Contents) -> list[Change]:
    """Return the files that differ, for settings that are in both."""
    before, after = ({name.partition("/")[0] for name in files} for files in (then, now))
    settings = before & after
    return [
        Change(name, _short(then.get(name)), _short(now.get(name)))
        for name in dict.fromkeys((*then, *now))
        if name.partition("/")[0] in settings and then.get(name) != now.get(name)
    ]


def _short(digest: str | None) -> str:
    return "no file" if digest is None else f"contents {digest[:8]}"


def saved_contents(checkpoints: Path) -> tuple[int, Contents]:
    """Return step and contents of the newest readable checkpoint; step 0 without a checkpoint."""
    from reprise.rl.checkpoint import reader

    step, host = reader.newest_host(checkpoints)
    return step, host.get("contents", {})


def check_policy(step: int, then: Contents, policy: Path, *, is_base: bool) -> list[str]:
    """Return warnings on policy files that differ from the files of a checkpoint of `step`.

    Raises ValueError for another config.json and, if the weights are the base of an adapter in the
    checkpoint, for other weights.
    """
    own = {name: digest for name, digest in then.items() if name.startswith(f"{POLICY}/")}
    changed = changes(own, policy_contents(policy))
    wrong = [c for c in changed if c.field.endswith("/config.json") or (is_base and _is_weights(c))]
    if wrong:
        raise ValueError(
            f"{policy}: {_listed(wrong)} than up to step {step} of the run; fix: bring the files "
            "back, or name the folder that has them as the policy"
        )
    others = [c for c in changed if not _is_weights(c)]
    return [f"{policy}: {_listed(others)} than up to step {step}"] if others else []


def refuse_other_base(then: Contents, now: Contents, source: str, policy: Path) -> None:
    """Raise ValueError if the adapter in `source` belongs to weights other than the policy has."""
    if then and base_digest(then) != base_digest(now):
        raise ValueError(
            f"{source}: the adapter was trained on other weights than the ones of {policy}; fix: "
            "open the policy that it was trained on"
        )


def check_rewards(then: Contents, now: Contents) -> list[str]:
    """Return warnings on reward files of a run that differ now."""
    changed = changes(then, {name: now.get(name, digest) for name, digest in then.items()})
    others = [change for change in changed if change.field.startswith("Reward.")]
    return [f"{_listed(others)} than in the run: rewards may differ"] if others else []


def _is_weights(change: Change) -> bool:
    return change.field.endswith((".safetensors", ".gguf"))


def _listed(changed: list[Change], max_shown: int = 4) -> str:
    names = ", ".join(change.field for change in changed[:max_shown])
    more = f" and {len(changed) - max_shown} more" if len(changed) > max_shown else ""
    return f"{names}{more} {'has' if len(changed) == 1 else 'have'} other contents"


def base_digest(files: Contents) -> str:
    """Return one digest of the config and weights that an adapter belongs to."""
    ends = "/config.json", ".safetensors", ".gguf"
    return digests.combine(
        {
            name: digest
            for name, digest in files.items()
            if name.startswith(f"{POLICY}/") and name.endswith(ends)
        }
    )


# --- user files -----------------------------------------------------------------------


def _with_imported(path: Path) -> list[Path]:
    """Return a Python file, and the files of its folder that it imports, directly or indirectly."""
    files = [path]
    for file in files:
        for module in _imported(file, path.parent):
            for candidate in (module.with_suffix(".py"), module / "__init__.py"):
                is_new = candidate not in files and len(files) <= MAX_IMPORTED
                is_ours = any(candidate.is_relative_to(PROJECT_ROOT / name) for name in PACKAGES)
                is_local = candidate.is_relative_to(path.parent) and not is_ours
                if is_new and is_local and candidate.is_file():
                    files.append(candidate)
    return files


def _imported(file: Path, folder: Path) -> list[Path]:
    """Return the paths that a file imports modules from; empty if it is not Python."""
    if file.stat().st_size > MAX_SOURCE_BYTES:
        return []
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    modules = []
    for node in nodes:
        if isinstance(node, ast.Import):
            modules += [folder.joinpath(*alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = (
                folder if not node.level else file.parents[min(node.level, len(file.parents)) - 1]
            )
            module = start.joinpath(*(node.module or "").split("."))
            modules += [module, *(module / alias.name for alias in node.names)]
    return [module for module in modules if module.name]
