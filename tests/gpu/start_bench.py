"""Seconds from nothing to a ready engine, each time in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

BUILD = """
import logging, sys
logging.basicConfig(level="INFO")
from tests.gpu.load import LOADS, engine_of
engine_of("ready", LOADS[sys.argv[1]])
"""


def start(load_name: str) -> dict[str, object]:
    """With an empty cache of compiled programs, then with the one that this left."""
    seconds = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", BUILD, load_name],
                env=os.environ | {"NEOJAX_CACHE": cache},
                check=True,
            )
            seconds[f"{name}_s"] = time.perf_counter() - began
    print(f"start: {seconds['cold_s']:.1f} s cold, {seconds['warm_s']:.1f} warm", flush=True)
    return seconds
