"""The closed set of shapes that have compiled programs."""

from __future__ import annotations

import bisect
import dataclasses
from typing import NamedTuple

MAX_CHUNKS = 8
"""Prefill chunks in one step: beyond it a step is long enough for them to wait for the next."""


class Shape(NamedTuple):
    """Padded size of a sub-batch: device tokens first, then host rows."""

    num_tokens: int  # T: prefill tokens and device decodes
    num_host_rows: int  # B: host decodes

    @property
    def num_rows(self) -> int:
        """Rows of the activations."""
        return self.num_tokens + self.num_host_rows


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """Padded sizes, ascending. The largest of each is the step's limit."""

    tokens: tuple[int, ...]
    host_rows: tuple[int, ...]

    @classmethod
    def of(cls, max_num_batched_tokens: int, max_num_seqs: int, has_host: bool) -> Buckets:
        """Powers of two for tokens (one row apart), powers of four for host rows.

        Padding a linear stage costs arithmetic, so token buckets are dense; a host row's padding
        costs one activation row and no attention.
        """
        tokens = [1, 4]
        while tokens[-1] < max_num_batched_tokens:
            tokens.append(min(2 * tokens[-1], max_num_batched_tokens))
        host_rows = [min(4, max_num_seqs)] if has_host else []
        while host_rows and host_rows[-1] < max_num_seqs:
            host_rows.append(min(4 * host_rows[-1], max_num_seqs))
        return cls(tuple(tokens), tuple(host_rows))

    def shape(self, num_tokens: int, num_host_rows: int) -> Shape:
        """The smallest shape that holds a sub-batch."""
        return Shape(_fit(self.tokens, num_tokens), _fit(self.host_rows, num_host_rows))

    @property
    def device_shapes(self) -> list[Shape]:
        """Sub-batches without host rows."""
        return [Shape(t, 0) for t in self.tokens]

    @property
    def host_shapes(self) -> list[Shape]:
        """Sub-batches of nothing but host rows."""
        return [Shape(0, b) for b in self.host_rows]


def _fit(sizes: tuple[int, ...], n: int) -> int:
    """The smallest size that holds n; 0 for none."""
    return sizes[bisect.bisect_left(sizes, n)] if n else 0
