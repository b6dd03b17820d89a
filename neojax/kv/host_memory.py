"""How much memory the host can give to the KV cache, and what a wish for more meets.

MemAvailable bounds only the default: some virtual machines grow their memory as it is touched, so
it understates. A cgroup's limit is hard: beyond it the process is killed.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from neojax.kv.geometry import GIB

log = logging.getLogger(__name__)

DEFAULT_BYTES = GIB
"""KV cache on the host unless told otherwise: enough to try things."""

_NO_LIMIT = 1 << 60  # cgroup v1 writes "no limit" as a huge number of whole pages


def available_bytes(root: Path = Path("/")) -> int:
    """MemAvailable; what Linux thinks it can give without swapping."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cgroup_room_bytes(root: Path = Path("/")) -> int | None:
    """What the cgroups of this process still allow it; None without a limit.

    Pages of files that nobody uses count as room: the kernel drops them first. The process's own
    cgroup and every parent of it count; the tightest wins.
    """
    rooms = []
    for directory, is_v2 in _cgroup_directories(root):
        limit = _number(directory / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        used = _number(directory / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        stat = _read(directory / "memory.stat") or ""
        key = "inactive_file" if is_v2 else "total_inactive_file"
        idle = [int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == key]
        rooms.append(max(0, limit - used + sum(idle)))
    return min(rooms, default=None)


def default_kv_bytes() -> int:
    """The host's KV cache when no size is asked for: at most half of what is available."""
    room = cgroup_room_bytes()
    available = available_bytes()
    return min(DEFAULT_BYTES, (available if room is None else min(available, room)) // 2)


def check_kv_bytes(wanted: int) -> None:
    """ValueError if a cgroup forbids so much; a warning if it is more than seems available."""
    room = cgroup_room_bytes()
    if room is not None and wanted > room:
        raise ValueError(
            f"the host's KV cache of {wanted / GIB:.2f} GiB is more than the {room / GIB:.2f} GiB "
            f"that the memory limit of this process's cgroup leaves: try --cpu-kv-gib "
            f"{0.8 * room / GIB:.2f} or raise the limit"
        )
    available = available_bytes()
    if wanted > available:
        log.warning(
            "the host's KV cache of %.2f GiB is more than the %.2f GiB that seem available: "
            "touching its memory will tell",
            wanted / GIB,
            available / GIB,
        )


def _cgroup_directories(root: Path) -> list[tuple[Path, bool]]:
    """Directories with the memory controller's files, and whether they are of cgroup v2."""
    own = {True: "/", False: "/"}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own[True] = path
        elif "memory" in controllers.split(","):
            own[False] = path
    bases = {True: root / "sys/fs/cgroup", False: root / "sys/fs/cgroup/memory"}
    return [
        (bases[is_v2] / str(parent).lstrip("/"), is_v2)
        for is_v2, path in own.items()
        for parent in (Path(path), *Path(path).parents)
    ]


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """The file's number; None if there is no file, or it says "max"."""
    text = (_read(path) or "").strip()
    return int(text) if text.isdecimal() else None
