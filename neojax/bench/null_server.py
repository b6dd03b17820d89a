"""`python -m neojax.bench.null_server STEP_S [flags of neojax.serve]`: the server without a model.

Everything but the engine is real; the engine is `null_engine`. For measuring, and for trying a
client against a server that is ready in a second.
"""

from __future__ import annotations

import sys

from neojax.cli import parse
from neojax.config import ServeConfig
from neojax.serve.__main__ import main as serve

PROG = "python -m neojax.bench.null_server STEP_S"


def main(argv: list[str]) -> int:
    """Serve until a signal comes; the exit code."""
    step_s, *flags = argv
    config = parse(flags, ServeConfig, prog=PROG)
    from neojax.hub import resolve_checkpoint
    from neojax.text.tokenizer import Tokenizer

    vocab_size = Tokenizer.from_checkpoint(resolve_checkpoint(config.model)).vocab_size
    engine = [sys.executable, "-m", "neojax.bench.null_engine", str(vocab_size), step_s]
    return serve(flags, engine_command=engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
