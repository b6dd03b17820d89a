"""The real server over the fake engine, as a command: fake options, `--`, the server's flags."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from neojax.serve.__main__ import main

if __name__ == "__main__":
    split = sys.argv.index("--")
    engine = [sys.executable, str(Path(__file__).with_name("fake_engine.py")), *sys.argv[1:split]]
    stall_s = float(engine.pop()) if "--stall-s" in engine else None
    if stall_s is not None:
        engine.remove("--stall-s")
    sys.exit(main(sys.argv[split + 1 :], engine_command=engine, stall_s=stall_s))
