"""Which model the GPU checks measure, and how much of everything they ask of it.

Two loads: the shapes of Llama-3.1-8B for a large GPU, and a tiny model for any device at all.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from neojax.config import EngineConfig
from neojax.engine.build import build_engine
from neojax.engine.core import EngineCore

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
}
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "eos_token_id": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Load:
    """A model's config, and how much of everything the sections ask of it."""

    model: dict[str, Any]
    weight_bytes: float  # read by a decode step: all but the embedding's table
    kv_bytes_per_token: int
    sizes: dict[str, int]
    host: dict[str, Any]  # flags of engines with a host pool
    decode_batches: tuple[int, ...]
    context: int  # of decodes, near enough
    prompts: tuple[int, int]  # lengths of lone prompts; the longer comes many at a time too
    num_prompts: int
    output: int
    num_at_once: tuple[int, ...]
    step_batches: tuple[int, ...]  # of host_time and, the first of them, of swap
    swap_tokens: int
    device_rows: tuple[int, ...]  # of ROLLING steps
    group_rows: tuple[int, ...]
    group_contexts: tuple[int, ...]


FULL = Load(
    LLAMA_8B,
    weight_bytes=15.01e9,
    kv_bytes_per_token=2 * 32 * 8 * 128 * 2,
    sizes={"max_model_len": 2048 + 4096, "max_num_seqs": 256, "max_num_batched_tokens": 4096},
    host={"cpu_kv_gib": 8},
    decode_batches=(1, 8, 16, 32, 64, 128, 256),
    context=1000,
    prompts=(1000, 4096),
    num_prompts=16,
    output=100,
    num_at_once=(64, 256),
    step_batches=(64, 256),
    swap_tokens=2048,
    # The middle of the grid first.
    device_rows=(64, 4, 256),
    group_rows=(4, 2, 8),
    group_contexts=(1024, 256, 4096),
)
SMALL = Load(
    TINY,
    weight_bytes=1e6,
    kv_bytes_per_token=2 * 4 * 2 * 16 * 4,
    sizes={"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64},
    host={"cpu_kv_gib": 0.25, "cpu_threads": 1},
    decode_batches=(1, 8),
    context=80,
    prompts=(20, 100),
    num_prompts=4,
    output=8,
    num_at_once=(4,),
    step_batches=(4,),
    swap_tokens=64,
    device_rows=(4,),
    group_rows=(2,),
    group_contexts=(16, 64),
)


LOADS = {"8b": FULL, "tiny": SMALL}

# Flags of an engine, by what its sections need.
FLAGS: dict[str, dict[str, Any]] = {
    "device": {"offload_policy": "device-only"},
    # Compiled as they go: their sections need a few programs only.
    "host": {"offload_policy": "auto", "enforce_eager": True},
    "rolling": {"offload_policy": "rolling", "enforce_eager": True},
    "ready": {"offload_policy": "auto"},
}


def build(load: Load, **flags: Any) -> EngineCore:
    """An engine with random weights, with everything compiled unless the flags say otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(load.model))
        config = EngineConfig(model=folder, load_format="dummy", **(load.sizes | flags))
        return build_engine(config, Path(folder))


def engine_of(kind: str, load: Load) -> EngineCore:
    """One of that kind in FLAGS, with a host pool unless it is device-only."""
    return build(load, **FLAGS[kind], **({} if kind == "device" else load.host))
