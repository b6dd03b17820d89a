"""How long a step takes on two lanes, event by event: what the scheduler's closed form predicts.

    device | linear b0 | attention b0 | linear b1 | linear b0 | ...
    host   |       attention of b1        | attention of b0's rows | ...

Unlike the prediction it goes through every layer, so that filling and draining the pipeline costs
what it costs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from neojax.scheduler.costs import CostTables
from neojax.scheduler.plan import Mode, Plan, Swap
from neojax.scheduler.prediction import Load

ENTRY = 0.25
"""Share of a linear stage before the first attention (norm, qkv); the rest follows the last."""


class StepTimes(NamedTuple):
    """Seconds of a step, and for how many of them each lane worked."""

    seconds: float
    device_s: float
    host_s: float


def step_times(plan: Plan, tables: CostTables) -> StepTimes:
    """A DEVICE_ONLY or PIPELINED plan on a machine whose parts cost what the tables say."""
    b0, b1 = Load.of(plan.b0), Load.of(plan.b1)
    links = _links_s(b0, plan.swaps, tables)
    per_step = tables.per_step[plan.mode]
    ends = per_step(b0.num_rows) + per_step(b1.num_rows)
    layers = _layers(plan.mode, b0, b1, tables)
    return StepTimes(max(layers.seconds, links) + ends, layers.device_s + ends, layers.host_s)


def _links_s(b0: Load, swaps: Iterable[Swap], c: CostTables) -> float:
    """Stores, fetches and swaps run beside the layers, on a link each way."""
    moved = {True: 0, False: 0}
    for swap in swaps:
        moved[swap.is_out] += swap.num_tokens
    down = c.store(b0.store_tokens) + c.swap_out(moved[True])
    up = c.fetch(b0.fetch_tokens) + c.swap_in(moved[False])
    return c.num_layers * max(down, up)


def _layers(mode: Mode, b0: Load, b1: Load, c: CostTables) -> StepTimes:
    batches = [batch for batch in (b0, b1) if batch.num_rows]
    linear = [c.linear[mode](b.num_rows) + c.hop(b.num_host_rows) for b in batches]
    on_host = [c.host_decode(b.num_host_rows, b.host_context) for b in batches]
    attention = [
        c.device_decode(b.num_decodes, b.decode_context)
        + sum(c.prefill_attention(tokens, context) for tokens, context in b.chunks)
        for b in batches
    ]
    store = c.store(b0.store_tokens)
    device = host = link = 0.0  # when each is free again
    joined = [0.0] * len(batches)  # when the attention of a sub-batch's host rows is done
    for layer in range(c.num_layers + 1):
        share = ENTRY if layer == 0 else 1 - ENTRY if layer == c.num_layers else 1.0
        for i in range(len(batches)):
            device = max(device, joined[i]) + share * linear[i]
            if layer == c.num_layers:
                continue
            if on_host[i]:
                joined[i] = host = max(host, device) + on_host[i]
            device += attention[i]
            if i == 0 and store:
                link = max(link, device) + store
    busy = c.num_layers * (sum(linear) + sum(attention))
    return StepTimes(max(device, link), busy, c.num_layers * sum(on_host))


def rolling_step_times(
    b0: Load, group_rows: int, groups: Iterable[tuple[int, int]], c: CostTables,
    swaps: Iterable[Swap] = (),
) -> StepTimes:  # fmt: skip
    """A ROLLING step: every layer carries a group of host rows, padded to group_rows.

    groups: rows and sum of contexts of those under way. The host attends to all of them within
    the step, in the steady state; the linear stages' table has the starts and joins in it.
    """
    layer = (
        c.linear[Mode.ROLLING](b0.num_rows + group_rows)
        + c.device_decode(b0.num_decodes, b0.decode_context)
        + sum(c.prefill_attention(tokens, context) for tokens, context in b0.chunks)
    )
    host_s = sum(c.host_decode(rows, context) for rows, context in groups)
    links_s = _links_s(b0, swaps, c)
    ends = c.per_step[Mode.ROLLING](b0.num_rows + group_rows)
    device_s = c.num_layers * layer + ends
    return StepTimes(max(device_s, host_s, links_s + ends), device_s, host_s)
