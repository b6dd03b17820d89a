"""The closed set of shapes that have compiled programs.

Few, because each costs seconds before ready: DEVICE_ONLY steps have a bucket for every power of
two of tokens, the others fewer, and device tokens beside host rows only a few pairs.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import NamedTuple

from neojax.scheduler.plan import Mode

MIN_CHUNK_TOKENS = 16
"""Smallest bucket of a step with chunks on a GPU, where so few tokens cost what one costs."""

MIN_TABLE_WIDTH = 64
"""Narrowest table on a GPU: 1024 tokens in blocks of 16."""

MAX_TABLE_WIDTHS = 3

DENSE_TOKENS = 256
"""From here on arithmetic bounds a linear stage, and PIPELINED buckets are as dense as the others;
below, reading weights does, and every second bucket is left out."""


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

    tokens: tuple[int, ...]  # of DEVICE_ONLY steps
    pipelined_tokens: tuple[int, ...]  # of PIPELINED sub-batches and ROLLING steps
    host_rows: tuple[int, ...]  # of sub-batches that have nothing else
    mixed: tuple[Shape, ...]  # device tokens beside host rows; both numbers ascend
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
        tokens: tuple[int, ...] | None = None,
    ) -> Buckets:
        """The buckets of an engine with these limits.

        Padding a linear stage costs arithmetic; a host row's padding costs one activation row and
        no attention. On a GPU, loops must have fixed bounds and kernels like their tables full:
        decodes get programs by table width there.

        Args:
            table_width: blocks of the longest sequence.
            tokens: instead of the powers of two, for tests.
        """
        tokens = tokens or (1, *_powers(4, 2, max_num_batched_tokens))
        host_rows = _powers(8 if is_gpu else 4, 4, max_num_seqs) if has_host else ()
        pipelined = _thinned(tokens, MIN_CHUNK_TOKENS if is_gpu else 4) if has_host else ()
        return cls(
            tokens,
            pipelined,
            host_rows,
            _mixed(pipelined, host_rows, smallest=64 if is_gpu else 16),
            _widths(table_width) if is_gpu else (table_width,),
            max_num_seqs if is_gpu else 0,
        )

    def grid(self, mode: Mode) -> tuple[int, ...]:
        """Padded numbers of device tokens, where no host rows are beside them."""
        match mode:
            case Mode.DEVICE_ONLY:
                return self.tokens
            case Mode.PIPELINED | Mode.ROLLING:
                return self.pipelined_tokens

    def padded(self, mode: Mode, num_tokens: int, *, has_chunks: bool) -> int:
        """So many device tokens, padded; ROLLING steps without one are computed as if with one."""
        grid = self.grid(mode)
        if has_chunks and self.max_decodes:
            num_tokens = max(num_tokens, min(MIN_CHUNK_TOKENS, grid[-1]))
        return _fit(grid, max(num_tokens, mode is Mode.ROLLING))

    def shape(self, mode: Mode, num_tokens: int, num_host_rows: int, *, has_chunks: bool) -> Shape:
        """The smallest shape that holds a sub-batch."""
        if num_tokens and num_host_rows:
            return next(
                shape
                for shape in self.mixed
                if num_tokens <= shape.num_tokens and num_host_rows <= shape.num_host_rows
            )
        tokens = self.padded(mode, num_tokens, has_chunks=has_chunks)
        return Shape(tokens, _fit(self.host_rows, num_host_rows))

    def attention(
        self, mode: Mode, shape: Shape, num_blocks: int, *, has_chunks: bool
    ) -> AttentionShape:
        """The attention of a sub-batch whose longest context has so many blocks."""
        width = _fit(self.table_widths, max(1, num_blocks))
        found = AttentionShape(width, False)
        if has_chunks or found not in self.attentions(mode, shape.num_tokens):
            return AttentionShape(self.table_widths[-1], True)
        return found

    def attentions(self, mode: Mode, num_tokens: int) -> list[AttentionShape]:
        """Every attention that a bucket of device tokens may need in this mode."""
        tokens = self.grid(mode)
        if num_tokens not in tokens:
            return []
        full = AttentionShape(self.table_widths[-1], True)
        if not self.max_decodes:
            return [full]
        found = [full] if num_tokens >= min(MIN_CHUNK_TOKENS, tokens[-1]) else []
        if num_tokens <= _fit(tokens, min(self.max_decodes, tokens[-1])):
            found += [AttentionShape(width, False) for width in self.table_widths]
        return found

    def head_rows(self, shape: Shape) -> int:
        """Rows of the activations that a shape's head takes: shapes of as many share one."""
        return max(shape.num_rows, _fit(self.tokens, min(shape.num_rows, self.tokens[-1])))

    @property
    def device_shapes(self) -> list[Shape]:
        """Sub-batches of DEVICE_ONLY steps."""
        return [Shape(t, 0) for t in self.tokens]

    @property
    def pipelined_shapes(self) -> list[Shape]:
        """PIPELINED sub-batches with device tokens alone."""
        return [Shape(t, 0) for t in self.pipelined_tokens]

    @property
    def host_shapes(self) -> list[Shape]:
        """Sub-batches of nothing but host rows."""
        return [Shape(0, b) for b in self.host_rows]


def _powers(first: int, factor: int, last: int) -> tuple[int, ...]:
    """first, first * factor, ... and last."""
    sizes = [min(first, last)]
    while sizes[-1] < last:
        sizes.append(min(factor * sizes[-1], last))
    return tuple(sizes)


def _thinned(tokens: tuple[int, ...], smallest: int) -> tuple[int, ...]:
    """The buckets that PIPELINED sub-batches and ROLLING steps have too."""
    kept = [tokens[-1]]
    for count in reversed(tokens[:-1]):
        is_dense = count >= DENSE_TOKENS
        if count >= smallest and (is_dense or 4 * count <= kept[0]):
            kept.insert(0, count)
    return tuple(kept)


def _mixed(tokens: tuple[int, ...], host_rows: tuple[int, ...], smallest: int) -> tuple[Shape, ...]:
    """Few host rows beside few tokens; the last takes as many as there can be of both."""
    if not tokens:
        return ()
    fitting = [count for count in tokens[:-1] if count >= smallest]
    return (
        *(Shape(t, _fit(host_rows, min(max(1, t // 4), host_rows[-1]))) for t in fitting),
        Shape(tokens[-1], host_rows[-1]),
    )


def _widths(table_width: int) -> tuple[int, ...]:
    """Evenly apart, by factors of four or more."""
    factor = max(4.0, (table_width / MIN_TABLE_WIDTH) ** (1 / (MAX_TABLE_WIDTHS - 1)))
    widths = [table_width]
    while len(widths) < MAX_TABLE_WIDTHS and widths[0] / factor >= MIN_TABLE_WIDTH - 0.5:
        widths.insert(0, round(widths[0] / factor))
    return tuple(widths)


def _fit(sizes: tuple[int, ...], n: int) -> int:
    """The smallest size that holds n; 0 for none."""
    return sizes[bisect.bisect_left(sizes, n)] if n else 0
