"""The real server over the fake engine, as a command: options, `--`, the server's flags.

--stall-s, --header-timeout-s and --last-words-s change what a test cannot wait for, or must not be
hurried by; the other options are the fake engine's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from neojax.serve import connection, supervisor
from neojax.serve.__main__ import main

if __name__ == "__main__":
    split = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--stall-s", type=float)
    parser.add_argument("--header-timeout-s", type=float, default=connection.HEADER_TIMEOUT_S)
    parser.add_argument("--last-words-s", type=float, default=0.2)
    options, of_engine = parser.parse_known_args(sys.argv[1:split])
    connection.HEADER_TIMEOUT_S = options.header_timeout_s
    supervisor.LAST_WORDS_S = options.last_words_s
    engine = [sys.executable, str(Path(__file__).with_name("fake_engine.py")), *of_engine]
    sys.exit(main(sys.argv[split + 1 :], engine_command=engine, stall_s=options.stall_s))
