"""Tokens of tiny float32 models on the default device against a plain forward pass."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import numpy as np

from neojax.engine.core import EngineCore
from neojax.sampling_params import SamplingParams
from tests.engine import tiny
from tests.gpu.engine_bench import end

NUM_REQUESTS = 10


def right(budget_s: float) -> dict[str, object]:
    """How many tokens are not the best of their logits, up to ties, by the end of the budget.

    A model's programs compile as they are needed, which on a cold machine takes longer than all
    the rest: what was not reached by then is named.
    """
    deadline = time.monotonic() + budget_s
    off, count, complete = 0, 0, []
    # TF32 would be the default on a GPU.
    jax.config.update("jax_default_matmul_precision", "highest")
    for variant, config in tiny.VARIANTS.items():
        if time.monotonic() > deadline:
            break
        model = tiny.tiny_model(config)
        engine = tiny.tiny_engine(model, policy="device-only", num_host_blocks=0)
        requests = tiny.mixed_requests(NUM_REQUESTS)
        answers, is_complete = tokens_until(engine, requests, deadline)
        engine.close()
        for (prompt, _), tokens in zip(requests, answers, strict=True):
            if not tokens:
                continue
            logits = tiny.dense_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
            picked = logits[np.arange(len(tokens)), tokens]
            off += int((logits.max(-1) - picked > 1e-4 * np.abs(logits).max()).sum())
            count += len(tokens)
        if is_complete:
            complete.append(variant)
        print(f"right: {variant}: {off} of {count} tokens off so far", flush=True)
    jax.config.update("jax_default_matmul_precision", None)
    left_out = [variant for variant in tiny.VARIANTS if variant not in complete]
    if left_out:
        print(
            f"right: the budget of {budget_s:.0f} s ended before {', '.join(left_out)} "
            f"{'was' if len(left_out) == 1 else 'were'} complete",
            flush=True,
        )
    return {"tokens": count, "off": off, "complete": complete, "left_out": left_out}


def tokens_until(
    engine: EngineCore, requests: Sequence[tuple[list[int], SamplingParams]], deadline: float
) -> tuple[list[list[int]], bool]:
    """The tokens of each request by then, a point of time.monotonic(), and whether that is all."""
    tokens: list[list[int]] = [[] for _ in requests]
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    while engine.has_work and time.monotonic() < deadline:
        for output in engine.step().outputs:
            assert output.message is None, output.message
            tokens[int(output.request_id)] += output.token_ids
    is_complete = not engine.has_work
    end(engine)
    return tokens, is_complete
