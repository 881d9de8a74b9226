"""Rows of one fixed shape from responses, with little padding, for training and reuse.

A row holds several prompts, each computed once, followed by the responses to it, which do not see
one another (`models.attention.Packing`). The last prompt token comes before every response, since
it predicts its first token: a response of n tokens takes n positions, its prompt of P takes P − 1
more, once per row.

If attention sums blocks of C keys by position, prompts and responses start at multiples of C: the
last (P − 1) mod C tokens of the shared ones come before every response instead, and positions up to
a multiple belong to the response before them. Plain numpy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from reprise.models.attention import Packing


SAMPLES_PER_ROW = 16  # a micro-batch holds at most this many responses for each of its rows
ROW_MULTIPLE_TOKENS = 64  # rows are a multiple of this long


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows of a micro-batch, positions of a row, and how many samples they may hold.

    Each of `copies` of the weights has an equal part of the rows, with their samples. Prompts and
    responses start at multiples of `block`, which divides `length`.
    """

    rows: int
    length: int
    samples: int
    copies: int = 1
    block: int = 1

    @property
    def of_copy(self) -> Shape:
        """Return the shape of one copy's part."""
        rows, samples = self.rows // self.copies, self.samples // self.copies
        return dataclasses.replace(self, rows=rows, samples=samples, copies=1)

    def shared(self, response: Response) -> int:
        """Return how many positions of its prompt a response shares with others."""
        known = len(response.prompt_ids) - 1
        return known - known % self.block

    def own(self, response: Response) -> int:
        """Return how many positions a response takes in addition to the shared ones."""
        known = (len(response.prompt_ids) - 1) % self.block
        return -(-(known + len(response.tokens)) // self.block) * self.block

    def prompt_places(self, response: Response, prompt_start: int, start: int) -> np.ndarray:
        """Return the places of a prompt's tokens but the last, from those of a `Layout`."""
        shared = self.shared(response)
        repeated = len(response.prompt_ids) - 1 - shared
        return np.concatenate([prompt_start + np.arange(shared), start + np.arange(-repeated, 0)])


@dataclasses.dataclass(frozen=True, eq=False)
class Response:
    """A response's tokens, and the prompt that it shares with its group."""

    name: str
    group_id: int
    prompt_ids: np.ndarray
    tokens: np.ndarray


@dataclasses.dataclass(eq=False)
class Row:
    """The content of one row: (a prompt's shared positions, its responses), in order."""

    free: int
    parts: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)

    @property
    def num_samples(self) -> int:
        return sum(len(indices) for _, indices in self.parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Rows of int32 [B, T], and the places of the responses in the flattened [B · T].

    Response `order[e]` is predicted from `starts[e]` on, its prompt is at `prompt_starts[e]`: see
    `Shape.prompt_places`.
    """

    tokens_BT: np.ndarray
    targets_BT: np.ndarray
    packing: Packing
    order: np.ndarray
    starts: np.ndarray
    prompt_starts: np.ndarray
    used_positions: int


def batch_shape(
    micro_batch_tokens: int,
    max_tokens: int,
    *,
    row_multiple: int = 1,
    copies: int = 1,
    block: int = 1,
) -> Shape:
    """Return rows for the longest prompt and response, of about `micro_batch_tokens` in all.

    The number of rows is a multiple of `row_multiple`, the size of the mesh's batch axes, which
    `copies` divides.
    """
    length = -(-max_tokens // ROW_MULTIPLE_TOKENS) * ROW_MULTIPLE_TOKENS
    rows = max(micro_batch_tokens // length // row_multiple, 1) * row_multiple
    return Shape(rows, length, SAMPLES_PER_ROW * rows, copies, block)


def plan(responses: Sequence[Response], shape: Shape) -> list[list[Row]]:
    """Pack the responses into as few rows as a greedy search finds, the rows into micro-batches."""
    batches: list[list[Row]] = []
    for row in _fill_rows(responses, shape):
        for rows in batches:
            num_samples = sum(r.num_samples for r in rows) + row.num_samples
            if len(rows) < shape.rows and num_samples <= shape.samples:
                rows.append(row)
                break
        else:
            batches.append([row])
    return batches


def _fill_rows(responses: Sequence[Response], shape: Shape) -> list[Row]:
    """Put whole groups, largest first, into the fullest row that has room.

    A group that no single row holds is split, and its prompt computed once in each.
    """
    sizes = [shape.own(r) for r in responses]
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, r in enumerate(responses):
        if shape.shared(r) + sizes[i] > shape.length:
            raise ValueError(
                f"{r.name} has {len(r.prompt_ids) + len(r.tokens)} tokens, a row holds "
                f"{shape.length + 1}: make the shape with a larger max_tokens"
            )
        groups.setdefault((r.group_id, *r.prompt_ids.tolist()), []).append(i)

    def shared(indices: Sequence[int]) -> int:
        return shape.shared(responses[indices[0]])

    def size(indices: Sequence[int]) -> int:
        return shared(indices) + sum(sizes[i] for i in indices)

    chunks: list[list[int]] = []
    for indices in groups.values():
        parts: list[list[int]] = []
        for i in sorted(indices, key=lambda i: -sizes[i]):
            for part in parts:
                if len(part) < shape.samples and size([*part, i]) <= shape.length:
                    part.append(i)
                    break
            else:
                parts.append([i])
        chunks += parts

    rows: list[Row] = []
    for chunk in sorted(chunks, key=lambda c: (-size(c), c[0])):
        needed = size(chunk)
        limit = shape.samples - len(chunk)
        fitting = [r for r in rows if r.free >= needed and r.num_samples <= limit]
        row = min(fitting, key=lambda r: r.free, default=None)
        if row is None:
            row = Row(shape.length)
            rows.append(row)
        row.parts.append((shared(chunk), chunk))
        row.free -= needed
    return rows


def lay_out(responses: Sequence[Response], rows: Sequence[Row], shape: Shape) -> Layout:
    """Return the arrays of one micro-batch of `plan`; rows that it does not fill are padding."""
    from reprise.models.attention import Packing

    T, zeros_5BT = shape.length, np.zeros((5, shape.rows, shape.length), np.int32)
    tokens_BT, targets_BT, positions_BT, prompt_BT, branch_BT = zeros_5BT
    order, starts, prompt_starts = list[int](), list[int](), list[int]()
    for b, row in enumerate(rows):
        at = 0
        for number, (shared, indices) in enumerate(row.parts, start=1):
            prompt_at, prompt_ids = at, responses[indices[0]].prompt_ids
            at += shared
            tokens_BT[b, prompt_at:at] = prompt_ids[:shared]
            positions_BT[b, prompt_at:at] = np.arange(shared)
            for branch, i in enumerate(indices, start=1):
                tokens, known = responses[i].tokens, prompt_ids[shared:]
                first, last = at + len(known) - 1, at + len(known) - 1 + len(tokens)
                tokens_BT[b, at:last] = np.concatenate([known, tokens[:-1]])
                targets_BT[b, first:last] = tokens
                span = slice(at, at + shape.own(responses[i]))
                positions_BT[b, span] = shared + np.arange(span.stop - at)
                branch_BT[b, span] = branch
                order.append(i)
                starts.append(b * T + first)
                prompt_starts.append(b * T + prompt_at)
                at = span.stop
            prompt_BT[b, prompt_at:at] = number
    packing, used = Packing(positions_BT, prompt_BT, branch_BT), sum(T - row.free for row in rows)
    places = np.array(order, int), np.array(starts, int), np.array(prompt_starts, int)
    return Layout(tokens_BT, targets_BT, packing, *places, used)
