"""Measured costs, kept on disk: the same model on the same machine need not be measured again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

import neojax
from neojax.runner.profiler import Profiler
from neojax.scheduler.costs import CostTables

log = logging.getLogger(__name__)


def cached_costs(
    folder: Path, fingerprint: Mapping[str, str], measure: Callable[[], CostTables]
) -> CostTables:
    """Tables from the folder, or measured and left there.

    A changed fingerprint, another machine or version means another file; a damaged one is
    measured anew, and a folder that cannot be written is no error.
    """
    key = {**fingerprint, **_surroundings()}
    text = json.dumps(key, sort_keys=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    try:
        tables = _read(path, key)
        log.info("costs of this machine: %s", path)
        return tables
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("%s cannot be used and is measured again: %s", path, error)
    tables = measure()
    try:
        _write(path, json.dumps({"key": key, "tables": json.loads(tables.to_json())}, indent=1))
    except OSError as error:
        log.warning("measured costs are not kept: %s", error)
    return tables


def _surroundings() -> dict[str, str]:
    """What changes costs without the engine's doing."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "jax": jax.__version__,
        "neojax": neojax.__version__,
        "method": str(Profiler.METHOD),
        "host": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "matmul_precision": str(jax.config.values["jax_default_matmul_precision"]),
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()  # not every architecture names its model there


def _read(path: Path, key: Mapping[str, str]) -> CostTables:
    """Raises ValueError for a file that is not what was written here."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("key") != dict(key):
        raise ValueError("it belongs to another engine")
    return CostTables.from_json(json.dumps(data.get("tables")))


def _write(path: Path, text: str) -> None:
    """Whole or not at all: other engines may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as f:
        f.write(text)
    os.replace(f.name, path)
