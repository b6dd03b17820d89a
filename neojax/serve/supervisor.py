"""The life of a server: start the engine, serve, drain on a signal, end when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from neojax.config import ServeConfig
from neojax.serve.app import create_app
from neojax.serve.connection import MAX_HEADER_BYTES, Connection
from neojax.serve.engine_client import EngineClient
from neojax.serve.engine_process import EngineProcess
from neojax.serve.gate import Gate
from neojax.serve.listener import url
from neojax.serve.state import ServeState
from neojax.serve.stats_log import capacity_line, log_stats
from neojax.serve.text_model import TextModel

log = logging.getLogger("neojax.serve")

# After the engine died, so that probes and clients see why, not only a closed port. A signal cuts
# it short.
LAST_WORDS_S = 1.0
# For what an engine said before it died to come out of the socket.
_LAST_MESSAGE_S = 1.0
# For finished responses to leave, and for the engine to end by itself.
_FLUSH_S = 3
_ENGINE_STOP_S = 5.0

Result = TypeVar("Result")


class Supervisor:
    """Runs one server to its end."""

    def __init__(
        self,
        config: ServeConfig,
        sock: socket.socket,
        engine_command: Sequence[str],
        load_text: Callable[[ServeConfig], TextModel],
        stall_s: float,
    ) -> None:
        self._config = config
        self._sock = sock
        self._url = url(sock, is_https=config.ssl_certfile is not None)
        self._load_text = load_text
        self._state = ServeState(config, stall_s)
        self._engine = EngineProcess(engine_command)
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(self) -> int:
        """Serve until a signal or the engine's end; the exit code of the process."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._on_signal, signum)
        http = _HttpServer(
            uvicorn.Config(
                self._application(),
                ssl_certfile=self._config.ssl_certfile,
                ssl_keyfile=self._config.ssl_keyfile,
                http=Connection,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )
        log.info("listening on %s, loading %s", self._url, self._config.model)
        http_task = self._spawn(http.serve(sockets=[self._sock]))
        engine_task = self._spawn(self._run_engine())
        stop_task = self._spawn(self._stop.wait())
        exit_code = 1
        try:
            await asyncio.wait(
                {http_task, engine_task, stop_task}, return_when=asyncio.FIRST_COMPLETED
            )
            if stop_task.done():
                await self._drain(engine_task)
            if engine_task.done():
                failure = engine_task.result()
                log.error("%s; the server ends", failure)
                if self._state.client is not None:
                    self._state.client.fail(failure)
                await asyncio.wait({stop_task}, timeout=LAST_WORDS_S)
            elif stop_task.done():
                exit_code = 0
            http.should_exit = True
            await http_task
        finally:
            await self._end_engine()
        return exit_code

    def _application(self) -> ASGIApp:
        app: ASGIApp = Gate(create_app(self._state), self._config.api_keys)
        if self._config.origins:
            # Outside the gate: a browser's preflight request carries no key.
            app = CORSMiddleware(
                app,
                allow_origins=self._config.origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        return app

    async def _run_engine(self) -> str:
        """Bring the engine up and watch it; returns only when it failed, with the reason."""
        try:
            text_model = await _in_daemon_thread(lambda: self._load_text(self._config))
        except Exception as error:  # whatever it is, the server ends and says so
            log.debug("loading failed", exc_info=error)
            return f"{self._config.model} cannot be loaded: {error}"
        self._state.text_model = text_model
        client = EngineClient(self._engine.endpoint_in, self._engine.endpoint_out)
        self._state.client = client
        await self._engine.start(self._config, text_model.checkpoint)
        receiving = self._spawn(client.receive())
        exited = self._spawn(self._engine.wait())
        await asyncio.wait({receiving, exited, client.ready}, return_when=asyncio.FIRST_COMPLETED)
        if client.ready.done():
            self._announce(client)
            self._state.ready = client.ready.result()
            if not self._config.disable_log_stats:
                self._spawn(log_stats(self._state))
            await asyncio.wait({receiving, exited}, return_when=asyncio.FIRST_COMPLETED)
        if exited.done() and not receiving.done():
            await asyncio.wait({receiving}, timeout=_LAST_MESSAGE_S)
        if client.failure is not None:
            return client.failure
        if receiving.done():
            return f"the engine sent what cannot be read: {receiving.exception()}"
        return f"the engine process ended unexpectedly ({_describe_exit(exited.result())})"

    def _announce(self, client: EngineClient) -> None:
        ready = client.ready.result()
        log.info("%s", capacity_line(ready))
        log.info(
            "ready in %.1f s: %s serves %s on %s. Try:\n  curl %s/v1/chat/completions "
            "-H 'Content-Type: application/json' -d "
            '\'{"messages": [{"role": "user", "content": "What is the capital of France?"}]}\'',
            ready.startup_s,
            self._url,
            self._state.model_names[0],
            ready.device,
            self._url,
        )

    def _on_signal(self, signum: int) -> None:
        if self._stop.is_set():
            log.warning("second signal: ending now")
            self._engine.kill()
            os._exit(128 + signum)
        log.info("%s: no new requests; a second one ends at once", signal.Signals(signum).name)
        self._state.is_draining = True
        self._stop.set()

    async def _drain(self, engine_task: asyncio.Task[str]) -> None:
        """Let running requests finish, until the deadline or the engine's end."""
        client = self._state.client
        deadline_s = time.monotonic() + self._config.shutdown_timeout
        while client is not None and client.num_requests and not engine_task.done():
            if time.monotonic() >= deadline_s:
                log.warning("%d requests did not finish in time", client.num_requests)
                client.abort_all("the server is shutting down")
                break
            await asyncio.sleep(0.02)

    async def _end_engine(self) -> None:
        client = self._state.client
        if client is not None:
            client.shut_down()
        is_serving = self._state.ready is not None
        await self._engine.stop(_ENGINE_STOP_S if is_serving else 0.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if client is not None:
            client.close()

    def _spawn(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        return task


class _HttpServer(uvicorn.Server):
    """Leaves signals to the supervisor."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


async def _in_daemon_thread(work: Callable[[], Result]) -> Result:
    """Run blocking work in a thread that does not keep the process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        outcome: tuple[Result | None, Exception | None]
        try:
            outcome = (work(), None)
        except Exception as error:
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, daemon=True, name="load-text").start()
    return await done
