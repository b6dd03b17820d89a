"""Counts XLA compilations: after warm-up there must be none."""

from __future__ import annotations

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Listens to jax's own events. Counts every compilation of the process."""

    def __init__(self) -> None:
        self.count = 0
        self._is_open = True
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def reset(self) -> None:
        """Start again from zero."""
        self.count = 0

    def close(self) -> None:
        """Stop counting."""
        self._is_open = False

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if self._is_open and event == _EVENT:
            self.count += 1
