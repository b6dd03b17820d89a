"""What holds under any policy: plans that programs can run, and nobody left behind."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterator

from neojax.scheduler.admission import can_finish_in
from neojax.scheduler.limits import SchedulerLimits
from neojax.scheduler.memory import Memory
from neojax.scheduler.offer import Choice, Chunk, Offer
from neojax.scheduler.policy import OffloadPolicy
from neojax.scheduler.request import Placement, Request
from neojax.scheduler.situation import Situation

log = logging.getLogger(__name__)

MAX_WAIT_STEPS = 128
"""Steps that a host row or a prompt on its way to the host is passed over at most."""

DUE_STEPS = MAX_WAIT_STEPS // 2
"""Steps after which a policy is told of a host row, to serve it where that costs least."""


class Supervision:
    """Asks the policy, and overrules it where its answer cannot run or leaves somebody waiting."""

    def __init__(self, limits: SchedulerLimits, memory: Memory) -> None:
        self._limits = limits
        self._memory = memory
        self._usual = OffloadPolicy()

    def checked(self, step: int, offer: Offer, policy: OffloadPolicy, now: Situation) -> Choice:
        """The policy's choice, or all that can run."""
        for chunk in offer.chunks:
            chunk.request.served_step = chunk.request.served_step or step
        num_due = _num_waiting(offer, step - DUE_STEPS)
        if num_due:
            offer = dataclasses.replace(offer, num_due=num_due)
        choice = policy.choose(offer, now)
        if (fault := self._fault(choice, offer)) is not None:
            log.warning("policy %s %s; the usual choice is taken", policy.name, fault)
            return self._usual.everything(offer)
        left_out = _left_out(choice, offer)
        if not policy.serves_host(now):
            # Those that the device can hold wait for it, and nobody starts there before them.
            left_out = (r for r in left_out if not self._goes_back(r, policy))
        overdue = {r for r in left_out if step - r.served_step > MAX_WAIT_STEPS}
        if overdue:
            return self._with(overdue, choice, offer)
        if choice.entering is None and offer.steps_parked > MAX_WAIT_STEPS:
            reason = f"rows between two layers had waited for {offer.steps_parked} steps"
            return Choice(offer.trimmed(offer.num_tokens), entering=(), reason=reason)
        return choice

    def _with(self, overdue: Collection[Request], choice: Choice, offer: Offer) -> Choice:
        """The choice and these, for which its prefill makes room.

        Not all that waits: what does not hide under the device's work holds it up, and in a step
        with everybody that is most. A ROLLING step takes nobody along, so all runs in its stead.
        """
        reason = f"a request on the host had waited for more than {MAX_WAIT_STEPS} steps"
        if choice.entering is not None:
            return dataclasses.replace(self._usual.everything(offer), reason=reason)
        rows = [r for r in offer.host_decodes if r in overdue]
        host0, host1 = choice.host0, choice.host1
        room = offer.num_tokens - len(rows) - len(host0) - len(host1)
        if len(rows) == len(overdue):
            offer = dataclasses.replace(offer, chunks=tuple(choice.chunks))
        chunks = offer.trimmed(room)
        if not (offer.device_decodes or chunks):
            host0, host1 = self._usual.split([*host0, *host1, *rows], has_device_work=False)
        elif self._limits.can_mix and not host1:
            host0 = [*host0, *rows]  # b1 would read all weights again for them
        else:
            host1 = [*host1, *rows]
        return Choice(chunks, host0, host1, reason)

    def _goes_back(self, request: Request, policy: OffloadPolicy) -> bool:
        return request.is_decoding and can_finish_in(
            request, Placement.DEVICE, policy, self._memory
        )

    def _fault(self, choice: Choice, offer: Offer) -> str | None:
        """Why the choice cannot be run; None if it can."""
        host = [*choice.host0, *choice.host1]
        if len(set(map(id, host))) < len(host) or not set(host) <= set(offer.host_decodes):
            return f"split {len(offer.host_decodes)} host rows into others than these"
        if not _is_served_in_order(choice, offer):
            return "chose other prefill chunks than the next ones of those offered"
        if (
            choice.entering is not None
            and (fault := self._rolling_fault(choice, offer)) is not None
        ):
            return fault
        num_tokens = len(host) + sum(chunk.num_tokens for chunk in choice.chunks)
        if num_tokens > offer.num_tokens:
            return f"chose {num_tokens} tokens of {offer.num_tokens}"
        has_device_work = bool(offer.device_decodes or choice.chunks)
        if choice.host0 and has_device_work and not self._limits.can_mix:
            return f"split {len(host)} host rows as no program can run: some beside device work"
        if choice.host1 and not (choice.host0 or has_device_work):
            return f"split {len(host)} host rows as no program can run: none in b0"
        if host or has_device_work or choice.entering or offer.num_under_way:
            return None
        # In ROLLING steps a row waits until its token has been read.
        can_run = offer.chunks or (
            offer.group if choice.entering is not None else offer.host_decodes
        )
        return "chose nothing though something can run" if can_run else None

    def _rolling_fault(self, choice: Choice, offer: Offer) -> str | None:
        """Why a ROLLING step cannot be run."""
        entering = choice.entering or ()
        if not self._limits.rolling_rows:
            return "chose a ROLLING step, which this engine has no programs for"
        if choice.host0 or choice.host1:
            return "chose host rows that ride along and others that do not, in one step"
        if len(set(map(id, entering))) < len(entering) or not set(entering) <= {
            r for r in offer.host_decodes if not r.num_pending
        }:
            return f"let {len(entering)} host rows enter that may not"
        if len(entering) > self._limits.rolling_rows:
            return f"let {len(entering)} host rows enter; a group holds {self._limits.rolling_rows}"
        return None


def _num_waiting(offer: Offer, step: int) -> int:
    """Host rows that were served last before this step."""
    return sum(1 for _ in itertools.takewhile(lambda r: r.served_step < step, offer.host_decodes))


def _left_out(choice: Choice, offer: Offer) -> Iterator[Request]:
    """Requests on the host, or on their way to it, that the choice passes over."""
    host = *choice.host0, *choice.host1, *(choice.entering or ())
    chosen = {*host, *(chunk.request for chunk in choice.chunks)}
    yield from (r for r in offer.host_decodes if r not in chosen)
    for chunk in offer.chunks:
        if chunk.placement is Placement.HOST and chunk.request not in chosen:
            yield chunk.request


def _is_served_in_order(choice: Choice, offer: Offer) -> bool:
    """Of each placement the first chunks offered, each shortened only where it may be."""
    for placement in Placement:
        offered = [chunk for chunk in offer.chunks if chunk.placement is placement]
        chosen = [chunk for chunk in choice.chunks if chunk.placement is placement]
        if len(chosen) > len(offered):
            return False
        for ours, theirs in zip(offered, chosen, strict=False):
            if theirs.request is not ours.request or not _fits(theirs, ours, offer.block_size):
                return False
    return True


def _fits(chosen: Chunk, offered: Chunk, block_size: int) -> bool:
    if not 0 < chosen.num_tokens <= offered.num_tokens:
        return False
    is_whole = chosen.num_tokens == chosen.request.num_remaining
    return is_whole or chosen.placement is Placement.DEVICE or chosen.stop % block_size == 0
