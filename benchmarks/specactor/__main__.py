"""Drafting workers (SpecActor) on a virtual clock: `python -m benchmarks.specactor --json`

Real engines, drafters, messages, schedulers and coordinators; the seconds of rounds, drafts and
moves are those of a 70B model on eight H100s and of a 1B draft model on one, by the roofline,
called projected. Policy and draft model are the ones that ship, so that acceptance is theirs;
requests are taken to hold 2,000 positions beside their own. `wall_s` are seconds of this machine,
on which all workers share the cores.

- `decoupled`: four workers of eight devices. Coupled, each drafts for its requests, then verifies;
  decoupled, one of them drafts for the other three, as chains that run ahead or as all cases one
  round ahead. `batch` is that of each of the three; the same requests go to all ways, each with the
  best of its windows.
- `planner`: the plan that Algorithm 1 chooses by the prices and the acceptance that was seen,
  against the best of all that were tried.
- `tail`: rollouts under the scheduler that gives whole groups to workers, with one window for all
  (the best for the first batch); then planned by the batch that is left and by request (Algorithm
  2, every `RECONFIGURE_TOKENS` tokens: responses are a hundredth as long as the paper's); then with
  idle workers that answer the last requests again (Algorithm 3). A tail is from the end of nine
  tenths of the requests to that of all.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import environment
from benchmarks.specactor.prices import (
    COUPLED,
    DEVICES,
    ENUMERATION,
    FREE_RUNNING,
    WORKERS,
    draft_seconds,
    step_price,
    verify_seconds,
)
from benchmarks.specactor.rollouts import Bench, Played, load_models, requests_of
from benchmarks.specactor.tail import Rollout, TailPlan
from rl.trajectory import Request, Trajectory
from sched.policies.specactor import Acceptance, rate

PACKAGES = ("jax", "jaxlib", "numpy")
BATCHES = (1, 8, 32, 64)
WINDOWS = {COUPLED: (1, 2, 3, 4), FREE_RUNNING: (3, 5), ENUMERATION: (3, 4)}
RECONFIGURE_TOKENS = 32
TAIL_REQUESTS = 96
Tried = Mapping[tuple[str, int], Played]  # by way and window


def timed(work: Callable[[], Played]) -> tuple[Played, float]:
    began_s = time.perf_counter()
    return work(), time.perf_counter() - began_s


def differing(one: Mapping[int, Trajectory], other: Mapping[int, Trajectory]) -> int:
    """Return how many responses are not the same, token for token."""
    assert one.keys() == other.keys(), "the same was asked"
    return sum(not np.array_equal(one[r].response_ids, other[r].response_ids) for r in one)


def play_all(bench: Bench, requests: Sequence[Request]) -> tuple[Tried, dict[str, Any]]:
    """Play every way with every window, and plain decoding; return them, and figures of each."""
    plain = bench.coupled(requests, 0)
    tried: dict[tuple[str, int], Played] = {}
    figures: dict[str, Any] = {"plain": {"projected_s": round(plain.seconds, 4)}}
    for way, windows in WINDOWS.items():
        for window in windows:
            play = bench.coupled if way == COUPLED else bench.ahead_of
            given = (requests, window) if way == COUPLED else (requests, window, way)
            played, wall_s = timed(lambda p=play, g=given: p(*g))
            tried[way, window] = played
            figures[f"{way}, window {window}"] = {
                "projected_s": round(played.seconds, 4),
                "wall_s": round(wall_s, 2),
                "accepted": round(played.p, 3),
                "rounds_with_draft": round(played.hits, 3),
                "drafting_busy": round(played.drafting_busy, 3),
                "responses_that_differ": differing(plain.responses, played.responses),
            }
    return tried, figures


def best_of(tried: Tried, way: str) -> tuple[int, float]:
    """Return the window of a way that took least, and its seconds."""
    seconds = {window: p.seconds for (name, window), p in tried.items() if name == way}
    window = min(seconds, key=seconds.__getitem__)
    return window, seconds[window]


def planned(tried: Tried, num_requests: int) -> tuple[str, int]:
    """Return the way and window that the model of Algorithm 1 rates highest, of those tried.

    Acceptance is what one window of each way has shown, which a run sees whatever its window.
    """
    p = tried[COUPLED, WINDOWS[COUPLED][-1]].draft_p(WINDOWS[COUPLED][-1])
    hits = tried[ENUMERATION, WINDOWS[ENUMERATION][0]].hits
    verifying = WORKERS - 1
    step = {way: step_price(way, DEVICES / verifying) for way in (FREE_RUNNING, ENUMERATION)}

    def rated(way: str, window: int) -> float:
        drafting = 0 if way == COUPLED else 1
        acceptance = Acceptance(p, hits if way == ENUMERATION else None)

        def draft(requests: float) -> float:
            if way == COUPLED:
                return draft_seconds(requests, DEVICES)
            return step[way](round(num_requests / verifying), window) / window

        def verify(requests: float, w: int) -> float:
            return verify_seconds(requests, w + 1)

        return rate(WORKERS, num_requests, drafting, window, draft, verify, acceptance)

    return max(tried, key=lambda plan: rated(*plan))


def decoupled(bench: Bench, batch: int) -> dict[str, Any]:
    """Return the figures of one batch."""
    requests = requests_of((WORKERS - 1) * batch, bench.sampling.max_new_tokens)
    tried, figures = play_all(bench, requests)
    coupled, coupled_s = best_of(tried, COUPLED)
    found: dict[str, Any] = {"batch": batch, "requests": len(requests), "coupled_window": coupled}
    for way in (FREE_RUNNING, ENUMERATION):
        window, seconds = best_of(tried, way)
        found |= {f"{way}_window": window, f"{way}_against_coupled": round(coupled_s / seconds, 3)}
    choice, least_s = planned(tried, len(requests)), min(p.seconds for p in tried.values())
    found["planner"] = {
        "choice": f"{choice[0]}, window {choice[1]}",
        "against_best_tried": round(tried[choice].seconds / least_s, 3),
        "against_coupled": round(coupled_s / tried[choice].seconds, 3),
    }
    differ = sum(f["responses_that_differ"] for f in figures.values() if "wall_s" in f)
    return found | {"responses_that_differ": differ, "plans": figures}


def tail(bench: Bench, first_window: int) -> dict[str, Any]:
    """Return the seconds of whole rollouts and of their last tenth, by what is done about it."""
    requests = requests_of(TAIL_REQUESTS, bench.sampling.max_new_tokens)
    plain = bench.coupled(requests, 0).responses
    ways = {
        "decoupled": TailPlan(first_window),
        "reconfigured": TailPlan(0, RECONFIGURE_TOKENS),
        "fastest_of_n": TailPlan(0, RECONFIGURE_TOKENS, 4),
    }
    found: dict[str, Any] = {"requests": len(requests), "first_window": first_window}
    for name, plan in ways.items():
        rollout = Rollout(bench, requests, plan)
        done = rollout.play()
        ended_s = sorted(rollout.ended_s)
        nine_tenths_s = ended_s[int(0.9 * len(ended_s)) - 1]
        found[name] = {
            "projected_s": round(ended_s[-1], 4),
            "tail_s": round(ended_s[-1] - nine_tenths_s, 4),
            "copies": rollout.num_copies,
            "copies_that_won": rollout.num_won,
            "responses_that_differ": differing(plain, done),
        }
    for before, after in (("decoupled", "reconfigured"), ("reconfigured", "fastest_of_n")):
        for field in ("projected_s", "tail_s"):
            ratio = found[before][field] / found[after][field]
            found[f"{after}_against_{before}_{field.removesuffix('_s')}"] = round(ratio, 3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.specactor", description=__doc__)
    parser.add_argument("--max_new_tokens", type=int, default=192)
    parser.add_argument("--draw", default="gumbel", choices=("gumbel", "cdf"))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    bench = Bench(load_models(), arguments.max_new_tokens, arguments.draw)
    batches = [decoupled(bench, batch) for batch in arguments.batches]
    result = environment.record("benchmarks.specactor", PACKAGES) | {
        "verifier": "Llama-3.1-70B on 8 H100",
        "drafter": "Llama-3.2-1B on each of 8 H100",
        "draw": arguments.draw,
        "max_new_tokens": arguments.max_new_tokens,
        "decoupled": batches,
        "tail": tail(bench, batches[min(2, len(batches) - 1)]["enumeration_window"]),
    }
    figures = {
        f"batch {b['batch']}: {name}": b[name]
        for b in batches
        for name in ("free_running_against_coupled", "enumeration_against_coupled", "planner")
    }
    figures |= {name: value for name, value in result["tail"].items() if "_against_" in name}
    environment.show(result, arguments, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
