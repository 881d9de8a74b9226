"""The suffix forest against a matcher that looks through all texts for each answer.

The random programs (2,000 in all) plant and uproot trees, grow their sequences in
turns, and keep their followers all along; every answer must be equal.
"""

import collections
import dataclasses
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from suffix_contexts import occurrences

from reprise.spec.drafter import no_drafts
from reprise.spec.retrieval import suffix_kernels as kernels
from reprise.spec.retrieval.suffix_forest import Followers, ProposalRule, SuffixForest

# --- the brute-force matcher --------------------------------------------------------------


@dataclasses.dataclass
class Text:
    """A sequence of the brute-force matcher; tokens are bytes."""

    tokens: bytes
    weight: float


@dataclasses.dataclass
class Brute:
    """A tree: its sequences by id."""

    most: int
    texts: dict[int, Text] = dataclasses.field(default_factory=dict)

    def occurrences(self):
        """(count, weight) of every context of up to most + 1 tokens, by looking everywhere."""
        found = collections.defaultdict(lambda: [0, 0.0])
        for text in self.texts.values():
            for end in range(1, len(text.tokens) + 1):
                for start in range(end, max(end - self.most - 1, 0) - 1, -1):
                    entry = found[text.tokens[start:end]]
                    entry[0] += 1
                    entry[1] += text.weight
        return found

    def match(self, found, context):
        """The longest suffix of at most `most` tokens that occurs."""
        for length in range(min(len(context), self.most), 0, -1):
            if context[-length:] in found:
                return length
        return 0

    def children(self, found, context, rule):
        nexts = [
            (t, *found[context + bytes([t])]) for t in range(4) if context + bytes([t]) in found
        ]
        nexts.sort(key=lambda c: (-c[2] if rule.by_weight else 0, -c[1], c[0]))
        return [(t, count) for t, count, _ in nexts[: rule.max_children]]

    def propose(self, found, context, rule, max_nodes):
        """(token, parent, probability) of each draft token."""
        length = min(self.match(found, context), rule.longest)
        most = min(self.most, rule.longest + rule.path_tokens)
        while length >= rule.shortest:
            start = context[len(context) - length :]
            if self.children(found, start, rule):
                break
            length -= 1
        if length < max(rule.shortest, 0):
            return []
        waiting, drafted, born = [], [], 0

        def expand(context, prob, parent):
            nonlocal born
            total = found[context][0] + rule.prior
            for token, count in self.children(found, context, rule):
                of_child = prob * (count / total)
                if of_child >= rule.min_prob:
                    after = (context + bytes([token]))[-most:]
                    waiting.append((-of_child, born, token, parent, after))
                    born += 1

        expand(start, 1.0, -1)
        while waiting and len(drafted) < max_nodes:
            best = min(waiting)
            waiting.remove(best)
            drafted.append((best[2], best[3], np.float32(-best[0])))
            expand(best[4], -best[0], len(drafted) - 1)
        return drafted


# --- random programs ----------------------------------------------------------------------

WEIGHTS = (1.0, 0.5, -2.0, 0.25)  # sums of these are exact
RULES = (
    ProposalRule(7, 1),
    ProposalRule(7, 2, 1, True),
    ProposalRule(2, 1, 2, False, 0.5),
    ProposalRule(7, 0, 4, False, 0.0, 0.2),
    ProposalRule(7, 1, 4, True, 1.0),
    ProposalRule(1, 0, 2, True, 0.0, 0.4),
    ProposalRule(1, 1, 2, False, 0.5, path_tokens=0),
    ProposalRule(2, 1, 1, True, path_tokens=1),
)
MAX_NODES = 7
CASES = 2_000
ROWS, ROOM = 2, 64


class Program:
    """Runs one program on a forest and on the matcher; `check` compares all that can be asked."""

    def __init__(self, program: bytes) -> None:
        self.bytes = collections.deque(program)
        self.most = 1 + self.next(5)
        self.alphabet = 1 + self.next(4)
        self.forest = SuffixForest(self.most)
        self.trees: dict[int, Brute] = {}
        self.homes: dict[int, int] = {}  # sequence → tree
        self.context_BL = np.zeros((ROWS, ROOM), np.int32)
        self.lengths = [0] * ROWS
        self.followers = Followers.of([-1] * 4)  # two trees for each row

    def next(self, below: int) -> int:
        return self.bytes.popleft() % below if self.bytes else 0

    def text(self) -> bytes:
        """A few random tokens, half of the time after a piece of a text that a tree holds."""
        text = bytes(self.next(self.alphabet) for _ in range(self.next(5)))
        known = self.pick(self.homes) if self.next(2) else None
        if known is None:
            return text
        source = self.trees[self.homes[known]].texts[known].tokens
        start = self.next(len(source) + 1)
        return source[start : start + self.next(12)] + text

    def pick(self, ids) -> int | None:
        ids = list(ids)
        return ids[self.next(len(ids))] if ids else None

    def run(self) -> None:
        self.plant()
        while self.bytes:
            KINDS[self.next(len(KINDS))](self)
        self.check()

    def plant(self) -> None:
        if len(self.trees) < 3:
            tree = self.forest.plant()
            assert tree not in self.trees
            self.trees[tree] = Brute(self.most)
            for f in range(4):
                if self.followers.trees_F[f] < 0 or self.next(4) == 0:
                    self.followers.restart(f, tree)

    def uproot(self) -> None:
        tree = self.pick(self.trees)
        if tree is not None:
            self.forest.uproot(tree)
            del self.trees[tree]
            self.homes = {s: t for s, t in self.homes.items() if t != tree}
            for f in np.flatnonzero(self.followers.trees_F == tree):
                self.followers.restart(f, self.pick(self.trees) if self.trees else -1)

    def add(self) -> None:
        tree = self.pick(self.trees)
        if tree is not None:
            text, weight = self.text(), WEIGHTS[self.next(4)]
            sequence = self.forest.add(tree, list(text), weight)
            assert sequence not in self.homes
            self.homes[sequence] = tree
            self.trees[tree].texts[sequence] = Text(text, weight)

    def append(self) -> None:
        sequence = self.pick(self.homes)
        if sequence is not None:
            text = self.text()
            self.forest.append(sequence, list(text))
            self.trees[self.homes[sequence]].texts[sequence].tokens += text

    def append_batch(self) -> None:
        sequences = list(self.homes)[: self.next(4)]
        texts = [self.text() for _ in sequences]
        offsets = np.cumsum([0, *map(len, texts)])
        self.forest.append_batch(sequences, list(b"".join(texts)), offsets)
        for sequence, text in zip(sequences, texts, strict=True):
            self.trees[self.homes[sequence]].texts[sequence].tokens += text

    def extend_context(self) -> None:
        row, text = self.next(ROWS), self.text()
        if self.lengths[row] + len(text) > ROOM:
            self.lengths[row] = 0
            for f in (2 * row, 2 * row + 1):
                self.followers.restart(f, self.followers.trees_F[f])
        self.context_BL[row, self.lengths[row] : self.lengths[row] + len(text)] = list(text)
        self.lengths[row] += len(text)

    def check(self) -> None:
        rows = [0, 0, 1, 1]
        contexts = [bytes(self.context_BL[r, : self.lengths[r]].tolist()) for r in rows]
        which = [f for f in range(4) if self.next(8) != 7]  # some stay behind
        rule, limits = RULES[self.next(len(RULES))], [self.next(MAX_NODES + 1) for _ in which]
        rule = rule._replace(
            longest=min(rule.longest, self.most), shortest=min(rule.shortest, self.most)
        )
        out = no_drafts(4, MAX_NODES)
        self.forest.follow(
            self.followers,
            self.context_BL,
            [rows[f] for f in which],
            [self.lengths[rows[f]] for f in which],
            which,
        )
        self.forest.propose(self.followers, rule, limits, out, which)
        found = {tree: brute.occurrences() for tree, brute in self.trees.items()}
        for i, f in enumerate(which):
            tree = int(self.followers.trees_F[f])
            if tree < 0:
                assert out.count_A[i] == 0
                continue
            brute, context, n = self.trees[tree], contexts[f], out.count_A[i]
            matched = brute.match(found[tree], context)
            assert self.followers.matched_F[f] == matched
            got = list(
                zip(out.tokens_AN[i, :n], out.parents_AN[i, :n], out.prob_AN[i, :n], strict=True)
            )
            assert got == brute.propose(found[tree], context, rule, limits[i])
        self.check_counts(found)

    def check_counts(self, found) -> None:
        total = sum(len(x.tokens) for brute in self.trees.values() for x in brute.texts.values())
        assert self.forest.num_tokens == total
        for tree, counts in found.items():
            contexts = [c for c in counts if len(c) <= self.most]
            for context in (
                b"",
                *contexts[self.next(4) :: 4 + self.next(4)],
                self.text()[: self.most],
            ):
                wanted = counts.get(context, (0, 0.0))
                assert occurrences(self.forest, tree, context) == tuple(wanted)


P = Program
KINDS = (*(P.add,) * 3, *(P.append,) * 4, *(P.append_batch,) * 2)
KINDS += (*(P.extend_context,) * 5, *(P.check,) * 5, P.plant, P.uproot)


@settings(
    max_examples=CASES // 4, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
@given(st.integers(0, 2**32 - 1), st.integers(40, 180))
def test_random_programs_equal_the_matcher(seed, length):
    rng = random.Random(seed)
    for _ in range(4):
        Program(rng.randbytes(length)).run()


# --- the checks can fail ------------------------------------------------------------------


class Crossing(SuffixForest):
    """A new sequence begins where the one before in its tree ended."""

    def add(self, tree, tokens=(), weight=1.0):
        before = self._members[tree & kernels.SLOT_MASK][-1:]
        sequence = super().add(tree, (), weight)
        for column in (kernels.LAST, kernels.NODE, kernels.MATCHED) if before else ():
            of_last = self._arena.sequences[before[0], column]
            self._arena.sequences[sequence & kernels.SLOT_MASK, column] = of_last
        self.append(sequence, tokens)
        return sequence


class Deaf(SuffixForest):
    """Followers do not hear of growth."""

    def follow(self, followers, tokens_BL, rows_F, lengths_F, which_F=None):
        for state_X, tree in zip(followers.state_FX, followers.trees_F, strict=True):
            if tree >= 0:
                grown = self._arena.trees[tree & kernels.SLOT_MASK, kernels.GROWN]
                state_X[kernels.SEEN_GROWN] = grown
        super().follow(followers, tokens_BL, rows_F, lengths_F, which_F)


@pytest.mark.parametrize("fault", [Crossing, Deaf])
def test_a_planted_fault_is_found(fault):
    def run():
        for seed in range(300):
            program = Program(random.Random(seed).randbytes(200))
            program.forest = fault(program.most)
            program.run()

    with pytest.raises(AssertionError):
        run()
