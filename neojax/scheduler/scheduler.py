"""Continuous batching over two KV pools: which rows the next step runs, and where requests live.

A state machine over queues and block pools. It knows nothing of devices: `schedule` gives a plan
as if the previous one had already completed, `update` is told the sampled tokens later.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Iterator, Sequence

from neojax.scheduler.block_pool import BlockPool
from neojax.scheduler.plan import Mode, Plan, Rolling, Row, SubBatch
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import START, Placement, Progress, Request, RequestState
from neojax.scheduler.rolling import Held, RollingGroups

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the compiled programs and the pools can take."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_num_chunks: int  # prefill chunks in one step
    scratch_tokens: int  # prefix and chunk tokens of HOST-placed prefills in one step
    num_layers: int = 0  # of the model; counts only with ROLLING steps
    rolling_rows: int = 0  # host rows of a group in ROLLING steps; 0: there are none


class Scheduler:
    """Queues, pools and the policy. Not thread-safe: one thread steps and feeds it."""

    def __init__(self, limits: SchedulerLimits, policy: OffloadPolicy) -> None:
        self.limits = limits
        self.policy = policy
        self.pools = {
            Placement.DEVICE: BlockPool(limits.num_device_blocks),
            Placement.HOST: BlockPool(limits.num_host_blocks),
        }
        self.waiting: list[Request] = []  # by arrival
        self.running: list[Request] = []  # by arrival
        self.num_preemptions = 0
        self.num_placed = dict.fromkeys(Placement, 0)
        self._slots = BlockPool(limits.max_num_seqs)
        self._rolling = RollingGroups(limits.num_layers)
        self.rolling_rows = limits.rolling_rows
        """Most rows of a group; may be lowered to what the host attends to in a step."""
        self._requests: dict[str, Request] = {}
        self._step = 0  # newest step given out
        self._completed = 0  # newest step known to have completed

    @property
    def has_requests(self) -> bool:
        """Whether any request waits or runs, or rows of stopped ones are under way."""
        return bool(self._requests or self._rolling)

    @property
    def rows_under_way(self) -> Iterator[Row]:
        """Host rows between two layers, in ROLLING mode."""
        return self._rolling.rows

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold the K/V of so many tokens."""
        return -(-num_tokens // self.limits.block_size)

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
        if not self._placements(request):
            raise ValueError(self._why_never(request))
        self._requests[request.request_id] = request
        bisect.insort(self.waiting, request, key=lambda r: r.arrival)

    def abort(self, request_id: str, reason: str = "abort") -> Request | None:
        """Finish a request wherever it is; None when it is not known (any more)."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)
        return request

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can run until a step in flight completes."""
        budget = self.limits.max_num_batched_tokens
        decodes = self._schedule_decodes(budget)
        budget -= len(decodes)
        entering = self._schedule_entering()
        chunks = self._schedule_chunks(budget)
        if entering or self._rolling:
            return self._rolling_plan(chunks, decodes, entering)
        if not (decodes or chunks):
            return None
        self._step += 1
        device = tuple(row for row in decodes if row.placement is Placement.DEVICE)
        host = [row for row in decodes if row.placement is Placement.HOST]
        needs_host = bool(host) or any(row.placement is Placement.HOST for row in chunks)
        host0, host1 = self._split(host, has_device_work=bool(device or chunks))
        plan = Plan(
            step=self._step,
            mode=Mode.PIPELINED if needs_host else Mode.DEVICE_ONLY,
            b0=SubBatch(tuple(chunks), device, tuple(host0)),
            b1=SubBatch(host_decodes=tuple(host1)),
        )
        self._advance(plan)
        return plan

    def update(self, plan: Plan, tokens: Sequence[int]) -> list[Request]:
        """Take in the tokens of a completed step, one per `plan.sampled_rows`.

        Returns the requests that got a token. A row of a request that has stopped meanwhile is
        the price of scheduling ahead: its token is dropped.
        """
        self.release(plan.step)
        for row in plan.rows:
            if row.epoch == row.request.num_preemptions:
                row.request.num_resident = row.stop
        advanced: list[Request] = []
        for row, token in zip(plan.sampled_rows, tokens, strict=True):
            request = row.request
            request.num_pending -= 1
            if request.state is RequestState.FINISHED:
                continue
            request.output_ids.append(token)
            advanced.append(request)
            if token in request.stop_ids:
                request.stop_reason = token
                self._finish(request, "stop")
            elif len(request.output_ids) >= request.max_tokens:
                self._finish(request, "length")
        return advanced

    def release(self, step: int) -> None:
        """Every step up to `step` has completed: what they held is free."""
        self._completed = max(self._completed, step)
        for pool in (*self.pools.values(), self._slots):
            pool.release(step)

    def rollback(self) -> None:
        """Forget all steps in flight and the device pool's contents; nothing may be running.

        DEVICE requests are recomputed from their tokens. HOST requests keep their blocks: a
        decode resumes at its last read token (appending is idempotent), a prefill starts anew.
        """
        for held in self._rolling.clear():
            self.pools[held.placement].retire(held.blocks, self._step)
            self._slots.retire([held.slot], self._step)
        for request in list(self.running):
            request.num_pending = 0
            if request.placement is Placement.DEVICE:
                self._preempt(request)
            else:
                known = len(request.prompt_ids) + len(request.output_ids)
                done = bool(request.output_ids) and request.num_resident >= known - 1
                request.progress = Progress(known - 1, 0) if done else START
        for request in self.waiting:
            request.num_pending = 0
        self.release(self._step)

    def check_integrity(self) -> None:
        """Invariants of the pools and queues; cheap enough for every idle moment and test."""
        for placement, pool in self.pools.items():
            pool.check_integrity(
                [
                    b
                    for owner in (*self.running, *self._rolling.held)
                    if owner.placement is placement
                    for b in owner.blocks
                ]
            )
        owners = (*self.running, *self._rolling.held)
        self._slots.check_integrity([owner.slot for owner in owners if owner.slot is not None])
        assert len(self._requests) == len(self.running) + len(self.waiting)

    def _split(
        self, host: Sequence[Row], has_device_work: bool
    ) -> tuple[Sequence[Row], Sequence[Row]]:
        """The policy's split of the host rows, or the rule's where the policy's cannot run."""
        host0, host1 = self.policy.split(host, has_device_work)
        is_partition = sorted(map(id, (*host0, *host1))) == sorted(map(id, host))
        # No compiled program has device tokens beside host rows, nor an empty b0.
        if is_partition and not (host0 and has_device_work) and (host0 or has_device_work):
            return host0, host1
        if host:
            log.warning(
                "policy %s split %d host rows as no program can run; the usual split is taken",
                self.policy.name,
                len(host),
            )
        return OffloadPolicy.split(self.policy, host, has_device_work)

    def _schedule_decodes(self, budget: int) -> list[Row]:
        rows: list[Row] = []
        rolls = self.policy.rolls and self.limits.rolling_rows > 0
        # A copy: growing one request may preempt younger ones, which are behind it in the list.
        for request in list(self.running):
            if len(rows) >= budget:
                break
            if rolls and request.placement is Placement.HOST:
                continue
            if request.state is not RequestState.RUNNING or not request.is_decoding:
                continue
            if request.wants_more and self._grow(request):
                rows.append(self._row(request, 1))
        return rows

    def _schedule_entering(self) -> list[Row]:
        """Host rows of the group that a ROLLING step takes in, the oldest first.

        A row enters only when its token has been read: one that turned out to have stopped would
        hold its blocks for as many steps as there are layers.
        """
        rows: list[Row] = []
        if not self.policy.rolls:
            return rows
        for request in list(self.running):
            if len(rows) >= self.rolling_rows:
                break
            if (
                request.placement is Placement.HOST
                and request.state is RequestState.RUNNING
                and request.is_decoding
                and not request.num_pending
                and self._grow(request)
            ):
                rows.append(dataclasses.replace(self._row(request, 1), samples=False))
        return rows

    def _rolling_plan(
        self, chunks: Sequence[Row], decodes: Sequence[Row], entering: Sequence[Row]
    ) -> Plan:
        self._step += 1
        leaving = self._rolling.advance(entering)
        for held in self._rolling.release(leaving):
            self.pools[held.placement].retire(held.blocks, self._step)
            self._slots.retire([held.slot], self._step)
        for row in entering:
            # All its K and V are spoken for; it cannot be scheduled again before it samples.
            row.request.progress = Progress(row.stop, 1)
        plan = Plan(
            step=self._step,
            mode=Mode.ROLLING,
            b0=SubBatch(tuple(chunks), tuple(decodes)),
            rolling=Rolling(tuple(entering), leaving),
        )
        self._advance(plan)
        return plan

    def _advance(self, plan: Plan) -> None:
        """Requests go on as if the step had run."""
        for row in plan.rows:
            if row.epoch == row.request.num_preemptions:
                row.request.progress = Progress(row.stop, 0)
            row.request.num_pending += row.samples

    def _schedule_chunks(self, budget: int) -> list[Row]:
        rows: list[Row] = []
        scratch = self.limits.scratch_tokens
        blocked: set[Placement] = set()
        for request in [*self.running, *self.waiting]:
            if budget <= 0 or len(rows) >= self.limits.max_num_chunks:
                break
            is_new = request.state is RequestState.WAITING
            if not is_new and (request.is_decoding or request.num_remaining == 0):
                continue
            placement = self._admissible(request, blocked) if is_new else request.placement
            if placement is None:
                if len(blocked) == len(self.pools):
                    break
                continue
            n = min(request.num_remaining, budget)
            if placement is Placement.HOST:
                n = self._host_chunk(request, n, scratch, is_first=not rows)
                if n == 0:
                    blocked.add(Placement.HOST)  # those behind it wait their turn
                    continue
                scratch -= self._rounded(request.progress.token + n)
            if is_new:
                self._start(request, placement)
            rows.append(self._row(request, n))
            budget -= n
        return rows

    def _host_chunk(self, request: Request, n: int, scratch: int, is_first: bool) -> int:
        """Tokens of a HOST-placed prefill chunk that this step can take; 0 for none.

        A chunk that is not the last ends on a block boundary, so that the arena never holds a
        block that two steps write. A later chunk must fetch its prefix from the arena, so a
        prompt is split only when it leads the step's chunks: waiting would not help it.
        """
        start = request.progress.token
        if n < request.num_remaining:
            if not is_first:
                return 0
            n = (start + n) // self.limits.block_size * self.limits.block_size - start
        return n if n > 0 and self._rounded(start + n) <= scratch else 0

    def _rounded(self, num_tokens: int) -> int:
        """Whole blocks: a chunk and its prefix start a block of their own in the scratch pool."""
        return self.num_blocks(num_tokens) * self.limits.block_size

    def _admissible(self, request: Request, blocked: set[Placement]) -> Placement | None:
        """Where a waiting request can start now. Marks pools that it waits for as blocked."""
        if request.num_pending or not self._slots.num_free:
            blocked.update(self.pools)
            return None
        need = self.num_blocks(request.num_tokens)
        for placement in self._placements(request):
            if placement in blocked:
                continue
            # Each running request is about to grow: without a block in hand for each of them,
            # the newcomer would soon be preempted again.
            headroom = sum(r.placement is placement for r in self.running)
            if (
                self.policy.rolls
                and placement is Placement.HOST
                and headroom >= (self.limits.num_layers + 1) * self.rolling_rows
            ):
                continue
            if need + headroom <= self.pools[placement].num_free:
                return placement
        blocked.update(self._placements(request))
        return None

    def _placements(self, request: Request) -> tuple[Placement, ...]:
        """Pools in which the request can finish, the policy's preferred one first."""
        wanted = request.params.kv_placement
        # The last token's K/V is never needed.
        worst = self.num_blocks(len(request.prompt_ids) + request.max_tokens - 1)
        return tuple(
            p
            for p in self.policy.placements
            if wanted in ("auto", p.value) and worst <= self.pools[p].limit
        )

    def _why_never(self, request: Request) -> str:
        wanted = request.params.kv_placement
        if wanted not in ("auto", *(p.value for p in self.policy.placements)):
            return f"kv_placement {wanted!r} is not possible under policy {self.policy.name!r}"
        tokens = len(request.prompt_ids) + request.max_tokens - 1
        room = ", ".join(
            f"the {p} pool holds {self.pools[p].limit * self.limits.block_size}"
            for p in self.policy.placements
        )
        return (
            f"prompt ({len(request.prompt_ids)}) plus max_tokens ({request.max_tokens}) needs KV "
            f"for {tokens} tokens; {room}. Lower max_tokens, or start with a larger --cpu-kv-gib"
        )

    def _grow(self, request: Request) -> bool:
        """Make room for the next token, preempting the youngest of the same pool if need be."""
        if self.num_blocks(request.num_tokens) <= len(request.blocks):
            return True
        assert request.placement is not None
        pool = self.pools[request.placement]
        if not pool.num_free and not pool.num_retired:
            # Freed blocks arrive when the steps in flight complete; until then the row waits.
            victims = (
                r
                for r in reversed(self.running)
                if r.placement is request.placement and not r.progress.layer
            )
            if (victim := next(victims, None)) is not None:
                self._preempt(victim)
        if not pool.num_free or request.state is not RequestState.RUNNING:
            return False
        request.blocks.extend(pool.allocate(1))
        return True

    def _start(self, request: Request, placement: Placement) -> None:
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=lambda r: r.arrival)
        request.state = RequestState.RUNNING
        request.placement = placement
        request.slot = self._slots.allocate(1)[0]
        # The whole prompt's blocks at once: a prefill that has begun never waits for memory.
        request.blocks = self.pools[placement].allocate(self.num_blocks(request.num_tokens))
        if request.num_preemptions == 0:
            self.num_placed[placement] += 1

    def _preempt(self, request: Request) -> None:
        """Give up the request's blocks; it will be recomputed from its tokens."""
        self._vacate(request)
        request.state = RequestState.WAITING
        request.placement = None
        request.progress = START
        request.num_resident = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=lambda r: r.arrival)

    def _finish(self, request: Request, reason: str) -> None:
        if request.state is RequestState.RUNNING:
            self._vacate(request)
        else:
            self.waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]

    def _vacate(self, request: Request) -> None:
        self.running.remove(request)
        assert request.placement is not None
        assert request.slot is not None
        if request.progress.layer:
            self._rolling.hold(Held(request, request.placement, request.blocks, request.slot))
        else:
            self.pools[request.placement].retire(request.blocks, self._step)
            self._slots.retire([request.slot], self._step)
            self.release(self._completed)
        request.blocks = []
        request.slot = None

    def _row(self, request: Request, n: int) -> Row:
        assert request.slot is not None
        assert request.placement is not None
        stop = request.progress.token + n
        return Row(
            request=request,
            start=request.progress,
            num_tokens=n,
            samples=stop == request.num_tokens and request.wants_more,
            slot=request.slot,
            placement=request.placement,
            epoch=request.num_preemptions,
            blocks=tuple(request.blocks[: self.num_blocks(stop)]),
        )
