"""Who owns which KV block of one pool (device or host)."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """A free list over blocks 0..num_blocks-1, with a limit below the arrays' size.

    A block of a stopped request is *retired* with the number of the newest enqueued step and
    returns to the free list when that step completes: until then a program, a worker or a copy
    that was enqueued earlier may still read or write it.
    """

    def __init__(self, num_blocks: int, limit: int | None = None) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))
        self._retired: deque[tuple[int, list[int]]] = deque()
        self._limit = num_blocks
        self.set_limit(limit)

    def set_limit(self, limit: int | None) -> None:
        """Hand out at most this many blocks at a time; None lifts the limit.

        Raises ValueError when the arrays are smaller.
        """
        if limit is not None and not 0 <= limit <= self.num_blocks:
            raise ValueError(f"block limit must be between 0 and {self.num_blocks}, got {limit}")
        self._limit = self.num_blocks if limit is None else limit

    @property
    def limit(self) -> int:
        """Most blocks in use at a time."""
        return self._limit

    @property
    def num_used(self) -> int:
        """Blocks owned by requests or retired and not yet free."""
        return self.num_blocks - len(self._free)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now."""
        return max(0, self._limit - self.num_used)

    @property
    def num_retired(self) -> int:
        """Blocks that become free when the steps in flight complete."""
        return sum(len(blocks) for _, blocks in self._retired)

    @property
    def usage(self) -> float:
        """Share of the limit in use, 0..1."""
        return self.num_used / self._limit if self._limit else 0.0

    def allocate(self, n: int) -> list[int]:
        """Take n blocks; the caller has looked at `num_free`."""
        assert n <= self.num_free, (n, self.num_free)
        return [self._free.popleft() for _ in range(n)]

    def retire(self, blocks: list[int], step: int) -> None:
        """Give blocks back once `step` (the newest enqueued) has completed."""
        if blocks:
            self._retired.append((step, blocks))

    def release(self, completed_step: int) -> None:
        """All steps up to `completed_step` have completed."""
        while self._retired and self._retired[0][0] <= completed_step:
            self._free.extend(self._retired.popleft()[1])

    def check_integrity(self, owned: list[int]) -> None:
        """Every block is exactly once free, retired, or in `owned`."""
        retired = [b for _, blocks in self._retired for b in blocks]
        seen = sorted([*self._free, *retired, *owned])
        assert seen == list(range(self.num_blocks)), "a block is lost or owned twice"
