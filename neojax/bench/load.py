"""The settings that say what is sent: shared by every benchmark that serves requests."""

from __future__ import annotations

import dataclasses

from neojax.bench.arrivals import Traffic, make_traffic
from neojax.bench.workload import parse_workload

REQUESTS_PER_CLIENT = 3
OPEN_LOOP_REQUESTS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """What is sent, and how often."""

    workload: str = "64/32"
    """Lengths: ac, azure-conv, osc, osc-normal, IN/OUT tokens, or IN/OUT~0.1 within ±10 %."""
    num_requests: int | None = None
    """Requests of a run. Default: three per client of a closed loop, else 100."""
    warm_up: int = 0
    """Leave so many requests out: the first by sending for latencies, by completion for rates."""
    output: str | None = None
    """Write the results as JSON to this file."""

    def traffic(self, arrivals: str, seed: int) -> Traffic:
        """The requests of one run. Raises ValueError for what cannot be."""
        form, _, clients = arrivals.partition(":")
        per_loop = REQUESTS_PER_CLIENT * int(clients) if form == "closed" and clients else None
        count = self.num_requests or per_loop or OPEN_LOOP_REQUESTS
        if count <= self.warm_up:
            raise ValueError(f"--warm-up {self.warm_up} leaves nothing of {count} requests")
        return make_traffic(parse_workload(self.workload), arrivals, count, seed)
