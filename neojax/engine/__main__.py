"""The engine process: `python -m neojax.engine`, started by the HTTP process, never by hand.

stdin's first line is JSON with the settings and the two endpoints; end of file on stdin means
that the parent is gone, and so is this process a moment later.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import msgspec
import zmq

from neojax import log as log_format
from neojax.config import EngineConfig
from neojax.engine.build import build_engine
from neojax.engine.core import EngineCore
from neojax.engine.messages import (
    Abort,
    AddRequest,
    Failed,
    FromEngine,
    Ready,
    Shutdown,
    Stats,
    ToEngine,
    Tokens,
)
from neojax.engine.report import RequestTokens
from neojax.sampling_params import SamplingParams

log = logging.getLogger("neojax.engine")

STATS_INTERVAL_S = 0.1
IDLE_STATS_INTERVAL_S = 1.0


class EngineProcess:
    """The engine between its two sockets."""

    def __init__(self, engine: EngineCore, inbox: zmq.Socket, outbox: zmq.Socket) -> None:
        self.engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._next_stats_s = 0.0
        self._is_running = True

    def run(self) -> None:
        """Serve until told to shut down."""
        while self._is_running:
            self._receive()
            if self.engine.has_work:
                self._send_tokens(self.engine.step().outputs)
            self._send_stats()

    def send(self, message: FromEngine) -> None:
        """Give a message to the HTTP process."""
        self._outbox.send(self._encoder.encode(message))

    def _receive(self) -> None:
        # Without work, wait for a message, but not so long that the statistics go stale.
        timeout_ms = 0 if self.engine.has_work else int(1000 * IDLE_STATS_INTERVAL_S)
        while self._inbox.poll(timeout_ms):
            self._handle(self._decoder.decode(self._inbox.recv()))
            timeout_ms = 0

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest(request_id, prompt_ids, params):
                try:
                    self.engine.add_request(request_id, prompt_ids, SamplingParams(**params))
                except (ValueError, TypeError) as error:
                    refusal = RequestTokens(request_id, [], "rejected", message=str(error))
                    self._send_tokens([refusal])
            case Abort(request_id):
                self.engine.abort(request_id)
            case Shutdown():
                self._is_running = False

    def _send_tokens(self, outputs: list[RequestTokens]) -> None:
        if outputs:
            self.send(Tokens(outputs))

    def _send_stats(self) -> None:
        now = time.monotonic()
        if now >= self._next_stats_s or not self.engine.has_work:
            self._next_stats_s = now + STATS_INTERVAL_S
            self.send(Stats(self.engine.stats()))


def main() -> int:
    """Read the settings, build the engine, serve. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the HTTP process's to handle
    log_format.setup("info")
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(settings["endpoint_in"])
    outbox.connect(settings["endpoint_out"])
    outbox.setsockopt(zmq.LINGER, 2000)
    try:
        started = time.perf_counter()
        config = EngineConfig(**settings["config"])
        engine = build_engine(config, Path(settings["checkpoint"]))
        process = EngineProcess(engine, inbox, outbox)
        limits = engine.scheduler.limits
        process.send(
            Ready(
                max_model_len=engine.max_model_len,
                vocab_size=engine.vocab_size,
                device=jax.devices()[0].device_kind,
                num_device_blocks=limits.num_device_blocks,
                num_host_blocks=limits.num_host_blocks,
                block_size=limits.block_size,
                startup_s=time.perf_counter() - started,
            )
        )
        process.run()
        engine.close()
    except Exception as error:  # the parent must hear of it, whatever it is
        log.exception("the engine cannot go on")
        outbox.send(msgspec.msgpack.encode(Failed(str(error))))
        context.destroy(linger=2000)
        return 1
    context.destroy(linger=2000)
    return 0


def _exit_with_parent() -> None:
    # Not through sys.stdin: its lock, held by this thread, would abort the interpreter at its end.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
