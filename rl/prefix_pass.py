"""Cached responses on their way into the engine: packed, verified, and cut where a rule says.

What stands of a response, with the token that the same pass draws behind it, enters a
row with its keys and values; a request that has its end in there never needs a row.
"""

from __future__ import annotations

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
from rl.trajectory import FinishReason, Origin, Prefix, Request, Trajectory
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
class PrefixPass:
    """What the passes of a phase have in common."""

    rule: PrefixRule
    sampling: SamplingConfig
    key: jax.Array
    stop_ids: np.ndarray
    policy_version: int
    longest_tokens: int  # of a request, prompt and response together

    def run(
        self,
        replica: Replica,
        params: Params,
        requests: Sequence[Request],
        counts: VerifiedPrefixes,
    ) -> Iterator[tuple[KVCache, list[Entering]]]:
        """Verify the requests' cached responses: of each pass its cache and who enters from it.

        Adds to `counts`.
        """
        samples = [self._sample(request) for request in requests]
        whole, single = replica.config.verify_shapes(self.longest_tokens)
        for packed, indices in _batches(samples, whole, single):
            batch = _inputs(packed, [samples[i] for i in indices], replica.context_tokens)
            cache, found = verify_packed(
                params,
                jax.tree.map(replica.put, batch),
                self.key,
                np.float32(self.sampling.temperature),
                np.int32(self.sampling.top_k),
                np.float32(self.sampling.top_p),
                **replica.verify_packed_options(self.sampling.draw),
            )
            drawn_X, drawn_logprobs_X, logprobs_X, possible_X = packed_verify.unpack(found)
            entering = []
            for e, i in enumerate(indices):
                at_L = packed.batch.index_EM[e, : samples[i].trajectory.num_tokens]
                verified = Verified(
                    logprobs_X[at_L], possible_X[at_L], drawn_X[at_L], drawn_logprobs_X[at_L]
                )
                prefix = self._prefix(requests[i], verified)
                prompt_at = _prompt_start(packed.batch.packing, int(at_L[0]))
                in_prompt = prompt_at + np.arange(len(requests[i].prompt_ids) - 1)
                positions = np.concatenate([in_prompt, at_L[: len(prefix.response_ids)]])
                entering.append(Entering(requests[i], prefix, positions))
                drawn_tokens = len(prefix.response_ids) - prefix.reused_tokens
                counts.add(len(at_L), prefix.reused_tokens, drawn_tokens)
            counts.passes[packed.batch.tokens_BT.shape] += 1
            yield cache, entering

    def _sample(self, request: Request) -> Sample:
        """The request's cached tokens, up to an end token and to its limit."""
        cached = request.cached
        assert cached is not None
        tokens = cached.tokens[: self._limit(request)]
        ends = np.nonzero(np.isin(tokens, self.stop_ids))[0]
        tokens = tokens[: ends[0] + 1] if len(ends) else tokens
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

    def _limit(self, request: Request) -> int:
        return request.max_new_tokens or self.sampling.max_new_tokens

    def _prefix(self, request: Request, verified: Verified) -> Prefix:
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
