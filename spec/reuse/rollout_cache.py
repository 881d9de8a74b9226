"""The rollout cache, which holds the last-epoch responses of every prompt within a memory cap.

History drafts (RhymeRL, section 5.3) and prefix reuse (SPEC-RL, section 3.2) read from the cache.
Beyond `memory_bytes`, the least recently used groups are spilled, with one file per group. The
files never change, so a checkpoint links them. Damaged or foreign files are named in `problems`,
and their prompts are answered from scratch.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reprise.models.folder import Folder
from reprise.spec.reuse.agreement import FIRST_RATE, Agreement

MAGIC = b"RPR1"
_HEADER = 12  # bytes: magic, CRC-32 of the rest, length of the JSON
_ENDING = ".rollouts"  # suffix of file names
MAX_RENEWALS = 2**26  # more than the steps of a run; renewals are a part of request ids
_MAX_PROMPT_TOKENS = 2**22  # limits the memory that a damaged header can claim


class CacheFileError(ValueError):
    """A damaged or foreign blob."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """The log-probabilities and policy versions of response tokens; [num_tokens] each.

    `logprobs` (float32) are under the policy of the cached epoch. `emission_logprobs` and
    `policy_versions` (int32) are for the policy that drew the token, which is older if the token
    was reused.
    """

    logprobs: np.ndarray
    emission_logprobs: np.ndarray
    policy_versions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class CachedResponse:
    """One response (int32 tokens), its reward, and its scores if reuse is on.

    When noise repeats, `agreement` compares the response with the previous response. `miss_rate` is
    the expected rate of differing tokens (`spec.reuse.agreement`) and is not stored.
    """

    sample_index: int
    tokens: np.ndarray
    reward: float
    scores: Scores | None = None
    agreement: Agreement | None = None
    miss_rate: float = FIRST_RATE


@dataclasses.dataclass(frozen=True, eq=False)
class CachedGroup:
    """The responses of one epoch to one prompt (int32 ids).

    `taught` states whether the rewards differ. `renewals` counts how often the noise of the prompt
    was renewed before the responses were drawn (`spec.reuse.renewal`).
    """

    prompt_ids: np.ndarray
    responses: tuple[CachedResponse, ...]
    taught: bool = True
    renewals: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(r.tokens) for r in self.responses)


def of_group(tokens: Sequence[np.ndarray], rewards: Sequence[float | None]) -> CachedGroup:
    """Return a group without scores, as history drafts need; a missing reward counts as 0."""
    pairs = enumerate(zip(tokens, rewards, strict=True))
    responses = tuple(CachedResponse(i, t, 0.0 if r is None else float(r)) for i, (t, r) in pairs)
    return CachedGroup(np.empty(0, np.int32), responses)


def encode(key: str, group: CachedGroup, policy: str = "") -> bytes:
    """Return MAGIC | CRC-32 | size of the JSON | JSON (key, policy, …) | deflated arrays."""
    responses = group.responses
    scores = [r.scores for r in responses if r.scores is not None]
    assert len(scores) in (0, len(responses)), "all responses of a group are scored, or none"
    header = {
        "key": key,
        "policy": policy,
        "samples": [r.sample_index for r in responses],
        "lengths": [len(r.tokens) for r in responses],
        "rewards": [r.reward for r in responses],
        "agreements": [r.agreement for r in responses],
        "scored": bool(scores),
        "taught": group.taught,
        "renewals": group.renewals,
    }
    text = json.dumps(header).encode()
    arrays = [np.asarray(x, "<i4") for x in (group.prompt_ids, *(r.tokens for r in responses))]
    arrays += [np.asarray(s.policy_versions, "<i4") for s in scores]
    # most emission log-probs equal the log-probs, which compresses well
    arrays += [np.asarray(s.logprobs, "<f4").view("<i4") for s in scores]
    arrays += [np.asarray(s.emission_logprobs, "<f4").view("<i4") for s in scores]
    packed = zlib.compress(np.concatenate(arrays).tobytes(), 1)
    body = len(text).to_bytes(4, "little") + text + packed
    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def decode(blob: bytes, key: str, policy: str = "", vocab_size: int = 2**31) -> CachedGroup:
    """Return the group; raise CacheFileError for damage or another prompt, policy or vocabulary."""
    if len(blob) < _HEADER or blob[:4] != MAGIC:
        raise CacheFileError("expected a blob of the rollout cache, got something else")
    body = blob[8:]
    if zlib.crc32(body) != int.from_bytes(blob[4:8], "little"):
        raise CacheFileError("expected the checksum that it was written with: it is damaged")
    size = int.from_bytes(body[:4], "little")
    try:
        header = _Header.read(body[4 : 4 + size])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CacheFileError(f"expected a header of the rollout cache ({error})") from error
    if header.key != key:
        raise CacheFileError(f"expected the responses to {key!r}, got those to {header.key!r}")
    if header.policy != policy:
        raise CacheFileError(
            f"expected those of a policy and tokenizer like {policy!r}, got {header.policy!r}"
        )
    total = sum(header.lengths)
    kinds = 4 if header.scored else 1
    flat = _inflated(body[4 + size :], kinds * total)
    prompt_ids, rest = np.split(flat, [len(flat) - kinds * total])
    ends = np.cumsum([0, *header.lengths])
    tokens, *scored = (np.split(part, ends[1:-1]) for part in np.split(rest, kinds))
    for ids in (prompt_ids, *tokens):
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise CacheFileError(f"expected tokens of 0 to {vocab_size - 1}")
    scores: list[Scores | None] = [None] * len(header.lengths)
    if scored:
        scores = [
            Scores(new.view(np.float32), old.view(np.float32), versions)
            for versions, new, old in zip(*scored, strict=True)
        ]
    rows = zip(
        header.samples,
        tokens,
        header.rewards,
        scores,
        header.agreements,
        strict=bool(header.lengths),
    )
    responses = tuple(CachedResponse(*row) for row in rows)
    return CachedGroup(prompt_ids, responses, header.taught, header.renewals)


@dataclasses.dataclass(frozen=True)
class _Header:
    key: str
    policy: str
    samples: list[int]
    lengths: list[int]
    rewards: list[float]
    agreements: list[Agreement | None]
    scored: bool
    taught: bool
    renewals: int

    @staticmethod
    def read(text: bytes) -> _Header:
        """Parse a header; raise ValueError, TypeError or KeyError if `encode` never writes it."""
        row = json.loads(text)
        header = _Header(**{f.name: row[f.name] for f in dataclasses.fields(_Header)})
        counts = (*header.samples, *header.lengths, header.renewals)
        if any(type(n) is not int or not 0 <= n < 2**31 for n in counts):
            raise ValueError("expected counts of 0 or more")
        if header.renewals >= MAX_RENEWALS:
            raise ValueError(f"expected fewer than {MAX_RENEWALS} renewals")
        if any(type(r) not in (int, float) or math.isnan(r) for r in header.rewards):
            raise ValueError("expected rewards")
        if not len(header.samples) == len(header.lengths) == len(header.rewards):
            raise ValueError("expected as many rewards as responses")
        if len(header.agreements) != len(header.samples):
            raise ValueError("expected as many agreements as responses")
        agreements = [_agreement(row) for row in header.agreements]
        header = dataclasses.replace(header, agreements=agreements)
        if len(set(header.samples)) != len(header.samples):
            raise ValueError("expected every sample once")
        if type(header.scored) is not bool or type(header.taught) is not bool:
            raise ValueError("expected true or false")
        return header


def _agreement(row: Any) -> Agreement | None:
    if row is None:
        return None
    kept, decided = row
    if (
        type(kept) is not int
        or type(decided) is not int
        or not 0 <= kept <= decided <= kept + 1 < 2**31
    ):
        raise ValueError("expected kept tokens, and at most one more that was decided on")
    return Agreement(kept, decided)


def _inflated(packed: bytes, min_numbers: int) -> np.ndarray:
    """Inflate at least `min_numbers` int32, at most a prompt more, or raise CacheFileError."""
    max_bytes = 4 * (min_numbers + _MAX_PROMPT_TOKENS)
    try:
        raw = zlib.decompressobj().decompress(packed, max_bytes + 1)
    except zlib.error as error:
        raise CacheFileError(f"expected deflated arrays ({error})") from error
    if len(raw) % 4 or not 4 * min_numbers <= len(raw) <= max_bytes:
        raise CacheFileError(f"expected {min_numbers} numbers and a prompt, got {len(raw)} bytes")
    return np.frombuffer(raw, "<i4").astype(np.int32)


@dataclasses.dataclass(frozen=True)
class SpilledFile:
    """An immutable file in the cache folder, named after its entry and its content."""

    name: str
    num_bytes: int
    sha256: str


class RolloutCache:
    """Groups by prompt key: `replace` after each epoch, `get` before the next.

    With `epochs` 2, the group before the last is kept too (`back=1`). `policy` names the shape of
    policy and tokenizer; groups of another shape are problems. Without a `folder`, nothing is
    spilled.
    """

    def __init__(
        self,
        memory_bytes: int = 2**30,
        folder: Folder | Path | None = None,
        *,
        policy: str = "",
        vocab_size: int = 2**31,
        epochs: int = 1,
    ) -> None:
        self.memory_bytes = memory_bytes
        self.folder = Folder(folder, create=True) if isinstance(folder, Path) else folder
        self.policy = policy
        self.vocab_size = vocab_size
        self.epochs = epochs
        self.problems: list[str] = []
        self.num_bytes = 0  # size of the blobs in memory
        self._blobs: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._spilled: dict[str, SpilledFile] = {}
        self._before: dict[str, bytes | None] = {}  # blobs replaced since `mark`, by entry

    def __len__(self) -> int:
        return len(self._blobs) + len(self._spilled)

    def replace(self, key: str, group: CachedGroup) -> None:
        """Store the group of the last epoch for a prompt."""
        self._renew(key, encode(key, group, self.policy))

    def take_over(self, other: RolloutCache) -> None:
        """Move the groups of another cache of the same policy into this cache."""
        assert other.policy == self.policy and other.epochs == 1 and other.folder is None
        for key, blob in other._blobs.items():
            self._renew(key, blob)
        other._clear()

    def _renew(self, key: str, blob: bytes) -> None:
        for back in range(self.epochs - 1, 0, -1):
            older = self._blob(_entry_name(key, back - 1))
            if older is not None:
                self._replace(_entry_name(key, back), older)
        self._replace(_entry_name(key, 0), blob)

    def mark(self) -> None:
        """Remember the current groups for `undo`."""
        self._before.clear()

    def undo(self) -> None:
        """Restore every group as it was at the last `mark`."""
        for entry, blob in self._before.items():
            if blob is None:
                self._forget(entry)
            else:
                self._put(entry, blob)
        self._before.clear()

    def _replace(self, entry: str, blob: bytes) -> None:
        if entry not in self._before:
            self._before[entry] = self._blob(entry)
        self._put(entry, blob)

    def get(self, key: str, back: int = 0) -> CachedGroup | None:
        """Return the group of `back` epochs before the last; None if missing or unreadable."""
        assert 0 <= back < self.epochs
        entry = _entry_name(key, back)
        blob = self._blob(entry)
        if blob is None:
            return None
        try:
            return decode(blob, key, self.policy, self.vocab_size)
        except CacheFileError as error:
            self.problems.append(f"cached responses to {key!r} are skipped: {error}")
            self._forget(entry)
            return None

    def blob(self, key: str) -> bytes | None:
        """Return the encoded group of the last epoch of a prompt, or None."""
        return self._blob(_entry_name(key, 0))

    def new_problems(self) -> list[str]:
        """Return the problems since the last call; their prompts are answered from scratch."""
        new = self.problems
        self.problems = []
        return new

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state besides `spilled`, least recently used entries first."""
        joined = b"".join(self._blobs.values())
        files = self.spilled()
        return {
            "keys": list(self._blobs),
            "sizes": [len(blob) for blob in self._blobs.values()],
            "blobs": np.frombuffer(joined, np.uint8),
            "files": [[p, f.name, f.num_bytes, f.sha256] for p, f in sorted(files.items())],
        }

    def spilled(self) -> dict[str, SpilledFile]:
        """Return the existing spilled files by entry; add missing files to `problems`."""
        for entry, file in list(self._spilled.items()):
            assert self.folder is not None
            if not self.folder.is_file(file.name):
                self.problems.append(f"cached responses to {entry!r} are skipped: no {file.name}")
                self._forget(entry)
        return dict(self._spilled)

    def load_state(
        self,
        state: dict[str, Any],
        source: Folder | None = None,
        damaged: Collection[str] = (),
    ) -> None:
        """Replace everything with a `state`, linking files of `source` except `damaged` files."""
        self._clear()
        for entry, name, num_bytes, sha256 in state["files"]:
            if name in damaged or source is None or not source.is_file(name):
                self.problems.append(f"cached responses to {entry!r} are skipped: {name} is lost")
            elif self.folder is None:
                self._put(entry, source.read(name))
            else:
                self.folder.link(source, name)
                self._spilled[entry] = SpilledFile(name, num_bytes, sha256)
        data = state["blobs"].tobytes()
        start = 0
        for entry, size in zip(state["keys"], state["sizes"], strict=True):
            self._put(entry, data[start : start + size])
            start += size

    # -- memory and disk -------------------------------------------------------

    def _put(self, entry: str, blob: bytes) -> None:
        self._forget(entry)
        self._blobs[entry] = blob
        self.num_bytes += len(blob)
        while self.folder is not None and self.num_bytes > self.memory_bytes:
            oldest, old = self._blobs.popitem(last=False)
            self.num_bytes -= len(old)
            self._spilled[oldest] = _spill(self.folder, oldest, old)

    def _blob(self, entry: str) -> bytes | None:
        """Return the blob of an entry, which becomes the most recently used entry."""
        if entry in self._spilled:
            assert self.folder is not None
            try:
                blob = self.folder.read(self._spilled[entry].name)
            except OSError as error:
                self.problems.append(f"cached responses to {entry!r} are skipped: {error}")
                self._forget(entry)
                return None
            self._put(entry, blob)  # which may spill it again
            return blob
        if entry in self._blobs:
            self._blobs.move_to_end(entry)
        return self._blobs.get(entry)

    def _forget(self, entry: str) -> None:
        file = self._spilled.pop(entry, None)
        if file is not None and self.folder is not None:
            with contextlib.suppress(FileNotFoundError):
                self.folder.remove(file.name)
        self.num_bytes -= len(self._blobs.pop(entry, b""))

    def _clear(self) -> None:
        """Forget everything, including files of a killed process."""
        for name in self.folder.names() if self.folder is not None else ():
            if name.endswith(_ENDING):
                self.folder.remove(name)  # type: ignore[union-attr]
        self._spilled.clear()
        self._blobs.clear()
        self.num_bytes = 0


def _spill(folder: Folder, entry: str, blob: bytes) -> SpilledFile:
    """Write a blob to a file, replacing a file left by a killed process."""
    digest = hashlib.sha256(blob).hexdigest()
    where = hashlib.sha256(entry.encode()).hexdigest()[:16]
    file = SpilledFile(f"{where}-{digest}{_ENDING}", len(blob), digest)
    if folder.exists(file.name):  # left by a killed process
        folder.remove(file.name)
    with folder.create(file.name) as out:
        out.write(blob)
    return file


def _entry_name(key: str, back: int) -> str:
    """Return the entry name of a group; example keys contain no NUL."""
    return key if not back else f"{key}\0{back}"
