"""What rounds cost: measured seconds by bucket, for whoever decides how much to guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Table = Mapping[tuple[int, int, int], float]


class RoundTimes:
    """Seconds of a round by (slots, nodes, positions), as measured on this device and shape.

    `lookup_seconds` are those of a round within a call that looks its guesses up;
    `draft_seconds` what a learned drafter takes besides, by (slots, depth, positions), of which
    `draft_depths` are the depths.
    """

    def __init__(
        self,
        seconds: Table,
        lookup_seconds: Table | None = None,
        draft_seconds: Table | None = None,
    ) -> None:
        self._tables = dict(seconds), dict(lookup_seconds or {}), dict(draft_seconds or {})
        # (depth, seconds), ascending, by (slots, positions)
        self._depths: dict[tuple[int, int], list[tuple[int, float]]] = {}
        for (slots, depth, positions), taken_s in sorted(self._tables[2].items()):
            self._depths.setdefault((slots, positions), []).append((depth, taken_s))
        self.draft_depths = tuple(sorted({depth for _, depth, _ in self._tables[2]}))

    def __call__(self, num_slots: int, num_nodes: int, num_positions: int) -> float | None:
        return self._tables[0].get((num_slots, num_nodes, num_positions))

    def lookup(self, num_slots: int, num_nodes: int, num_positions: int) -> float | None:
        return self._tables[1].get((num_slots, num_nodes, num_positions))

    def draft(self, num_slots: int, depth: int, num_positions: int) -> float:
        """Between two measured depths as the line through them; 0 where none is measured."""
        at = self._depths.get((num_slots, num_positions))
        if not at:
            return 0.0
        (d0, t0), (d1, t1) = at[0], at[-1]
        return t0 if d0 == d1 else t0 + (t1 - t0) * (depth - d0) / (d1 - d0)

    def rows(self) -> list[list[float]]:
        """[table, slots, nodes or depth, positions, seconds] each: what a run folder keeps."""
        return [
            [k, *at, t] for k, table in enumerate(self._tables) for at, t in sorted(table.items())
        ]

    @staticmethod
    def from_rows(rows: Sequence[Sequence[float]]) -> RoundTimes:
        tables: tuple[dict, dict, dict] = {}, {}, {}
        for kind, b, n, s, seconds in rows:
            tables[int(kind)][int(b), int(n), int(s)] = float(seconds)
        return RoundTimes(*tables)
