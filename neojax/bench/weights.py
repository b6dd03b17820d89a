"""`python -m neojax.bench weights`: how long a checkpoint takes to load, and what host memory.

Writes shards of random weights with Llama-3.1-8B's shapes, reads them as plain files, and loads
them in a fresh process. The page cache is emptied of the files before each, so both wait for the
disk.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import ml_dtypes
import numpy as np

from neojax.bench.measure import hardware
from neojax.bench.report import table
from neojax.models.config import ModelConfig
from neojax.models.hf_config_writer import hf_config
from neojax.models.parameters import checkpoint_parts
from neojax.models.safetensors_writer import write_safetensors

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500000.0,
    max_position_embeddings=8192,
)
STORED = np.dtype(ml_dtypes.bfloat16)
BUFFER_BYTES = 16 * 2**20
GB = 1e9


class Loaded(NamedTuple):
    """What a fresh process saw."""

    device: str
    seconds: float
    peak_bytes: int  # of host memory, above what the process had before it loaded
    weight_bytes: int  # on the device


def main(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m neojax.bench weights", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("--layers", type=int, default=32, help="of 32, for small disks")
    parser.add_argument("--dtype", default="bfloat16", help="to load as; bfloat16 is stored")
    parser.add_argument("--directory", type=Path, help="where the files go; default: a new one")
    parser.add_argument("--repeats", type=int, default=3, help="medians of so many are printed")
    parser.add_argument("--json", type=Path, help="write the figures to a file, too")
    arguments = parser.parse_args(argv)
    config = dataclasses.replace(LLAMA_8B, num_layers=arguments.layers)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        directory = Path(scratch)
        write_dummy(directory, config)
        files = sorted(directory.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        reads, loads = [], []
        for _ in range(arguments.repeats):
            evict(files)
            reads.append(read_seconds(files))
            evict(files)
            loads.append(load_in_a_fresh_process(directory, arguments.dtype))
    read_s = statistics.median(reads)
    load_s = statistics.median(load.seconds for load in loads)
    peak = statistics.median(load.peak_bytes for load in loads)
    on_host = loads[0].weight_bytes if loads[0].device == "cpu" else 0
    print(f"{len(files)} files, {size / GB:.2f} GB; {hardware()}")
    print(
        table(
            ["", "s", "GB/s", "host GB"],
            [
                ["read the files", f"{read_s:.2f}", f"{size / GB / read_s:.2f}", ""],
                [
                    f"load as {arguments.dtype} on {loads[0].device}",
                    f"{load_s:.2f}",
                    f"{size / GB / load_s:.2f}",
                    f"{(peak - on_host) / GB:.2f} beside the weights",
                ],
            ],
        )
    )
    if arguments.json:
        figures = {
            "bytes": size,
            "read_s": reads,
            "loads": [load._asdict() for load in loads],
            "hardware": hardware(),
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def write_dummy(directory: Path, config: ModelConfig) -> None:
    """A checkpoint of that shape: one block of random values, over and over."""
    shapes = {name: part.shape for name, part in checkpoint_parts(config).items()}
    block = np.random.default_rng(0).normal(0.0, 0.02, 2**22).astype(STORED)

    def read(name: str) -> np.ndarray:
        return np.resize(block, shapes[name])

    (directory / "config.json").write_text(json.dumps(hf_config(config, STORED.name)))
    write_safetensors(directory, shapes, read, STORED, max_shard_bytes=10**9)


def evict(files: Sequence[Path]) -> None:
    """Take files out of the page cache; they must be on the disk already."""
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(files: Sequence[Path]) -> float:
    """Time to read files from end to end, one after the other."""
    buffer = bytearray(BUFFER_BYTES)
    started = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return time.perf_counter() - started


def load_in_a_fresh_process(directory: Path, dtype: str) -> Loaded:
    """Load a checkpoint where nothing was loaded before."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_load, args=(theirs, directory, dtype))
    process.start()
    theirs.close()
    try:
        return Loaded(*ours.recv())
    except EOFError as error:
        raise RuntimeError("the loading process ended early; its error is above") from error
    finally:
        process.join()


def _load(connection: Connection, directory: Path, dtype: str) -> None:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from neojax.models.checkpoint import load_model

    device = jax.devices()[0]
    jax.block_until_ready(jnp.zeros(1) + 1)  # the device is up; what follows is loading
    before = _status_bytes("VmRSS")
    started = time.perf_counter()
    config = ModelConfig.from_checkpoint(directory)
    state = nnx.state(load_model(directory, config, dtype=jnp.dtype(dtype), progress=False))
    jax.block_until_ready(state)
    seconds = time.perf_counter() - started
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    connection.send((device.platform, seconds, _status_bytes("VmHWM") - before, weights))


def _status_bytes(name: str) -> int:
    """An entry of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
