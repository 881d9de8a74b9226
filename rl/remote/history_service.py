"""A history worker: a program that keeps cached groups, and indexes those of a step's prompts.

    run's program → history worker    Meet, Prepare, Feed, Build, Ping
    rollout worker → history worker   Fetch
    history worker →                  Met, Lacks, Built, Trees, Done, Failed: one answer to each

Groups come as they are made, and again where they are lacking (`Lacks`). A group is forgotten once
it is indexed: the responses of that step take its place.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np

from rl.remote import service
from rl.remote.messages import Done, Ping
from rl.remote.records import expect
from rl.remote.service import Met, ServiceProgram
from rl.remote.wire import Codec, WireError
from rl.speculation.sources import HISTORY_RULES
from spec.retrieval.history import IndexPart, build_index, part_of
from spec.retrieval.suffix_arrays import TreeArrays
from spec.reuse.rollout_cache import CachedGroup, CacheFileError, checksum, decode

MOST_INDEXES = 3  # that are kept: two steps run in a pipeline, and another one is built
MOST_WAIT_S = 60.0  # of a Build


@dataclasses.dataclass(frozen=True)
class Meet:
    """The first words. The program ends itself when nobody has spoken to it for `silence_s`.

    `source` names the rule that drafts from the history; `policy` and `vocab_size` are those of
    the groups (`spec.reuse.rollout_cache`), of which at most `most_bytes` are kept for later.
    """

    identity: Mapping[str, str]
    silence_s: float
    source: str
    policy: str
    vocab_size: int
    most_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class PromptTail:
    """The end of a prompt (int32), and the checksum of its cached group, if there is one."""

    tail: np.ndarray
    checksum: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Prepare:
    """Announces an index of these prompts; groups with other checksums are forgotten."""

    name: str
    prompts: Mapping[str, PromptTail]


@dataclasses.dataclass(frozen=True)
class Lacks:
    """The prompts whose groups are not there."""

    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Feed:
    """Groups as `spec.reuse.rollout_cache.encode` writes them."""

    blobs: Mapping[str, bytes]


@dataclasses.dataclass(frozen=True)
class Build:
    """Starts to build an index, once; answered when it is built, or after `wait_s`."""

    name: str
    wait_s: float


@dataclasses.dataclass(frozen=True)
class Built:
    """`damaged` groups have been left out."""

    done: bool
    num_tokens: int = 0
    damaged: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Fetch:
    """Asks for an index that is built."""

    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Trees:
    """An index; its arrays are to be checked (`spec.retrieval.suffix_arrays.check`)."""

    part: IndexPart


def _check_meet(record: Meet) -> None:
    expect(record.source in HISTORY_RULES, f"a source of {', '.join(HISTORY_RULES)}")
    expect(record.vocab_size > 0 and record.most_bytes >= 0, "tokens, and bytes of 0 or more")


def _check_prompt(record: PromptTail) -> None:
    expect(bool((record.tail >= 0).all()), "token ids of 0 or more")


def _check_part(record: IndexPart) -> None:
    expect(len(record.keys) == len(record.trees.roots_T), "a key of each tree")
    expect(len(set(record.keys)) == len(record.keys), "each key once")


CODEC = Codec(
    (Meet, Prepare, Lacks, Feed, Build, Built, Fetch, Trees, Ping, *service.ANSWERS),
    {
        PromptTail: {"tail": ("int32", 1)},
        TreeArrays: {
            "states_SX": ("int32", 2),
            "weights_S": ("float32", 1),
            "edges_EX": ("int32", 2),
            "roots_T": ("int64", 1),
            "grown_T": ("int64", 1),
        },
    },
    {Meet: _check_meet, PromptTail: _check_prompt, IndexPart: _check_part},
)


@dataclasses.dataclass(eq=False)
class _Index:
    """An index, from its announcement on; `built` is None until it is asked for."""

    prompts: Mapping[str, PromptTail]
    built: Future[tuple[Built, IndexPart]] | None = None


class HistoryProgram(ServiceProgram):
    """Answers messages; `config_text` is the configuration of the run that it was started for."""

    def __init__(self, config_text: str, leave: Callable[[str], None] | None = None) -> None:
        super().__init__(CODEC, config_text, leave)
        self._met: Meet | None = None
        self._lock = threading.Lock()
        self._blobs: dict[str, bytes] = {}
        self._num_bytes = 0
        self._indexes: collections.OrderedDict[str, _Index] = collections.OrderedDict()
        self.answers = {
            Meet: self._meet,
            Prepare: self._prepare,
            Feed: self._feed,
            Build: self._build,
            Fetch: self._fetch,
            Ping: lambda _: Done(),
        }

    @property
    def num_bytes(self) -> int:
        """The bytes of all groups that wait to be indexed."""
        return self._num_bytes

    def _meet(self, asked: Meet) -> Met:
        met = self.meet(asked.identity, asked.silence_s, {})
        self._met = asked
        return met

    def _prepare(self, asked: Prepare) -> Lacks:
        self._told()
        with self._lock:
            self._indexes[asked.name] = _Index(asked.prompts)
            while len(self._indexes) > MOST_INDEXES:
                self._indexes.popitem(last=False)
            for key, prompt in asked.prompts.items():
                if key in self._blobs and checksum(self._blobs[key]) != prompt.checksum:
                    self._forget(key)
            return Lacks(self._lacking(asked.prompts))

    def _feed(self, asked: Feed) -> Done:
        most_bytes = self._told().most_bytes
        with self._lock:
            coming = {k for x in self._indexes.values() if x.built is None for k in x.prompts}
            for key, blob in asked.blobs.items():
                self._forget(key)
                if key in coming or self._num_bytes + len(blob) <= most_bytes:
                    self._blobs[key] = blob
                    self._num_bytes += len(blob)
        return Done()

    def _build(self, asked: Build) -> Built:
        index = self._of(asked.name)
        with self._lock:
            if index.built is None:
                if lacking := self._lacking(index.prompts):
                    raise WireError(f"expected the groups of {', '.join(lacking[:3])} first")
                index.built = Future()
                blobs = {
                    k: self._blobs[k] for k, p in index.prompts.items() if p.checksum is not None
                }
                for key in blobs:
                    self._forget(key)
                threading.Thread(
                    target=self._index, args=(index, blobs), name="index", daemon=True
                ).start()
        try:
            return index.built.result(min(max(asked.wait_s, 0.0), MOST_WAIT_S))[0]
        except FutureTimeoutError:
            return index.built.result()[0] if index.built.done() else Built(False)

    def _fetch(self, asked: Fetch) -> Trees:
        index = self._of(asked.name)
        if index.built is None or not index.built.done():
            raise WireError(f"expected an index that is built, and {asked.name} is not")
        return Trees(index.built.result()[1])

    def _index(self, index: _Index, blobs: Mapping[str, bytes]) -> None:
        """A thread: build an index, of the groups that can be read."""
        assert index.built is not None
        try:
            met, groups, damaged = self._told(), dict[str, CachedGroup](), list[str]()
            for key, blob in blobs.items():
                try:
                    groups[key] = decode(blob, key, met.policy, met.vocab_size)
                except CacheFileError:
                    damaged.append(key)
            tails = {key: index.prompts[key].tail for key in groups}
            built = build_index(groups, tails, HISTORY_RULES[met.source])
            told = Built(True, built.num_tokens, tuple(damaged))
            index.built.set_result((told, part_of(built)))
        except BaseException as error:
            index.built.set_exception(error)

    def _told(self) -> Meet:
        if self._met is None:
            raise WireError("expected Meet first")
        return self._met

    def _of(self, name: str) -> _Index:
        with self._lock:
            if name not in self._indexes:
                raise WireError(f"expected an index of {', '.join(self._indexes)}, got {name}")
            return self._indexes[name]

    def _lacking(self, prompts: Mapping[str, PromptTail]) -> tuple[str, ...]:
        """The lock is held."""
        return tuple(
            k for k, p in prompts.items() if p.checksum is not None and k not in self._blobs
        )

    def _forget(self, key: str) -> None:
        self._num_bytes -= len(self._blobs.pop(key, b""))
