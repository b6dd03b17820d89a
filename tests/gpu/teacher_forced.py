"""bfloat16 through the fast attention, on the plans and tokens of a float32 run.

Two runners with the same weights, rounded to bfloat16 first, execute the same plans: device-only,
with rows on the host, with chunks of long prompts, with swaps. The float32 one, through plain XLA
attention and products at full precision, chooses the tokens; only the logits are compared.
"""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from neojax.engine.core import EngineCore
from neojax.runner.runner import Runner
from tests.engine.tiny import BASE, mixed_requests, tiny_engine, tiny_model
from tests.soak import RandomSwapping

CONFIG = dataclasses.replace(
    BASE, num_heads=8, num_kv_heads=2, head_dim=128, num_layers=4, vocab_size=BASE.vocab_size
)
TOLERANCE = 0.05
"""Of the largest logit: bfloat16 keeps 8 bits, and 4 layers add up."""


def engines() -> tuple[EngineCore, Runner]:
    """The float32 engine, and a bfloat16 runner of the same shape."""
    model = tiny_model(CONFIG)
    graphdef, state = nnx.split(model)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), rounded)
    flags = {"num_device_blocks": 64, "num_host_blocks": 64, "layers_per_program": 4}
    reference = tiny_engine(nnx.merge(graphdef, exact), **flags)
    fast = tiny_engine(nnx.merge(graphdef, rounded), dtype=jnp.bfloat16, **flags)
    return reference, fast.runner


def teacher_forced(num_requests: int = 40, seed: int = 0) -> dict[str, float | int | str]:
    """Largest difference of logits, and whether the best token is the same where it is clear."""
    jax.config.update("jax_default_matmul_precision", "highest")
    engine, fast = engines()
    scheduler, rng = engine.scheduler, random.Random(seed)
    usual = scheduler._swapping
    worst, largest, rows, clear, differ = 0.0, 0.0, 0, 0, 0
    for limit, probability in ((None, 0.0), (14, 0.0), (40, 0.2)):
        engine.set_block_limit(limit)
        scheduler._swapping = RandomSwapping(engine, rng, probability)
        for i, (prompt, params) in enumerate(mixed_requests(num_requests, seed)):
            engine.add_request(f"{limit}-{i}", prompt, params)
        while scheduler.has_requests:
            plan = scheduler.schedule()
            assert plan is not None
            handle = engine.runner.enqueue(plan, wants_logits=True)
            other = fast.enqueue(plan, wants_logits=True)
            tokens = handle.tokens()
            other.tokens()
            if tokens:
                a, b = handle.logits(), other.logits()
                top = np.sort(a, axis=-1)
                is_clear = top[:, -1] - top[:, -2] > TOLERANCE * np.abs(a).max()
                worst = max(worst, float(np.abs(a - b).max()))
                largest = max(largest, float(np.abs(a).max()))
                rows += len(a)
                clear += int(is_clear.sum())
                differ += int((a.argmax(-1) != b.argmax(-1))[is_clear].sum())
            scheduler.update(plan, tokens)
    scheduler._swapping = usual
    engine.close()
    fast.close()
    jax.config.update("jax_default_matmul_precision", None)
    return {
        "attention": fast._attention.name, "rows": rows, "largest_logit": largest,
        "worst_difference": worst, "relative": worst / largest, "clear_rows": clear,
        "clear_rows_that_differ": differ,
    }  # fmt: skip
