"""The closed set of shapes that have compiled programs."""

from __future__ import annotations

import bisect
import dataclasses
from typing import NamedTuple

MAX_CHUNKS = 8
"""Prefill chunks in one step: beyond it a step is long enough for them to wait for the next."""

MIN_CHUNK_TOKENS = 16
"""Smallest bucket of a step with chunks on a GPU, where so few tokens cost what one costs."""

MIN_TABLE_WIDTH = 64
"""Narrowest table on a GPU: 1024 tokens in blocks of 16."""


class Shape(NamedTuple):
    """Padded size of a sub-batch: device tokens first, then host rows."""

    num_tokens: int  # T: prefill tokens and device decodes
    num_host_rows: int  # B: host decodes

    @property
    def num_rows(self) -> int:
        """Rows of the activations."""
        return self.num_tokens + self.num_host_rows


class AttentionShape(NamedTuple):
    """What device attention is specialised for, besides the number of tokens."""

    table_width: int  # blocks of the longest context, padded
    has_chunks: bool  # False: decode rows alone, the first at token 0


@dataclasses.dataclass(frozen=True, slots=True)
class Buckets:
    """Padded sizes, ascending. The largest of each is the step's limit."""

    tokens: tuple[int, ...]
    host_rows: tuple[int, ...]
    table_widths: tuple[int, ...]
    max_decodes: int = 0
    """Steps of decodes alone have programs of their own up to so many rows; 0: they share the
    programs of steps with chunks, whose loops cost nothing when there is no tile to run."""

    @classmethod
    def of(
        cls,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        table_width: int,
        *,
        has_host: bool,
        is_gpu: bool,
    ) -> Buckets:
        """Powers of two for tokens (one row apart), powers of four for host rows.

        Padding a linear stage costs arithmetic, so token buckets are dense; a host row's padding
        costs one activation row and no attention. On a GPU, loops must have fixed bounds and
        kernels like their tables full: decodes get programs by table width there.
        """
        tokens = [1, 4]
        while tokens[-1] < max_num_batched_tokens:
            tokens.append(min(2 * tokens[-1], max_num_batched_tokens))
        host_rows = [min(4, max_num_seqs)] if has_host else []
        while host_rows and host_rows[-1] < max_num_seqs:
            host_rows.append(min(4 * host_rows[-1], max_num_seqs))
        widths = [table_width]
        while is_gpu and widths[0] > MIN_TABLE_WIDTH:
            widths.insert(0, -(-widths[0] // 2))
        return cls(tuple(tokens), tuple(host_rows), tuple(widths), max_num_seqs if is_gpu else 0)

    def shape(self, num_tokens: int, num_host_rows: int, *, has_chunks: bool) -> Shape:
        """The smallest shape that holds a sub-batch."""
        if has_chunks and self.max_decodes:
            num_tokens = max(num_tokens, min(MIN_CHUNK_TOKENS, self.tokens[-1]))
        return Shape(_fit(self.tokens, num_tokens), _fit(self.host_rows, num_host_rows))

    def attention(self, num_blocks: int, *, has_chunks: bool) -> AttentionShape:
        """The attention of a sub-batch whose longest context has so many blocks."""
        if has_chunks or not self.max_decodes:
            return AttentionShape(self.table_widths[-1], True)
        return AttentionShape(_fit(self.table_widths, max(1, num_blocks)), False)

    def attentions(self, shape: Shape) -> list[AttentionShape]:
        """Every attention that a device shape may need."""
        full = AttentionShape(self.table_widths[-1], True)
        if not self.max_decodes:
            return [full]
        found = [full] if shape.num_tokens >= min(MIN_CHUNK_TOKENS, self.tokens[-1]) else []
        if shape.num_tokens <= _fit(self.tokens, self.max_decodes):
            found += [AttentionShape(width, False) for width in self.table_widths]
        return found

    @property
    def rolling_tokens(self) -> tuple[int, ...]:
        """Every other token bucket: a ROLLING step's padding hides behind its group's rows."""
        return self.tokens[::-1][::2][::-1]

    def rolling_shape(self, num_tokens: int, *, has_chunks: bool) -> int:
        """Padded device tokens of a ROLLING step; one that has none is computed as one that has."""
        if has_chunks and self.max_decodes:
            num_tokens = max(num_tokens, min(MIN_CHUNK_TOKENS, self.tokens[-1]))
        return _fit(self.rolling_tokens, max(1, num_tokens))

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
