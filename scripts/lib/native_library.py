"""The native library built for the interpreter that runs this, by CMake and nothing else.

For scripts that run where neojax itself cannot be installed. Knows nothing of what it is used for.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = f"_cpu_paged_attn{sysconfig.get_config_var('EXT_SUFFIX')}"


def is_older_than_its_sources(library: Path, root: Path = ROOT) -> bool:
    """By the time at which files were written, of those that the library is built from."""
    sources = [path for path in (root / "ffi").rglob("*") if path.suffix in (".cc", ".h")]
    newest = max(path.stat().st_mtime for path in [*sources, root / "CMakeLists.txt"])
    return library.stat().st_mtime < newest


def build(folder: Path) -> Path:
    """The library, in that folder. Raises RuntimeError where a tool is missing or fails.

    Wheels in build/wheels serve instead of a network where nanobind is not installed.
    """
    # Tools that pip installed lie beside the interpreter, which need not be on the path.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool, path=path) is None]
    if missing:
        raise RuntimeError(
            f"{' and '.join(missing)} not found, which build the native library. Try "
            f"{sys.executable} -m pip install {' '.join(missing)} nanobind"
        )
    environment = os.environ | {"PATH": path}
    if importlib.util.find_spec("nanobind") is None:
        wheels = ["--no-index", "--find-links", str(ROOT / "build" / "wheels")]
        target = ["--target", str(folder / "packages")]
        _run([sys.executable, "-m", "pip", "install", "-q", *wheels, *target, "nanobind"])
        sys.path.append(str(folder / "packages"))
    import nanobind

    _run(
        [
            "cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja",
            "-DNEOJAX_PYTHON_MODULE=ON", f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={nanobind.cmake_dir()}",
        ],
        environment,
    )  # fmt: skip
    _run(["cmake", "--build", str(folder)], environment)
    return folder / NAME


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout[-4000:]}")
