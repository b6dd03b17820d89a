"""The ROLLING mode: host rows ride in the device's batch and advance by one layer per step.

    step t:    layer l-1            | layer l
    device     device rows, group l-1 | device rows, group l | ...
    host       the jobs that step t-1 started, one per layer, in the order of the layers

Every layer has a group of host rows whose attention the step before has started. A layer joins
it there, ends the layer for device rows and group together, and starts the attention of the next
layer for the group, which is joined in the next step. So each host job has a whole step to end,
no weight is read twice, and a host row gets a token in one step more than there are layers.

After APEX (arXiv 2506.03296); one channel with a slot for each layer serves all groups, because
starts and joins follow the order of the layers.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from neojax.ops import host_attention
from neojax.ops.attention import Decodes, NewRows, Tiles
from neojax.runner.programs import Arguments, Programs, Signature
from neojax.runner.shapes import AttentionShape
from neojax.runner.stages import (
    KV,
    Leaves,
    Stages,
    attention_of,
    finish,
    project,
    side_by_side,
)
from neojax.runner.step_meta import Packed
from neojax.scheduler.plan import Mode, Row


class Parked(NamedTuple):
    """A layer's group of host rows between two steps. Donated by the programs that advance it."""

    message: Any  # what started its attention; its residual [c, D] rides in it
    ticket: Any  # of its attention, int32[1]


NO_PLAN = -1
"""The ring entry of a group without rows. It must not name one that another step fills: its joins
would count as that one's, and the entry be free while it is still read."""


class Register:
    """Which group each layer has: a shift register that mirrors the device's parked groups."""

    def __init__(self, num_layers: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self._groups: deque[np.ndarray] = deque(maxlen=num_layers)
        self.clear()

    def clear(self) -> None:
        """No group has rows."""
        for _ in range(self._groups.maxlen or 0):
            self.advance((), NO_PLAN)

    def advance(self, entering: Sequence[Row], plan: int) -> None:
        """A step: each group moves on by a layer. `plan`: the entering group's ring entry."""
        group = np.zeros(self.num_rows + 2, np.int32)
        group[: len(entering)] = [row.start.token for row in entering]
        group[-2:] = plan if entering else NO_PLAN, len(entering)
        self._groups.appendleft(group)

    def write(self, out: np.ndarray) -> None:
        """Fill the metadata's field `rolling`, int32[L, c + 2]."""
        out[:] = self._groups


def layers(
    stages: Stages,
    layers: tuple[Leaves, ...],
    pools: tuple[KV, ...],
    scratch: tuple[KV, KV] | None,
    parked: tuple[Parked, ...],
    packed: Packed,
    layer_ids: tuple[Int[Array, ""], ...],
    x: Float[Array, "R D"],
    *,
    shape: AttentionShape,
) -> tuple[tuple[KV, ...], tuple[KV, KV] | None, tuple[Parked, ...], Float[Array, "R D"]]:
    """Whole layers of a ROLLING step: x holds the device rows, then the group that comes by.

    scratch: of HOST-placed prefill chunks, the first layer's first, its prefixes on their way;
    None where the step has none.
    """
    meta = stages.layout.attention(packed.attention)
    tiles, decodes = attention_of(meta, shape)
    scratches: list[Any] = [None, None] if scratch is None else list(scratch)
    updated: list[KV] = []
    groups: list[Parked] = []
    for i, (leaves, kv, group, layer) in enumerate(
        zip(layers, pools, parked, layer_ids, strict=True)
    ):
        both = None if scratch is None else (scratches[i % 2], scratches[1 - i % 2])
        kv, both, group, x = _layer(
            stages, leaves, kv, both, group, packed, layer, tiles, decodes, x
        )
        if both is not None:
            scratches[i % 2], scratches[1 - i % 2] = both
        updated.append(kv)
        groups.append(group)
    return (
        tuple(updated),
        None if scratch is None else (scratches[0], scratches[1]),
        tuple(groups),
        x,
    )


# An inner jit: the layer is traced and lowered once, however many of them a program holds.
@functools.partial(jax.jit, static_argnums=0)
def _layer(
    stages: Stages,
    leaves: Leaves,
    kv: KV,
    scratch: tuple[KV, KV] | None,
    parked: Parked,
    packed: Packed,
    layer: jax.Array,
    tiles: Tiles | None,
    decodes: Decodes,
    x: jax.Array,
) -> tuple[KV, tuple[KV, KV] | None, Parked, jax.Array]:
    assert stages.channel is not None
    lane, channel = stages.channel.lane, stages.channel.index
    model, (num_tokens, c) = stages.model, stages.layout.shape
    meta = stages.layout.attention(packed.attention)
    groups = meta.rolling
    positions = stages.layout.rows(packed).positions[:num_tokens]
    positions = jnp.concatenate([positions, groups.positions[layer]])
    q, k, v = project(model.merge_layer(leaves), x, positions)
    parked_x = host_attention.last_rider(parked.message, (c, x.shape[1]), x.dtype)
    # The residual of the group that comes is read before that of the group that goes is parked in
    # its place: without the barrier XLA would rather copy.
    entering = jnp.concatenate([x[:num_tokens], parked_x])
    x, entering = jax.lax.optimization_barrier((x, entering))
    hdr = jnp.stack([groups.plan[layer], layer, groups.num_rows[layer]])
    group_rows = side_by_side(a[num_tokens:] for a in (q, k, v))
    message = host_attention.message(group_rows, hdr, x[num_tokens:])
    out, ticket = host_attention.exchange(
        message,
        parked.ticket,
        lane=lane,
        channel=channel,
        num_rows=c,
        num_q_heads=model.num_heads,
        head_dim=model.head_dim,
        dtype=x.dtype,
    )
    q, k, v = q[:num_tokens], k[:num_tokens], v[:num_tokens]
    kv = stages.append(kv, meta.kv_slots, k, v)
    attended = stages.attend_device(q, kv.k, kv.v, tiles, decodes, NewRows(k, v))
    if scratch is not None:
        rows = side_by_side((q, k, v))
        this, following, attended, _ = stages.attend_host_chunks(
            packed.attention, layer, rows, attended, *scratch
        )
        scratch = (this, following)
    x = finish(
        model.merge_layer(leaves),
        entering,
        positions,
        jnp.concatenate([attended, out.reshape(c, *attended.shape[1:])]),
    )
    return kv, scratch, Parked(message, ticket), x


def park(stages: Stages, x: Float[Array, "c D"]) -> Parked:
    """A group without rows: what each layer has before the first step."""
    assert stages.channel is not None
    rows = jnp.zeros((len(x), stages.model.row_width), x.dtype)
    hdr = jnp.array([NO_PLAN, 0, 0], jnp.int32)
    ticket, x = host_attention.start(
        rows, hdr, x, lane=stages.channel.lane, channel=stages.channel.index
    )
    return Parked(host_attention.message(rows, hdr, x), ticket)


class RollingPrograms(Programs):
    """The jitted stages of one shape of ROLLING steps; its host rows are a group."""

    def __init__(
        self,
        stages: Stages,
        attentions: Sequence[AttentionShape],
        head_full: Callable[..., Any],
        *,
        parks: bool,
    ) -> None:
        """parks: whether this shape's `park` is the one that is used; it is the same for all."""
        super().__init__(stages, {Mode.ROLLING: attentions}, head_full)
        self.parks = parks
        self.rolling = {
            shape: jax.jit(
                functools.partial(layers, stages, shape=shape), donate_argnums=(1, 2, 3, 6)
            )
            for shape in attentions
        }
        self.park = jax.jit(functools.partial(park, stages))

    def signatures(self, a: Arguments) -> Iterator[Signature]:
        """Every program that a ROLLING step of this shape may run."""
        yield from super().signatures(a)
        shape, spec = self.shape, jax.ShapeDtypeStruct
        layout, group = self.stages.layout, a.layers_per_program
        group_x = spec((shape.num_host_rows, a.hidden_size), a.dtype)
        parked = jax.eval_shape(functools.partial(park, self.stages), group_x)
        packed = jax.eval_shape(layout.split, spec((layout.size,), jnp.int32))
        x = spec((shape.num_rows, a.hidden_size), a.dtype)
        for attention, function in self.rolling.items():
            scratches: list[Any] = [None]
            if attention.has_chunks and a.scratch is not None:
                scratches.append((a.scratch, a.scratch))
            for scratch in scratches:
                args = (
                    a.layers[:group],
                    a.pools[:group],
                    scratch,
                    (parked,) * group,
                    packed,
                    a.layer_ids[:group],
                    x,
                )
                yield Signature("rolling", shape, function, args)
        if self.parks:
            yield Signature("park", shape, self.park, (group_x,))
