"""`python -m rl.demo`: the same responses, plain and with drafts, in three minutes on two cores.

    python -m rl.demo                    a policy of 22M parameters that searches, 16 questions
    python -m rl.demo --pairs 16         more pairs of rollouts

Nothing is trained. The first rollout fills the history of the questions. Then every pair draws new
responses to four of them twice, plainly and with drafts, with the same noise, in alternating order,
as a step of `make train` would. Drafts come from the history, from siblings and from the text of
the request. The last lines have the median, and `--output` a picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reprise.models.folder import Folder
from reprise.models.hints import program
from reprise.rl.data.rows import open_rows
from reprise.rl.gin.values import ConfigError
from reprise.rl.reports.style import RUN_COLORS, STYLE
from reprise.rl.runtime.exit_codes import EXIT_USAGE
from reprise.rl.runtime.progress import say
from reprise.rl.runtime.run_files import resolve_path

SMALL = "policies/countdown"
GROWN = "downloads/countdown"  # as `make countdown` grows it
GROWTH = ("--width", "4", "--layers", "7")
QUESTIONS = "policies/countdown/few.jsonl"
PICTURE = "demo.png"
QUESTIONS_PER_PAIR, GROUP_SIZE = 4, 8  # as a step of configs/countdown_cpu.gin
SLOTS = 16
# One bucket of slots, and rounds of 16, 32 and 64 nodes: few programs to compile.
SETTINGS = (
    f"Engine.slots={SLOTS}",
    f"Engine.min_slots={SLOTS}",
    "Engine.max_nodes=8",
    "Engine.max_round_nodes=64",
    "Engine.prefill_chunk_tokens=32",
    "Rollout.max_prompt_tokens=32",
    "Sampling.max_new_tokens=1024",
    'Speculation.budget="goodput"',
    'Speculation.sources=("history", "group", "own")',
)
BUSY_RATIO = 1.15  # of the seconds of the same plain rollout, before and after the pairs


@dataclasses.dataclass(frozen=True)
class Machine:
    """The seconds of the same plain rollout before and after the pairs, and the price of nodes.

    `num_nodes` is the size of the largest round, and `round_ratio` its seconds over a plain
    round's; None if the budget has measured none.
    """

    before_s: float
    after_s: float
    num_nodes: int | None = None
    round_ratio: float | None = None

    @property
    def is_busy(self) -> bool:
        slower, faster = max(self.before_s, self.after_s), min(self.before_s, self.after_s)
        return slower > BUSY_RATIO * faster


@dataclasses.dataclass(frozen=True)
class Pair:
    """One rollout drawn twice: seconds, tokens, and the share that drafts proposed."""

    plain_s: float
    drafts_s: float
    num_tokens: int
    num_drafted: int
    num_responses: int
    num_different: int

    @property
    def gain(self) -> float:
        return self.plain_s / self.drafts_s


def main(argv: Sequence[str]) -> int:
    """Run the demo; return its exit code."""
    parser = argparse.ArgumentParser(
        prog=program("demo"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--pairs", type=int, default=8, help="pairs of rollouts (default: 8)")
    parser.add_argument("--policy", help="a Hugging Face folder or GGUF file to sample from")
    parser.add_argument("--questions", default=QUESTIONS, help="JSON lines with a prompt each")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="for the picture")
    arguments = parser.parse_args(argv)
    if arguments.pairs < 1:
        parser.error(f"--pairs: expected at least 1, got {arguments.pairs}")
    try:
        prompts = _prompts(resolve_path(arguments.questions))
        folder = arguments.policy or _grown(arguments.output)
        pairs, machine = compare(folder, prompts, arguments.pairs)
        for line in summary(pairs, machine):
            say(line)
        picture = arguments.output / PICTURE
        Folder(arguments.output, create=True).replace(PICTURE, draw(pairs))
    except (ConfigError, ValueError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        return EXIT_USAGE
    say(f"picture: {picture}")
    return 0


def _prompts(file: Path) -> list[str]:
    """Return the prompts of a file. Raises ValueError or OSError."""
    rows = open_rows("jsonl", [file])
    if not len(rows):
        raise ValueError(f"{file}: expected at least one line, got none")
    prompts = list[str]()
    for number in range(len(rows)):
        prompt = rows[number].get("prompt")
        if not isinstance(prompt, str):
            raise ValueError(
                f"{rows.where(number)}: expected a text as `prompt`, got {prompt!r:.60}"
            )
        prompts.append(prompt)
    return prompts


def _grown(output: Path) -> str:
    """Return the folder of the grown policy; grow it into the output folder if there is none."""
    for folder in (resolve_path(GROWN), output / "policy"):
        if (folder / "config.json").is_file():
            return str(folder)
    say(f"growing a policy of 22M parameters from {SMALL}")
    target = output / "policy"
    module = "reprise.policies.make.grow"
    command = [sys.executable, "-P", "-m", module, str(resolve_path(SMALL)), *GROWTH]
    done = subprocess.run([*command, "--output", str(target)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{module} failed: {done.stderr.strip()[-500:]}")
    return str(target)


def compare(
    folder: str,
    prompts: Sequence[str],
    num_pairs: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    settings: Sequence[str] = SETTINGS,
) -> tuple[list[Pair], Machine]:
    """Return the pairs of rollouts, and how fast this machine was."""
    from reprise.rl.python.api import Policy

    policy = Policy(folder, *settings)

    def drawn(seed: int, *, drafts: bool) -> tuple[float, list[Any]]:
        first = QUESTIONS_PER_PAIR * seed % len(prompts)
        questions = prompts[first : first + QUESTIONS_PER_PAIR]
        start_s = clock()
        groups = policy.sample(questions, n=GROUP_SIZE, seed=seed, drafts=drafts)
        return clock() - start_s, [sample for group in groups for sample in group]

    say(f"{len(prompts)} questions, {GROUP_SIZE} responses to each; the first rollout is history")
    policy.sample(prompts, n=GROUP_SIZE, seed=0)
    before_s, _ = drawn(0, drafts=False)
    pairs = []
    for seed in range(1, num_pairs + 1):
        plain_first = seed % 2 == 1
        if plain_first:
            plain_s, plain = drawn(seed, drafts=False)
        drafts_s, drafted = drawn(seed, drafts=True)
        if not plain_first:
            plain_s, plain = drawn(seed, drafts=False)
        pair = Pair(
            plain_s=plain_s,
            drafts_s=drafts_s,
            num_tokens=sum(len(one.token_ids) for one in plain),
            num_drafted=sum(int(one.is_drafted.sum()) for one in drafted),
            num_responses=len(plain),
            num_different=sum(
                a.token_ids != b.token_ids for a, b in zip(plain, drafted, strict=True)
            ),
        )
        pairs.append(pair)
        say(row(seed, pair))
    after_s, _ = drawn(0, drafts=False)
    times = policy.round_times
    if times is None:
        return pairs, Machine(before_s, after_s)
    measured = {nodes: seconds for (_, nodes, *_), seconds in times.rounds.items()}
    largest = max(measured)
    ratio = measured[largest] / measured[min(measured)]
    return pairs, Machine(before_s, after_s, num_nodes=largest, round_ratio=ratio)


def row(number: int, pair: Pair) -> str:
    return (
        f"pair {number}: plain {pair.plain_s:5.2f} s, drafts {pair.drafts_s:5.2f} s: "
        f"{pair.gain:.2f}×; {pair.num_responses} responses, {pair.num_tokens:,} tokens, "
        f"{pair.num_different} differ"
    )


def summary(pairs: Sequence[Pair], machine: Machine) -> list[str]:
    """Return the lines below the pairs: the median, the reason, and warnings."""
    gain = statistics.median(pair.gain for pair in pairs)
    different = sum(pair.num_different for pair in pairs)
    responses = sum(pair.num_responses for pair in pairs)
    tokens = sum(pair.num_tokens for pair in pairs)
    drafted = sum(pair.num_drafted for pair in pairs)
    lines = [f"median of {len(pairs)}: {gain:.2f}×; {different} of {responses} responses differ"]
    why = f"why: {drafted / tokens:.0%} of the tokens were accepted draft tokens"
    if machine.round_ratio is not None:
        why += (
            f"; a round that verifies {machine.num_nodes} tokens for {SLOTS} requests takes "
            f"{machine.round_ratio:.1f} plain rounds, and the budget drafts only where that pays"
        )
    lines.append(why)
    if machine.is_busy:
        lines.append(
            f"this machine is busy: the same plain rollout took {machine.before_s:.1f} s before "
            f"the pairs and {machine.after_s:.1f} s after; repeat the demo when nothing else runs"
        )
    lines.append(
        "on a GPU or TPU every round reads all weights, so more nodes cost less and larger models "
        "gain more (not measured yet); your run: docs/will_it_help.md"
    )
    return lines


def draw(pairs: Sequence[Pair]) -> bytes:
    """Return a picture of the pairs, as PNG."""
    import matplotlib
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = np.arange(len(pairs))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        bars = {
            "plain decoding": ([pair.plain_s for pair in pairs], RUN_COLORS[6]),
            "with drafts, the same tokens": ([pair.drafts_s for pair in pairs], RUN_COLORS[0]),
        }
        for offset, (label, (seconds, color)) in zip((-0.2, 0.2), bars.items(), strict=True):
            axes.bar(places + offset, seconds, 0.38, label=label, color=color)
        for place, pair in zip(places, pairs, strict=True):
            axes.text(place + 0.2, pair.drafts_s, f"{pair.gain:.2f}×", ha="center", va="bottom")
        axes.set_xticks(places, [f"pair {number}" for number in range(1, len(pairs) + 1)])
        axes.set_ylabel("seconds of a rollout")
        axes.set_ylim(0, 1.3 * max(pair.plain_s for pair in pairs))
        axes.set_title(f"{pairs[0].num_responses} responses, drawn twice")
        axes.legend(loc="upper left", ncols=2)
        axes.grid(axis="x", visible=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
