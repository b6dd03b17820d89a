"""Blocks and slots: what the running requests hold of the two pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neojax.scheduler.block_pool import BlockPool
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.rolling import Held


class Memory:
    """The two block pools and the slots of a step's rows."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.pools = {
            Placement.DEVICE: BlockPool(limits.num_device_blocks),
            Placement.HOST: BlockPool(limits.num_host_blocks),
        }
        self.slots = BlockPool(limits.max_num_seqs)
        self._block_size = limits.block_size
        self._completed = 0  # newest step known to have completed

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold the K/V of so many tokens."""
        return -(-num_tokens // self._block_size)

    def lacks(self, request: Request) -> int:
        """Blocks to allocate before the request's newest token has a place."""
        missing = request.num_tokens - len(request.blocks) * self._block_size
        return self.num_blocks(missing) if missing > 0 else 0

    def short(self, requests: Iterable[Request]) -> list[Request]:
        """Those of them that lack blocks."""
        size = self._block_size  # a step asks of hundreds
        return [r for r in requests if r.num_tokens > len(r.blocks) * size]

    def holding(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """The blocks of its first tokens."""
        return tuple(request.blocks[: -(-num_tokens // self._block_size)])

    def start(self, request: Request, placement: Placement) -> None:
        """Give a request its slot, and the blocks of all its tokens.

        All at once: a prefill that has begun never waits for memory.
        """
        request.placement = placement
        request.slot = self.slots.allocate(1)[0]
        request.blocks = self.pools[placement].allocate(self.num_blocks(request.num_tokens))

    def vacate(self, request: Request) -> Held:
        """Take blocks and slot from a request; `retire` gives them back."""
        assert request.placement is not None
        assert request.slot is not None
        held = Held(request, request.placement, request.blocks, request.slot)
        request.blocks = []
        request.slot = None
        return held

    def retire(self, held: Held, step: int) -> None:
        """They are free once `step`, the newest enqueued, has completed."""
        self.pools[held.placement].retire(held.blocks, step)
        self.slots.retire([held.slot], step)
        self.release(self._completed)

    def move(self, request: Request, placement: Placement, step: int) -> None:
        """Give a running request blocks of the other pool; the old ones are free after `step`."""
        assert request.placement is not None
        blocks = self.pools[placement].allocate(self.num_blocks(request.num_tokens))
        self.pools[request.placement].retire(request.blocks, step)
        request.placement, request.blocks = placement, blocks

    def release(self, step: int) -> None:
        """Every step up to `step` has completed: what they held is free."""
        self._completed = max(self._completed, step)
        for pool in (*self.pools.values(), self.slots):
            pool.release(step)

    def check_integrity(self, owners: Sequence[Request | Held]) -> None:
        """No block and no slot is lost or owned twice."""
        for placement, pool in self.pools.items():
            pool.check_integrity([b for o in owners if o.placement is placement for b in o.blocks])
        self.slots.check_integrity([o.slot for o in owners if o.slot is not None])
