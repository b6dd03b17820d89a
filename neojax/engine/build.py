"""From settings to an engine: loads the model, sizes the pools, compiles, says what fits where."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge  # there is no public way to ask whether the device is in use

from neojax.config import EngineConfig, cache_dir
from neojax.engine.core import EngineCore, check_policy
from neojax.engine.cost_cache import cached_costs
from neojax.engine.grammar import GrammarCompiler
from neojax.engine.request_log import RequestLog
from neojax.engine.start_report import StartClock, log_start, memory_rows
from neojax.environment import MAX_INFLIGHT, MEM_FRACTION, device_environment
from neojax.kv import host_memory
from neojax.kv.geometry import CPU_DEVICE_POOL_BYTES, GIB, KVGeometry
from neojax.kv.host_pool import check_isa
from neojax.models.checkpoint import load_model
from neojax.models.config import ModelConfig
from neojax.models.decoder import Decoder, DecoderConfig, load_model_class
from neojax.runner.logit_state import LogitStateSizes
from neojax.runner.runner import Runner, RunnerConfig
from neojax.scheduler.limits import MAX_CHUNKS, SchedulerLimits
from neojax.scheduler.policy import OffloadPolicy, load_policy
from neojax.scheduler.request import Placement
from neojax.scheduler.scheduler import Scheduler
from neojax.text.eos import eos_token_ids
from neojax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

MAX_LAYERS_PER_PROGRAM = 8
ROLLING_ROWS = 16
"""Host rows of a group: as many as the fastest hosts attend to in a step. Padding is cheap."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of both pools and the context they allow."""

    num_device_blocks: int
    num_host_blocks: int
    max_model_len: int


def build_engine(config: EngineConfig, checkpoint: Path, *, progress: bool = True) -> EngineCore:
    """An engine with everything compiled. Raises ValueError where the settings cannot be met."""
    clock = StartClock()
    prepare_jax(config)
    check_isa(config.cpu_isa)
    policy = load_policy(config.offload_policy)
    dtype = resolve_dtype(config.dtype)
    with clock.part("weights"):
        model = _load(config, checkpoint, dtype, progress)
    model_config = model.config
    geometry = KVGeometry(
        model_config.num_layers,
        model_config.num_kv_heads,
        model_config.head_dim,
        config.block_size,
        dtype,
    )
    sizes = resolve_sizes(
        config,
        geometry,
        model_config.max_position_embeddings,
        activation_bytes(config, model_config, dtype),
    )
    rolling_rows = resolve_rolling_rows(config, policy, sizes)
    with clock.part("host KV"):
        runner = Runner(
            model,
            RunnerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=sizes.max_model_len,
                num_device_blocks=sizes.num_device_blocks,
                num_host_blocks=sizes.num_host_blocks,
                layers_per_program=resolve_layers_per_program(config, model_config.num_layers),
                cpu_threads=config.cpu_threads,
                cpu_bind=config.cpu_bind,
                cpu_isa=config.cpu_isa,
                rolling_rows=rolling_rows,
            ),
            geometry,
        )
    costs, programs = None, []
    if not config.enforce_eager:
        with clock.part("programs"):
            programs = [program for _, program in runner.compile(progress=progress)]
    with clock.part("device KV"):
        runner.allocate()
    if not config.enforce_eager:
        with clock.part("warm-up"):
            runner.warm_up()
        if runner.host is not None:
            with clock.part("costs"):
                costs = cached_costs(
                    cache_dir() / "costs",
                    runner.fingerprint(),
                    lambda: runner.profile(progress=progress),
                )
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        block_size=config.block_size,
        num_device_blocks=sizes.num_device_blocks,
        num_host_blocks=sizes.num_host_blocks,
        max_num_chunks=MAX_CHUNKS,
        scratch_tokens=runner.scratch_tokens,
        num_layers=model_config.num_layers,
        rolling_rows=rolling_rows,
        can_swap=runner.host is not None,
        rotate_steps=config.rotate_residency,
        swap_in_threshold=config.swap_in_threshold,
        swap_out_threshold=config.swap_out_threshold,
        tpot_slo_s=config.tpot_slo_ms / 1e3,
    )
    scheduler = Scheduler(limits, policy, costs)
    check_policy(policy.placements, config.offload_policy, scheduler)
    engine = EngineCore(
        scheduler,
        runner,
        eos_ids=eos_token_ids(checkpoint),
        vocab_size=model_config.vocab_size,
        seed=config.seed,
        request_log=_request_log(config),
        grammars=GrammarCompiler(
            lambda: Tokenizer.from_checkpoint(checkpoint), model_config.vocab_size
        ),
    )
    engine.set_block_limit(config.num_gpu_blocks_limit)
    log_start(clock, memory_rows(runner, geometry, programs), runner)
    return engine


def _load(config: EngineConfig, checkpoint: Path, dtype: np.dtype, progress: bool) -> Decoder:
    if config.model_class is not None:
        return load_model_class(config.model_class, checkpoint, dtype)
    return load_model(
        checkpoint,
        ModelConfig.from_checkpoint(checkpoint).limited_to(config.max_model_len),
        dtype=dtype,
        load_format=config.load_format,
        seed=config.seed,
        progress=progress,
    )


def _request_log(config: EngineConfig) -> RequestLog:
    try:
        return RequestLog(None if config.request_log is None else Path(config.request_log))
    except OSError as error:
        raise ValueError(f"--request-log {config.request_log}: {error}") from error


def prepare_jax(config: EngineConfig) -> None:
    """Set what counts only before the device is first used; say so when it is too late.

    Compiled programs are kept on disk, unless the user has chosen otherwise.
    """
    wanted = device_environment(config.gpu_memory_utilization)
    if not xla_bridge.backends_are_initialized():
        os.environ.update(wanted)
        options = {"max_inflight_computations": MAX_INFLIGHT}
        jax.config.update("jax_pjrt_client_create_options", options)
    elif jax.default_backend() == "gpu" and MEM_FRACTION[0] in wanted:
        log.warning(
            "jax already holds the GPU; to give neojax its share of memory set %s=%s before jax "
            "is first used",
            MEM_FRACTION[0],
            wanted[MEM_FRACTION[0]],
        )
    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009 - not in jax's stubs
        jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def resolve_dtype(name: str) -> np.dtype:
    """The parameters' and the cache's type; auto is what the device computes fastest."""
    if name == "auto":
        device = jax.devices()[0]
        if device.platform == "cpu":
            name = "float32"
        else:
            name = "bfloat16" if float(device.compute_capability) >= 8.0 else "float16"
    return jnp.dtype(name)


def resolve_sizes(
    config: EngineConfig, geometry: KVGeometry, model_max_len: int, reserve_bytes: int = 0
) -> Sizes:
    """Blocks and context from memory and flags. Raises ValueError with the numbers that work.

    reserve_bytes: device memory to leave to activations.
    """
    num_device = config.num_gpu_blocks_override or max(
        0, geometry.num_blocks(_device_pool_bytes(config, reserve_bytes))
    )
    num_host = geometry.num_blocks(_host_pool_bytes(config))
    # The longest sequence must fit a pool that the policy uses, within the block limit.
    limit = config.num_gpu_blocks_limit
    usable = {
        Placement.DEVICE: num_device if limit is None else min(num_device, limit),
        Placement.HOST: num_host,
    }
    placements = load_policy(config.offload_policy).placements
    largest = max(usable[placement] for placement in placements) * config.block_size
    wanted = config.max_model_len
    if wanted is not None and wanted > model_max_len:
        raise ValueError(
            f"max_model_len {wanted} is more than the model's {model_max_len} positions"
        )
    if wanted is not None and wanted > largest:
        need = wanted * geometry.token_bytes / GIB
        raise ValueError(
            f"max_model_len {wanted} needs {need:.2f} GiB of KV in one pool; the device pool has "
            f"{num_device * geometry.block_bytes / GIB:.2f}, the host pool "
            f"{num_host * geometry.block_bytes / GIB:.2f}. Try --cpu-kv-gib {need + 0.01:.2f} or "
            f"--max-model-len {largest}"
        )
    max_model_len = wanted or min(model_max_len, largest)
    if max_model_len < 2:
        raise ValueError(
            f"no room for KV cache: the device pool has {num_device} blocks, the host pool "
            f"{num_host}; a block takes {geometry.block_bytes / GIB:.4f} GiB"
        )
    # More blocks than all sequences can fill would be memory for nothing.
    most = config.max_num_seqs * -(-max_model_len // config.block_size)
    if config.num_gpu_blocks_override is None:
        num_device = min(num_device, most)
    num_host = min(num_host, most)
    host_memory.check_kv_bytes(num_host * geometry.block_bytes)
    return Sizes(num_device, num_host, max_model_len)


def _device_pool_bytes(config: EngineConfig, reserve_bytes: int) -> float:
    stats = jax.devices()[0].memory_stats()
    if stats is None:
        return min(CPU_DEVICE_POOL_BYTES, host_memory.available_bytes() / 4)
    # bytes_limit is what XLA was allowed to take: the utilization is in it already.
    return stats["bytes_limit"] - stats["bytes_in_use"] - reserve_bytes


def activation_bytes(config: EngineConfig, model: DecoderConfig, dtype: np.dtype) -> int:
    """What a step needs besides weights and pools: activations, logits, room to grow.

    The widest moment of a layer holds gate, up and their product beside the residual, doubled for
    two steps in flight. The full head holds eight arrays of float32 logits (as XLA compiles it for
    the CPU backend). And what sampling remembers of each request: counts of every token.
    """
    per_token = (3 * model.intermediate_size + 4 * model.hidden_size) * dtype.itemsize
    logits = 8 * 4 * config.max_num_seqs * model.vocab_size
    state = LogitStateSizes(config.max_num_seqs, model.vocab_size).num_bytes
    return 2 * config.max_num_batched_tokens * per_token + logits + state + GIB


def _host_pool_bytes(config: EngineConfig) -> float:
    if config.offload_policy == "device-only":
        return 0
    if config.cpu_kv_gib is None:
        return host_memory.default_kv_bytes()
    return config.cpu_kv_gib * GIB


def resolve_rolling_rows(config: EngineConfig, policy: OffloadPolicy, sizes: Sizes) -> int:
    """Rows of a group of ROLLING steps; 0 where there are none and need no programs.

    By default only a policy that insists has them: a hop costs 50 us of a layer's 140 on an H200,
    and auto served less with ROLLING steps than without (docs/measurements.md).
    """
    if not sizes.num_host_blocks:
        return 0
    if config.rolling_rows is not None:
        return config.rolling_rows
    return min(ROLLING_ROWS, config.max_num_seqs) if policy.needs_rolling else 0


def resolve_layers_per_program(config: EngineConfig, num_layers: int) -> int:
    """The flag, or the largest divisor of the layers up to 8. ValueError for what is none."""
    divisors = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
    wanted = config.layers_per_program
    if wanted is None:
        return max(n for n in divisors if n <= MAX_LAYERS_PER_PROGRAM)
    if wanted not in divisors:
        raise ValueError(
            f"layers_per_program {wanted} does not divide the model's {num_layers} layers; "
            f"possible are {', '.join(map(str, divisors))}"
        )
    return wanted
