"""EAGLE and n-grams on drafting workers: `python -m benchmarks.specactor.trees --json`

As `benchmarks.specactor`, with other drafters: an EAGLE drafter of the 70B model's shape, or
n-grams of each request's own text, which take no seconds of a device. Coupled, four workers draft
for themselves; decoupled, one of them drafts trees behind the last commit for the other three. The
EAGLE drafter has learned from the shipped policy's responses to other prompts.

`choice` are the measured seconds of following blocks to what requests have, on the host, for a
round of so many requests: what rounds would save that did it on the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import environment
from benchmarks.specactor.__main__ import PACKAGES, differing
from benchmarks.specactor.prices import DEVICES, WORKERS, eagle_seconds, verify_seconds
from benchmarks.specactor.rollouts import Apart, Bench, Played, load_models, requests_of
from benchmarks.specactor.virtual_time import PricedEngine, VirtualTime
from rl.drafter_training.config import DrafterConfig
from rl.drafter_training.offline import OfflineConfig, OfflineTraining
from rl.drafting.ahead_maker import AheadMaker, DraftedRollout, LearnedAhead, OwnAhead
from rl.engine.rollout_spec import DrafterContext, RolloutSpec
from rl.packing import Response
from rl.speculation.learned_drafter import LearnedDrafter
from rl.trajectory import Request, Trajectory
from spec.decoupled.messages import Block
from spec.decoupled.received import ReceivedBlocks
from spec.drafter import Drafter, LiveSlots, Source
from spec.eagle import model as eagle
from spec.eagle.config import DataBufferConfig, DrafterTrainingConfig, TreeConfig
from spec.eagle.model import EagleWeights
from spec.retrieval.ngram import NgramDrafter

BATCHES = (1, 8, 32)
WINDOWS = (1, 2, 3, 4)
TREE = TreeConfig(max_depth=4, top_k=4, proposal="shared_noise")
DRAFTER = DrafterConfig(micro_batches=1, batch_rows=8, row_tokens=256)
TRAINING = DrafterTrainingConfig(variant="eagle", learning_rate=1e-3)
OWN_STEP_S = 1e-4  # of looking n-grams up, for all requests of a drafting worker
REPEATS = 200


def trained(bench: Bench, prompts: int, samples: int, steps: int) -> tuple[LearnedDrafter, dict]:
    """Train an EAGLE drafter on responses to the last prompts of the task."""
    policy, params = bench.models.policy, bench.models.params
    requests = requests_of(2 * prompts * samples, bench.sampling.max_new_tokens)[-prompts:]
    asked = [
        dataclasses.replace(r, request_id=10_000 + samples * i + j, sample_index=j)
        for i, r in enumerate(requests)
        for j in range(samples)
    ]
    virtual = VirtualTime()
    engine = bench.engine(64, virtual, lambda record, drafted: 0.0)
    spec = RolloutSpec(params, bench.sampling, bench.key, policy.eos_token_ids)
    done = list[Trajectory]()
    virtual.run([lambda: done.extend(engine.run(spec, asked))])
    responses = [
        Response(str(t.request_id), t.group_id, t.prompt_ids, t.response_ids) for t in done
    ]
    shape = eagle.config_for(policy)
    start = EagleWeights(shape, eagle.init(shape, jax.random.key(0)))
    config = OfflineConfig(DRAFTER, TRAINING, DataBufferConfig(max_bytes=2**31))
    settings = {"seed": 0, "temperature": bench.sampling.temperature, "dtype": np.float32}
    training = OfflineTraining(config, policy, params, start, **settings)
    training.train(responses, steps, lambda: False, _told)
    found = {name: round(x, 4) for name, x in training.evaluate(responses[:64]).items()}
    return LearnedDrafter(training.drafter, TREE), {"steps": steps, **found}


def _told(step: int, row: dict[str, float]) -> None:
    if step % 50 == 0:
        print(f"drafter step {step}: {row}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Way:
    """A drafter of verifying workers, and the same on drafting workers.

    `coupled_s` and `step_s` are the seconds of a draft so deep for so many requests of a worker, or
    of a drafting worker's devices for it.
    """

    bench: Bench
    maker: Callable[[int], AheadMaker]
    coupled: Callable[[DrafterContext, int], Drafter]
    coupled_s: Callable[[float, int], float]
    step_s: Callable[[int, int], float]

    def play_coupled(self, requests: Sequence[Request], window: int) -> Played:
        """Play workers that draft for themselves."""

        def drafter_of(engine: PricedEngine) -> Drafter:
            return self.coupled(self._context(engine), window)

        draft_s = lambda live: self.coupled_s(live, window)  # noqa: E731
        return self.bench.alone(requests, window, drafter_of, draft_s)

    def play_trees(self, requests: Sequence[Request], window: int) -> Played:
        """Play verifying workers that one drafting worker drafts for."""
        maker, bench = self.maker(window), self.bench

        def made(engine: PricedEngine, home: PricedEngine) -> Apart:
            context = self._context(engine)
            rollout = DraftedRollout(bench.key, bench.sampling, maker.shared(context))
            return Apart(maker.ahead(home, rollout), maker.source, maker.states(context))

        return bench.apart(requests, window, made, self.step_s, 2 * window + 1)

    def _context(self, engine: PricedEngine) -> DrafterContext:
        bench = self.bench
        return engine.drafter_context(RolloutSpec(bench.models.params, bench.sampling, bench.key))


def ways(bench: Bench, learned: LearnedDrafter) -> dict[str, Way]:
    """Return the ways to draft, by their sources."""

    def coupled(context: DrafterContext, window: int) -> Drafter:
        drafter = learned.drafter_for(context)
        drafter.depth = window
        return drafter

    devices, top_k = DEVICES / (WORKERS - 1), TREE.top_k
    return {
        "learned": Way(
            bench,
            maker=lambda window: LearnedAhead(learned, window),
            coupled=coupled,
            coupled_s=lambda live, depth: depth * eagle_seconds(live, DEVICES, top_k),
            step_s=lambda n, depth: depth * eagle_seconds(max(n / devices, 1.0), 1, top_k),
        ),
        "own": Way(
            bench,
            maker=lambda window: OwnAhead(),
            coupled=lambda context, window: NgramDrafter(),
            coupled_s=lambda live, depth: 0.0,
            step_s=lambda n, depth: OWN_STEP_S,
        ),
    }


def compared(way: Way, batch: int) -> dict[str, Any]:
    """Return the figures of a batch, each way at the best of its windows."""
    bench = way.bench
    requests = requests_of((WORKERS - 1) * batch, bench.sampling.max_new_tokens)
    plain = bench.coupled(requests, 0)
    figures: dict[str, Any] = {}
    for name, play in (("coupled", way.play_coupled), ("trees", way.play_trees)):
        for window in WINDOWS:
            played = play(requests, window)
            figures[f"{name}, window {window}"] = {
                "projected_s": round(played.seconds, 4),
                "accepted": round(played.p, 3),
                "rounds_with_draft": round(played.hits, 3),
                "drafting_busy": round(played.drafting_busy, 3),
                "responses_that_differ": differing(plain.responses, played.responses),
            }

    def best_s(name: str) -> float:
        return min(f["projected_s"] for key, f in figures.items() if key.startswith(name))

    return {
        "batch": batch,
        "plain_s": round(plain.seconds, 4),
        "coupled_against_plain": round(plain.seconds / best_s("coupled"), 3),
        "trees_against_coupled": round(best_s("coupled") / best_s("trees"), 3),
        "responses_that_differ": sum(f["responses_that_differ"] for f in figures.values()),
        "plans": figures,
    }


def choice_seconds(batch: int, nodes: int = 64, window: int = 4) -> float:
    """Measure taking up a block for each request of a round, and following all of them."""
    rng, total = np.random.default_rng(0), 1000
    ids, tokens_BL = np.arange(batch), rng.integers(0, 100, (batch, total), dtype=np.int32)
    full, left = np.full(batch, total, np.int32), np.full(batch, 1000)
    live = LiveSlots(ids, ids, ids, ids, np.full(batch, 100, np.int32), full, left, tokens_BL)
    parents_N = np.concatenate([[-1], rng.integers(-1, np.arange(1, nodes))]).astype(np.int32)
    prob_N = np.sort(rng.random(nodes).astype(np.float32))[::-1]
    received, taken = ReceivedBlocks(), []
    window_A, most_A = np.full(batch, window), np.full(batch, 16, np.int32)
    for n in range(REPEATS + 1):
        # behind all but the last token, which the block has
        blocks = []
        for r in range(batch):
            tokens_N = rng.integers(0, 100, nodes).astype(np.int32)
            tokens_N[0] = tokens_BL[r, total - 1]
            blocks.append(Block(r, n + 1, total - 1, tokens_N, parents_N, prob_N))
        began_s = time.perf_counter()
        received.put(blocks, live)
        drafts = received.drafts(live, window_A, most_A, 16, Source.MODEL)
        taken.append(time.perf_counter() - began_s)
        assert drafts.count_A.all(), "each request has a draft"
    return statistics.median(taken[1:])


def choices() -> list[dict[str, float]]:
    """Return the seconds of choosing on the host, beside those of a round."""
    found = []
    for batch in (1, 8, 32, 64):
        taken_s, round_s = choice_seconds(batch), verify_seconds(batch, 5)
        share = {"share_of_round": round(taken_s / round_s, 5)}
        found.append({"batch": batch, "seconds": round(taken_s, 7), **share})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.specactor.trees", description=__doc__
    )
    parser.add_argument("--max_new_tokens", type=int, default=160)
    parser.add_argument("--draw", default="gumbel", choices=("gumbel", "cdf"))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--drafter_steps", type=int, default=600)
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    models = load_models()
    layers = eagle.config_for(models.policy).feature_layers
    bench = Bench(models, arguments.max_new_tokens, arguments.draw, layers)
    learned, training = trained(bench, 64, 8, arguments.drafter_steps)
    found = {
        source: [compared(way, batch) for batch in arguments.batches]
        for source, way in ways(bench, learned).items()
    }
    result = environment.record("benchmarks.specactor.trees", PACKAGES) | {
        "verifier": "Llama-3.1-70B on 8 H100",
        "drafter": "EAGLE of its shape; n-grams",
        "draw": arguments.draw,
        "max_new_tokens": arguments.max_new_tokens,
        "training": training,
        **found,
        "choice": choices(),
    }
    figures = {
        f"{source}, batch {row['batch']}: trees_against_coupled": row["trees_against_coupled"]
        for source, rows in found.items()
        for row in rows
    }
    environment.show(result, arguments, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
