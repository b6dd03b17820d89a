"""Small engines with lively random weights, and an independent forward pass to judge them by."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from neojax.engine.core import EngineCore
from neojax.engine.grammar import GrammarCompiler
from neojax.kv.geometry import KVGeometry
from neojax.models.checkpoint import load_model
from neojax.models.config import ModelConfig
from neojax.models.llama import Llama
from neojax.models.rope_scaling import DynamicRopeScaling, Llama3RopeScaling
from neojax.runner.runner import Runner, RunnerConfig
from neojax.sampling_params import SamplingParams
from neojax.scheduler.limits import MAX_CHUNKS, SchedulerLimits
from neojax.scheduler.policy import load_policy
from neojax.scheduler.scheduler import Scheduler
from tests.models.attention import causal_attend

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)

BASE = ModelConfig(
    vocab_size=199,
    hidden_size=96,
    intermediate_size=128,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    max_position_embeddings=1024,
    tie_embeddings=False,
    name="tiny",
)
LLAMA3 = Llama3RopeScaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
VARIANTS = {
    "gqa3": BASE,
    "mha": dataclasses.replace(BASE, num_heads=4, num_kv_heads=4, tie_embeddings=True),
    "gqa4-h128-llama3": dataclasses.replace(
        BASE, num_heads=4, num_kv_heads=1, head_dim=128, rope_scaling=LLAMA3
    ),
    "gqa8-window-dynamic": dataclasses.replace(
        BASE,
        num_heads=8,
        num_kv_heads=1,
        sliding_window=40,
        rope_scaling=DynamicRopeScaling(4.0, 32),
    ),
}


@functools.cache
def tiny_model(config: ModelConfig = BASE, seed: int = 0) -> Llama:
    """Random weights large enough that every token sways the next one."""
    model = load_model(
        None, config, dtype=jnp.float32, load_format="dummy", seed=seed, progress=False
    )
    graphdef, state = nnx.split(model)
    louder = jax.tree.map(lambda x: x * 8 if x.ndim == 2 else x, state)
    return nnx.merge(graphdef, louder)


def tiny_engine(
    model: Llama,
    *,
    policy: str = "auto",
    num_device_blocks: int = 64,
    num_host_blocks: int = 64,
    max_model_len: int = 256,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    layers_per_program: int = 3,
    token_buckets: tuple[int, ...] | None = (8, 64),
    eos_ids: Iterable[int] = (),
    rolling_rows: int = 0,
    grammars: GrammarCompiler | None = None,
    dtype: DTypeLike = jnp.float32,
    compiles: Callable[[Runner], Any] | None = None,
) -> EngineCore:
    """An engine that compiles as it goes; or by `compiles`, before there are pools."""
    c = model.config
    geometry = KVGeometry(c.num_layers, c.num_kv_heads, c.head_dim, 16, jnp.dtype(dtype))
    runner = Runner(
        model,
        RunnerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            num_device_blocks=num_device_blocks,
            num_host_blocks=num_host_blocks,
            layers_per_program=layers_per_program,
            token_buckets=token_buckets,
            rolling_rows=rolling_rows,
        ),
        geometry,
    )
    if compiles is not None:
        compiles(runner)
    runner.allocate()
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=16,
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks,
        max_num_chunks=MAX_CHUNKS,
        scratch_tokens=runner.scratch_tokens,
        num_layers=c.num_layers,
        rolling_rows=rolling_rows,
    )
    return EngineCore(
        Scheduler(limits, load_policy(policy)),
        runner,
        eos_ids=frozenset(eos_ids),
        vocab_size=c.vocab_size,
        seed=0,
        grammars=grammars,
    )


def mixed_requests(count: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 150 tokens, 1 to 24 tokens of output, greedy."""
    rng = np.random.default_rng(seed)
    return [
        (
            rng.integers(0, BASE.vocab_size, int(rng.integers(1, 151))).tolist(),
            SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 25))),
        )
        for _ in range(count)
    ]


def run_all(
    engine: EngineCore, requests: Sequence[tuple[list[int], SamplingParams]]
) -> list[list[int]]:
    """Token ids of each request; the pools must be empty afterwards."""
    tokens: dict[str, list[int]] = {}
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
        tokens[str(index)] = []
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.message is None, output.message
            tokens[output.request_id] += output.token_ids
    assert engine.stats().device_kv_usage == 0
    assert engine.stats().host_kv_usage == 0
    return list(tokens.values())


@functools.cache
def _dense(model: Llama) -> Callable[[jax.Array], jax.Array]:
    graphdef, state = nnx.split(model)
    attend = functools.partial(causal_attend, window=model.config.sliding_window)

    def forward(state: Any, ids: jax.Array) -> jax.Array:
        positions = jnp.arange(len(ids), dtype=jnp.int32)
        return nnx.merge(graphdef, state)(ids, positions, attend)

    return functools.partial(jax.jit(forward), state)


def dense_logits(model: Llama, ids: Sequence[int]) -> np.ndarray:
    """Logits [T, V] of a whole sequence by plain causal attention."""
    padded = np.zeros(256, np.int32)  # one compilation; what lies behind changes nothing
    padded[: len(ids)] = ids
    return np.asarray(_dense(model)(padded))[: len(ids)]


def assert_same_tokens(
    model: Llama,
    requests: Sequence[tuple[list[int], SamplingParams]],
    expected: Sequence[list[int]],
    got: Sequence[list[int]],
) -> None:
    """Equal token for token; a first difference is forgiven only at a tie of the logits."""
    for (prompt, _), a, b in zip(requests, expected, got, strict=True):
        assert len(a) == len(b)
        if a == b:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        logits = dense_logits(model, prompt + a[:at])[-1]
        assert abs(logits[a[at]] - logits[b[at]]) < 1e-4 * np.abs(logits).max(), (at, a, b)
