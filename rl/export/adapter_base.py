"""The base policy of an adapter, from the adapter folder: a name, and a digest if we wrote it."""

from __future__ import annotations

from pathlib import Path

from reprise.models.formats import peft_files
from reprise.models.formats.hf_files import shown
from reprise.rl.export import model_card
from reprise.rl.settings import identity


def check_base(
    adapter: Path, policy: Path, policy_files: identity.Contents, *, any_base: bool
) -> str:
    """Return a warning if the adapter folder names another policy, otherwise an empty string.

    Raises ValueError if the folder records a different base digest, unless `any_base`.
    """
    base = peft_files.read_base(adapter)
    own, digest = describe_base(policy, policy_files)
    if base.digest == digest:
        return ""
    if base.digest and not any_base:
        raise ValueError(
            f"{adapter}: the adapter was trained on other weights ({shown(base.name)}) than the "
            f"ones of {policy}; fix: open the policy that it was trained on, or say any_base=True"
        )
    last = Path(base.name).name.casefold()
    names = {own, model_card.read_base(policy).name}
    if not base.digest and last in {"", *(Path(name).name.casefold() for name in names)}:
        return ""
    return (
        f"warning: {adapter} names the base {shown(base.name)}, and the policy is {own}: an "
        "adapter is right for the weights alone that it was trained on"
    )


def describe_base(policy: Path, policy_files: identity.Contents) -> tuple[str, str]:
    """Return the public name of a policy (hub id or folder name) and its digest."""
    own = model_card.read_base(policy)
    return own.hub_id or own.name, identity.base_digest(policy_files)
