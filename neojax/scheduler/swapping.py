"""Which requests move between the pools: out when the device overflows, in when it has room.

And both by turns, where the user asks for it: see `rotation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neojax.scheduler.admission import can_finish_in
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.memory import Memory
from neojax.scheduler.plan import Swap
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.rotation import Rotation
from neojax.scheduler.situation import Situation
from neojax.scheduler.standing import Standing

MIN_STEPS_BETWEEN_MOVES = 16
"""A request stays where it has moved for so many steps: no ping-pong at the thresholds."""


class Swapping:
    """Moves of whole requests. Only decodes move: a prefill's blocks are being written."""

    def __init__(self, limits: SchedulerLimits, memory: Memory) -> None:
        self._limits = limits
        self._memory = memory
        self._rotation = Rotation(limits, memory)

    @property
    def held(self) -> Iterable[Request]:
        """Requests that wait for blocks to move into, and do not run meanwhile."""
        incoming = self._rotation.incoming
        return () if incoming is None else (incoming,)

    def pass_time(self, step_s: float | None) -> None:
        """A step was planned that takes so long; None: nobody knows."""
        self._rotation.pass_time(step_s)

    def schedule(
        self, step: int, running: Sequence[Request], standing: Standing, policy: OffloadPolicy,
        now: Situation,
    ) -> list[Swap]:  # fmt: skip
        """Moves of `step`: out of a device pool that this step would overflow, else a turn, else
        one in.
        """
        if not self._limits.can_swap:
            return []
        rotation = self._rotation
        rotates = rotation.is_on and policy.serves_host(now)
        if rotation.is_on:
            rotation.look(step, standing, is_due=rotates)
        swaps = self._out(step, running, standing, policy)
        if not swaps and rotates:
            swaps = self._turn(step, standing, policy, now)
        if swaps or self.held:
            return swaps
        if not policy.serves_host(now):
            # On the host they wait for nothing but this; with an idle device, not even for rest.
            return self._in(step, standing, policy, rested=now.num_device > 0)
        return self._in(step, standing, policy, rested=True) if policy.wants_back(now) else []

    def _out(
        self, step: int, running: Sequence[Request], standing: Standing, policy: OffloadPolicy
    ) -> list[Swap]:
        """The youngest first, as long as the device's decodes lack blocks to grow into."""
        device, host = (self._memory.pools[p] for p in (Placement.DEVICE, Placement.HOST))
        held = device.num_used - device.num_retired
        excess = held - self._limits.swap_out_threshold * device.limit
        if excess + standing.num_device <= 0:
            return []  # not even if each took a block
        on_device = [r for r in running if r.placement is Placement.DEVICE]
        excess += sum(self._memory.lacks(r) for r in on_device if r.is_decoding)
        on_host = standing.num_host
        swaps: list[Swap] = []
        for victim in reversed(standing.device_decodes):
            if excess <= 0 or victim is on_device[0]:
                break  # the oldest stays: somebody must get on
            if not self._may_move(victim, step) or not self._suits_host(victim, policy):
                continue
            if self._memory.num_blocks(victim.num_tokens) + on_host > host.num_free:
                break
            on_host += 1
            excess -= len(victim.blocks) + self._memory.lacks(victim)
            swaps.append(self._move(victim, Placement.HOST, step, "the device is full"))
        return swaps

    def _turn(
        self, step: int, standing: Standing, policy: OffloadPolicy, now: Situation
    ) -> list[Swap]:
        """Who comes in because room was made; else those who make room for the next one."""
        arriving = self._rotation.arriving(standing)
        if arriving is not None:
            return [self._move(arriving, Placement.DEVICE, step, "its turn on the device")]
        leaving = self._rotation.leaving(step, standing, policy, now)
        return [self._move(r, Placement.HOST, step, "another's turn") for r in leaving]

    def _in(
        self, step: int, standing: Standing, policy: OffloadPolicy, *, rested: bool
    ) -> list[Swap]:
        """The oldest on the host, one at a time: its copies must hide under the step.

        Where requests take turns, the one that is furthest behind. rested: only if it has not
        moved of late.
        """
        movable = [r for r in standing.host_decodes if not rested or self._may_move(r, step)]
        if self._rotation.is_on:
            movable = self._rotation.behind(step, movable)
        oldest = next(iter(movable), None)
        if oldest is None or not can_finish_in(oldest, Placement.DEVICE, policy, self._memory):
            return []
        device = self._memory.pools[Placement.DEVICE]
        need = self._memory.num_blocks(oldest.num_tokens) + standing.num_device
        # With nobody there the threshold would only keep a long request out for ever.
        share = self._limits.swap_in_threshold if standing.num_device else 1.0
        room = int(share * device.limit) - device.num_used
        if need > min(room, device.num_free):
            return []
        return [self._move(oldest, Placement.DEVICE, step, "the device has room")]

    def _suits_host(self, request: Request, policy: OffloadPolicy) -> bool:
        """Whether it may be on the host: to run there, or until there is room on the device."""
        if request.params.kv_placement == Placement.DEVICE.value:
            return False
        if Placement.HOST in policy.placements:
            return can_finish_in(request, Placement.HOST, policy, self._memory)
        return True

    def _may_move(self, request: Request, step: int) -> bool:
        moved = request.moved_step
        return moved is None or step - moved >= MIN_STEPS_BETWEEN_MOVES

    def _move(self, request: Request, placement: Placement, step: int, reason: str) -> Swap:
        source = tuple(request.blocks)
        self._memory.move(request, placement, step)
        request.moved_step = step
        target = tuple(request.blocks)
        tokens = request.progress.token
        filled = self._memory.num_blocks(tokens)
        return Swap(request, placement, tokens, source[:filled], target[:filled], reason)
