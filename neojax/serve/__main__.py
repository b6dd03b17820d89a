"""python -m neojax.serve: an OpenAI-compatible server over one engine process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from neojax import cli, log
from neojax.config import ServeConfig

if TYPE_CHECKING:
    from neojax.serve.text_model import TextModel

PROG = "python -m neojax.serve"


def main(
    argv: Sequence[str] | None = None,
    *,
    engine_command: Sequence[str] | None = None,
    load_text: Callable[[ServeConfig], TextModel] | None = None,
    stall_s: float | None = None,
) -> int:
    """Run a server; the exit code. The keyword arguments replace parts of it in tests."""
    config = cli.parse(sys.argv[1:] if argv is None else argv, ServeConfig, prog=PROG)
    if config.api_key is None and os.environ.get("NEOJAX_API_KEY"):
        config = dataclasses.replace(config, api_key=os.environ["NEOJAX_API_KEY"])
    log.setup(config.log_level)

    # After the command line: --help and mistakes are answered without loading the server.
    from neojax.serve.listener import check_certificate, listen

    try:
        if config.ssl_certfile is not None:
            check_certificate(config.ssl_certfile, config.ssl_keyfile)
        sock = listen(config.host, config.port)
    except OSError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1

    from neojax.serve.engine_process import ENGINE_COMMAND
    from neojax.serve.state import STALL_S
    from neojax.serve.supervisor import Supervisor
    from neojax.serve.text_model import TextModel

    async def run() -> int:
        supervisor = Supervisor(
            config,
            sock,
            engine_command or ENGINE_COMMAND,
            load_text or TextModel.load,
            STALL_S if stall_s is None else stall_s,
        )
        return await supervisor.run()

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
