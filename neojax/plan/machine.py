"""Machines as data sheets describe them, and how much of that software gets.

Peak figures are the makers'; what is attained of them is one set of constants for every machine,
taken from measurements on one H200 (docs/measurements.md) before anything was compared.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

GB = 1e9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One host and the devices that serve one model together."""

    name: str
    num_devices: int = 1
    device_flops: float
    """Dense 16-bit floating-point operations per second, each device."""
    device_bandwidth: float
    """Bytes per second of device memory, each device."""
    device_memory: float
    """Bytes of device memory, each device."""
    device_link: float = 0.0
    """Bytes per second and direction between devices; needed for more than one."""
    host_link: float
    """Bytes per second and direction between the host and all devices together."""
    host_cores: int
    host_bandwidth: float
    """Bytes per second of host memory within reach of these cores."""
    host_memory: float
    """Bytes of host memory."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("name", "device_link") and not value > 0:
                raise ValueError(f"machine {self.name}: {field.name} must be above 0, got {value}")
        if self.num_devices > 1 and not self.device_link > 0:
            raise ValueError(f"machine {self.name}: {self.num_devices} devices need a device_link")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What is attained of a machine's peak, and times that no data sheet gives (seconds)."""

    flops: float = 0.70
    """Matrix products: 2048 tokens through a layer take 1.30 ms."""
    attention_flops: float = 0.25
    """Prefill attention: 16 prompts of 4096 at 39,400 tokens/s, less their matrix products."""
    bandwidth: float = 0.75
    """Reading weights and KV cache: a layer at 8 tokens takes 123 µs."""
    link: float = 0.80
    """Copies of whole blocks between host and device."""
    hop_link: float = 0.40
    """The small copies of a hop: 38 µs for 8 rows, 85 for 64."""
    hop_s: float = 32e-6
    """A start and a join without their bytes."""
    rolling_hop_s: float = 14e-6
    """The same in a ROLLING step, all included: 32 took 0.45 ms."""
    stage_s: float = 10e-6
    """What a layer of its own programs takes longer than one in a program of many."""
    step_s: float = 0.4e-3
    """Embedding, sampling and launches of a sub-batch, without reading the head's weights."""
    all_reduce_s: float = 10e-6
    """A sum over devices without its bytes; two a layer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostKernel:
    """How fast one core attends, and how much of the host's bandwidth all of them attain.

    A core needs seconds_per_byte + seconds_per_byte_and_head * G for each byte of K and V, where
    G query heads share a kv head.
    """

    name: str
    seconds_per_byte: float
    seconds_per_byte_and_head: float
    bandwidth: float
    call_s: float
    """What a layer of a sub-batch takes beside reading K and V."""

    def bytes_per_s(self, machine: Machine, group: int) -> float:
        """K and V read per second by all cores."""
        core = 1 / (self.seconds_per_byte + self.seconds_per_byte_and_head * group)
        return min(machine.host_cores * core, self.bandwidth * machine.host_bandwidth)


EFFICIENCY = Efficiency()
NEOJAX_KERNEL = HostKernel(
    name="neojax",  # 119 GB/s at G=4 and 133 at G=1 on 16 cores whose memory gives 150
    seconds_per_byte=0.05e-9,
    seconds_per_byte_and_head=0.01e-9,
    bandwidth=0.80,
    call_s=10e-6,  # waking the workers and dividing the work
)
NEO_KERNEL = HostKernel(
    name="NEO",  # 3.6 GB/s a core at G=4, 2.2 to 2.8 at G=7 (third party), 9 estimated at G=1
    seconds_per_byte=0.055e-9,
    seconds_per_byte_and_head=0.056e-9,
    bandwidth=0.80,
    call_s=0.6e-3,  # the launches of a layer, which the paper gives, are the same thread's
)
HOST_KERNELS = {"neojax": NEOJAX_KERNEL, "neo": NEO_KERNEL}


def _aws_g5(size: int) -> Machine:
    """g5.{size}xlarge: 2 cores and 16 GB for each unit of size, one A10G."""
    cores = 2 * size
    return Machine(
        name=f"a10g-g5.{size}xlarge",
        device_flops=70e12,
        device_bandwidth=600 * GB,
        device_memory=24 * GB,
        host_link=32 * GB,  # PCIe 4.0 x16
        host_cores=cores,
        # EPYC 7R32: eight channels of DDR4-3200 for 48 cores, about 20 GB/s for a core alone.
        host_bandwidth=min(204.8 * GB, cores * 20 * GB),
        host_memory=16 * size * GB,
    )


_NAMED = (
    Machine(
        name="t4-g4dn.4xlarge",
        device_flops=65e12,
        device_bandwidth=320 * GB,
        device_memory=16 * GB,
        host_link=16 * GB,  # PCIe 3.0 x16
        host_cores=8,
        # Xeon 8259CL: six channels of DDR4-2933 for 24 cores.
        host_bandwidth=min(140.8 * GB, 8 * 12 * GB),
        host_memory=64 * GB,
    ),
    *map(_aws_g5, (2, 4, 8, 16)),
    Machine(
        name="2xh100",
        num_devices=2,
        device_flops=989e12,
        device_bandwidth=3350 * GB,
        device_memory=80 * GB,
        device_link=450 * GB,
        host_link=2 * 64 * GB,  # PCIe 5.0 x16 each
        host_cores=56,
        # The paper does not describe this host: one socket of a Xeon 8480, DDR5-4800, is assumed.
        host_bandwidth=307 * GB,
        host_memory=512 * GB,
    ),
    Machine(
        name="h200",
        device_flops=989e12,
        device_bandwidth=4800 * GB,
        device_memory=141 * GB,
        host_link=64 * GB,
        host_cores=16,
        host_bandwidth=150 * GB,  # measured: a loop that only reads
        host_memory=128 * GB,
    ),
)
MACHINES = {machine.name: machine for machine in _NAMED}


def resolve_machine(text: str) -> Machine:
    """A machine by name, or from a JSON file with the fields of `Machine`.

    Raises ValueError naming what there is.
    """
    if text in MACHINES:
        return MACHINES[text]
    path = Path(text)
    if not path.is_file():
        raise ValueError(
            f"machine {text!r} is neither a JSON file nor one of {', '.join(MACHINES)}"
        )
    try:
        return Machine(**{"name": path.stem} | json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(Machine))
        raise ValueError(f"machine {path}: {error}. Its fields are {names}") from error
