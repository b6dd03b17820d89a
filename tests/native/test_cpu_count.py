"""How many threads the host attention takes of the cores that the process may use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
from neojax import _cpu_paged_attn as native
print(native.usable_cores(), native.default_num_threads())
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux")
@pytest.mark.parametrize("num_cores", [1, 2])
def test_threads_follow_the_affinity_and_not_the_machine(num_cores: int):
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    # What OpenMP is told is another library's.
    environment = {**os.environ, "OMP_NUM_THREADS": "64"}
    ended = subprocess.run(
        [sys.executable, "-c", CODE, ",".join(map(str, cores))],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert ended.stdout.split() == [str(len(cores)), "1"]
