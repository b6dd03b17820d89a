"""Whose row of the logit state is whose: writes a request's row when it starts, and its masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax
import numpy as np

from neojax.runner.logit_state import (
    MASKS_PER_WRITE,
    LogitState,
    LogitStateSizes,
    write_masks,
)
from neojax.runner.programs import Signature
from neojax.runner.shapes import Shape
from neojax.scheduler.plan import Row
from neojax.scheduler.request import Request


class LogitRows:
    """Follows the plans on the host; the state itself is passed through, for it is donated."""

    def __init__(self, sizes: LogitStateSizes) -> None:
        self.sizes = sizes
        self._write_request = jax.jit(sizes.write_request, donate_argnums=0)
        self._write_masks = jax.jit(write_masks, donate_argnums=0)
        self._owners: dict[int, tuple[Request, int]] = {}

    def make(self) -> LogitState:
        """A new state, nobody's."""
        self._owners.clear()
        return self.sizes.make()

    def prepare(self, state: LogitState, rows: Iterable[Row]) -> tuple[LogitState, list[int]]:
        """The state, with what its sampling rows need launched; and the row that each reads."""
        found: list[int] = []
        masks: list[tuple[int, np.ndarray]] = []
        for row in rows:
            if not row.request.params.changes_logits:
                found.append(self.sizes.neutral)
                continue
            found.append(row.slot)
            # A life that begins, or goes on after the state was lost: its tokens are all known.
            if self._owners.get(row.slot) != (row.request, row.epoch):
                self._owners[row.slot] = (row.request, row.epoch)
                state = self._write_request(state, self.sizes.pack(row.slot, row.request))
            if row.request.constraint is not None:
                masks.append((row.slot, row.request.constraint.mask))
        for first in range(0, len(masks), MASKS_PER_WRITE):
            state = self._write_masks(state, *self._packed(masks[first : first + MASKS_PER_WRITE]))
        return state, found

    def signatures(self, state: LogitState) -> Iterator[Signature]:
        """The programs that write rows."""
        packed = self.sizes.no_row()
        yield Signature("write_request", Shape(0, 0), self._write_request, (state, packed))
        yield Signature("write_masks", Shape(0, 0), self._write_masks, (state, *self._packed([])))

    def warm_up(self, state: LogitState) -> LogitState:
        """Run both programs; they write nothing."""
        state = self._write_request(state, self.sizes.no_row())
        return self._write_masks(state, *self._packed([]))

    def _packed(self, masks: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        slots = np.full(MASKS_PER_WRITE, self.sizes.neutral + 1, np.int32)  # dropped
        words = np.zeros((MASKS_PER_WRITE, self.sizes.num_words), np.int32)
        for i, (slot, mask) in enumerate(masks):
            slots[i], words[i] = slot, mask
        return slots, words
