"""Cost tables of a machine that is not here: bytes and operations over what it attains.

A layer's matrix products take the longer of reading weights and computing, rounded where the two
meet (the norm of order two fits the H200's measured layers within 5 %).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from neojax.models.config import ModelConfig
from neojax.plan.machine import EFFICIENCY, NEOJAX_KERNEL, Efficiency, HostKernel, Machine
from neojax.scheduler.costs import CostTables, Table1, Table2
from neojax.scheduler.plan import Mode

BYTES = 2  # of a weight or a K or V element


class Roofline:
    """Seconds of each part of a step, of one model on one machine."""

    def __init__(
        self,
        machine: Machine,
        model: ModelConfig,
        *,
        kernel: HostKernel = NEOJAX_KERNEL,
        efficiency: Efficiency = EFFICIENCY,
    ) -> None:
        self.machine, self.model, self.kernel, self.efficiency = machine, model, kernel, efficiency
        n, e = machine.num_devices, efficiency
        self._flops = n * machine.device_flops * e.flops
        self._attention_flops = n * machine.device_flops * e.attention_flops
        self._bandwidth = n * machine.device_bandwidth * e.bandwidth
        d, f = model.hidden_size, model.intermediate_size
        self._layer_weights = d * (2 * model.q_size + 2 * model.kv_size + 3 * f)

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.model.num_layers * self._kv_layer_bytes

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return self.model.num_parameters * BYTES

    @property
    def device_kv_tokens(self) -> int:
        """Tokens whose KV the devices hold beside weights, at 0.9 of their memory less 1 GB."""
        memory = self.machine.num_devices * (0.9 * self.machine.device_memory - 1e9)
        return max(0, int((memory - self.weight_bytes) / self.kv_token_bytes))

    @property
    def host_kv_tokens(self) -> int:
        """Tokens whose KV three quarters of the host's memory hold."""
        return int(0.75 * self.machine.host_memory / self.kv_token_bytes)

    def linear(self, rows: float, mode: Mode = Mode.DEVICE_ONLY) -> float:
        """Matrix products of a layer, its sums over devices included.

        In ROLLING mode also the start and join of its host rows, which have a step to end in.
        """
        seconds = self._products(rows, self._layer_weights)
        if mode is Mode.PIPELINED:
            seconds += self.efficiency.stage_s
        elif mode is Mode.ROLLING:
            seconds += self.efficiency.rolling_hop_s
        n = self.machine.num_devices
        if n > 1:
            moved = 2 * (n - 1) / n * rows * self.model.hidden_size * BYTES
            seconds += 2 * (self.efficiency.all_reduce_s + moved / self.machine.device_link)
        return seconds

    def prefill_attention(self, chunk: float, context: float) -> float:
        """Causal attention of a chunk's tokens to a context that ends with them."""
        pairs = chunk * (max(context, chunk) - chunk / 2)
        return 4 * self.model.q_size * pairs / self._attention_flops

    def device_decode(self, rows: float, context: float) -> float:
        """Reading the KV of one layer."""
        del rows
        return context * self._kv_layer_bytes / self._bandwidth

    def host_decode(self, rows: float, context: float) -> float:
        """The workers reading the KV of one layer."""
        del rows
        group = self.model.num_heads // self.model.num_kv_heads
        rate = self.kernel.bytes_per_s(self.machine, group)
        return self.kernel.call_s + context * self._kv_layer_bytes / rate

    def hop(self, rows: float) -> float:
        """q, k and v down, the output up."""
        row_bytes = 2 * (self.model.q_size + self.model.kv_size) * BYTES
        link = self.machine.host_link * self.efficiency.hop_link
        return self.efficiency.hop_s + rows * row_bytes / link

    def copy(self, tokens: float) -> float:
        """K and V of one layer over the host's link."""
        return tokens * self._kv_layer_bytes / (self.machine.host_link * self.efficiency.link)

    def per_step(self, rows: float) -> float:
        """The head's product, and what does not depend on rows."""
        head = self.model.hidden_size * self.model.vocab_size
        return self.efficiency.step_s + self._products(min(rows, 256), head)

    def tables(self, max_tokens: int, max_context: int) -> CostTables:
        """The tables up to steps of max_tokens and pools of max_context tokens."""
        tokens, contexts = _grid(max_tokens), _grid(max_context)
        rows = _grid(min(max_tokens, 4096))
        return CostTables(
            num_layers=self.model.num_layers,
            linear={
                mode: _table1(tokens, lambda rows, mode=mode: self.linear(rows, mode))
                for mode in Mode
            },
            prefill_attention=_table2(tokens, contexts, self.prefill_attention),
            device_decode=_table2(rows, contexts, self.device_decode),
            host_decode=_table2(rows, contexts, self.host_decode),
            hop=_table1(rows, self.hop),
            store=_table1(tokens, self.copy),
            fetch=_table1(contexts, self.copy),
            swap_out=_table1(contexts, self.copy),
            swap_in=_table1(contexts, self.copy),
            per_step=dict.fromkeys(Mode, _table1(tokens, self.per_step)),
        )

    @property
    def _kv_layer_bytes(self) -> int:
        return 2 * self.model.kv_size * BYTES

    def _products(self, rows: float, weights: float) -> float:
        return math.hypot(weights * BYTES / self._bandwidth, 2 * rows * weights / self._flops)


def _grid(largest: int) -> list[int]:
    """1 to `largest` in steps of about a quarter octave."""
    count = max(1, math.ceil(4 * math.log2(max(largest, 2))))
    return sorted({round(largest ** (i / count)) for i in range(count + 1)} | {largest})


def _table1(xs: list[int], cost: Callable[[float], float]) -> Table1:
    return Table1(tuple(xs), tuple(map(cost, xs)))


def _table2(xs: list[int], ys: list[int], cost: Callable[[float, float], float]) -> Table2:
    values = tuple(tuple(itertools.starmap(cost, ((x, y) for y in ys))) for x in xs)
    return Table2(tuple(xs), tuple(ys), values)
