"""What the server is doing (loading, serving, draining, dead) and whether a request may enter."""

from __future__ import annotations

import time

from neojax.config import ServeConfig
from neojax.engine.messages import Ready
from neojax.serve.engine_client import EngineClient
from neojax.serve.errors import ApiError
from neojax.serve.metrics import Metrics
from neojax.serve.text_model import TextModel

# Without a finished step for this long while requests run, /health says so. Compiling the first
# step of a shape (--enforce-eager) takes seconds, on slow machines tens of seconds.
STALL_S = 60.0


class ServeState:
    """Shared by the routes and the supervisor; changed by the supervisor only."""

    def __init__(self, config: ServeConfig, stall_s: float = STALL_S) -> None:
        self.config = config
        self.model_names = config.served_names
        self.metrics = Metrics(self.model_names[0])
        self.metrics.stats = lambda: self.client.stats if self.client is not None else None
        self.metrics.ready = lambda: self.ready
        self.stall_s = stall_s
        self.text_model: TextModel | None = None
        self.client: EngineClient | None = None
        self.ready: Ready | None = None
        self.is_draining = False

    @property
    def fault(self) -> str | None:
        """Why the server cannot take requests now; None when it can."""
        if self.client is not None and self.client.failure is not None:
            return self.client.failure
        if self.ready is None:
            return "the model is still loading"
        if self.is_draining:
            return "the server is shutting down"
        return None

    @property
    def health_fault(self) -> str | None:
        """Like `fault`, and also when the engine has stopped finishing steps."""
        if self.fault is not None:
            return self.fault
        assert self.client is not None
        stalled_s = self.client.stalled_s
        if stalled_s > self.stall_s:
            return f"the engine has finished no step for {stalled_s:.0f} s"
        return None

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds since the engine finished a step, by its last word; None before its first."""
        stats = self.client.stats if self.client is not None else None
        return None if stats is None else max(0.0, time.time() - stats.last_step_unix_s)

    def check_size(self, num_choices: int) -> None:
        """Raise 400 when one request asks for more choices than may ever be queued."""
        limit = self.config.max_num_queued_reqs
        if num_choices > limit:
            raise ApiError(
                400,
                f"the request asks for {num_choices} choices (prompts times n), more than the "
                f"{limit} that this server queues: send them in several requests",
                param="prompt",
            )

    def admit(self, num_requests: int) -> None:
        """Raise 503 when the queue has no room for this many more engine requests."""
        assert self.client is not None
        limit = self.config.max_num_queued_reqs
        if self.client.num_requests + num_requests > limit:
            self.metrics.rejected("queue_full")
            raise ApiError(
                503,
                f"the queue is full: {self.client.num_requests} of {limit} requests "
                f"(--max-num-queued-reqs), {num_requests} more asked",
                retry_after_s=1,
            )

    def require_ready(self) -> tuple[TextModel, EngineClient, Ready]:
        """What a route needs to serve; raises 503 with the reason when it cannot."""
        if self.fault is not None:
            self.metrics.rejected("not_ready")
            raise ApiError(503, self.fault, retry_after_s=5)
        assert self.text_model is not None
        assert self.client is not None
        assert self.ready is not None
        return self.text_model, self.client, self.ready
