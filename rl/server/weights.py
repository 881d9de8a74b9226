"""Checkpoints written and loaded, and the samplers in memory: for the worker's thread."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from rl.api import Policy
from rl.sampler import Sampler
from rl.server.bodies import field, number, texts
from rl.server.records import SAMPLER, CheckpointPath, Records

MAX_SAMPLERS = 16  # adapters that stay in memory to sample from
NO_NAME = "unnamed-"  # a checkpoint of samplers that its client has not named


class Weights:
    """A policy's adapters: each checkpoint's folder, and the ones that were sampled from last."""

    def __init__(self, policy: Policy, records: Records, now_s: Callable[[], float]) -> None:
        self._policy, self._records, self._now_s = policy, records, now_s
        self._samplers: dict[str | None, Sampler] = {}  # by path, the newest last; None: no adapter

    def save(self, body: Mapping[str, Any], at: CheckpointPath, policy: Policy) -> None:
        """Write a checkpoint, one of samplers without the optimizer. Raises ValueError."""
        path, ttl_s = str(at), number(body, "ttl_seconds", None)
        before, metadata = self._records.checkpoints.get(path), texts(body)
        if before is not None and not field(body, "overwrite", bool, False):
            raise ValueError(f"{path} exists: choose another name, or overwrite=True")
        folder_name, now_s = uuid.uuid4().hex, self._now_s()
        folder = self._records.folder / "checkpoints" / folder_name
        if at.kind == SAMPLER:
            policy.export_adapter(folder)
        else:
            policy.save_state(folder)
        record = {
            **{"path": path, "run": at.run, "kind": at.kind, "name": at.name},
            **{"folder": folder_name, "time_s": now_s, "public": False},
            "bytes": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()),
            "expires_s": None if ttl_s is None else now_s + ttl_s,
            "user_metadata": metadata,
        }
        self._records.put("checkpoints", path, record)
        if before is not None:
            shutil.rmtree(folder.parent / before["folder"], ignore_errors=True)
            self._samplers.pop(path, None)
        if at.kind == SAMPLER:
            self._keep(path, policy.sampler())
        self.drop_unnamed(at.run, MAX_SAMPLERS)

    def drop_unnamed(self, run: str, num_left: int) -> None:
        """Delete a run's checkpoints without a name but for the newest; from any thread."""
        unnamed = [c for c in self._records.run_checkpoints(run) if c["name"].startswith(NO_NAME)]
        for record in unnamed[: max(0, len(unnamed) - num_left)]:
            self._records.drop_checkpoint(record["path"])

    def sampler(self, path: str | None) -> Sampler:
        """Return a checkpoint's weights, or the policy's without an adapter. Raises ValueError."""
        if (sampler := self._samplers.get(path)) is None:
            sampler = self._adapted(path).sampler()
        self._keep(path, sampler)
        return sampler

    def _adapted(self, path: str | None) -> Policy:
        """Return the policy with the adapter of a checkpoint, or with one that changes nothing."""
        if path is None:
            return self._policy.with_new_adapter()
        folder = self._records.checkpoint_folder(path)
        if self._records.checkpoints[path]["kind"] == SAMPLER:
            return self._policy.with_adapter(folder)
        policy = self._policy.with_new_adapter()
        policy.load_state(folder, with_optimizer=False)
        return policy

    def _keep(self, path: str | None, sampler: Sampler) -> None:
        """Keep a sampler as the newest; the one that was used the longest ago goes."""
        self._samplers.pop(path, None)
        self._samplers[path] = sampler
        while len(self._samplers) > MAX_SAMPLERS:
            del self._samplers[next(iter(self._samplers))]
