"""Shapes of a draft cache's passes, as configurations make them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Passes:
    """Shapes of the passes over tokens whose entries a row lacks.

    A draft computes the last `window_tokens` of each row; earlier ones come in chunks of one of the
    `chunk_widths`, ascending, about `pass_tokens` a pass.
    """

    window_tokens: int
    chunk_widths: tuple[int, ...]
    pass_tokens: int = 512

    def shape(self, lacking_tokens: int, num_rows: int, num_positions: int) -> tuple[int, int]:
        """Return (P, C) of a pass where the row that lacks most lacks so many tokens."""
        widths = [min(w, num_positions) for w in self.chunk_widths]
        C = next((w for w in widths if w >= lacking_tokens), widths[-1])
        return min(num_rows, max(1, self.pass_tokens // C)), C
