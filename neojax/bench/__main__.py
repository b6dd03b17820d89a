"""`python -m neojax.bench NAME ...`: one benchmark by name."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = ("http", "kernel", "serve", "sweep", "throughput", "weights")


def main(argv: list[str]) -> int:
    """Runs the named benchmark; 2 for a name that is none."""
    if argv and argv[0] in BENCHMARKS:
        return importlib.import_module(f"neojax.bench.{argv[0]}").main(argv[1:])
    asked = "-h" in argv or "--help" in argv
    print(
        f"usage: python -m neojax.bench {{{','.join(BENCHMARKS)}}} ...",
        file=sys.stdout if asked else sys.stderr,
    )
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
