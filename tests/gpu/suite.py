"""The tests marked gpu as one section of the GPU checks: how many passed, within a time limit."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

GRACE_S = 30.0
"""For pytest to say what it has so far, once it is interrupted."""


def run_tests(limit_s: float, paths: tuple[str, ...] = ("tests/gpu",)) -> dict[str, object]:
    """Counts of the tests in these files. Raises RuntimeError when none could be run.

    At the limit pytest is interrupted, as by Ctrl-C: the tests that ran until then count.
    """
    # Whoever is started in the background ignores Ctrl-C, and so would the process started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
        pytest = subprocess.Popen([*command, f"--junitxml={report}", *paths])
        try:
            pytest.wait(limit_s)
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
            pytest.send_signal(signal.SIGINT)
        try:
            code = pytest.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pytest.kill()
            code = pytest.wait()
        if not report.exists():
            raise RuntimeError(f"pytest ended with {code} and no report, see above")
        (suite,) = ET.parse(report).getroot().iter("testsuite")
    count = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    off = count["failures"] + count["errors"]
    # Not pytest's 1 (some failed), nor 2 (interrupted): a wrong call, or nothing to run.
    if code not in (0, 1, 2) or (code == 2 and in_time):
        raise RuntimeError(f"pytest ended with {code}, see above")
    return {
        "passed": count["tests"] - off - count["skipped"],
        "failed": off,
        "skipped": count["skipped"],
        "in_time": in_time,
    }
