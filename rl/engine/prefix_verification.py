"""Verification of cached responses: packed into passes, and cut where the rule says.

What stays of a response, with the token that the same pass draws behind it, enters a
row with its keys and values; a request whose response ends there never needs a row.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from models.kv_cache import KVCache
from rl import packing
from rl.engine.ending import Endings
from rl.engine.model_runner import ModelRunner
from rl.engine.rollout_spec import RolloutSpec
from rl.engine.stats import VerifiedPrefixes
from rl.packing import Layout, Response, Row, Shape
from rl.trajectory import (
    FinishReason,
    Origin,
    PartialRequest,
    Prefix,
    Request,
    Trajectory,
    of_prefix,
)
from spec.config import SamplingConfig
from spec.reuse import packed_verify
from spec.reuse.packed_verify import PackedResponses, verify_packed
from spec.reuse.prefix_rule import Verified
from spec.reuse.rollout_cache import CachedResponse, Scores
from spec.sampling import Processing


@dataclasses.dataclass(frozen=True, eq=False)
class VerifiedRequest:
    """A request with its prefix, and where in the pass's one row its keys and values are.

    `positions` are those of all of its tokens but the last, which is the next tree's root.
    """

    partial: PartialRequest
    positions: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class _Pass:
    """A pass to come: its rows hold some of the requests' cached responses."""

    requests: Sequence[PartialRequest]
    responses: Sequence[Response]
    rows: Sequence[Row]
    shape: Shape

    def __len__(self) -> int:
        return sum(row.num_samples for row in self.rows)


class PrefixVerifier:
    """Requests whose cached responses wait to be verified, or are verified and wait for a row.

    Which of the requests that come together share a pass is planned at once. A pass runs when
    rows are free and no request is ready for them, so that no more than one pass's keys and
    values wait. Its counts are added to `counts`.
    """

    def __init__(
        self,
        spec: RolloutSpec,
        runner: ModelRunner,
        longest_tokens: int,
        endings: Endings,
        counts: VerifiedPrefixes,
    ) -> None:
        self._spec, self._runner, self._endings, self._counts = spec, runner, endings, counts
        self._shapes = runner.config.verify_shapes(longest_tokens)
        self._passes: collections.deque[_Pass] = collections.deque()
        self._ready: collections.deque[VerifiedRequest] = collections.deque()
        self._packed: KVCache | None = None

    def add(self, requests: Sequence[PartialRequest]) -> None:
        """Queue requests that have cached responses and none of their own yet."""
        responses = [_response(p.request, self._usable(p.request)) for p in requests]
        for rows, shape in _rows_of_passes(responses, *self._shapes):
            self._passes.append(_Pass(requests, responses, rows, shape))

    def __len__(self) -> int:
        return sum(len(p) for p in self._passes) + len(self._ready)

    @property
    def packed(self) -> KVCache:
        """The keys and values, in one row, of the requests that `take` returned last."""
        assert self._packed is not None
        return self._packed

    def take(self, most: int) -> tuple[list[Trajectory], list[VerifiedRequest]]:
        """Return up to `most` requests that are ready for a row, after the next pass if none is.

        Also return the trajectories of requests whose responses that pass has shown to be whole.
        """
        ended: list[Trajectory] = []
        if not self._ready:
            began_s = self._runner.clock()
            for verified in self._verify():
                prefix = verified.partial.prefix
                assert prefix is not None
                if prefix.finish_reason is None:
                    self._ready.append(verified)
                else:
                    ended.append(of_prefix(verified.partial.request, prefix))
            self._counts.seconds += self._runner.clock() - began_s
        count = min(most, len(self._ready))
        return ended, [self._ready.popleft() for _ in range(count)]

    def _verify(self) -> list[VerifiedRequest]:
        """Run the next pass."""
        planned = self._passes.popleft()
        spec, runner, shape = self._spec, self._runner, planned.shape
        layout = packing.lay_out(planned.responses, planned.rows, shape)
        self._packed, found = verify_packed(
            spec.params,
            jax.tree.map(runner.put, self._inputs(planned, layout)),
            spec.key,
            **runner.verify_packed_options(spec.sampling.draw),
        )
        drawn_X, drawn_logprobs_X, logprobs_X, possible_X = packed_verify.unpack(found)
        entering = []
        for i, start, prompt_start in _places(layout):
            p, n = planned.requests[i], len(planned.responses[i].tokens)
            at = slice(start, start + n)
            verified = Verified(logprobs_X[at], possible_X[at], drawn_X[at], drawn_logprobs_X[at])
            prefix = self._prefix(p.request, verified)
            num_tokens = len(prefix.response_ids)
            in_prompt = prompt_start + np.arange(len(p.request.prompt_ids) - 1)
            positions = np.concatenate([in_prompt, start + np.arange(num_tokens)])
            left = None if p.max_tokens is None else p.max_tokens - num_tokens
            partial = PartialRequest(p.request, prefix, max_tokens=left)
            entering.append(VerifiedRequest(partial, positions))
            self._counts.add(n, prefix.reused_tokens, num_tokens - prefix.reused_tokens)
        self._counts.passes[shape.rows, shape.length] += 1
        return entering

    def _inputs(self, planned: _Pass, layout: Layout) -> PackedResponses:
        """The pass's rows, and whose noise draws at each position."""
        shape = layout.tokens_BT.shape
        ids_X, position_X = np.zeros((2, layout.tokens_BT.size), np.int32)
        processing = Processing.filled(SamplingConfig(), shape)
        for i, start, _ in _places(layout):
            response, request = planned.responses[i], planned.requests[i].request
            n = len(response.tokens)
            here = slice(start, start + n)
            ids_X[here], position_X[here] = request.request_id, np.arange(n)
            processing.put(here, request.sampling or self._spec.sampling)
        return PackedResponses(
            layout.tokens_BT,
            layout.targets_BT,
            layout.packing,
            ids_X.reshape(shape),
            position_X.reshape(shape),
            processing,
        )

    def _usable(self, request: Request) -> np.ndarray:
        """The request's cached tokens, up to where a response would end."""
        assert request.cached is not None
        tokens = request.cached.tokens[: request.limit(self._spec.sampling)]
        return tokens[: self._endings.read(self._endings.rule(request.sampling), tokens)[0]]

    def _prefix(self, request: Request, verified: Verified) -> Prefix:
        """The tokens that the rule keeps, and the one that was drawn behind them."""
        rule, cached = self._spec.rule, request.cached
        assert rule is not None and cached is not None
        cached = _first(cached, len(verified.drawn))
        kept = rule.kept(request.request_id, cached, verified)
        drawn = slice(kept, kept + 1)  # empty where all of it is kept
        tokens = np.concatenate([cached.tokens[:kept], verified.drawn[drawn]])
        logprobs = np.concatenate([verified.logprobs[:kept], verified.drawn_logprobs[drawn]])
        emission = logprobs
        versions = np.full(len(tokens), self._spec.policy_version, np.int32)
        origin = Origin.ACCEPTED if rule.mode.couples_noise else Origin.REUSED
        if not rule.mode.couples_noise and cached.scores is not None:
            emission = logprobs.copy()
            emission[:kept] = cached.scores.emission_logprobs[:kept]
            versions[:kept] = cached.scores.policy_versions[:kept]
        origins = np.full(len(tokens), Origin.BONUS, np.uint8)
        origins[:kept] = origin
        reason = None
        if self._endings.read(self._endings.rule(request.sampling), tokens)[2]:
            reason = FinishReason.STOP
        elif len(tokens) >= request.limit(self._spec.sampling):
            reason = FinishReason.LENGTH
        return Prefix(tokens, logprobs, emission, versions, origins, kept, reason)


def _response(request: Request, tokens: np.ndarray) -> Response:
    name, prompt_ids = f"request {request.request_id}", np.asarray(request.prompt_ids, np.int32)
    return Response(name, request.group_id, prompt_ids, tokens)


def _rows_of_passes(
    responses: Sequence[Response], whole: Shape, single: Shape
) -> Iterator[tuple[list[Row], Shape]]:
    """Yield the rows of every pass; where few are left over, one row at a time."""
    for rows in packing.plan(responses, whole):
        if 2 * len(rows) > whole.rows:
            yield rows, whole
        else:
            yield from (([row], single) for row in rows)


def _places(layout: Layout) -> Iterator[tuple[int, int, int]]:
    """Yield each response's index, where it starts, and where its prompt starts."""
    columns = layout.order, layout.starts, layout.prompt_starts
    return zip(*(column.tolist() for column in columns), strict=True)


def _first(cached: CachedResponse, num_tokens: int) -> CachedResponse:
    scores = cached.scores
    if scores is not None:
        scores = Scores(*(x[:num_tokens] for x in vars(scores).values()))
    return dataclasses.replace(cached, tokens=cached.tokens[:num_tokens], scores=scores)
