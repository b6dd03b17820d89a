"""The pure functions that programs are made of: what one stage of a step computes.

A model calls one `attend` hook per layer. DEVICE_ONLY steps give it a hook that appends to the
pool and attends. PIPELINED steps need the layer cut in two at the hook; `project` and `finish`
do that by calling the layer with a hook that captures q, k, v, or returns what another program
attended. The half that is not asked for has no consumer, and XLA drops it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from neojax.models.decoder import Decoder
from neojax.ops import host_attention
from neojax.ops.attention import Decodes, DeviceAttention, NewRows, Tiles
from neojax.runner import logit_state, sampling
from neojax.runner.logit_state import LogitState
from neojax.runner.scores import Scores, score
from neojax.runner.shapes import AttentionShape
from neojax.runner.step_meta import AttentionMeta, MetaLayout, Packed, SampleRows, Sampling

Leaves: TypeAlias = tuple[jax.Array, ...]
"""Parameters of one layer (or of the ends), flat: dispatch costs less than with a dictionary."""


class KV(NamedTuple):
    """One layer's pools, [P, p, K, H] each; donated by every program that writes them.

    The scratch of host prefills is a KV too, of flat [S, K, H] arrays.
    """

    k: jax.Array
    v: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class ModelParts:
    """How to rebuild a model's modules from flat parameters, and how its heads attend."""

    merge_ends: Callable[[Leaves], Any]
    merge_layer: Callable[[Leaves], Any]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    window: int | None  # tokens that each token looks back; None: all

    @property
    def row_width(self) -> int:
        """Elements of a token's q, k and v."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def split_model(model: Decoder) -> tuple[Leaves, tuple[Leaves, ...], ModelParts]:
    """A model as flat parameters, and how to put its modules together again inside programs."""

    def flat(module: Any) -> tuple[Leaves, Any]:
        graphdef, state = nnx.split(module)
        leaves, treedef = jax.tree.flatten(state)
        return tuple(leaves), lambda leaves: nnx.merge(
            graphdef, jax.tree.unflatten(treedef, leaves)
        )

    ends, merge_ends = flat(model.ends)
    # Every layer has the same structure, so the first one's serves all: one program for them all.
    layers = [flat(layer) for layer in model.layers]
    c = model.config
    parts = ModelParts(
        merge_ends,
        layers[0][1],
        c.num_heads,
        c.num_kv_heads,
        c.head_dim,
        len(layers),
        c.sliding_window,
    )
    return ends, tuple(leaves for leaves, _ in layers), parts


@dataclasses.dataclass(frozen=True, slots=True)
class Channel:
    """Where a sub-batch's host rows go."""

    lane: int  # id of the native lane
    index: int  # 0 for b0, 1 for b1


@dataclasses.dataclass(frozen=True, slots=True)
class Stages:
    """Stage functions of one shape. All take and return arrays; none has a side effect."""

    model: ModelParts
    layout: MetaLayout
    attend_device: DeviceAttention
    channel: Channel | None = None

    def embed(
        self, ends: Leaves, packed: Int[Array, "M"], tokens: Int[Array, "slots"]
    ) -> tuple[Packed, Float[Array, "R D"]]:
        """First stage. Returns the metadata too: later programs find it on the device."""
        parts = self.layout.split(packed)
        rows = self.layout.rows(parts)
        newest = tokens[rows.request_slots]
        ids = jnp.where(rows.token_ids >= 0, rows.token_ids, newest)
        return parts, self.model.merge_ends(ends).embed(ids)

    def layers(
        self,
        layers: tuple[Leaves, ...],
        pools: tuple[KV, ...],
        packed: Packed,
        x: Float[Array, "R D"],
        *,
        shape: AttentionShape,
    ) -> tuple[tuple[KV, ...], Float[Array, "R D"]]:
        """Whole layers of a DEVICE_ONLY step."""
        positions = self.layout.rows(packed).positions
        meta = self.layout.attention(packed.attention)
        tiles, decodes = attention_of(meta, shape)
        updated = []
        for leaves, kv in zip(layers, pools, strict=True):
            kv, x = _whole_layer(self, leaves, kv, positions, meta.kv_slots, tiles, decodes, x)
            updated.append(kv)
        return tuple(updated), x

    def enter(
        self, leaves: Leaves, packed: Packed, layer: Int[Array, ""], x: jax.Array, kv: Any
    ) -> tuple[Any, Any, jax.Array, Any]:
        """Pre-projection of a layer, K/V into the pool, start of the host rows' attention.

        Returns (pools, rows [T, (N+2K)·H] of the device tokens, x, ticket); pools and rows are
        None without device tokens, the ticket without host rows.
        """
        q, k, v = project(self.model.merge_layer(leaves), x, self.layout.rows(packed).positions)
        meta = self.layout.attention(packed.attention)
        num_tokens = self.layout.shape.num_tokens
        rows = ticket = None
        if kv is not None:
            kv = self.append(kv, meta.kv_slots, k[:num_tokens], v[:num_tokens])
            rows = side_by_side(a[:num_tokens] for a in (q, k, v))
        if self.channel is not None and self.layout.shape.num_host_rows:
            ticket, x = host_attention.start(
                side_by_side(a[num_tokens:] for a in (q, k, v)),
                jnp.stack([meta.plan, layer, meta.num_host_rows]),
                x,
                lane=self.channel.lane,
                channel=self.channel.index,
            )
        return kv, rows, x, ticket

    def leave(
        self, leaves: Leaves, packed: Packed, x: jax.Array, attended: Any, ticket: Any
    ) -> Float[Array, "R D"]:
        """After the last layer's attention: what `finish_layer` returns, padded for the head."""
        x = self.finish_layer(leaves, packed, x, attended, ticket)
        return jnp.pad(x, ((0, self.layout.head_rows - len(x)), (0, 0)))

    def finish_layer(
        self, leaves: Leaves, packed: Packed, x: jax.Array, attended: Any, ticket: Any
    ) -> Float[Array, "R D"]:
        """Join of the host rows, post-projection and MLP of a layer."""
        parts = [] if attended is None else [attended]
        if ticket is not None:
            assert self.channel is not None
            out, x = host_attention.join(
                ticket,
                x,
                lane=self.channel.lane,
                channel=self.channel.index,
                num_rows=self.layout.shape.num_host_rows,
                num_q_heads=self.model.num_heads,
                head_dim=self.model.head_dim,
                dtype=x.dtype,
            )
            parts.append(out.reshape(len(out), self.model.num_heads, self.model.head_dim))
        positions = self.layout.rows(packed).positions
        return finish(self.model.merge_layer(leaves), x, positions, jnp.concatenate(parts))

    def linear(
        self,
        this: Leaves,
        following: Leaves,
        packed: Packed,
        layer: Int[Array, ""],
        x: jax.Array,
        attended: Any,
        ticket: Any,
        kv: Any,
    ) -> tuple[Any, Any, jax.Array, Any]:
        """The linear stage: a layer's second half and the next one's first; `layer` is the next.

        Returns what `enter` returns.
        """
        x = self.finish_layer(this, packed, x, attended, ticket)
        return self.enter(following, packed, layer, x, kv)

    def attend(
        self,
        meta: Int[Array, "A"],
        rows: Float[Array, "T qkv"],
        kv: KV,
        *,
        shape: AttentionShape,
    ) -> Float[Array, "T N H"]:
        """Device attention of the device tokens; their K/V are already in the pool."""
        tiles, decodes = attention_of(self.layout.attention(meta), shape)
        q, k, v = self._split(rows)
        return self.attend_device(q, kv.k, kv.v, tiles, decodes, NewRows(k, v))

    def attend_host_chunks(
        self,
        packed: Int[Array, "A"],
        layer: Int[Array, ""],
        rows: Float[Array, "T qkv"],
        attended: Float[Array, "T N H"],
        scratch: KV,
        following: KV,
    ) -> tuple[KV, KV, Float[Array, "T N H"], Int[Array, "1"]]:
        """Prefill chunks of HOST requests: K/V to the arena, attention over the scratch pool.

        The scratch gets the prefix from the arena and the chunk from `rows`; it is as good as a
        device pool for the length of one layer. Its prefix was started a layer before, as that of
        the next layer is here, into the scratch `following`.
        """
        meta = self.layout.attention(packed)
        lane = self._lane
        hdr = jnp.stack([meta.plan, layer, meta.num_host_chunks])
        is_last = layer + 1 == self.model.num_layers
        ahead = jnp.stack([meta.plan, layer + 1, jnp.where(is_last, 0, meta.num_host_chunks)])
        # Through `attended`, the start comes behind the layer before, which read that scratch.
        *started, attended = host_attention.start_fetch(ahead, *following, attended, lane=lane)
        *prefix, attended = host_attention.join_fetch(hdr, *scratch, attended, lane=lane)
        done, attended = host_attention.store(rows, hdr, attended, lane=lane)
        q, k, v = self._split(rows)
        # [S, K, H]: the library's call takes it as it is (a reshape would cost a copy); as a pool
        # of blocks it is seen only by what appends and attends.
        paged = (-1, self.layout.block_size, *scratch.k.shape[1:])
        kv = KV(*(pool.reshape(paged) for pool in prefix))
        kv = self.append(kv, meta.scratch_slots, k, v)
        host = self.attend_device(q, kv.k, kv.v, meta.host_tiles, None, NewRows(k, v))
        scratch = KV(*(pool.reshape(scratch.k.shape) for pool in kv))
        is_host = meta.scratch_slots < self.layout.num_scratch_slots
        return scratch, KV(*started), jnp.where(is_host[:, None, None], host, attended), done

    def head(
        self,
        ends: Leaves,
        packed: Int[Array, "8 S"],
        x: Float[Array, "R D"],
        tokens: Int[Array, "slots"],
        *,
        is_greedy: bool,
    ) -> tuple[Int[Array, "slots"], Int[Array, "S"]]:
        """Last stage: a token for each sampling row, written to its request's slot."""
        chosen = Sampling.unpack(packed)
        logits = self.logits(ends, packed, x)
        if is_greedy:
            likeliest = sampling.greedy(logits)
            new = sampling.checked(likeliest, logits, likeliest)
        else:
            new = sampling.sample(logits, chosen)
        return tokens.at[chosen.slot].set(new, mode="drop"), new

    def logits(
        self, ends: Leaves, packed: Int[Array, "8 S"], x: Float[Array, "R D"]
    ) -> Float[Array, "S V"]:
        """float32 logits of the sampling rows."""
        chosen = Sampling.unpack(packed)
        return self.model.merge_ends(ends).head(x[chosen.row])

    @property
    def _lane(self) -> int:
        assert self.channel is not None
        return self.channel.lane

    def append(self, kv: KV, slots: Int[Array, "T"], k: jax.Array, v: jax.Array) -> KV:
        """K and V of the device tokens, written to their slots of the pool."""
        with jax.named_scope("append"):
            return KV(*self.attend_device.append(kv.k, kv.v, slots, k, v))

    def _split(self, rows: Float[Array, "T qkv"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q [T, N, H], k [T, K, H], v [T, K, H] of the device tokens."""
        m = self.model
        heads = rows.reshape(len(rows), -1, m.head_dim)
        return (
            heads[:, : m.num_heads],
            heads[:, m.num_heads : m.num_heads + m.num_kv_heads],
            heads[:, m.num_heads + m.num_kv_heads :],
        )


def side_by_side(arrays: Iterable[jax.Array]) -> Float[Array, "R qkv"]:
    """q, k and v of each row in one: a copy to the host is one copy."""
    return jnp.concatenate([a.reshape(len(a), -1) for a in arrays], axis=1)


def attention_of(meta: AttentionMeta, shape: AttentionShape) -> tuple[Tiles | None, Decodes]:
    """The attention metadata that a program of this shape looks at."""
    tiles, decodes = meta.tiles, meta.decodes
    width = shape.table_width
    decodes = decodes._replace(tables=decodes.tables[:, :width])
    if not shape.has_chunks:
        return None, decodes
    return tiles._replace(tables=tiles.tables[:, :width]), decodes


def project(layer: Any, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
    """A layer up to its attend hook: q [R, N, H], k [R, K, H], v [R, K, H]."""
    captured: list[tuple[jax.Array, ...]] = []

    def capture(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        captured.append((q, k, v))
        return jnp.zeros_like(q)

    layer(x, positions, capture)
    (qkv,) = captured
    return qkv


def finish(layer: Any, x: jax.Array, positions: jax.Array, attended: jax.Array) -> jax.Array:
    """A layer from its attend hook on, given what the hook returns."""
    return layer(x, positions, lambda q, k, v: attended)


def head_full(
    model: ModelParts,
    ends: Leaves,
    packed: Int[Array, "10 S"],
    x: Float[Array, "R D"],
    tokens: Int[Array, "slots"],
    state: LogitState,
) -> tuple[Int[Array, "slots"], LogitState, Int[Array, "S"], Scores]:
    """Last stage where a row asks for more than temperature, top-k and top-p.

    Returns the newest tokens, the logit state, and per row the new token and the scores of its
    target, or of the new token where it has none. The same for all shapes of as many rows.
    """
    rows = SampleRows.unpack(packed)
    position = rows.sampling.position
    logits = model.merge_ends(ends).head(x[rows.sampling.row])
    changed = logit_state.change(state, rows.state, position, logits)
    new = sampling.sample(changed, rows.sampling, logit_state.min_p(state, rows.state))
    new = sampling.checked(new, logits, sampling.greedy(logits))
    scores = score(logits, jnp.where(rows.target >= 0, rows.target, new))
    state = logit_state.count(state, rows.state, new)
    return tokens.at[rows.sampling.slot].set(new, mode="drop"), state, new, scores


@functools.cache
def first_fetch(lane: int) -> Callable[[Any, KV], KV]:
    """The program that begins to bring the first layer's prefixes; one for all shapes.

    It takes the hdr of `start_fetch` and the scratch, which is donated.
    """

    def start(hdr: Int[Array, "3"], scratch: KV) -> KV:
        k, v, _ = host_attention.start_fetch(hdr, *scratch, jnp.zeros(1, jnp.int32), lane=lane)
        return KV(k, v)

    return jax.jit(start, donate_argnums=1)


# An inner jit: the layer is traced and lowered once, however many of them a program holds.
@functools.partial(jax.jit, static_argnums=0)
def _whole_layer(
    stages: Stages,
    leaves: Leaves,
    kv: KV,
    positions: Int[Array, "T"],
    slots: Int[Array, "T"],
    tiles: Tiles | None,
    decodes: Decodes,
    x: jax.Array,
) -> tuple[KV, jax.Array]:
    updated = [kv]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        updated[0] = stages.append(kv, slots, k, v)
        new = NewRows(k, v)
        return stages.attend_device(q, updated[0].k, updated[0].v, tiles, decodes, new)

    x = stages.model.merge_layer(leaves)(x, positions, attend)
    return updated[0], x
