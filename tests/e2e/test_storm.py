"""Streams whose clients are killed leave nothing behind. `tests.e2e.storm` is the longer form."""

from __future__ import annotations

import sys

import pytest

from tests.e2e.storm import FLAGS, READY_TIMEOUT_S, storm
from tests.serve.running_server import RunningServer


@pytest.mark.slow
def test_five_hundred_streams_with_clients_killed_at_random_leave_nothing(
    default_checkpoint: object,
):
    server = RunningServer([sys.executable, "-m", "neojax.serve", *FLAGS])
    try:
        server.wait_ready(READY_TIMEOUT_S)
        result = storm(server, num_streams=500, seconds=30, num_probes=4)
        assert result.num_killed > 10
        assert result.num_aborted > 500
        assert result.most_waiting > 300
        assert server.stop(timeout_s=60) == 0, server.stderr
    finally:
        server.kill()
