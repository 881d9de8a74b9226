"""The seconds that cached responses saved or cost in a step, estimated from its rounds."""

from __future__ import annotations

from collections.abc import Sequence

from reprise.rl.records.stats import RoundRecord, seconds_saved
from reprise.spec.reuse.prefix_rule import ReuseMode
from reprise.spec.round_times import RoundTimes, StepSeconds

NO_REUSE = ReuseMode("off")


def reuse_saved_s(rounds: Sequence[RoundRecord], times: RoundTimes) -> float:
    """Return an estimate of the seconds that cached tokens saved against plain decoding.

    A pass of chunks counts as the plain rounds that would draw its tokens, over all busy rows;
    cached tokens of nodes count as drafts do. Pricing passes that do not run is a loss.
    """
    saved_s = seconds_saved([r for r in rounds if r.cached_nodes], times)
    for r in rounds:
        if r.cached_in_chunks:
            plain_s = times(r.num_slots, r.num_slots, r.num_positions)
            assert plain_s is not None, f"no measured plain round of {r.num_slots} slots"
            saved_s += r.plain_rounds * plain_s - (r.ended_s - r.ready_s)
        else:
            saved_s -= r.pricing_seconds
    return saved_s


def reuse_loss_text(lost: Sequence[StepSeconds], mode: ReuseMode) -> str:
    """Return a message about the cost of reuse in the latest losing steps, and its consequence."""
    lost_s = -sum(s.reuse_saved_s for s in lost)
    rollout_s = sum(s.rollout_s for s in lost)
    if mode.couples_noise:
        end = "it ends for the rest of the run, and its responses only draft"
    else:
        end = "it goes on, since it is a part of the training; Reuse.mode turns it off"
    return (
        f"verifying last epoch's responses has cost about {lost_s / rollout_s:.1%} of "
        f"{rollout_s:.1f} s of rounds in the last {len(lost)} steps: {end}"
    )
