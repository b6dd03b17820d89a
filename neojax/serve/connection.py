"""One client's connection: uvicorn's, with bounds on headers' size and on how slowly they come."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 64 * 1024
HEADER_TIMEOUT_S = 20.0


class Connection(H11Protocol):
    """Closes when a request's headers are not there in time.

    uvicorn's own timer runs between requests only: a byte now and then would hold a socket
    for ever.
    """

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # type: ignore[override]
        """Called by the loop; the first request's time begins."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Called by the loop; a later request's time begins with its first byte."""
        if not self._has_request:
            self._start_header_timer()
        super().data_received(data)
        if self._has_request:
            self._stop_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop."""
        self._stop_header_timer()
        super().connection_lost(exc)

    @property
    def _has_request(self) -> bool:
        # None until the first request, whatever its annotation says.
        return bool(self.cycle) and not self.cycle.response_complete

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
