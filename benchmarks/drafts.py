"""The suffix index by itself: `python -m benchmarks.drafts --json`.

Texts are synthetic (16 of 8,000 tokens, vocabulary 32,000, phrases that recur) and real
(groups of rollouts of the shipped policy). Measured: building an index, following a text
token by token, and the draft tokens that turn out right when texts grow side by side, each
drafted from its siblings and itself. With `--arctic_python PATH`, an interpreter that has
ArcticInference's suffix decoding, the same replay runs on it, at the same budget and
depth, in each of its settings; the best one is compared.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np

from benchmarks import environment
from benchmarks.draft_texts import Group, accepted_by_walk, save_groups, synthetic
from spec.acceptance import round_acceptance
from spec.budget.aimd import MOST_TOKENS as MOST_WINDOW
from spec.budget.aimd import Aimd
from spec.budget.union import DrafterUnion
from spec.drafter import Drafter, LiveSlots
from spec.retrieval import group as group_drafts
from spec.retrieval import history, ngram, suffix_queries
from spec.retrieval.group import GroupDrafter
from spec.retrieval.history import HistoryDrafter, build_index
from spec.retrieval.ngram import NgramDrafter
from spec.retrieval.suffix_forest import Followers, ProposalRule, SuffixForest
from spec.reuse.rollout_cache import CachedGroup, RolloutCache, of_group

PACKAGES = ("jax", "numpy", "numba")
DEPTH_TOKENS = 16  # of contexts, as the drafters of training have it
BUDGET_NODES = 16
REPEATS = 5
THREAD_ROUNDS, ROUND_S = 100, 0.01

Make = Callable[[], Drafter]


@dataclasses.dataclass(frozen=True, eq=False)
class Epoch:
    """Texts of a prompt, and its responses of the epoch before."""

    now: Group
    past: CachedGroup

    def drafter(self, rule: ProposalRule) -> HistoryDrafter:
        store, prompt = RolloutCache(), self.now.texts[0][: self.now.prompt_tokens]
        store.replace("p", self.past)
        return HistoryDrafter(build_index(store, {"p": prompt}, rule), {0: "p"}, rule)


_clock_gettime = ctypes.CDLL(None).clock_gettime
_clock_gettime.argtypes = [ctypes.c_int, ctypes.c_void_p]
_clock_gettime.restype = ctypes.c_int
_MONOTONIC = 1


def build(group: Group, depth_tokens: int) -> dict[str, float]:
    """Median seconds to index all texts of a group, and what the index holds."""
    seconds, forest = [], SuffixForest(depth_tokens)
    for _ in range(REPEATS + 1):
        forest = SuffixForest(depth_tokens)
        began_s = time.perf_counter()
        tree = forest.plant()
        for text in group.texts:
            forest.add(tree, text)
        seconds.append(time.perf_counter() - began_s)
    return {
        "build_tokens_per_s": round(forest.num_tokens / statistics.median(seconds[1:])),
        "bytes_per_token": round(forest.num_bytes / forest.num_tokens, 1),
    }


@numba.njit
def _follow_each(arena, most, which_F, trees_F, state_FX, tokens_BL, rows_F, length_F, out_ns_T):  # type: ignore[no-untyped-def]
    """Follow one text a token at a time; nanoseconds of each token."""
    then, now = np.zeros(2, np.int64), np.zeros(2, np.int64)
    for i in range(len(out_ns_T)):
        length_F[0] = i + 1
        _clock_gettime(_MONOTONIC, then.ctypes)
        suffix_queries.follow(arena, most, which_F, trees_F, state_FX, tokens_BL, rows_F, length_F)
        _clock_gettime(_MONOTONIC, now.ctypes)
        out_ns_T[i] = (now[0] - then[0]) * 1_000_000_000 + now[1] - then[1]


def follow(group: Group) -> dict[str, float]:
    """Microseconds a token of following the last text in an index of the others.

    Each token's least of `REPEATS` runs counts: what the machine did meanwhile is left out.
    """
    forest = SuffixForest(DEPTH_TOKENS)
    tree = forest.plant()
    for text in group.texts[:-1]:
        forest.add(tree, text)
    tokens_BL = np.ascontiguousarray(group.texts[-1][None], np.int32)
    runs = []
    for _ in range(REPEATS + 1):
        followers = Followers.of([tree])
        ns_T = np.zeros(tokens_BL.shape[1], np.int64)
        zero = np.zeros(1, np.int64)
        _follow_each(
            forest._arena, DEPTH_TOKENS, zero, followers.trees_F, followers.state_FX,
            tokens_BL, zero, np.zeros(1, np.int64), ns_T,
        )  # fmt: skip
        runs.append(ns_T)
    us_T = np.min(runs[1:], axis=0) / 1e3
    return {
        "follow_p50_us": round(float(np.percentile(us_T, 50)), 3),
        "follow_p99_us": round(float(np.percentile(us_T, 99)), 3),
        "follow_worst_us": round(float(us_T.max()), 3),
    }


def replay(
    group: Group,
    make: Make,
    num_nodes: int = BUDGET_NODES,
    aimd: Aimd | None = None,
    on_lookup: Callable[[int], object] = lambda right: None,
) -> dict[str, float]:
    """Texts grow side by side; each round each takes what was right of its draft, and one more.

    With `aimd` a draft has the nodes of its request's window, `num_nodes` at most. `on_lookup` is
    told of each draft how many of its tokens were right.
    """
    drafter, steps_N = make(), np.arange(num_nodes + 1)
    A, L = len(group.texts), max(map(len, group.texts))
    tokens_BL = np.zeros((A, L), np.int32)
    for a, text in enumerate(group.texts):
        tokens_BL[a, : len(text)] = text
    ends_A = np.array([len(t) for t in group.texts], np.int32)
    totals_A = np.full(A, group.prompt_tokens + 1, np.int32)
    lookups = accepted = drafted = 0
    windows: list[int] = []
    draft_s = 0.0
    while (alive_A := np.flatnonzero(totals_A < ends_A)).size:
        live = _live(group, tokens_BL, alive_A, totals_A, ends_A)
        most_A = np.minimum(ends_A[alive_A] - totals_A[alive_A], num_nodes).astype(np.int32)
        if aimd:
            window_A = aimd.limits(live, A)
            windows += window_A.tolist()
            most_A = np.minimum(most_A, window_A)
        began_s = time.perf_counter()
        drafts = drafter.propose(live, most_A, num_nodes)
        drafter.committed(live)
        draft_s += time.perf_counter() - began_s
        before_A = totals_A[alive_A]
        for i, a in enumerate(alive_A.tolist()):
            n = int(drafts.count_A[i])
            tokens, parents = drafts.tokens_AN[i, :n].tolist(), drafts.parents_AN[i, :n].tolist()
            right = accepted_by_walk(tokens, parents, tokens_BL[a, totals_A[a] : ends_A[a]])
            lookups, accepted, drafted = lookups + 1, accepted + right, drafted + n
            on_lookup(right)
            totals_A[a] = min(totals_A[a] + right + 1, ends_A[a])
        if aimd:
            emitted_A = totals_A[alive_A] - before_A
            coming_AN = tokens_BL[alive_A[:, None], np.minimum(before_A[:, None] + steps_N, L - 1)]
            acceptance = round_acceptance(drafts, drafts.count_A, coming_AN, emitted_A)
            aimd.observe(live, drafts, acceptance)
        ended = totals_A[alive_A] >= ends_A[alive_A]
        if ended.any():
            drafter.finished(_live(group, tokens_BL, alive_A[ended], totals_A, ends_A))
    figures = {
        "lookups": lookups,
        "mean_accepted": accepted / lookups,
        "mean_drafted": drafted / lookups,
        "us_per_lookup": 1e6 * draft_s / lookups,
    }
    if aimd:
        figures |= {"mean_window": statistics.mean(windows), "longest_window": max(windows)}
    return figures


def _live(
    group: Group, tokens_BL: np.ndarray, alive_A: np.ndarray, totals_A: np.ndarray,
    ends_A: np.ndarray,
) -> LiveSlots:  # fmt: skip
    return LiveSlots(
        rows_A=alive_A.astype(np.int32),
        request_ids_A=alive_A.astype(np.int64),
        group_ids_A=np.zeros(len(alive_A), np.int64),
        prompt_tokens_A=np.full(len(alive_A), group.prompt_tokens, np.int32),
        total_tokens_A=totals_A[alive_A],
        remaining_tokens_A=ends_A[alive_A] - totals_A[alive_A],
        tokens_BL=tokens_BL,
    )


def thread_seconds(num_requests: int) -> dict[str, float]:
    """Median milliseconds that drafts and what feeds them take of the rollout thread's round.

    Requests of about 1,000 tokens in groups of 8 get two tokens a round, whose verification is
    stood in for by a wait of `ROUND_S`.
    """
    texts = synthetic(num_requests, 1_000).texts
    tokens_BL, ids_A = np.stack(texts), np.arange(num_requests)
    L, seconds = tokens_BL.shape[1], []
    drafter = GroupDrafter()
    for total in range(L - 2 * THREAD_ROUNDS, L, 2):
        live = LiveSlots(
            *(ids_A.astype(np.int32), ids_A, ids_A // 8, np.full(num_requests, 32)),
            *(np.full(num_requests, total), np.full(num_requests, L - total), tokens_BL),
        )
        began_s = time.perf_counter()
        drafter.propose(live, np.full(num_requests, BUDGET_NODES, np.int32), BUDGET_NODES)
        drafter.committed(live)
        seconds.append(time.perf_counter() - began_s)
        time.sleep(ROUND_S)
    ms = 1e3 * np.asarray(seconds[THREAD_ROUNDS // 4 :])
    return {"median_ms": round(float(np.median(ms)), 3), "p90_ms": round(np.percentile(ms, 90), 3)}


def ours() -> Drafter:
    """What a first epoch drafts with."""
    return DrafterUnion([GroupDrafter(update_tokens=1), NgramDrafter()])


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means weigh each lookup the same."""
    total = sum(r["lookups"] for r in rows)
    names = [n for n in rows[0] if n not in ("lookups", "longest_window")]
    means = {n: round(sum(r[n] * r["lookups"] for r in rows) / total, 4) for n in names}
    longest = {n: max(r[n] for r in rows) for n in rows[0] if n == "longest_window"}
    return {"lookups": total, **means, **longest}


def replay_all(groups: Sequence[Group]) -> dict[str, float]:
    """`replay` of each group."""
    replay(groups[0], ours)  # compile
    return mean_of([replay(group, ours) for group in groups])


def contexts(epochs: Sequence[Epoch]) -> dict[str, dict[str, float]]:
    """Draft tokens that keep their whole context down a branch, or no more than their rule's
    `longest`.

    `histospec` is the paper's rule in its windows (seven tokens where contexts are cut),
    `history` ours, `all` joins history, siblings and own text, and `aimd_trees` gives these
    trees HistoSpec's windows.
    """
    figures: dict[str, dict[str, float]] = {}

    def add(name: str, make: Callable[[Epoch], Drafter], windows: bool) -> None:
        def rows(some: Sequence[Epoch]) -> list[dict[str, float]]:
            nodes = MOST_WINDOW if windows else BUDGET_NODES
            makes = [(e.now, functools.partial(make, e)) for e in some]
            return [replay(group, m, nodes, Aimd() if windows else None) for group, m in makes]

        rows(epochs[:1])  # compile
        figures[name] = mean_of(rows(epochs))

    for variant, path_tokens in (("whole", MOST_WINDOW), ("cut", 0)):
        kept = functools.partial(dataclasses.replace, path_tokens=path_tokens)

        def trees(epoch: Epoch, kept: Callable[..., ProposalRule] = kept) -> Drafter:
            siblings = GroupDrafter(kept(group_drafts.RULE), update_tokens=1)
            own = NgramDrafter(kept(ngram.RULE))
            return DrafterUnion([epoch.drafter(kept(history.RULE)), siblings, own])

        for name, rule in (("histospec", history.PAPER_RULE), ("history", history.RULE)):
            make = functools.partial(Epoch.drafter, rule=kept(rule))
            add(f"{name}_{variant}", make, name == "histospec")
        add(f"all_{variant}", trees, False)
        add(f"aimd_trees_{variant}", trees, True)
    return figures


def arctic(python: str, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The replay in each of ArcticInference's settings, in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        save_groups(Path(scratch) / "groups.npz", groups)
        module = "benchmarks.baselines.arctic_suffix"
        command = [python, "-m", module, str(Path(scratch) / "groups.npz")]
        command += ["--depth", str(DEPTH_TOKENS), "--budget", str(BUDGET_NODES)]
        done = subprocess.run(
            command, cwd=environment.ROOT, check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(done.stdout)


def rollouts(num_prompts: int, group_size: int) -> list[Epoch]:
    """Groups of responses of the shipped policy, and as many by other noise as their history."""
    from benchmarks.workloads import BASE_POLICY, questions, tiny
    from rl.rollout import generate
    from spec.sampling import step_key

    w = tiny("base", BASE_POLICY, BASE_POLICY, num_prompts, group_size)
    done = generate(w.model, w.params, w.requests, w.sampling, key=step_key(0, 1))
    epochs = []
    for g, row in enumerate(questions(num_prompts)):
        mine = [t for t in done if t.group_id == g]
        texts = [np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int32) for t in mine]
        past = w.history.get(row["id"])
        assert past is not None, "each prompt has a history"
        epochs.append(Epoch(Group(texts, len(mine[0].prompt_ids)), past))
    return epochs


def synthetic_epochs() -> list[Epoch]:
    """Synthetic texts with others of the same phrases as their history, all of one reward."""
    both = synthetic(num_texts=16)
    past = [t[both.prompt_tokens :] for t in both.texts[8:]]
    now = Group(both.texts[:8], both.prompt_tokens)
    return [Epoch(now, of_group(past, [1.0] * len(past)))]


def measure(python: str | None, num_prompts: int, group_size: int) -> dict[str, Any]:
    texts = synthetic()
    real = rollouts(num_prompts, group_size)
    figures: dict[str, Any] = {**build(texts, DEPTH_TOKENS), **follow(texts)}
    figures["group_thread"] = {n: thread_seconds(n) for n in (64, 256)}
    whole = build(texts, DEPTH_TOKENS + MOST_WINDOW)
    figures |= {f"whole_context_{name}": value for name, value in whole.items()}
    figures["contexts"] = {"synthetic": contexts(synthetic_epochs()), "rollouts": contexts(real)}
    for name, groups in (("synthetic", [texts]), ("rollouts", [e.now for e in real])):
        row: dict[str, Any] = replay_all(groups)
        if python:
            row["arctic"] = arctic(python, groups)
            row["arctic_mean_accepted"] = max(r["mean_accepted"] for r in row["arctic"])
            row["ratio_to_arctic"] = round(row["mean_accepted"] / row["arctic_mean_accepted"], 4)
        figures[name] = row
    return figures | {"mean_accepted": figures["synthetic"]["mean_accepted"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arctic_python", help="interpreter that can import arctic_inference")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group_size", type=int, default=16)
    environment.add_output_flags(parser)
    arguments = parser.parse_args()
    figures = measure(arguments.arctic_python, arguments.prompts, arguments.group_size)
    hidden = ("--arctic_python",)
    record = environment.record("benchmarks.drafts", PACKAGES, hidden=hidden)
    result = {"benchmark": "drafts", **figures, **record}
    environment.show(result, arguments, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
