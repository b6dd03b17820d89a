"""Where the running requests stand as a step begins: one pass over them, for all who ask."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import NamedTuple

from neojax.scheduler.request import Placement, Request


class Standing(NamedTuple):
    """The running requests by what they can do next; every list by priority and arrival."""

    device_decodes: list[Request]  # that want their next token
    host_decodes: list[Request]
    prefills: list[Request]  # with tokens to compute before they decode
    num_device: int  # all that live there, whatever they do
    on_host: list[Request]

    @property
    def num_host(self) -> int:
        """All that live on the host."""
        return len(self.on_host)

    @classmethod
    def of(cls, running: Iterable[Request], moving: Container[Request] = ()) -> Standing:
        """moving: requests that change pools in this step and cannot run in it."""
        decodes: dict[Placement | None, list[Request]] = {p: [] for p in Placement}
        num_device = 0
        on_host: list[Request] = []
        prefills: list[Request] = []
        for request in running:
            if request.placement is Placement.HOST:
                on_host.append(request)
            else:
                num_device += 1
            computed = request.progress.token
            remaining = request.num_tokens - computed
            if remaining == 1 and computed:  # as `Request.is_decoding`: a step asks hundreds
                if request.wants_more and request not in moving:
                    decodes[request.placement].append(request)
            elif remaining:
                prefills.append(request)
        return cls(
            decodes[Placement.DEVICE],
            decodes[Placement.HOST],
            prefills,
            num_device,
            on_host,
        )
