"""An engine process that computes nothing: each request's prompt comes back, token by token.

`python -m neojax.bench http` puts it in place of `python -m neojax.engine`, so that what is
measured is the HTTP process. Every step gives every running request one token, as a real step does.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import zmq

from neojax.engine.messages import Abort, AddRequest, FromEngine, Ready, Shutdown, ToEngine, Tokens
from neojax.engine.report import RequestTokens

CONTEXT = 8192


class _Running(NamedTuple):
    tokens: Iterator[int]
    numbers_left: Iterator[int]  # ends with 0


class NullEngine:
    """The engine's side of both sockets."""

    def __init__(self, endpoint_in: str, endpoint_out: str, step_s: float) -> None:
        """step_s: how long a step takes; 0 makes them as fast as the HTTP process takes them."""
        context = zmq.Context()
        self._inbox = context.socket(zmq.PULL)
        self._outbox = context.socket(zmq.PUSH)
        self._inbox.connect(endpoint_in)
        self._outbox.connect(endpoint_out)
        self._step_s = step_s
        self._running: dict[str, _Running] = {}
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def run(self, vocab_size: int) -> None:
        """Serve until told to shut down."""
        self._send(Ready(CONTEXT, vocab_size, "none", 0, 0, 16, 0.0))
        next_step_s = 0.0
        while True:
            wait_s = max(0.0, next_step_s - time.monotonic()) if self._running else 1.0
            # The last millisecond is not waited for: poll counts in whole ones.
            while self._inbox.poll(int(1000 * wait_s)):
                wait_s = 0.0
                match self._decoder.decode(self._inbox.recv()):
                    case AddRequest(request_id, prompt_ids, params):
                        self._running[request_id] = _Running(
                            itertools.cycle(prompt_ids), iter(range(params["max_tokens"])[::-1])
                        )
                    case Abort(request_id):
                        self._running.pop(request_id, None)
                    case Shutdown():
                        return
            if self._running and time.monotonic() >= next_step_s:
                next_step_s = time.monotonic() + self._step_s
                self._step()

    def _step(self) -> None:
        outputs: list[RequestTokens] = []
        for request_id, (tokens, numbers_left) in list(self._running.items()):
            is_last = next(numbers_left) == 0
            if is_last:
                del self._running[request_id]
            reason = "length" if is_last else None
            outputs.append(RequestTokens(request_id, [next(tokens)], reason))
        self._send(Tokens(outputs))

    def _send(self, message: FromEngine) -> None:
        self._outbox.send(self._encoder.encode(message))


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def main(vocab_size: int, step_s: float) -> None:
    """Read where the sockets are from stdin, as the real engine does, and serve."""
    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    NullEngine(settings["endpoint_in"], settings["endpoint_out"], step_s).run(vocab_size)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
