"""`python -m neojax.bench.null_server STEP_S [flags of neojax.serve]`: the server without a model.

Everything but the engine is real; the engine is `null_engine`. For measuring, and for trying a
client against a server that is ready in a second.
"""

from __future__ import annotations

import argparse
import sys

from neojax.cli import parse
from neojax.config import ServeConfig
from neojax.serve.__main__ import main as serve

PROG = "python -m neojax.bench.null_server"


def main(argv: list[str]) -> int:
    """Serve until a signal comes; the exit code."""
    parser = argparse.ArgumentParser(prog=PROG, description="The server without a model.")
    parser.add_argument("step_s", type=float, metavar="STEP_S", help="seconds of a step")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="of python -m neojax.serve")
    arguments = parser.parse_args(argv)
    flags: list[str] = arguments.flags
    config = parse(flags, ServeConfig, prog=f"{PROG} STEP_S")
    from neojax.hub import resolve_checkpoint
    from neojax.text.tokenizer import Tokenizer

    vocab_size = Tokenizer.from_checkpoint(resolve_checkpoint(config.model)).vocab_size
    engine = [sys.executable, "-m", "neojax.bench.null_engine", str(vocab_size)]
    engine += [str(arguments.step_s)]
    return serve(flags, engine_command=engine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
