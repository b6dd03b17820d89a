"""The engine process, spoken to as the HTTP process does, without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from neojax.engine.messages import AddRequest, FromEngine, Ready, Shutdown, Tokens

TIMEOUT_S = 120


class Engine:
    """A child process and the two sockets."""

    def __init__(self, folder: Path, checkpoint: Path):
        self.context = zmq.Context()
        self.inbox, self.outbox = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        endpoints = {name: f"ipc://{folder}/{name}" for name in ("in", "out")}
        self.inbox.bind(endpoints["in"])
        self.outbox.bind(endpoints["out"])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "neojax.engine"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        settings = {
            "config": {
                "model": str(checkpoint),
                "load_format": "dummy",
                "enforce_eager": True,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 32,
                "cpu_kv_gib": 0.01,
            },
            "checkpoint": str(checkpoint),
            "endpoint_in": endpoints["in"],
            "endpoint_out": endpoints["out"],
        }
        self.process.stdin.write(json.dumps(settings) + "\n")
        self.process.stdin.flush()

    def send(self, message):
        self.inbox.send(msgspec.msgpack.encode(message))

    def receive(self, kind):
        """The next message of that kind."""
        while self.outbox.poll(1000 * TIMEOUT_S):
            message = msgspec.msgpack.decode(self.outbox.recv(), type=FromEngine)
            if isinstance(message, kind):
                return message
        raise TimeoutError(f"no {kind.__name__} from the engine")

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stderr.close()
        self.context.destroy(linger=0)


@pytest.fixture
def engine(tmp_path, tiny_checkpoint):
    running = Engine(tmp_path, tiny_checkpoint)
    yield running
    running.close()


def test_an_engine_told_to_shut_down_serves_until_then_and_ends_cleanly(engine):
    ready = engine.receive(Ready)
    assert ready.num_device_blocks > 0
    engine.send(AddRequest("good", [1, 2, 3], {"max_tokens": 1, "temperature": 0.0}))
    engine.send(AddRequest("bad", [ready.vocab_size], {}))
    answers = {}
    while len(answers) < 2:
        answers |= {output.request_id: output for output in engine.receive(Tokens).outputs}
    assert answers["good"].finish_reason in ("stop", "length")
    assert answers["bad"].finish_reason == "rejected"
    assert "outside the vocabulary" in answers["bad"].message
    engine.send(Shutdown())
    # Its stdin stays open: end of file there would mean something else.
    code = engine.process.wait(timeout=TIMEOUT_S)
    log = engine.process.stderr.read()
    assert code == 0, log
    assert "Fatal" not in log


def test_an_engine_whose_parent_is_gone_ends_at_once(engine):
    engine.process.stdin.close()
    assert engine.process.wait(timeout=TIMEOUT_S) == 1
