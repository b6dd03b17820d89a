"""Continuous batching over two KV pools: which rows the next step runs, and where requests live.

A state machine over queues and block pools. It knows nothing of devices: `schedule` gives a plan
as if the previous one had already completed, `update` is told the sampled tokens later.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import operator
from collections.abc import Iterator, Sequence

from neojax.scheduler.admission import Admission, possible_placements, why_never
from neojax.scheduler.block_pool import BlockPool
from neojax.scheduler.costs import CostTables
from neojax.scheduler.forecast import Forecast
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.memory import Memory
from neojax.scheduler.offer import Chunk, Offer
from neojax.scheduler.plan import Mode, Move, Plan, Rolling, Row, SubBatch
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.prediction import Predictor
from neojax.scheduler.request import START, Placement, Progress, Request, RequestState
from neojax.scheduler.rolling import GroupSize, RollingGroups
from neojax.scheduler.situation import Situation
from neojax.scheduler.standing import Standing
from neojax.scheduler.supervision import Supervision
from neojax.scheduler.swapping import Swapping
from neojax.scheduler.waits import Waits

log = logging.getLogger(__name__)


class Scheduler:
    """Queues, pools and the policy. Not thread-safe: one thread steps and feeds it.

    costs: what decides the modes and placements of policies that weigh them; without, `auto` uses
    the host whenever the device is full, and a policy that needs them raises ValueError.
    """

    def __init__(
        self, limits: SchedulerLimits, policy: OffloadPolicy, costs: CostTables | None = None
    ) -> None:
        self.limits = limits
        self._forecast = None if costs is None else Forecast(costs, limits)
        self.waiting: list[Request] = []  # by priority and arrival
        self.running: list[Request] = []  # by priority and arrival
        self.num_preemptions = 0
        self.num_placed = dict.fromkeys(Placement, 0)
        self.num_swapped = dict.fromkeys(Placement, 0)  # by where they went
        self._memory = Memory(limits)
        self._swapping = Swapping(limits, self._memory)
        self._supervision = Supervision(limits, self._memory)
        self._rolling = RollingGroups(limits.num_layers)
        self._group_size = (
            GroupSize(None, limits) if self._forecast is None else self._forecast.group_size
        )
        self._waits = Waits(limits)
        self._requests: dict[str, Request] = {}
        self._moves: list[Move] = []  # since the newest plan
        self._step = 0  # newest step given out
        self._completed = 0  # newest step known to have completed
        self.set_policy(policy)

    @property
    def predictor(self) -> Predictor | None:
        """What steps cost; None without cost tables."""
        return None if self._forecast is None else self._forecast.predictor

    @property
    def pools(self) -> dict[Placement, BlockPool]:
        """The blocks of both sides."""
        return self._memory.pools

    @property
    def has_requests(self) -> bool:
        """Whether any request waits or runs, or rows of stopped ones are under way."""
        return bool(self._requests or self._rolling)

    @property
    def has_rows_under_way(self) -> bool:
        """Whether there are host rows between two layers."""
        return bool(self._rolling)

    @property
    def rows_under_way(self) -> Iterator[Row]:
        """Host rows between two layers, in ROLLING mode."""
        return self._rolling.rows

    def set_policy(self, policy: OffloadPolicy) -> None:
        """Change the policy; no request may wait or run. ValueError when it lacks cost tables."""
        if policy.needs_costs and self.predictor is None:
            raise ValueError(
                f"offload_policy {policy.name!r} decides by cost tables and this engine has none; "
                "choose auto, device-only or full"
            )
        if policy.needs_rolling and not self.limits.rolling_rows:
            raise ValueError(
                f"offload_policy {policy.name!r} needs programs of ROLLING steps, and this engine "
                f"has none: start it with --offload-policy {policy.name} or with --rolling-rows 16"
            )
        self.policy = policy

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError when it could never run, or its id is in use."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is already in use")
        if not request.prompt_ids:
            raise ValueError("the prompt has no tokens")
        if len(request.prompt_ids) >= self.limits.max_model_len:
            raise ValueError(
                f"the prompt has {len(request.prompt_ids)} tokens; max_model_len is "
                f"{self.limits.max_model_len}, which must also hold one token of output"
            )
        if not possible_placements(request, self.policy, self._memory):
            raise ValueError(why_never(request, self.policy, self._memory, self.limits))
        self._requests[request.request_id] = request
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def abort(self, request_id: str, reason: str = "abort") -> Request | None:
        """Finish a request wherever it is; None when it is not known (any more)."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)
        return request

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can run until a step in flight completes."""
        step = self._step + 1
        standing = Standing.of(self.running)
        now = self._look(step, standing)
        swaps = self._swapping.schedule(step, self.running, standing, self.policy, now)
        for swap in swaps:
            self.num_swapped[swap.placement_to] += 1
            self._moves.append(Move(swap.request, swap.placement_to, swap.reason))
        moving = {*(swap.request for swap in swaps), *self._swapping.held}
        if moving:
            standing = Standing.of(self.running, moving)
        num_preemptions = self.num_preemptions
        device = self._grown(standing.device_decodes)
        if self.num_preemptions > num_preemptions:
            standing = Standing.of(self.running, moving)
        offer = self._offer(step, device, standing, now)
        choice = self._supervision.checked(step, offer, self.policy, now)
        host = set(self._grown([*choice.host0, *choice.host1]))
        host0, host1 = ([r for r in rows if r in host] for rows in (choice.host0, choice.host1))
        if host1 and not (host0 or device or choice.chunks):
            host0, host1 = host1, host0  # rows of b0 could not grow
        entering = self._entering(choice.entering or ())
        started = self._started(choice.chunks)
        if self.num_preemptions > num_preemptions:
            device = [r for r in device if r.state is RequestState.RUNNING]
        runs = bool(device or host0 or host1 or started or swaps)
        # Rows that lack blocks may have to wait for those that the groups under way hold.
        rolls = bool(entering or self._rolling) and (choice.entering is not None or not runs)
        if not (runs or rolls):
            return None
        self._step = step
        b0 = SubBatch(
            tuple([self._row(c.request, c.num_tokens) for c in started]),
            tuple([self._row(r, 1) for r in device]),
            tuple([self._row(r, 1) for r in host0]),
        )
        b1 = SubBatch(host_decodes=tuple([self._row(r, 1) for r in host1]))
        if rolls:
            mode = Mode.ROLLING
        else:
            mode = Mode.PIPELINED if b1 or b0.host_decodes or b0.host_chunks else Mode.DEVICE_ONLY
        plan = Plan(
            step=step,
            mode=mode,
            b0=b0,
            b1=b1,
            rolling=self._roll(entering if rolls else None),
            swaps=tuple(swaps),
            moves=tuple(self._moves),
            reason=choice.reason,
        )
        self._moves = []
        if self._forecast is not None:
            groups = self._rolling.loads if rolls else ()
            plan = dataclasses.replace(plan, prediction=self._forecast.of(plan, groups))
        step_s = None if plan.prediction is None else plan.prediction.step_s
        self._swapping.pass_time(step_s)
        self._waits.pass_time(step_s or 0.0)
        self._advance(plan)
        return plan

    def update(self, plan: Plan, tokens: Sequence[int]) -> list[Request]:
        """Take in the tokens of a completed step, one per `plan.sampled_rows`.

        Returns the requests that got a token. A negative one stands for logits that were not
        finite: the request ends with an error. A row of a request that has stopped meanwhile is
        the price of scheduling ahead: its token is dropped.
        """
        self.release(plan.step)
        for row in plan.rows:
            if row.epoch == row.request.num_preemptions:
                row.request.num_resident = row.stop
        advanced: list[Request] = []
        for row, token in zip(plan.sampled_rows, tokens, strict=True):
            request = row.request
            if request.state is RequestState.FINISHED:
                request.receive(None)
                continue
            if token < 0:
                request.receive(None)
                self._finish(request, "error")
                continue
            request.receive(token)
            advanced.append(request)
            if token in request.stop_ids:
                request.stop_reason = token
                self._finish(request, "stop")
            elif len(request.output_ids) >= request.max_tokens:
                self._finish(request, "length")
        return advanced

    def observe(self, plan: Plan, step_s: float, host_attention_s: float) -> None:
        """Learn from a completed step: its wall time, the workers' busy time in it."""
        if self.predictor is not None and plan.prediction is not None:
            self.predictor.corrections.observe(plan.mode, plan.prediction, step_s, host_attention_s)

    def release(self, step: int) -> None:
        """Every step up to `step` has completed: what they held is free."""
        self._completed = max(self._completed, step)
        self._memory.release(step)

    def rollback(self) -> None:
        """Forget all steps in flight and the device pool's contents; nothing may be running.

        DEVICE requests are recomputed from their tokens, and so are those whose move to the host
        was in flight. HOST requests keep their blocks: a decode resumes at its last read token
        (appending is idempotent), a prefill starts anew.
        """
        for held in self._rolling.clear():
            self._memory.retire(held, self._step)
        for request in list(self.running):
            request.expect_nothing()
            request.progress = request.progress._replace(layer=0)
            was_moving = request.moved_step is not None and request.moved_step > self._completed
            if request.placement is Placement.DEVICE or was_moving:
                self._preempt(request, "a step failed")
            else:
                known = len(request.prompt_ids) + len(request.output_ids)
                done = bool(request.output_ids) and request.num_resident >= known - 1
                request.progress = Progress(known - 1, 0) if done else START
        for request in self.waiting:
            request.expect_nothing()
        self.release(self._step)

    def check_integrity(self) -> None:
        """Invariants of the pools and queues; cheap enough for every idle moment and test."""
        self._memory.check_integrity([*self.running, *self._rolling.held])
        under_way = {row.request for row in self._rolling.rows}
        assert {held.request for held in self._rolling.held} <= under_way
        assert {r for r in self.running if r.progress.layer} <= under_way
        assert len(self._requests) == len(self.running) + len(self.waiting)
        for request in self._requests.values():
            outputs = len(request.output_ids) + request.num_pending
            assert request.num_tokens == len(request.prompt_ids) + outputs

    def _look(self, step: int, standing: Standing) -> Situation:
        forecast = self._forecast
        if forecast is not None:
            everybody = itertools.chain(self.running, self.waiting)
            device = self.pools[Placement.DEVICE]
            forecast.look(step, everybody, len(self._requests), device.limit)
        now = Situation(
            limits=self.limits,
            num_device=standing.num_device,
            num_host=standing.num_host,
            num_waiting=len(self.waiting),
            predictor=self.predictor,
            outlook=None if forecast is None else forecast.outlook,
        )
        if not (self.limits.rolling_rows and self.policy.rolls(now)):
            return now
        context = 1.0 if forecast is None else forecast.outlook.mean_context
        return dataclasses.replace(now, num_rolling=self._group_size.capacity(context))

    def _offer(self, step: int, device: list[Request], standing: Standing, now: Situation) -> Offer:
        budget = self.limits.max_num_batched_tokens - len(device)
        host: list[Request] = []
        if Placement.HOST in self.policy.placements:
            # Stable: those served last in the same step keep their order.
            host = sorted(standing.host_decodes, key=operator.attrgetter("served_step"))
        admission = Admission(self.policy, self._memory, now, standing)
        chunks = admission.chunks(itertools.chain(standing.prefills, self.waiting), budget)
        offer = Offer(
            tuple(device), tuple(host), tuple(chunks), budget, self.limits.block_size,
            num_late=self._waits.num_late(host, step),
        )  # fmt: skip
        if not self.limits.rolling_rows:
            return offer
        staying = self._rolling.staying_loads
        return dataclasses.replace(
            offer,
            group=self._group(host, staying) if now.num_rolling else (),
            staying=tuple(staying),
            num_under_way=self._rolling.num_rows,
            steps_parked=step - 1 - self._rolling.advanced_step if self._rolling else 0,
        )

    def _group(
        self, host: Sequence[Request], staying: Sequence[tuple[int, int]]
    ) -> tuple[Request, ...]:
        """Host rows that would enter a ROLLING step: by priority, then the longest unserved.

        A row enters only when its token has been read: one that turned out to have stopped would
        hold its blocks for as many steps as there are layers.
        """
        ready = sorted((r for r in host if not r.num_pending), key=lambda r: r.params.priority)
        return tuple(ready[: self._group_size.fitting((r.num_tokens for r in ready), staying)])

    def _grown(self, requests: Sequence[Request]) -> list[Request]:
        """Those that have, or now get, a place for their next token.

        The youngest of the same pool is preempted if need be, whether it is among them or not.
        """
        requests = requests[: self.limits.max_num_batched_tokens]
        stuck = {r for r in self._memory.short(requests) if not self._grow(r)}
        return [r for r in requests if r.state is RequestState.RUNNING and r not in stuck]

    def _grow(self, request: Request) -> bool:
        if request.state is not RequestState.RUNNING:
            return False  # preempted for one before it
        assert request.placement is not None
        pool = self.pools[request.placement]
        if not pool.num_free and not pool.num_retired:
            # Freed blocks arrive when the steps in flight complete; until then the row waits.
            victim = next(r for r in reversed(self.running) if r.placement is request.placement)
            # Between two layers it could free nothing yet: it gets its token, then has its turn.
            if not victim.progress.layer:
                self._preempt(victim, f"the {request.placement} pool is full")
        if not pool.num_free or request.state is not RequestState.RUNNING:
            return False
        request.blocks.extend(pool.allocate(1))
        return True

    def _started(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks that still can run, after what growth has taken; new requests start."""
        kept: list[Chunk] = []
        for chunk in chunks:
            request = chunk.request
            if chunk.is_new:
                room = self.pools[chunk.placement].num_free
                if not self._memory.slots.num_free or self._memory.lacks(request) > room:
                    break
                self._start(request, chunk.placement)
            elif request.state is not RequestState.RUNNING:
                continue
            kept.append(chunk)
        return kept

    def _start(self, request: Request, placement: Placement) -> None:
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=lambda r: r.order)
        request.state = RequestState.RUNNING
        self._memory.start(request, placement)
        if request.num_preemptions == 0:
            self.num_placed[placement] += 1
        self._moves.append(Move(request, placement, "starts"))

    def _entering(self, requests: Sequence[Request]) -> list[Row]:
        """Those that have a place for their next token, as rows that do not sample yet."""
        grown = self._grown(requests)
        return [self._row(r, 1)._replace(samples=False) for r in grown]

    def _roll(self, entering: Sequence[Row] | None) -> Rolling:
        """The groups go on by a layer; None: they stay where they are."""
        if entering is None:
            return Rolling(num_under_way=self._rolling.num_rows)
        leaving = self._rolling.advance(entering, self._step)
        for held in self._rolling.release(leaving):
            self._memory.retire(held, self._step)
        for row in entering:
            # All its K and V are spoken for; it cannot be scheduled again before it samples.
            row.request.progress = Progress(row.stop, 1)
        return Rolling(tuple(entering), leaving, self._rolling.num_rows)

    def _advance(self, plan: Plan) -> None:
        """Requests go on as if the step had run."""
        step = plan.step
        for row in plan.rows:
            request = row.request
            if row.epoch == request.num_preemptions:
                request.progress = Progress(row.start.token + row.num_tokens, 0)
            if row.samples:
                request.expect_token()
            request.served_step = step

    def _row(self, request: Request, n: int) -> Row:
        assert request.slot is not None
        assert request.placement is not None
        start = request.progress
        stop = start.token + n
        # By position: a step has hundreds of rows.
        return Row(
            request,
            start,
            n,
            stop == request.num_tokens and request.wants_more,
            request.slot,
            request.placement,
            request.num_preemptions,
            self._memory.holding(request, stop),
        )

    def _preempt(self, request: Request, reason: str) -> None:
        """Give up the request's blocks; it will be recomputed from its tokens."""
        self._vacate(request)
        request.state = RequestState.WAITING
        request.placement = None
        request.progress = START
        request.num_resident = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._moves.append(Move(request, None, reason))
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def _finish(self, request: Request, reason: str) -> None:
        if request.state is RequestState.RUNNING:
            self._vacate(request)
        else:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        if self._forecast is not None and reason in ("stop", "length"):
            self._forecast.outlook.finished(request)
        del self._requests[request.request_id]

    def _vacate(self, request: Request) -> None:
        self.running.remove(request)
        held = self._memory.vacate(request)
        if request.progress.layer:
            self._rolling.hold(held)
        else:
            self._memory.retire(held, self._step)
