"""The engine's process: how it is started, what environment it gets and how it is ended.

It is a fresh interpreter. It lives as long as the pipe to its stdin is open, so it ends with this
process however this process ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from neojax.config import EngineConfig
from neojax.environment import device_environment

ENGINE_COMMAND = (sys.executable, "-m", "neojax.engine")

# A Unix socket's path must fit sockaddr_un.
_MAX_SOCKET_PATH = 100


class EngineProcess:
    """One engine process and the private directory of its two sockets."""

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._command = tuple(command)
        self._process: asyncio.subprocess.Process | None = None
        self._dir = tempfile.mkdtemp(prefix="neojax-")
        if len(self._dir) > _MAX_SOCKET_PATH - 10:
            os.rmdir(self._dir)
            self._dir = tempfile.mkdtemp(prefix="neojax-", dir="/tmp")
        self.endpoint_in = f"ipc://{self._dir}/in"
        self.endpoint_out = f"ipc://{self._dir}/out"

    async def start(self, config: EngineConfig, checkpoint: Path) -> None:
        """Start the process and send it its settings; its output goes to our terminal."""
        # An own session: Ctrl-C in the terminal must reach the server alone, which drains.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | device_environment(config.gpu_memory_utilization),
            start_new_session=True,
        )
        fields = [field.name for field in dataclasses.fields(EngineConfig)]
        first_line = {
            "config": {name: getattr(config, name) for name in fields},
            "checkpoint": str(checkpoint),
            "endpoint_in": self.endpoint_in,
            "endpoint_out": self.endpoint_out,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(first_line).encode() + b"\n")

    async def wait(self) -> int:
        """Return the exit code once the process has ended (-N: killed by signal N)."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """Wait up to grace_s for the end that it was asked for, then kill. Also if never started.

        The pipe stays open until then: closing it ends the process in the middle of a step.
        """
        process = self._process
        if process is not None and process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), grace_s)
            except TimeoutError:
                process.kill()
                await process.wait()
        self.remove_dir()

    def kill(self) -> None:
        """End the process now, without waiting."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        self.remove_dir()

    def remove_dir(self) -> None:
        """Remove the sockets' directory."""
        shutil.rmtree(self._dir, ignore_errors=True)
