"""Turns on the device: a request that is behind on the host takes the place of one that is ahead.

Where host rows advance more slowly than the device's, requests fall into two classes. Rotation
makes their mean time per token alike, at the price of copies. Off unless it is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from neojax.scheduler.admission import can_finish_in
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.memory import Memory
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.prediction import Predictor
from neojax.scheduler.request import Placement, Request, RequestState
from neojax.scheduler.situation import Situation
from neojax.scheduler.standing import Standing

LEAD = 1.25
"""Who takes a place has waited for each token so much longer than the one who gives it."""

COPY_SHARE = 0.1
"""Share of the predicted time of all steps that the copies of rotation may take."""

LEAST_LEFT = 16
"""Tokens that one who gives a place still wants at least: with fewer, it soon frees the place."""

HOLD_STEPS = 4
"""A request waits so many steps at most for the blocks that were made free for it."""

GROWTH_STEPS = 3
"""Steps between a request's move out and the next one's move in, in which the others grow."""


class Rotation:
    """Decides who leaves the device for whom; `Swapping` moves them.

    Two moves make a turn: one or more requests go out, and when their blocks are free, one step or
    two later, the request they made room for comes in. One turn at a time.
    """

    def __init__(self, limits: SchedulerLimits, memory: Memory) -> None:
        self._limits = limits
        self._memory = memory
        self._debt_s = 0.0  # of copies made, as far as steps since have not made up for it
        self._since = 0  # step at which room was made
        self.incoming: Request | None = None
        """The request that room was made for. It does not run until it has moved."""

    @property
    def is_on(self) -> bool:
        """Whether the user asked for it."""
        return self._limits.rotate_steps > 0

    def pass_time(self, step_s: float | None) -> None:
        """A step was planned; None: nobody knows how long it takes, so copies are not weighed."""
        if self._debt_s:
            self._debt_s = 0.0 if step_s is None else max(0.0, self._debt_s - COPY_SHARE * step_s)

    def look(self, step: int, standing: Standing, *, is_due: bool) -> None:
        """Take note of who decodes: time per token counts from the first token.

        is_due: whether requests run on the host at present, so that turns make sense.
        """
        for request in itertools.chain(standing.device_decodes, standing.host_decodes):
            if not request.decoding_since:
                request.decoding_since = step
        if self.incoming is not None and not (is_due and self._still_waits(self.incoming, step)):
            self.incoming = None

    def behind(self, step: int, requests: Iterable[Request]) -> list[Request]:
        """By priority, then those that have waited longest for each of their tokens."""
        return sorted(requests, key=lambda r: (r.params.priority, -_steps_per_token(r, step)))

    def arriving(self, standing: Standing) -> Request | None:
        """The request that room was made for, once its blocks are free."""
        request = self.incoming
        if request is None or not request.wants_more:
            return None
        growth = self._growth(standing, steps=0)
        if self._need(request) + growth > self._memory.pools[Placement.DEVICE].num_free:
            return None
        self.incoming = None
        return request

    def leaving(
        self, step: int, standing: Standing, policy: OffloadPolicy, now: Situation
    ) -> list[Request]:
        """Those that make room for the request that is furthest behind, now `incoming`."""
        if self._debt_s or self.incoming is not None:
            return []
        candidates = self.behind(step, self._rested(step, standing.host_decodes))
        if not candidates:
            return []
        # The least urgent first, then the furthest ahead.
        givers = sorted(
            (
                r
                for r in self._rested(step, standing.device_decodes)
                if r.most_tokens - r.num_tokens >= LEAST_LEFT and self._may_leave(r, policy)
            ),
            key=lambda r: (-r.params.priority, _steps_per_token(r, step)),
        )
        too_large = self._memory.pools[Placement.DEVICE].limit + 1
        for request in candidates:
            ahead = list(
                itertools.takewhile(lambda r, to=request: _may_take_place(to, r, step), givers)
            )
            if not ahead:
                continue
            need = self._need(request)
            # A larger one would not find the room either, and fewer are ahead of those to come.
            if need >= too_large or not can_finish_in(
                request, Placement.DEVICE, policy, self._memory
            ):
                continue
            out = self._making_room(need, ahead, standing)
            if out is None:
                too_large = need
                continue
            self.incoming, self._since = request, step
            if now.predictor is not None:
                self._debt_s += _copies_s(now.predictor, request, out)
            return out
        return []

    def _still_waits(self, request: Request, step: int) -> bool:
        """Whether the incoming request can still move, and its room has not gone to others."""
        is_there = request.state is RequestState.RUNNING and request.placement is Placement.HOST
        if not (is_there and request.is_decoding and (request.wants_more or request.num_pending)):
            return False
        return step - self._since < HOLD_STEPS

    def _rested(self, step: int, requests: Iterable[Request]) -> list[Request]:
        """Those that have had their turn where they are."""
        least = self._limits.rotate_steps
        return [r for r in requests if step - (r.moved_step or r.decoding_since) >= least]

    def _may_leave(self, request: Request, policy: OffloadPolicy) -> bool:
        return can_finish_in(request, Placement.HOST, policy, self._memory)

    def _making_room(
        self, need: int, ahead: Sequence[Request], standing: Standing
    ) -> list[Request] | None:
        """Whose blocks together are enough, one request's if possible; None: not even all are.

        The device does not get fuller than it is, or than requests may move in at any time.
        """
        device, host = (self._memory.pools[p] for p in (Placement.DEVICE, Placement.HOST))
        held = device.num_used - device.num_retired
        most = max(held, int(self._limits.swap_in_threshold * device.limit))
        growth = self._growth(standing, GROWTH_STEPS)
        room = min(most, device.limit - growth) - held
        spare = host.num_free - standing.num_host
        for request in ahead:
            if need <= room + len(request.blocks) and self._target_blocks(request) <= spare:
                return [request]
        out: list[Request] = []
        for request in ahead:
            spare -= self._target_blocks(request)
            if spare < 0:
                return None
            out.append(request)
            room += len(request.blocks)
            if need <= room:
                return out
        return None

    def _target_blocks(self, request: Request) -> int:
        """Blocks that it takes on the host, and one to grow into."""
        return self._memory.num_blocks(request.num_tokens) + 1

    def _need(self, request: Request) -> int:
        """Blocks that it takes on the device, its next token's included."""
        return self._memory.num_blocks(request.num_tokens + 1)

    def _growth(self, standing: Standing, steps: int) -> int:
        """Blocks that the device's decodes take in so many steps more."""
        num_blocks = self._memory.num_blocks
        return sum(
            max(0, num_blocks(r.num_tokens + steps) - len(r.blocks))
            for r in standing.device_decodes
        )


def _steps_per_token(request: Request, step: int) -> float:
    """Mean steps that a request has waited for a token, since its first one."""
    num_tokens = request.num_tokens - len(request.prompt_ids)
    return (step - request.decoding_since + 1) / max(1, num_tokens)


def _may_take_place(request: Request, of: Request, step: int) -> bool:
    """A more urgent request as soon as it lags behind the device; one as urgent, if far behind."""
    if request.params.priority > of.params.priority:
        return False
    is_as_urgent = request.params.priority == of.params.priority
    pace = _steps_per_token(of, step) if is_as_urgent else 1.0
    return _steps_per_token(request, step) >= LEAD * max(1.0, pace)


def _copies_s(predictor: Predictor, request: Request, out: Iterable[Request]) -> float:
    """Seconds that the copies of a turn take, both ways."""
    c = predictor.tables
    layer_s = c.swap_in(request.num_tokens) + sum(c.swap_out(r.num_tokens) for r in out)
    return c.num_layers * layer_s
