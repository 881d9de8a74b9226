"""Cached responses on their way into the engine: packed, verified, and cut where a rule says.

What stands of a response, with the token that the same pass draws behind it, enters a
row with its keys and values; a request that has its end in there never needs a row.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from models.attention import Packing
from models.kv_cache import KVCache
from models.transformer import Params
from rl import batching
from rl.batching import Packed, Sample, Shape
from rl.replica import Replica
from rl.timeline import VerifiedPrefixes
from rl.trajectory import FinishReason, Origin, Prefix, Request, Trajectory, of_prefix
from spec import contexts, packed_verify
from spec.packed_verify import PackedResponses, verify_packed
from spec.prefix_reuse import PrefixRule, Verified
from spec.rollout_cache import CachedResponse, Scores
from spec.sampling import SamplingConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Entering:
    """A request with its prefix, and where in the pass's one row its keys and values are.

    `positions` are those of all of its tokens but the last, which is the next tree's root.
    """

    request: Request
    prefix: Prefix
    positions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixJudge:
    """Which prefix a request starts with, given what the pass found of its cached response."""

    rule: PrefixRule
    sampling: SamplingConfig
    key: jax.Array
    stop_ids: np.ndarray
    policy_version: int

    def usable(self, request: Request) -> np.ndarray:
        """The request's cached tokens, up to an end token and to its limit."""
        assert request.cached is not None
        tokens = request.cached.tokens[: self._limit(request)]
        ends = np.nonzero(np.isin(tokens, self.stop_ids))[0]
        return tokens[: ends[0] + 1] if len(ends) else tokens

    def _limit(self, request: Request) -> int:
        return request.max_new_tokens or self.sampling.max_new_tokens

    def prefix(self, request: Request, verified: Verified) -> Prefix:
        """What the rule keeps, and the token that was drawn behind it."""
        cached = request.cached
        assert cached is not None
        num_tokens = len(verified.drawn)
        cached = _first(cached, num_tokens)
        kept = self.rule.kept(request.request_id, cached, verified)
        drawn = slice(kept, kept + 1)  # empty where all of it is kept
        tokens = np.concatenate([cached.tokens[:kept], verified.drawn[drawn]])
        logprobs = np.concatenate([verified.logprobs[:kept], verified.drawn_logprobs[drawn]])
        emission, versions = logprobs, np.full(len(tokens), self.policy_version, np.int32)
        origin = Origin.ACCEPTED if self.rule.draws_own else Origin.REUSED
        if not self.rule.draws_own and cached.scores is not None:
            emission = logprobs.copy()
            emission[:kept] = cached.scores.emission_logprobs[:kept]
            versions[:kept] = cached.scores.policy_versions[:kept]
        origins = np.full(len(tokens), Origin.BONUS, np.uint8)
        origins[:kept] = origin
        reason = None
        if np.isin(tokens[-1], self.stop_ids):
            reason = FinishReason.STOP
        elif len(tokens) >= self._limit(request):
            reason = FinishReason.LENGTH
        return Prefix(tokens, logprobs, emission, versions, origins, kept, reason)


class PrefixPasses:
    """Requests whose cached responses wait to be verified, or stand and wait for a row.

    They are packed once; a pass runs when rows are free and nobody is ready to take them, so
    that no more than one pass's keys and values wait. Its counts are added to `counts`.
    """

    def __init__(
        self,
        judge: PrefixJudge,
        replica: Replica,
        requests: Sequence[Request],
        longest_tokens: int,
        counts: VerifiedPrefixes,
    ) -> None:
        self._judge, self._replica, self._requests, self._counts = judge, replica, requests, counts
        self._samples = [_sample(request, judge.usable(request)) for request in requests]
        whole, single = replica.config.verify_shapes(longest_tokens)
        self._passes = collections.deque(_batches(self._samples, whole, single))
        self._ready: collections.deque[Entering] = collections.deque()
        self._unverified = len(requests)
        self._packed: KVCache | None = None

    def __len__(self) -> int:
        return self._unverified + len(self._ready)

    @property
    def packed(self) -> KVCache:
        """Keys and values of those that `take` gave last, all in one row."""
        assert self._packed is not None
        return self._packed

    def take(self, params: Params, most: int) -> tuple[list[Trajectory], list[Entering]]:
        """Up to `most` requests that are ready for a row, after the next pass if there is none.

        Also the trajectories of those whose responses that pass has shown to be whole.
        """
        ended: list[Trajectory] = []
        if not self._ready:
            began_s = self._replica.clock()
            for e in self._verify(params):
                if e.prefix.finish_reason is None:
                    self._ready.append(e)
                else:
                    ended.append(of_prefix(e.request, e.prefix))
            self._counts.seconds += self._replica.clock() - began_s
        count = min(most, len(self._ready))
        return ended, [self._ready.popleft() for _ in range(count)]

    def _verify(self, params: Params) -> list[Entering]:
        """Run the next pass."""
        packed, indices = self._passes.popleft()
        judge, replica = self._judge, self._replica
        samples = [self._samples[i] for i in indices]
        self._packed, found = verify_packed(
            params,
            jax.tree.map(replica.put, _inputs(packed, samples, replica.context_tokens)),
            judge.key,
            np.float32(judge.sampling.temperature),
            np.int32(judge.sampling.top_k),
            np.float32(judge.sampling.top_p),
            **replica.verify_packed_options(judge.sampling.draw),
        )
        drawn_X, drawn_logprobs_X, logprobs_X, possible_X = packed_verify.unpack(found)
        entering = []
        for e, i in enumerate(indices):
            request, at_L = self._requests[i], packed.batch.index_EM[e, : _num_tokens(samples[e])]
            verified = Verified(
                logprobs_X[at_L], possible_X[at_L], drawn_X[at_L], drawn_logprobs_X[at_L]
            )
            prefix = judge.prefix(request, verified)
            prompt_at = _prompt_start(packed.batch.packing, int(at_L[0]))
            in_prompt = prompt_at + np.arange(len(request.prompt_ids) - 1)
            positions = np.concatenate([in_prompt, at_L[: len(prefix.response_ids)]])
            entering.append(Entering(request, prefix, positions))
            drawn_tokens = len(prefix.response_ids) - prefix.reused_tokens
            self._counts.add(len(at_L), prefix.reused_tokens, drawn_tokens)
        self._unverified -= len(indices)
        rows, length = packed.batch.tokens_BT.shape
        self._counts.passes[rows, length] += 1
        return entering


def _num_tokens(sample: Sample) -> int:
    return sample.trajectory.num_tokens


def _sample(request: Request, tokens: np.ndarray) -> Sample:
    """A cached response, as `rl.batching` packs them."""
    zeros = np.zeros(len(tokens), np.float32)
    trajectory = Trajectory(
        request_id=request.request_id,
        group_id=request.group_id,
        sample_index=request.sample_index,
        prompt_ids=np.asarray(request.prompt_ids, np.int32),
        response_ids=tokens,
        logprobs=zeros,
        policy_versions=zeros.astype(np.int32),
        origins=zeros.astype(np.uint8),
        finish_reason=FinishReason.LENGTH,
        emission_logprobs=zeros,
    )
    return Sample(trajectory, 0.0)


def _first(cached: CachedResponse, num_tokens: int) -> CachedResponse:
    """Its first tokens."""
    scores = cached.scores
    if scores is not None:
        scores = Scores(*(x[:num_tokens] for x in vars(scores).values()))
    return dataclasses.replace(cached, tokens=cached.tokens[:num_tokens], scores=scores)


def _batches(
    samples: Sequence[Sample], whole: Shape, single: Shape
) -> Iterator[tuple[Packed, list[int]]]:
    """Packed samples and their indices; where few rows are left over, one at a time."""
    for packed in batching.micro_batches(samples, whole):
        indices = packed.sample_indices.tolist()
        rows = int(packed.batch.packing.prompt_BT.any(axis=1).sum())
        if 2 * rows > whole.rows:
            yield packed, indices
            continue
        part = [samples[i] for i in indices]
        for one in batching.micro_batches(part, single):
            yield one, [indices[j] for j in one.sample_indices.tolist()]


def _inputs(packed: Packed, samples: Sequence[Sample], context_tokens: int) -> PackedResponses:
    batch = packed.batch
    ids_X, at_X, met_X = np.zeros((3, batch.tokens_BT.size), np.int32)
    name_X = at_X.astype(np.uint32)
    for e, sample in enumerate(samples):
        t = sample.trajectory
        index_L = batch.index_EM[e, : t.num_tokens]
        ids_X[index_L], at_X[index_L] = t.request_id, np.arange(t.num_tokens)
        if context_tokens:
            names = contexts.of_response(t.prompt_ids, t.response_ids, context_tokens)
            name_X[index_L], met_X[index_L] = names
    rows = (batch.tokens_BT, batch.targets_BT, batch.packing)
    shape = batch.tokens_BT.shape
    if context_tokens:
        return PackedResponses(*rows, *(x.reshape(shape) for x in (ids_X, name_X, met_X)))
    return PackedResponses(*rows, ids_X.reshape(shape), at_X.reshape(shape))


def _prompt_start(packing: Packing, response_at: int) -> int:
    """Where in the flattened rows the prompt of the response at this position starts."""
    T = packing.prompt_BT.shape[1]
    row, column = divmod(response_at, T)
    prompt_T = np.asarray(packing.prompt_BT[row])
    return row * T + int(np.argmax(prompt_T == prompt_T[column]))
