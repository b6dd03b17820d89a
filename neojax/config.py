"""Every setting of the engine and the server: the source of CLI flags, `LLM` kwargs and the docs.

Knows nobody: no import of jax, numpy or any other part of neojax.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]


def cache_dir() -> Path:
    """Where neojax keeps what it fetched and compiled: $NEOJAX_CACHE, else ~/.cache/neojax."""
    root = os.environ.get("NEOJAX_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "neojax"
    )
    return Path(root)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine: what `LLM(...)` takes, and the first half of the server's flags."""

    model: str = DEFAULT_MODEL
    """Directory, GGUF file, Hugging Face id, or SmolLM2-135M-Instruct, the default model."""
    load_format: LoadFormat = "auto"
    """dummy: random weights, for benchmarks and tests; needs only the model's config."""
    model_class: str | None = None
    """module:Class of a Flax model of your own, made by Class.from_checkpoint(path, dtype); the
    tokenizer comes from --model. See docs/bring_your_own_model.md."""
    dtype: Dtype = "auto"
    """auto: float32 on the CPU backend, bfloat16 on sm_80 and later, else float16."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens. Default: the model's, as far as memory allows."""
    max_num_seqs: int = 32
    """Most sequences in one step."""
    max_num_batched_tokens: int = 512
    """Most tokens in one step; longer prompts are prefilled in chunks."""
    block_size: int = 16
    """Tokens in one KV block; a multiple of 16."""
    gpu_memory_utilization: float = 0.90
    """Share of the GPU's memory to use. On the CPU backend the device pool has a fixed default."""
    num_gpu_blocks_override: int | None = None
    """Size of the device pool's arrays, in blocks, instead of what memory allows."""
    num_gpu_blocks_limit: int | None = None
    """Most device blocks the allocator hands out; the arrays stay as they are."""
    cpu_kv_gib: float | None = None
    """Host memory for KV cache, in GiB; 0 is a plain device-only engine. Default: 1, or half of
    what is available where that is less."""
    cpu_threads: int | None = None
    """Threads of the host attention. Default: usable cores less two."""
    cpu_bind: str = "auto"
    """Where these threads run. A list of cores like 0-7,16: one thread on each; none: wherever the
    system puts them; auto: each stays on one NUMA node and reads the memory there."""
    cpu_isa: str | None = None
    """Kernels of the host attention: scalar, avx2, avx512, avx512bf16, amx, neon or neonbf16.
    Default: the fastest that this machine runs."""
    offload_policy: str = "auto"
    """auto (the host where that pays), device-only, neo (the paper's rule), full (every request's
    KV on the host), rolling (host rows ride in the device's batch and advance by one layer per
    step), or module:Class, a policy of your own (docs/policies.md)."""
    swap_in_threshold: float = 0.95
    """Share of the device's KV cache up to which requests move to it from the host."""
    swap_out_threshold: float = 1.0
    """Share of the device's KV cache above which requests move from it to the host."""
    rotate_residency: int = 0
    """Let requests take turns on the device: who has been there for so many steps gives its place
    to one that has got its tokens more slowly on the host for as long. 16 or more; 0: nobody is
    moved for fairness."""
    rolling_rows: int | None = None
    """Host rows of each layer's group in rolling steps. Above 0, their programs are compiled and
    measured, and auto may choose such steps. Default: 16 under rolling, else 0: a start takes
    longer with them, and on an H200 they lost."""
    tpot_slo_ms: float = 500.0
    """Time per output token up to which auto plans for requests on the host; where it predicts
    more, they wait for the device. Default: two tokens a second, half a reader's pace."""
    request_log: str | None = None
    """Append a JSON line to this file for each request that ends: arrival, placement, moves,
    times."""
    layers_per_program: int | None = None
    """Layers in one compiled program of a DEVICE_ONLY step. Default: the largest divisor of the
    model's layers up to 8."""
    enforce_eager: bool = False
    """Skip the compilation before ready; the first step of each shape compiles instead."""
    seed: int = 0
    """Seed of requests that bring none, and of dummy weights."""

    def __post_init__(self) -> None:
        _check_cores(self.cpu_bind, self.cpu_threads)
        for name, ok, rule in (
            ("max_num_seqs", self.max_num_seqs >= 1, "at least 1"),
            (
                "max_num_batched_tokens",
                self.max_num_batched_tokens >= self.max_num_seqs + self.block_size,
                f"at least max_num_seqs + block_size = {self.max_num_seqs + self.block_size}, so "
                "that a full batch of decodes leaves room for a prefill chunk",
            ),
            ("block_size", self.block_size % 16 == 0 and self.block_size > 0, "a multiple of 16"),
            ("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "in (0, 1]"),
            ("cpu_kv_gib", self.cpu_kv_gib is None or self.cpu_kv_gib >= 0, "0 or more"),
            (
                "layers_per_program",
                self.layers_per_program is None or self.layers_per_program >= 1,
                "at least 1",
            ),
            ("cpu_threads", self.cpu_threads is None or self.cpu_threads >= 1, "at least 1"),
            ("swap_in_threshold", 0 < self.swap_in_threshold <= 1, "in (0, 1]"),
            (
                "swap_out_threshold",
                self.swap_in_threshold <= self.swap_out_threshold <= 1,
                f"between swap_in_threshold ({self.swap_in_threshold}) and 1",
            ),
            (
                "rotate_residency",
                self.rotate_residency == 0 or self.rotate_residency >= 16,
                "0 or at least 16 steps, for which a request that has moved stays",
            ),
            (
                "rolling_rows",
                self.rolling_rows is None or 0 <= self.rolling_rows <= self.max_num_seqs,
                f"between 0 and max_num_seqs = {self.max_num_seqs}",
            ),
            ("tpot_slo_ms", self.tpot_slo_ms > 0, "above 0"),
            ("max_model_len", self.max_model_len is None or self.max_model_len >= 2, "2 or more"),
            (
                "num_gpu_blocks_override",
                self.num_gpu_blocks_override is None or self.num_gpu_blocks_override >= 1,
                "at least 1",
            ),
            (
                "num_gpu_blocks_limit",
                self.num_gpu_blocks_limit is None or self.num_gpu_blocks_limit >= 0,
                "0 or more",
            ),
        ):
            if not ok:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")
        if self.model_class is not None and self.load_format != "auto":
            raise ValueError(
                f"load_format {self.load_format} is for neojax's own models: "
                f"{self.model_class} reads its weights itself"
            )
        if self.offload_policy == "rolling" and self.rolling_rows == 0:
            raise ValueError(
                "offload_policy rolling needs rolling_rows above 0: leave rolling_rows out or "
                "choose another offload_policy"
            )
        if self.rolling_rows and self.cpu_kv_gib == 0:
            raise ValueError(
                f"rolling_rows {self.rolling_rows} are rows whose KV cache is on the host, but "
                "cpu_kv_gib is 0: give cpu_kv_gib some memory or leave rolling_rows out"
            )
        if self.rotate_residency and self.cpu_kv_gib == 0:
            raise ValueError(
                f"rotate_residency {self.rotate_residency} is of requests on the device and on the "
                "host, but cpu_kv_gib is 0: give cpu_kv_gib some memory or leave rotate_residency "
                "out"
            )
        if self.rotate_residency and self.offload_policy in ("device-only", "full"):
            raise ValueError(
                f"rotate_residency {self.rotate_residency} needs requests that run on either side, "
                f"and offload_policy {self.offload_policy} runs all on one: choose auto, neo or "
                "rolling, or leave rotate_residency out"
            )
        if self.offload_policy in ("full", "rolling") and self.cpu_kv_gib == 0:
            raise ValueError(
                f"offload_policy {self.offload_policy} needs KV cache on the host, but cpu_kv_gib "
                "is 0: give cpu_kv_gib some memory or choose offload_policy device-only"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """Settings of `python -m neojax.serve`: the engine's and the HTTP server's."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one. Bound before the model is loaded."""
    served_model_name: str | None = None
    """Name shown to clients instead of the model's own, or several separated by commas."""
    api_key: str | None = None
    """Require this bearer token, or one of several separated by commas. Also read from
    NEOJAX_API_KEY."""
    allowed_origins: str | None = None
    """Web pages of these origins, separated by commas, may call the server; * is all."""
    ssl_certfile: str | None = None
    """Serve HTTPS with this certificate (PEM)."""
    ssl_keyfile: str | None = None
    """Private key of the certificate, if it is not in the same file."""
    chat_template: str | None = None
    """File with a Jinja chat template instead of the model's own."""
    trust_request_chat_template: bool = False
    """Render templates that requests bring as chat_template; such a template can run for ever."""
    generation_config: Literal["auto", "none"] = "auto"
    """auto: requests without temperature, top_p or top_k get the model's generation_config.json."""
    max_num_queued_reqs: int = 1024
    """Requests waiting or running beyond which new ones get 503."""
    request_timeout: float | None = None
    """Seconds that a request may take from arrival to its last token. Default: any time."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM; 0 aborts them."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Verbosity of the log."""
    disable_log_stats: bool = False
    """Do not log throughput and KV usage every 10 seconds."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # super() does not survive slots=True
        for name, ok, rule in (
            ("port", 0 <= self.port <= 65535, "between 0 and 65535"),
            ("max_num_queued_reqs", self.max_num_queued_reqs >= 1, "at least 1"),
            ("shutdown_timeout", self.shutdown_timeout >= 0, "0 or more"),
            (
                "request_timeout",
                self.request_timeout is None or self.request_timeout > 0,
                "above 0",
            ),
            ("api_key", self.api_key is None or any(self.api_keys), "a key"),
        ):
            if not ok:
                shown = "nothing" if name == "api_key" else repr(getattr(self, name))
                raise ValueError(f"{name} must be {rule}, got {shown}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError("ssl_keyfile needs ssl_certfile, the certificate of this key")

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The accepted keys; none means that everybody may enter."""
        return _items(self.api_key)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names under which clients may ask for the model; the first one is the main one."""
        return _items(self.served_model_name) or (self.model,)

    @property
    def origins(self) -> tuple[str, ...]:
        """The origins whose pages may call the server."""
        return _items(self.allowed_origins)


def _items(listed: str | None) -> tuple[str, ...]:
    return tuple(item.strip() for item in (listed or "").split(",") if item.strip())


def bound_cores(cpu_bind: str) -> tuple[int, ...]:
    """The cores that a list like 0-7,16 names, in its order; none for auto and none."""
    cores: list[int] = []
    for item in _items(cpu_bind) if cpu_bind not in ("auto", "none") else ():
        first, _, last = item.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ValueError(f"cpu_bind must be auto, none or cores like 0-7,16, got {cpu_bind!r}")
        cores += range(int(first), int(last or first) + 1)
    if cpu_bind not in ("auto", "none") and len(set(cores)) != max(1, len(cores)):
        raise ValueError(f"cpu_bind must name one core or more, each once, got {cpu_bind!r}")
    return tuple(cores)


def _check_cores(cpu_bind: str, cpu_threads: int | None) -> None:
    cores = bound_cores(cpu_bind)
    if cores and cpu_threads not in (None, len(cores)):
        raise ValueError(
            f"cpu_bind {cpu_bind} names {len(cores)} cores, one a thread, but cpu_threads is "
            f"{cpu_threads}: leave cpu_threads out or name as many cores"
        )
