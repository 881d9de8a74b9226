"""Checkpoint files and in-memory samplers of a server, for use in the worker thread."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reprise.rl.python.api import Policy
from reprise.rl.python.sampler import Sampler
from reprise.rl.server.bodies import field, texts, ttl_s
from reprise.rl.server.records import CHECKPOINTS, SAMPLER, Change, CheckpointPath, Record, Records

MAX_SAMPLERS = 16  # adapters that stay in memory to sample from


class Weights:
    """The adapters of a policy: folders of checkpoints, and recently used samplers in memory."""

    def __init__(self, policy: Policy, records: Records) -> None:
        self._policy = policy
        self._records = records
        # By checkpoint folder (never reused), or None without an adapter. Newest last.
        self._samplers: dict[str | None, Sampler] = {}

    def save(
        self,
        body: Mapping[str, Any],
        at: CheckpointPath,
        policy: Policy,
        sampling_session: str | None = None,
    ) -> None:
        """Write a checkpoint, without the optimizer for samplers. Raises ValueError.

        A checkpoint with a `sampling_session` has no name from a client; only that session uses it.
        """
        path = str(at)
        lives_s = ttl_s(body)
        metadata = texts(body)
        before = self._records.checkpoints.get(path)
        if before is not None and not field(body, "overwrite", bool, False):
            raise ValueError(f"{path} exists: choose another name, or overwrite=True")
        folder_name = uuid.uuid4().hex
        now_s = self._records.now_s()
        folder = self._records.folder / CHECKPOINTS / folder_name
        try:
            if at.kind == SAMPLER:
                policy.export_adapter(folder)
            else:
                policy.save_state(folder)
            record = {
                **{"path": path, "run": at.run, "kind": at.kind, "name": at.name},
                **{"folder": folder_name, "time_s": now_s, "public": False},
                "bytes": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()),
                "expires_s": None if lives_s is None else now_s + lives_s,
                "user_metadata": metadata,
                "sampling_session": sampling_session,
                "version": policy.version,
            }
            changes: list[Change] = [("checkpoints", path, record)]
            if sampling_session is not None:
                session = self._records.runs[at.run]["session"]
                changes.append(("samplers", sampling_session, {"session": session, "path": path}))
            self._records.write(changes)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if before is not None:
            shutil.rmtree(folder.parent / before["folder"], ignore_errors=True)
        if at.kind == SAMPLER:
            self._keep(folder_name, policy.sampler())
        self.drop_unnamed(at.run, MAX_SAMPLERS)

    def drop_unnamed(self, run: str, num_left: int) -> None:
        """Delete unnamed checkpoints of a run except the newest `num_left`; from any thread."""
        own = self._records.run_checkpoints(run)
        unnamed = [c for c in own if c.get("sampling_session") is not None]
        for record in unnamed[: max(0, len(unnamed) - num_left)]:
            self._records.drop_checkpoint(record["path"])

    def sampler(self, path: str | None) -> Sampler:
        """Return the sampler of a checkpoint, None for the plain policy. Raises ValueError."""
        key = None if path is None else self._records.checkpoint(path)["folder"]
        if (sampler := self._samplers.get(key)) is None:
            sampler = self._adapted(path).sampler()
            if path is not None:  # a folder for `peft` does not hold the number of updates
                version = self._records.checkpoint(path).get("version", sampler.version)
                sampler = dataclasses.replace(sampler, version=version)
        self._keep(key, sampler)
        return sampler

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[tuple[Record, Path]]:
        """Yield the record and folder of a checkpoint. Raises ValueError if missing or replaced."""
        record = self._records.checkpoint(path)
        try:
            yield record, self._records.folder / CHECKPOINTS / record["folder"]
        except Exception:
            if self._records.checkpoint(path)["folder"] != record["folder"]:
                raise ValueError(f"{path} was saved again meanwhile: load it again") from None
            raise

    def _adapted(self, path: str | None) -> Policy:
        """Return the policy with the adapter of a checkpoint, or with a new zero-effect adapter."""
        if path is None:
            return self._policy.with_new_adapter()
        with self.reading(path) as (record, folder):
            if record["kind"] == SAMPLER:
                return self._policy.with_adapter(folder)
            policy = self._policy.with_new_adapter()
            policy.load_state(folder, with_optimizer=False)
            return policy

    def _keep(self, key: str | None, sampler: Sampler) -> None:
        """Keep a sampler as the newest; drop deleted and least recently used samplers."""
        self._samplers.pop(key, None)
        self._samplers[key] = sampler
        live = {c["folder"] for c in list(self._records.checkpoints.values())}
        for old in [old for old in self._samplers if old is not None and old not in live]:
            del self._samplers[old]
        while len(self._samplers) > MAX_SAMPLERS:
            del self._samplers[next(iter(self._samplers))]
