"""Listings of training runs, checkpoints and sessions, and changes to checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from reprise.rl.server.bodies import SHORT, Unknown, field
from reprise.rl.server.records import KINDS, SAMPLER, TRAINING, CheckpointPath, Record, Records

MAX_TIME_S = 253_402_300_799  # the end of the year 9999, the maximum of `datetime`


class Listings:
    """Server records as clients see them; `name` is the name of the model."""

    def __init__(self, records: Records, name: str) -> None:
        self.records = records
        self.name = name

    def runs(self, limit: int, offset: int) -> Record:
        names = list(reversed(self.records.runs))
        cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
        runs = [self.run(name) for name in names[offset : offset + limit]]
        return {"training_runs": runs, "cursor": cursor}

    def run(self, run: str) -> Record:
        if run not in self.records.runs:
            raise Unknown(f"found no training run {run!r:.100}")
        record = self.records.runs[run]
        own = self.records.run_checkpoints(run)

        def last(kind: str) -> Record | None:
            matches = [c for c in own if c["kind"] == kind]
            return checkpoint(matches[-1]) if matches else None

        return {
            **{"training_run_id": run, "base_model": self.name, "model_owner": "local"},
            **{"is_lora": True, "lora_rank": record["rank"]},
            "last_request_time": iso(record["last_s"]),
            **{"last_checkpoint": last(TRAINING), "last_sampler_checkpoint": last(SAMPLER)},
            "user_metadata": record["user_metadata"],
        }

    def checkpoints(self, run: str | None, limit: int, offset: int) -> Record:
        self.records.expire()
        if run is None:
            records = sorted(list(self.records.checkpoints.values()), key=lambda c: -c["time_s"])
        else:
            self.run(run)
            records = self.records.run_checkpoints(run)
        cursor = {"offset": offset, "limit": limit, "total_count": len(records)}
        shown = [checkpoint(c) for c in records[offset : offset + limit]]
        return {"checkpoints": shown, "cursor": cursor if run is None else None}

    def change_checkpoint(self, run: str, checkpoint_id: str, **fields: Any) -> None:
        """Change fields in the record of a checkpoint."""
        self.records.change("checkpoints", self._known(run, checkpoint_id), **fields)

    def expire_after(self, run: str, checkpoint_id: str, ttl_s: int | None) -> None:
        expires_s = None if ttl_s is None else self.records.now_s() + ttl_s
        self.change_checkpoint(run, checkpoint_id, expires_s=expires_s)

    def delete_checkpoint(self, run: str, checkpoint_id: str) -> None:
        self.records.drop_checkpoint(self._known(run, checkpoint_id))

    def weights_info(self, body: Mapping[str, Any]) -> Record:
        path = field(body, "tinker_path", str)
        at = CheckpointPath.parse(path)
        self._known(at.run, f"{at.kind}/{at.name}")
        record = self.records.runs[at.run]
        parts = {f"train_{short}": t in record["targets"] for short, t in SHORT.items()}
        return {"base_model": self.name, "is_lora": True, "lora_rank": record["rank"], **parts}

    def _known(self, run: str, checkpoint_id: str) -> str:
        """Return the path of a checkpoint. Raises Unknown."""
        self.records.expire()
        path = f"tinker://{run}/{checkpoint_id}"
        if path not in self.records.checkpoints:
            raise Unknown(f"found no checkpoint {path!r:.200}")
        return path

    def sessions(self, limit: int, offset: int) -> Record:
        return {"sessions": list(reversed(self.records.sessions))[offset : offset + limit]}

    def session(self, session: str) -> Record:
        if session not in self.records.sessions:
            raise Unknown(f"found no session {session!r:.100}")
        runs = self.records.of_session("runs", session)
        samplers = self.records.of_session("samplers", session)
        return {"training_run_ids": runs, "sampler_ids": samplers}


def checkpoint(record: Record) -> Record:
    """Return a checkpoint record as clients see it."""
    expires_s = record["expires_s"]
    return {
        **{"checkpoint_id": f"{record['kind']}/{record['name']}"},
        **{"checkpoint_type": KINDS[record["kind"]], "time": iso(record["time_s"])},
        **{"tinker_path": record["path"], "size_bytes": record["bytes"]},
        **{"public": record["public"], "user_metadata": record["user_metadata"]},
        "expires_at": None if expires_s is None else iso(expires_s),
    }


def iso(time_s: float) -> str:
    return datetime.fromtimestamp(min(time_s, MAX_TIME_S), UTC).isoformat()
