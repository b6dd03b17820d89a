"""What the compiled programs and the pools can take."""

from __future__ import annotations

import dataclasses

MAX_CHUNKS = 8
"""Prefill chunks in one step: beyond it a step is long enough for them to wait for the next."""


def scratch_tokens(max_model_len: int, block_size: int) -> int:
    """Tokens of the scratch pools of HOST-placed prefills: the longest prefix and its chunk."""
    return -(-max_model_len // block_size) * block_size + MAX_CHUNKS * block_size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Sizes that no plan exceeds, and which kinds of plans the runner can execute."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_num_chunks: int  # prefill chunks in one step
    scratch_tokens: int  # prefix and chunk tokens of HOST-placed prefills in one step
    num_layers: int = 0  # of the model; counts only with ROLLING steps
    rolling_rows: int = 0  # host rows of a group in ROLLING steps; 0: there are none
    tpot_slo_s: float = 0.5  # `auto` plans no longer time per token for requests on the host
    can_mix: bool = True  # device tokens and host rows in one sub-batch
    can_swap: bool = False  # `Plan.swaps`
    rotate_steps: int = 0  # a turn on the device, where requests take turns; 0: they do not
    swap_in_threshold: float = 0.95  # share of the device pool up to which requests move in
    swap_out_threshold: float = 1.0  # share of the device pool above which requests move out
