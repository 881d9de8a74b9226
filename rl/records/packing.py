"""Packing of responses into rows of one fixed shape, with little padding, for training and reuse.

A row holds several prompts, each computed once, followed by the responses to it, which do not see
one another (`models.attention.attention.Packing`). The last prompt token is repeated before every
response, since it predicts the first response token: a response of n tokens takes n positions, and
its prompt of P tokens takes P − 1 more, once per row.

If attention sums keys in blocks of C positions, prompts and responses start at multiples of C: the
last (P − 1) mod C shared tokens are then repeated before every response too, and padding up to the
next multiple belongs to the preceding response. Plain numpy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from reprise.models.attention.attention import Packing


SAMPLES_PER_ROW = 16  # a micro-batch holds at most this many responses for each of its rows
ROW_MULTIPLE_TOKENS = 64  # row lengths are multiples of this


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a micro-batch: rows, positions per row, and the maximum number of samples.

    Each of the `copies` copies of the weights has an equal share of rows and samples. Prompts and
    responses start at multiples of `block`, which divides `length`.
    """

    rows: int
    length: int
    samples: int
    copies: int = 1
    block: int = 1

    @property
    def of_copy(self) -> Shape:
        """Return the shape of the share of one copy."""
        rows = self.rows // self.copies
        samples = self.samples // self.copies
        return dataclasses.replace(self, rows=rows, samples=samples, copies=1)

    def shared(self, response: Response) -> int:
        """Return the number of prompt positions that a response shares with others."""
        known = len(response.prompt_ids) - 1
        return known - known % self.block

    def own(self, response: Response) -> int:
        """Return the number of positions that a response takes besides the shared positions."""
        known = (len(response.prompt_ids) - 1) % self.block
        return -(-(known + len(response.tokens)) // self.block) * self.block

    def prompt_places(self, response: Response, prompt_start: int, start: int) -> np.ndarray:
        """Return the places of all prompt tokens but the last, given two starts of a `Layout`."""
        shared = self.shared(response)
        repeated = len(response.prompt_ids) - 1 - shared
        return np.concatenate([prompt_start + np.arange(shared), start + np.arange(-repeated, 0)])


@dataclasses.dataclass(frozen=True, eq=False)
class Response:
    """The tokens of a response, and the prompt that it shares with its group.

    `drawn` are the places of the tokens that a loss reads; None: all places.
    """

    name: str
    group_id: int
    prompt_ids: np.ndarray
    tokens: np.ndarray
    drawn: np.ndarray | None = None


@dataclasses.dataclass(eq=False)
class Row:
    """The content of one row, in order: (number of shared prompt positions, response indices)."""

    free: int
    parts: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)
    num_samples: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Rows of int32 [B, T], and the places of the responses in the flattened [B · T].

    Response `order[e]` is predicted from place `starts[e]` onwards, and its prompt starts at
    `prompt_starts[e]` (see `Shape.prompt_places`).
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
    """Return a shape of about `micro_batch_tokens` positions, with rows of at least `max_tokens`.

    `max_tokens` is the length of the longest prompt and response together. The number of rows is a
    multiple of `row_multiple`, the size of the batch axes of the mesh, which `copies` divides.
    """
    length = -(-max_tokens // ROW_MULTIPLE_TOKENS) * ROW_MULTIPLE_TOKENS
    rows = max(micro_batch_tokens // length // row_multiple, 1) * row_multiple
    return Shape(rows, length, SAMPLES_PER_ROW * rows, copies, block)


def plan(responses: Sequence[Response], shape: Shape) -> list[list[Row]]:
    """Pack responses into as few rows as a greedy search finds, and the rows into micro-batches."""
    batches: list[list[Row]] = []
    for row in _fill_rows(responses, shape):
        for rows in batches:
            num_samples = sum([r.num_samples for r in [*rows, row]])
            if len(rows) < shape.rows and num_samples <= shape.samples:
                rows.append(row)
                break
        else:
            batches.append([row])
    return batches


def _fill_rows(responses: Sequence[Response], shape: Shape) -> list[Row]:
    """Put whole groups, largest first, into the fullest row that has room.

    A group that does not fit into one row is split, and its prompt is computed once in each of its
    rows.
    """
    sizes = [shape.own(r) for r in responses]
    shared = [shape.shared(r) for r in responses]
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, r in enumerate(responses):
        if shared[i] + sizes[i] > shape.length:
            raise ValueError(
                f"{r.name} has {len(r.prompt_ids) + len(r.tokens)} tokens, a row holds "
                f"{shape.length + 1}: make the shape with a larger max_tokens"
            )
        groups.setdefault((r.group_id, *r.prompt_ids.tolist()), []).append(i)

    chunks: list[tuple[int, list[int]]] = []  # minus the positions, and the responses
    for indices in groups.values():
        parts: list[list[int]] = []
        used: list[int] = []  # positions of each part
        for i in sorted(indices, key=sizes.__getitem__, reverse=True):
            for n, part in enumerate(parts):
                if len(part) < shape.samples and used[n] + sizes[i] <= shape.length:
                    part.append(i)
                    used[n] += sizes[i]
                    break
            else:
                parts.append([i])
                used.append(shared[i] + sizes[i])
        chunks += [(-size, part) for size, part in zip(used, parts, strict=True)]

    rows: list[Row] = []
    for minus_size, chunk in sorted(chunks):
        row = None
        for one in rows:
            has_room = one.free >= -minus_size and one.num_samples + len(chunk) <= shape.samples
            if has_room and (row is None or one.free < row.free):
                row = one
        if row is None:
            row = Row(shape.length)
            rows.append(row)
        row.parts.append((shared[chunk[0]], chunk))
        row.num_samples += len(chunk)
        row.free += minus_size
    return rows


def lay_out(responses: Sequence[Response], rows: Sequence[Row], shape: Shape) -> Layout:
    """Return the arrays of one micro-batch of `plan`; unfilled rows are padding."""
    from reprise.models.attention.attention import Packing

    T = shape.length
    zeros_5BT = np.zeros((5, shape.rows, shape.length), np.int32)
    tokens_BT, targets_BT, positions_BT, prompt_BT, branch_BT = zeros_5BT
    order = list[int]()
    starts = list[int]()
    prompt_starts = list[int]()
    for b, row in enumerate(rows):
        at = 0
        for number, (shared, indices) in enumerate(row.parts, start=1):
            prompt_at = at
            prompt_ids = responses[indices[0]].prompt_ids
            at += shared
            tokens_BT[b, prompt_at:at] = prompt_ids[:shared]
            positions_BT[b, prompt_at:at] = np.arange(shared)
            for branch, i in enumerate(indices, start=1):
                tokens = responses[i].tokens
                known = prompt_ids[shared:]
                first = at + len(known) - 1
                last = at + len(known) - 1 + len(tokens)
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
    packing = Packing(positions_BT, prompt_BT, branch_BT)
    used = sum([T - row.free for row in rows])
    return Layout(
        tokens_BT,
        targets_BT,
        packing,
        np.array(order, int),
        np.array(starts, int),
        np.array(prompt_starts, int),
        used,
    )
