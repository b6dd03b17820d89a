"""The step's metadata: one packed int32 array per sub-batch, written on the host, read in programs.

One array instead of twenty: each argument of a program costs dispatch time, each transfer a
round trip. Floats travel as their bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from neojax.kv.host_pool import HostPlan
from neojax.ops import attention
from neojax.ops.attention import TILE, Decodes, Tiles
from neojax.runner.shapes import Shape
from neojax.scheduler.limits import MAX_CHUNKS
from neojax.scheduler.plan import Row, SubBatch
from neojax.scheduler.request import Placement


class Sampling(NamedTuple):
    """The rows that give a token. Padding has slot max_num_seqs, which is dropped."""

    row: Int[Array, "S"]  # index into the activations
    slot: Int[Array, "S"]  # request slot
    position: Int[Array, "S"]  # position of the new token: the counter of its random draw
    seed: Int[Array, "S 2"]  # high and low word
    top_k: Int[Array, "S"]  # 0 = all
    temperature: Float[Array, "S"]  # 0 = greedy
    top_p: Float[Array, "S"]

    @classmethod
    def unpack(cls, packed: Int[Array, "8 S"]) -> Sampling:
        """Inside a program."""
        temperature, top_p = jax.lax.bitcast_convert_type(packed[6:], jnp.float32)
        row, slot, position = packed[0], packed[1], packed[2]
        return cls(row, slot, position, packed[3:5].T, packed[5], temperature, top_p)


class RollingMeta(NamedTuple):
    """The groups of a ROLLING step: group l passes from layer l-1 to layer l."""

    positions: Int[Array, "L c"]
    plan: Int[Array, "L"]  # entries of the host lane's ring
    num_rows: Int[Array, "L"]


class SampleRows(NamedTuple):
    """Rows of a head that does everything, sampled from or only scored."""

    sampling: Sampling
    state: Int[Array, "S"]  # row of the logit state
    target: Int[Array, "S"]  # token to score; -1: the one that is sampled

    @classmethod
    def unpack(cls, packed: Int[Array, "10 S"]) -> SampleRows:
        """Inside a program."""
        return cls(Sampling.unpack(packed[:8]), packed[8], packed[9])


class Rows(NamedTuple):
    """What embedding and linear stages need of each row of the activations."""

    token_ids: Int[Array, "R"]  # -1: take the slot's newest token
    positions: Int[Array, "R"]
    request_slots: Int[Array, "R"]


class AttentionMeta(NamedTuple):
    """What attention needs, on both lanes. Its shape follows from the device tokens' alone."""

    kv_slots: Int[Array, "T"]  # block * p + offset; padding and host tokens: P * p (dropped)
    tiles: Tiles  # chunks of DEVICE requests
    decodes: Decodes
    host_tiles: Tiles  # chunks of HOST requests, whose keys are in the scratch pool
    scratch_slots: Int[Array, "T"]  # padding and device tokens: the scratch's size (dropped)
    plan: Int[Array, ""]  # entry in the host lane's ring of plans
    num_host_rows: Int[Array, ""]
    num_host_chunks: Int[Array, ""]
    rolling: RollingMeta


class Packed(NamedTuple):
    """The packed array on the device, cut so that shapes that share a part share programs."""

    rows: Int[Array, "3 R"]
    attention: Int[Array, "A"]
    sampling: Int[Array, "8 S"]


@dataclasses.dataclass(frozen=True, slots=True)
class MetaLayout:
    """Where each field of a shape's metadata lies, and how to fill it."""

    shape: Shape
    max_num_seqs: int
    block_size: int
    table_width: int
    num_device_slots: int
    num_scratch_slots: int
    head_rows: int  # of the activations that the head takes; padded
    num_rolling_layers: int = 0
    """Layers whose groups a ROLLING step carries; its host rows are the group that enters."""

    @property
    def num_samples(self) -> int:
        """Rows of the logits."""
        return min(self.head_rows, self.max_num_seqs)

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name to shape, in the packed order: `Packed.rows`, then attention, then sampling."""
        num_tokens, num_rows = self.shape.num_tokens, self.shape.num_rows
        num_samples = self.num_samples
        num_chunks = min(MAX_CHUNKS, num_tokens)
        num_tiles = attention.num_tiles(num_tokens, MAX_CHUNKS)
        num_decodes = min(num_tokens, self.max_num_seqs)
        width = self.table_width
        scratch_width = self.num_scratch_slots // self.block_size
        return {
            "rows": (3, num_rows),  # token_ids, positions, request_slots
            # plan, host rows, host chunks, device tiles, host tiles, first decode
            "scalars": (6,),
            "slots": (2, num_tokens),  # kv_slots, scratch_slots
            "tiles": (4, num_tiles),
            "host_tiles": (4, num_tiles),
            "chunk_tables": (num_chunks, width),
            "host_chunk_tables": (num_chunks, scratch_width),
            "decode_lengths": (num_decodes,),
            "decode_tables": (num_decodes, width),
            # of each layer's group: positions, plan, rows
            "rolling": (self.num_rolling_layers, self.shape.num_host_rows + 2),
            # row, slot, position, seed (2), top_k, temperature, top_p
            "sampling": (8, num_samples),
        }

    @property
    def size(self) -> int:
        """int32 values in the packed array."""
        return sum(math.prod(shape) for shape in self.fields().values())

    def views(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """The fields of a packed array, writable."""
        return _cut(packed, self.fields())

    def split(self, packed: Int[Array, "M"]) -> Packed:
        """Inside a program: the parts that later programs take."""
        first = 3 * self.shape.num_rows
        last = self.size - 8 * self.num_samples
        return Packed(
            packed[:first].reshape(3, -1), packed[first:last], packed[last:].reshape(8, -1)
        )

    def rows(self, packed: Packed) -> Rows:
        """Inside a program: what rows say."""
        return Rows(*packed.rows)

    def attention(self, part: Int[Array, "A"]) -> AttentionMeta:
        """Inside a program: what `Packed.attention` says."""
        fields = self.fields()
        f = _cut(part, {name: fields[name] for name in fields if name not in ("rows", "sampling")})
        scalars, rolling = f["scalars"], f["rolling"]
        return AttentionMeta(
            kv_slots=f["slots"][0],
            tiles=Tiles(scalars[3], *f["tiles"], tables=f["chunk_tables"]),
            decodes=Decodes(scalars[5], f["decode_lengths"], f["decode_tables"]),
            host_tiles=Tiles(scalars[4], *f["host_tiles"], tables=f["host_chunk_tables"]),
            scratch_slots=f["slots"][1],
            plan=scalars[0],
            num_host_rows=scalars[1],
            num_host_chunks=scalars[2],
            rolling=RollingMeta(rolling[:, :-2], rolling[:, -2], rolling[:, -1]),
        )

    def fetch_hdr(self, packed: np.ndarray) -> np.ndarray:
        """The hdr of `start_fetch` for layer 0."""
        plan, _, num_host_chunks = self.views(packed)["scalars"][:3]
        return np.array([plan, 0, num_host_chunks], np.int32)

    def empty(self) -> np.ndarray:
        """A packed array of nothing but padding."""
        packed = np.zeros(self.size, np.int32)
        f = self.views(packed)
        f["slots"][0] = self.num_device_slots
        f["slots"][1] = self.num_scratch_slots
        f["sampling"][1] = self.max_num_seqs
        return packed

    def pack(
        self, batch: SubBatch, plan_index: int, leaving: Sequence[Row] = ()
    ) -> tuple[np.ndarray, HostPlan | None]:
        """Metadata of a sub-batch, and the host lane's part of it (None without host work).

        In a ROLLING step, the host rows of `batch` are those that enter; their places are those of
        the `leaving` when it ends.
        """
        packed = self.empty()
        f = self.views(packed)
        host = _HostPlanWriter(batch, self.table_width)
        tiles = {p: _TileWriter(f[n]) for p, n in _TILES.items()}
        token, scratch = 0, 0
        for row in batch.chunks:
            index = tiles[row.placement].add(token, row)
            positions = self._write_row(f, token, row)
            span = slice(token, token + row.num_tokens)
            if row.placement is Placement.HOST:
                f["slots"][1, span] = scratch + positions
                host.add_chunk(token, row, scratch)
                blocks = -(-row.stop // self.block_size)
                first = scratch // self.block_size
                f["host_chunk_tables"][index, :blocks] = np.arange(first, first + blocks)
                scratch += blocks * self.block_size
            else:
                f["slots"][0, span] = self._slots_of(row, positions)
                f["chunk_tables"][index, : len(row.blocks)] = row.blocks
            token += row.num_tokens
        num_tiles = [tiles[p].count for p in (Placement.DEVICE, Placement.HOST)]
        f["scalars"][:] = (plan_index, host.num_rows, host.num_chunks, *num_tiles, token)
        self._write_decodes(f, token, batch.decodes)
        for i, row in enumerate(batch.decodes):
            f["decode_tables"][i, : len(row.blocks)] = row.blocks
        self._write_tokens(f, self.shape.num_tokens, batch.host_decodes)
        for i, row in enumerate(batch.host_decodes):
            host.add_decode(i, row)
        self._write_sampling(f["sampling"], batch, leaving)
        return packed, host.finish()

    def sample_rows(self, packed: np.ndarray, states: Sequence[int], neutral: int) -> np.ndarray:
        """`SampleRows` of the sampling rows; states: their rows of the logit state."""
        rows = np.concatenate([self.views(packed)["sampling"], self._no_sample_rows(neutral)[8:]])
        rows[8, : len(states)] = states
        return rows

    def prompt_rows(self, batch: SubBatch, neutral: int) -> list[np.ndarray]:
        """`SampleRows` that score the prompts of chunks that ask for it, as many as it takes."""
        scored = list(scored_rows(batch))
        rows = [self._no_sample_rows(neutral) for _ in range(0, len(scored), self.num_samples)]
        for i, (_, activation, target) in enumerate(scored):
            part, column = divmod(i, self.num_samples)
            rows[part][0, column] = activation
            rows[part][9, column] = target
        return rows

    def _no_sample_rows(self, neutral: int) -> np.ndarray:
        rows = np.zeros((10, self.num_samples), np.int32)
        rows[1] = self.max_num_seqs  # slot: dropped
        rows[8] = neutral
        rows[9] = -1
        return rows

    def _write_row(self, f: dict[str, np.ndarray], first: int, row: Row) -> np.ndarray:
        span = slice(first, first + row.num_tokens)
        positions = np.arange(row.start.token, row.stop, dtype=np.int32)
        f["rows"][0, span] = row.request.token_ids(row.start.token, row.stop)
        f["rows"][1, span] = positions
        f["rows"][2, span] = row.slot
        return positions

    def _write_decodes(self, f: dict[str, np.ndarray], first: int, rows: Sequence[Row]) -> None:
        """All but the tables, a column at a time: numpy costs more per call than per number."""
        self._write_tokens(f, first, rows)
        p = self.block_size
        places = [divmod(row.start.token, p) for row in rows]
        f["slots"][0, first : first + len(rows)] = [
            row.blocks[block] * p + offset
            for row, (block, offset) in zip(rows, places, strict=True)
        ]
        f["decode_lengths"][: len(rows)] = [row.stop for row in rows]

    def _write_tokens(self, f: dict[str, np.ndarray], first: int, rows: Sequence[Row]) -> None:
        """Rows of one token each."""
        ids, positions, slots = f["rows"][:, first : first + len(rows)]
        ids[:] = [row.request.token_ids(row.start.token, row.stop)[0] for row in rows]
        positions[:] = [row.start.token for row in rows]
        slots[:] = [row.slot for row in rows]

    def _slots_of(self, row: Row, positions: np.ndarray) -> np.ndarray:
        blocks = np.asarray(row.blocks, np.int32)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def _write_sampling(self, s: np.ndarray, batch: SubBatch, leaving: Sequence[Row]) -> None:
        last = -1
        whole: list[tuple[int, ...]] = []
        floats: list[tuple[float, float]] = []
        first_host = next(iter(leaving or batch.host_decodes), None)
        for row in (*batch.chunks, *batch.decodes, *(leaving or batch.host_decodes)):
            last += row.num_tokens
            if row is first_host:
                last = self.shape.num_tokens  # host rows start behind the device's padding
            if not row.samples:
                continue
            seed, params = row.request.seed, row.request.params
            low = seed & 0xFFFFFFFF
            low -= (low & 1 << 31) << 1  # the same bits, signed
            whole.append((last, row.slot, row.stop, seed >> 32, low, max(params.top_k, 0)))
            temperature = 0.0 if params.is_greedy else params.temperature
            floats.append((temperature, params.top_p))
        if whole:
            s[:6, : len(whole)] = np.transpose(whole)
            s[6:, : len(whole)] = np.asarray(floats, np.float32).T.copy().view(np.int32)


class ScoredRow(NamedTuple):
    """A prompt token whose likelihood a chunk must tell."""

    row: Row
    activation: int  # index of the token before it
    target: int


def scored_rows(batch: SubBatch) -> Iterator[ScoredRow]:
    """Of the chunks whose request asks for prompt_logprobs.

    A request that is computed again after it has given tokens has told of its prompt already.
    """
    first = 0
    for row in batch.chunks:
        request = row.request
        if request.params.prompt_logprobs is not None and not request.output_ids:
            targets = request.prompt_ids[row.start.token + 1 : row.stop + 1]
            for i, target in enumerate(targets):
                yield ScoredRow(row, first + i, target)
        first += row.num_tokens


def _cut(packed: Any, fields: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    views, offset = {}, 0
    for name, shape in fields.items():
        size = math.prod(shape)
        views[name] = packed[offset : offset + size].reshape(shape)
        offset += size
    return views


_TILES = {Placement.DEVICE: "tiles", Placement.HOST: "host_tiles"}


class _TileWriter:
    """Cuts chunks into tiles, in the order of the tokens."""

    def __init__(self, out: np.ndarray) -> None:
        self.out = out  # i32[4, n]: token, length, position, row
        self.count = 0
        self._chunks = 0

    def add(self, token: int, row: Row) -> int:
        """Tiles of a chunk; returns the index of its block table."""
        offsets = np.arange(0, row.num_tokens, TILE)
        span = slice(self.count, self.count + len(offsets))
        self.out[0, span] = token + offsets
        self.out[1, span] = np.minimum(TILE, row.num_tokens - offsets)
        self.out[2, span] = row.start.token + offsets
        self.out[3, span] = self._chunks
        self.count += len(offsets)
        self._chunks += 1
        return self._chunks - 1


class _HostPlanWriter:
    """Collects what the host lane must know."""

    def __init__(self, batch: SubBatch, width: int) -> None:
        self.num_rows = len(batch.host_decodes)
        self.num_chunks = 0
        num_chunks = len(batch.host_chunks)
        self._plan = HostPlan(
            np.zeros(self.num_rows, np.int32),
            np.zeros((self.num_rows, width), np.int32),
            np.zeros((num_chunks, 4), np.int32),
            np.zeros((num_chunks, width), np.int32),
        )

    def add_decode(self, i: int, row: Row) -> None:
        self._plan.context_lens[i] = row.stop
        self._plan.tables[i, : len(row.blocks)] = row.blocks

    def add_chunk(self, token: int, row: Row, scratch_slot: int) -> None:
        i = self.num_chunks
        self._plan.chunks[i] = (token, row.num_tokens, row.start.token, scratch_slot)
        self._plan.chunk_tables[i, : len(row.blocks)] = row.blocks
        self.num_chunks += 1

    def finish(self) -> HostPlan | None:
        return self._plan if self.num_rows or self.num_chunks else None
