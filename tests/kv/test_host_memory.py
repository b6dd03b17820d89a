"""Limits of the host's memory, read from files as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from neojax.kv import host_memory
from neojax.kv.geometry import GIB


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_cgroup_counts_and_idle_file_pages_are_room(tmp_path: Path):
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/memory.max": "1000\n",
            "sys/fs/cgroup/pod/memory.current": "700\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 500\ninactive_file 50\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/box/memory.current": "700\n",
        },
    )
    assert host_memory.cgroup_room_bytes(root) == 350


def test_the_first_version_of_cgroups_is_read_too(tmp_path: Path):
    files = {
        "proc/self/cgroup": "5:cpu,memory:/box\n1:name=systemd:/\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "700\n",
    }
    assert host_memory.cgroup_room_bytes(write(tmp_path, files)) is None
    files["sys/fs/cgroup/memory/box/memory.limit_in_bytes"] = "600\n"
    assert host_memory.cgroup_room_bytes(write(tmp_path, files)) == 0


def test_no_cgroup_is_no_limit(tmp_path: Path):
    assert host_memory.cgroup_room_bytes(tmp_path) is None


def test_available_memory_is_what_linux_says(tmp_path: Path):
    root = write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:      5 kB\n"})
    assert host_memory.available_bytes(root) == 5 * 1024


def test_more_than_the_cgroup_leaves_is_refused_with_what_would_fit(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(host_memory, "cgroup_room_bytes", lambda: 10 * GIB)
    host_memory.check_kv_bytes(9 * GIB)
    with pytest.raises(ValueError, match=r"10\.00 GiB .* try --cpu-kv-gib 8\.00"):
        host_memory.check_kv_bytes(11 * GIB)


def test_more_than_seems_available_is_only_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(host_memory, "cgroup_room_bytes", lambda: None)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 * GIB)
    host_memory.check_kv_bytes(4 * GIB)
    assert "4.00 GiB is more than the 3.00 GiB that seem available" in caplog.text


def test_the_default_leaves_half(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: GIB)
    monkeypatch.setattr(host_memory, "cgroup_room_bytes", lambda: None)
    assert host_memory.default_kv_bytes() == GIB // 2
    monkeypatch.setattr(host_memory, "cgroup_room_bytes", lambda: GIB // 2)
    assert host_memory.default_kv_bytes() == GIB // 4
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(host_memory, "cgroup_room_bytes", lambda: None)
    assert host_memory.default_kv_bytes() == host_memory.DEFAULT_BYTES
