"""The native library: host KV arena, worker pool, host lane. See ffi/cpu_paged_attn.

Integer arrays are int32 and C-contiguous; floats are float32, bfloat16 or float16. Shape letters
are design.md's. Every bad argument is a ValueError that names it.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

class WorkerPool:
    """Threads that run one job at a time, the calling thread included.

    `num_threads` None: usable cores (affinity and cgroup quota) less two, or less one below four.
    `cpus` pins each thread to a core; the first is the lane's dispatcher's. `nodes`: the cores of
    each NUMA node; threads are spread over them and stay there, caches are placed so that each node
    holds a part, which its own threads read. None: the machine's; empty: none are told apart.
    """

    def __init__(
        self,
        num_threads: int | None = None,
        *,
        cpus: Sequence[int] = ...,
        nodes: Sequence[Sequence[int]] | None = None,
    ) -> None: ...
    @property
    def num_nodes(self) -> int:
        """Nodes that have threads; 1 where none are told apart."""

    @property
    def num_threads(self) -> int: ...
    def close(self) -> None:
        """Ends the threads after the job in progress; later jobs run on their caller."""

class HostKVCache:
    """KV of all layers in host memory, by blocks of `block_size` (a multiple of 16) tokens."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: str,
        pool: WorkerPool,
    ) -> None:
        """Maps and touches the memory. RuntimeError with the size reached if there is less."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def touch_s(self) -> float:
        """Seconds that touching every page took."""

    def write(self, layer: int, table: NDArray, start: int, k: NDArray, v: NDArray) -> None:
        """Puts k, v [n, K, H] at positions start.. of the sequence with block table [W]."""

    def read(self, layer: int, table: NDArray, start: int, n: int) -> tuple[NDArray, NDArray]:
        """k, v [n, K, H] of positions start.., in the cache's dtype."""

    def fill(self, value: float) -> None:
        """Sets every element; for tests that poison unused slots."""

    @staticmethod
    def bytes_per_block(
        num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
    ) -> int:
        """Bytes of one block over all layers, K and V."""

class CudaReport:
    """The device side of a lane."""

    @property
    def device(self) -> int: ...
    @property
    def memory_operations(self) -> bool:
        """Streams write and await flags themselves; otherwise host functions do."""

    @property
    def round_trip_us(self) -> float:
        """From the device to a thread and back, nothing moved."""

    @property
    def device_bytes(self) -> int: ...
    @property
    def pinned_bytes(self) -> int: ...
    @property
    def registered_bytes(self) -> int:
        """Of the arena, page-locked."""

    @property
    def register_s(self) -> float: ...
    @property
    def notes(self) -> list[str]:
        """What is worse than it could be, and why: worth a log line each."""

class HostLane:
    """Channels of started and joined attention jobs, served in launch order by one thread.

    `max_rows`: most sequences in one start. `num_plans`: entries of the plan ring. `softcap` c:
    logits become c * tanh(logit / c); 0 leaves them. `isa`: kernels to use, "" for the fastest.

    `cuda_device`: ordinal of the device, among those that the process sees, whose programs the
    lane serves; None for programs of the CPU platform. A CUDA lane takes all it needs there at
    once: per channel two slots, `staging_bytes` for stores, on the device and pinned each, and
    room for eight calls that move whole blocks, `swap_bytes` each at most.
    `memory_operations` False: host functions carry the flags, as where streams cannot.
    `watchdog_s`: a job that has not ended by then is waited for no more: on the CPU platform join
    fails and names the channel, on CUDA `error` does.
    `deep_slots`: slots of one more channel, behind the others, of which so many starts may await
    their join; a start there takes up to `deep_rows` sequences. 0: there is none.
    """

    def __init__(
        self,
        cache: HostKVCache,
        pool: WorkerPool,
        num_q_heads: int,
        num_channels: int,
        max_rows: int,
        scale: float,
        num_plans: int = 8,
        *,
        softcap: float = 0.0,
        isa: str = "",
        cuda_device: int | None = None,
        staging_bytes: int = 64 << 20,
        watchdog_s: float = 30.0,
        swap_bytes: int = 0,
        memory_operations: bool = True,
        deep_slots: int = 0,
        deep_rows: int = 0,
    ) -> None:
        """RuntimeError, with the driver's words, if the device cannot give what the lane needs."""

    @property
    def cuda_report(self) -> CudaReport | None:
        """What a CUDA lane found and took when it was made; None for the CPU platform."""

    @property
    def id(self) -> int:
        """The lowest id that no open lane had; an attribute of the FFI calls."""

    @property
    def isa(self) -> str: ...
    def set_plan(
        self,
        index: int,
        context_lens: NDArray,
        tables: NDArray,
        chunks: NDArray | None = None,
        chunk_tables: NDArray | None = None,
        uses: int = 0,
        *,
        window: int = 0,
    ) -> None:
        """Replaces entry `index` of the plan ring.

        Args:
          context_lens: int32 [B], tokens of each sequence, the new one included.
          tables: int32 [B, W], block ids; entries beyond a sequence's tokens are not read.
          chunks: int32 [C, 4], prefill chunks (row_offset, num_tokens, start, scratch_slot).
          chunk_tables: int32 [C, W], block tables of their sequences.
          uses: number of joins and stores whose hdr will name this entry, n = 0 included;
            until then it cannot be replaced.
          window: attend to the last `window` tokens only; 0 for all.

        Raises:
          RuntimeError: earlier uses of the entry are outstanding, or the lane is closed.
        """

    def plan_in_use(self, index: int) -> bool: ...
    @property
    def num_swaps_out(self) -> int:
        """Swaps out launched on a device so far; 0 on the CPU platform, where a call is all."""

    def await_swaps_out(self, count: int) -> None:
        """Waits until the first `count` have ended, well or not, or the device is given up."""

    def drain(self, timeout_s: float) -> None:
        """Waits for all queued jobs, then forgets starts not joined and outstanding plan uses.

        Call it when no program that uses the lane runs. TimeoutError names the channels. A lane
        whose watchdog struck works again afterwards, unless its device is lost.
        """

    def error(self) -> str | None:
        """The first failure since `clear_error`, of a job (its output was zero) or a device.

        On the CUDA platform a wrong hdr is found here too, not where the call is made.
        """

    def clear_error(self) -> None: ...
    def set_delay_us(self, microseconds: int) -> None:
        """Test hook: every job with rows first sleeps this long; on a device, with chunks too."""

    def fail_next_job(self, message: str) -> None:
        """Test hook: the next job with rows fails."""

    def record(self, on: bool) -> None:
        """Starts (forgetting the old) or stops recording job intervals."""

    def intervals(self) -> NDArray[np.int64]:
        """[J, 5]: channel, plan, layer, start_ns, end_ns on time.monotonic_ns's clock."""

    def counters(self) -> dict[str, int]:
        """Totals: starts, joins, stores, fetches, jobs, rows, tokens, busy_ns, tie_copies, ...

        `blocks_out` and `blocks_in` count blocks swapped, once for each layer.
        """

    def close(self) -> None:
        """Runs what is queued, ends the thread and frees the id. May be called twice.

        A CUDA lane gives up what has not come from the device within seconds, so that neither
        waits for the other.
        """

def attend(
    cache: HostKVCache,
    pool: WorkerPool,
    rows: NDArray,
    context_lens: NDArray,
    tables: NDArray,
    layer: int,
    *,
    num_q_heads: int,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    append: bool = False,
    isa: str = "",
) -> tuple[NDArray, NDArray[np.float32]]:
    """Decode attention of rows [B, (N+2K)*H] (q|k|v), outside any lane.

    Returns:
      out [B, N*H] in the dtype of rows, and the natural log-sum-exp of the logits [B, N].
    """

def time_read(
    cache: HostKVCache, pool: WorkerPool, *, streams: int, ahead: int, isa: str = ""
) -> float:
    """Seconds to read the whole arena once on every thread of the pool.

    Each thread reads `streams` (1, 2, 4 or 8) sequences side by side and asks for lines `ahead`
    bytes early (0: leaves that to the hardware).
    """

def time_attend(
    cache: HostKVCache,
    pool: WorkerPool,
    rows: NDArray,
    context_lens: NDArray,
    tables: NDArray,
    *,
    num_q_heads: int,
    scale: float,
    num_calls: int,
    asleep: bool = False,
    read_only: bool = False,
    isa: str = "",
) -> list[float]:
    """Seconds of each of `num_calls` calls on layers 0, 1, ... in turn, from submit to result.

    The pool is armed meanwhile; with `asleep` it is not, and its threads sleep before each call.
    With `read_only` the tiles are read, in the order in which kernels read them, and nothing is
    computed.
    """

def isa(name: str = "") -> str:
    """Kernels that `name`, else NEOJAX_CPU_ISA, else the machine selects."""

def available_isas() -> list[str]:
    """Kernels that run on this machine, slowest first."""

def usable_cores() -> int:
    """Cores of the affinity mask, capped by the cgroup's CPU quota."""

def default_num_threads() -> int: ...
def ffi_api_version() -> tuple[int, int]:
    """XLA FFI API version this library was built with."""

_Targets: TypeAlias = dict[
    Literal[
        "neojax.start.v2",
        "neojax.join.v1",
        "neojax.exchange.v1",
        "neojax.store.v1",
        "neojax.fetch.v1",
    ],
    object,
]

def registrations() -> _Targets:
    """FFI targets of platform cpu."""

def cuda_registrations() -> _Targets:
    """The same targets of platform CUDA; empty without libcuda or a device."""
