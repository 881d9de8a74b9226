"""The rollout cache: each prompt's responses of its last epoch, within a memory cap.

History drafts (RhymeRL, section 5.3) and prefix reuse (SPEC-RL, section 3.2) read from
it; every epoch refreshes it. Groups are kept as compressed blobs. Beyond `memory_bytes`
the least recently needed ones go to files of a folder, one each; a file that is damaged
or not ours is named in `problems`, and its prompt is answered afresh.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"RPR1"
_HEADER = 12  # magic, CRC-32 of what follows, length of the JSON


class CacheFileError(ValueError):
    """A blob that is damaged, or not one of ours."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Of each token of a response: what reuse has to know; [num_tokens] each.

    `logprobs` (float32) are under the policy of the epoch that the response is cached from,
    `emission_logprobs` and `policy_versions` (int32) of the policy that drew the token,
    which is an older one where it was reused.
    """

    logprobs: np.ndarray
    emission_logprobs: np.ndarray
    policy_versions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class CachedResponse:
    """One response (int32 tokens), its reward, and its scores where reuse is on."""

    sample_index: int
    tokens: np.ndarray
    reward: float
    scores: Scores | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class CachedGroup:
    """The responses of one epoch to one prompt (int32 ids)."""

    prompt_ids: np.ndarray
    responses: tuple[CachedResponse, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(r.tokens) for r in self.responses)

    @property
    def best_first(self) -> list[np.ndarray]:
        """The responses by falling reward."""
        return [r.tokens for r in sorted(self.responses, key=lambda r: -r.reward)]


def of_group(tokens: Sequence[np.ndarray], rewards: Sequence[float | None]) -> CachedGroup:
    """A group as history alone needs it; a missing reward counts 0."""
    pairs = enumerate(zip(tokens, rewards, strict=True))
    responses = tuple(CachedResponse(i, t, 0.0 if r is None else float(r)) for i, (t, r) in pairs)
    return CachedGroup(np.empty(0, np.int32), responses)


def encode(key: str, group: CachedGroup, policy: str = "") -> bytes:
    """MAGIC | CRC-32 | size of the JSON | JSON (key, policy, lengths, …) | deflated arrays."""
    responses = group.responses
    scores = [r.scores for r in responses if r.scores is not None]
    assert len(scores) in (0, len(responses)), "all responses of a group are scored, or none"
    header = {
        "key": key,
        "policy": policy,
        "samples": [r.sample_index for r in responses],
        "lengths": [len(r.tokens) for r in responses],
        "rewards": [r.reward for r in responses],
        "scored": bool(scores),
    }
    text = json.dumps(header).encode()
    arrays = [np.asarray(x, "<i4") for x in (group.prompt_ids, *(r.tokens for r in responses))]
    arrays += [np.asarray(s.policy_versions, "<i4") for s in scores]
    # most of the second kind repeat the first, which compression sees
    arrays += [np.asarray(s.logprobs, "<f4").view("<i4") for s in scores]
    arrays += [np.asarray(s.emission_logprobs, "<f4").view("<i4") for s in scores]
    packed = zlib.compress(np.concatenate(arrays).tobytes(), 1)
    body = len(text).to_bytes(4, "little") + text + packed
    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def decode(blob: bytes, key: str, policy: str = "") -> CachedGroup:
    """What `encode` was given.

    Raises CacheFileError where the blob is damaged, or of another prompt or policy.
    """
    if len(blob) < _HEADER or blob[:4] != MAGIC:
        raise CacheFileError("expected a blob of the rollout cache, got something else")
    body = blob[8:]
    if zlib.crc32(body) != int.from_bytes(blob[4:8], "little"):
        raise CacheFileError("expected the checksum that it was written with: it is damaged")
    size = int.from_bytes(body[:4], "little")
    header = json.loads(body[4 : 4 + size])
    if header["key"] != key:
        raise CacheFileError(f"expected the responses to {key!r}, got those to {header['key']!r}")
    if header["policy"] != policy:
        raise CacheFileError(
            f"expected those of a policy and tokenizer like {policy!r}, got {header['policy']!r}"
        )
    flat = np.frombuffer(zlib.decompress(body[4 + size :]), "<i4").astype(np.int32)
    lengths, ends = header["lengths"], np.cumsum([0, *header["lengths"]])
    total, kinds = int(ends[-1]), 4 if header["scored"] else 1
    prompt_ids, rest = np.split(flat, [len(flat) - kinds * total])
    tokens, *scored = (np.split(part, ends[1:-1]) for part in np.split(rest, kinds))
    scores: list[Scores | None] = [None] * len(lengths)
    if scored:
        scores = [
            Scores(new.view(np.float32), old.view(np.float32), versions)
            for versions, new, old in zip(*scored, strict=True)
        ]
    rows = zip(header["samples"], tokens, header["rewards"], scores, strict=bool(lengths))
    return CachedGroup(prompt_ids, tuple(CachedResponse(*row) for row in rows))


class RolloutCache:
    """Groups by prompt key: `replace` after each epoch, `get` before the next.

    With `epochs` 2 the group that was replaced last can be had as well (`back=1`). `policy`
    names the shape of policy and tokenizer: groups of another one are problems. Without a
    `folder` nothing is evicted, whatever the cap.
    """

    def __init__(
        self,
        memory_bytes: int = 2**30,
        folder: Path | None = None,
        *,
        policy: str = "",
        epochs: int = 1,
    ) -> None:
        self.memory_bytes, self.folder = memory_bytes, folder
        self.policy, self.epochs = policy, epochs
        self.problems: list[str] = []
        self.num_bytes = 0  # of blobs in memory
        self._blobs: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._spilled: set[str] = set()

    def __len__(self) -> int:
        return len(self._blobs) + len(self._spilled)

    def replace(self, key: str, group: CachedGroup) -> None:
        """The prompt's group of the last epoch is now this."""
        for back in range(self.epochs - 1, 0, -1):
            older = self._blob(_place(key, back - 1))
            if older is not None:
                self._put(_place(key, back), older)
        self._put(_place(key, 0), encode(key, group, self.policy))

    def get(self, key: str, back: int = 0) -> CachedGroup | None:
        """The prompt's group of `back` epochs before the last; None where there is none to read."""
        assert 0 <= back < self.epochs
        place = _place(key, back)
        blob = self._blob(place)
        if blob is None:
            return None
        try:
            return decode(blob, key, self.policy)
        except CacheFileError as error:
            self.problems.append(f"cached responses to {key!r} are skipped: {error}")
            self._forget(place)
            return None

    def new_problems(self) -> list[str]:
        """What went wrong since the last question; those prompts are answered afresh."""
        new, self.problems = self.problems, []
        return new

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: places from the least recently needed on, and their blobs."""
        places = [*sorted(self._spilled), *self._blobs]
        pairs = [(p, self._read(p) if p in self._spilled else self._blobs[p]) for p in places]
        kept = [(place, blob) for place, blob in pairs if blob is not None]
        joined = b"".join(blob for _, blob in kept)
        return {
            "keys": [place for place, _ in kept],
            "sizes": [len(blob) for _, blob in kept],
            "blobs": np.frombuffer(joined, np.uint8).copy(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave; whatever was here before is gone."""
        for place in list(self._spilled):
            self._forget(place)
        self._blobs.clear()
        self.num_bytes = 0
        data, start = state["blobs"].tobytes(), 0
        for place, size in zip(state["keys"], state["sizes"], strict=True):
            self._put(place, data[start : start + size])
            start += size

    # -- memory and disk -------------------------------------------------------

    def _put(self, place: str, blob: bytes) -> None:
        self._forget(place)
        self._blobs[place] = blob
        self.num_bytes += len(blob)
        while self.folder is not None and self.num_bytes > self.memory_bytes:
            oldest, old = self._blobs.popitem(last=False)
            self.num_bytes -= len(old)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._path(oldest).write_bytes(old)
            self._spilled.add(oldest)

    def _blob(self, place: str) -> bytes | None:
        """The blob, which is now the most recently needed."""
        if place in self._spilled:
            blob = self._read(place)
            if blob is None:
                self._forget(place)
            else:
                self._put(place, blob)
            return blob
        if place in self._blobs:
            self._blobs.move_to_end(place)
        return self._blobs.get(place)

    def _read(self, place: str) -> bytes | None:
        try:
            return self._path(place).read_bytes()
        except OSError as error:
            self.problems.append(f"cached responses to {place!r} are skipped: {error}")
            return None

    def _forget(self, place: str) -> None:
        if place in self._spilled:
            self._spilled.discard(place)
            self._path(place).unlink(missing_ok=True)
        self.num_bytes -= len(self._blobs.pop(place, b""))

    def _path(self, place: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.rollouts"


def _place(key: str, back: int) -> str:
    """Where a group lies: keys of examples hold no NUL."""
    return key if not back else f"{key}\0{back}"
