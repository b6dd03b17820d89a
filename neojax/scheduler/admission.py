"""Which requests may start, and where: worst-case need, room now, and order of arrival."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.memory import Memory
from neojax.scheduler.offer import Chunk
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import Placement, Request, RequestState
from neojax.scheduler.situation import Situation
from neojax.scheduler.standing import Standing


def worst_tokens(request: Request) -> int:
    """Tokens whose K/V the request may need; the last token's never is."""
    return len(request.prompt_ids) + request.max_tokens - 1


def possible_placements(
    request: Request, policy: OffloadPolicy, memory: Memory
) -> tuple[Placement, ...]:
    """Pools in which the request can finish, the policy's preferred one first."""
    return tuple(p for p in policy.placements if can_finish_in(request, p, policy, memory))


def can_finish_in(
    request: Request, placement: Placement, policy: OffloadPolicy, memory: Memory
) -> bool:
    """Whether `placement` is among the possible ones."""
    wanted = request.params.kv_placement
    return (
        wanted in ("auto", placement)
        and placement in policy.placements
        and memory.num_blocks(worst_tokens(request)) <= memory.pools[placement].limit
    )


def why_never(
    request: Request, policy: OffloadPolicy, memory: Memory, limits: SchedulerLimits
) -> str:
    """The message for a request that no pool can take, with the numbers."""
    wanted = request.params.kv_placement
    if wanted not in ("auto", *(p.value for p in policy.placements)):
        return f"kv_placement {wanted!r} is not possible under policy {policy.name!r}"
    room = ", ".join(
        f"the {p} pool holds {memory.pools[p].limit * limits.block_size}" for p in policy.placements
    )
    return (
        f"prompt ({len(request.prompt_ids)}) plus max_tokens ({request.max_tokens}) needs KV "
        f"for {worst_tokens(request)} tokens; {room}. Lower max_tokens, or start with a larger "
        "--cpu-kv-gib"
    )


class Admission:
    """One step's prefill chunks: of running requests, and of waiting ones that can start now.

    Nothing is taken yet: what is offered here is counted here.
    """

    def __init__(
        self, policy: OffloadPolicy, memory: Memory, now: Situation, standing: Standing
    ) -> None:
        self._policy = policy
        self._memory = memory
        self._now = now
        self._num_slots = memory.slots.num_free
        self._scratch = now.limits.scratch_tokens
        # Requests that were swapped out, and do not run where they are, come before new ones.
        are_out = not policy.serves_host(now) and any(
            can_finish_in(r, Placement.DEVICE, policy, memory) for r in standing.on_host
        )
        self._blocked: set[Placement] = set(Placement) if are_out else set()
        # Each running request is about to grow: without a block in hand for each of them, a
        # newcomer would soon be preempted again.
        self._free = {
            Placement.DEVICE: memory.pools[Placement.DEVICE].num_free - standing.num_device,
            Placement.HOST: memory.pools[Placement.HOST].num_free - standing.num_host,
        }
        self._kept = now.limits.num_device_blocks if policy.keeps_room else 0
        most = now.num_rolling
        self._num_host = most - now.num_host if most else now.limits.max_num_seqs

    def chunks(self, requests: Iterable[Request], budget: int) -> list[Chunk]:
        """Chunks of these requests, in their order, for so many tokens in all.

        requests: running ones that have tokens to compute before they decode, then waiting ones.
        """
        chunks: list[Chunk] = []
        for request in requests:
            if budget <= 0 or len(chunks) >= self._now.limits.max_num_chunks:
                break
            is_new = request.state is RequestState.WAITING
            placement = self._admissible(request) if is_new else request.placement
            if placement is None:
                if self._blocked.issuperset(self._policy.placements):
                    break
                continue
            n = min(request.num_remaining, budget)
            if placement is Placement.HOST:
                n = self._host_chunk(request, n, is_first=not chunks)
                if n == 0:
                    self._blocked.add(Placement.HOST)  # those behind it wait their turn
                    continue
                self._scratch -= self._rounded(request.progress.token + n)
            if is_new:
                self._free[placement] -= self._memory.num_blocks(request.num_tokens) + 1
                self._num_slots -= 1
                if placement is Placement.HOST:
                    self._num_host -= 1
                    self._now = dataclasses.replace(self._now, num_host=self._now.num_host + 1)
            chunks.append(Chunk(request, placement, n, is_new))
            budget -= n
        return chunks

    def _admissible(self, request: Request) -> Placement | None:
        """Where a waiting request can start now. Marks pools that it waits for as blocked."""
        if request.num_pending or not self._num_slots:
            self._blocked.update(self._free)
            return None
        if request.params.kv_placement in self._blocked:
            return None
        possible = possible_placements(request, self._policy, self._memory)
        need = self._memory.num_blocks(request.num_tokens)
        room = self._open(possible, need)
        placement = self._policy.place(request, possible, room, self._now) if room else None
        if placement is None:
            self._blocked.update(possible)
        elif possible[0] not in room:
            # What it prefers is full: the room left there is not for those behind it.
            self._blocked.add(possible[0])
        return placement

    def _open(self, possible: Sequence[Placement], need: int) -> list[Placement]:
        return [
            p
            for p in possible
            if p not in self._blocked
            and need <= self._free[p]
            and (p is Placement.DEVICE or self._has_room_on_host(possible, need))
        ]

    def _has_room_on_host(self, possible: Sequence[Placement], need: int) -> bool:
        kept = self._kept if Placement.DEVICE in possible else 0
        return self._num_host > 0 and need + kept <= self._free[Placement.HOST]

    def _host_chunk(self, request: Request, n: int, *, is_first: bool) -> int:
        """Tokens of a HOST-placed chunk that this step can take; 0 for none. See Offer.trimmed."""
        start = request.progress.token
        if n < request.num_remaining:
            n = n - (start + n) % self._now.limits.block_size if is_first else 0
        return n if n > 0 and self._rounded(start + n) <= self._scratch else 0

    def _rounded(self, num_tokens: int) -> int:
        """Whole blocks: a chunk and its prefix start a block of their own in the scratch pool."""
        return self._memory.num_blocks(num_tokens) * self._now.limits.block_size
