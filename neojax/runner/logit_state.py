"""What changes a request's logits before a token is drawn, and outlives the step: by request slot.

Penalties need the tokens so far, logit_bias and min_tokens their ids, a grammar its bit mask. All
lie in fixed arrays on the device: a row of a request's own is written when it starts, the rest of
its life only its newest token travels. Rows of requests without any of it read the last row, which
is neutral and never written.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from neojax.sampling_params import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS
from neojax.scheduler.request import Request

MAX_END_IDS = MAX_STOP_TOKEN_IDS + 64
"""Stop tokens of a request and the model's own end tokens, which are a few."""

MASKS_PER_WRITE = 8
"""Grammar masks that one launch brings to the device."""

_IN_PROMPT = 1 << 15
_MAX_COUNT = _IN_PROMPT - 1


class LogitState(NamedTuple):
    """Rows are request slots and, last, the neutral row."""

    counts: UInt[Array, "slots V"]  # uint16: times in the output; the highest bit: in the prompt
    bias_ids: Int[Array, "slots bias"]  # V: none
    biases: Float[Array, "slots bias"]
    end_ids: Int[Array, "slots end"]  # V: none
    first_end: Int[Array, "slots"]  # position from which a token of end_ids may stand
    scalars: Float[Array, "slots 4"]  # repetition, frequency and presence penalty, min_p
    mask: Int[Array, "slots words"]  # one bit per token, the lowest first: whether it may come


class LogitStateSizes(NamedTuple):
    """What the arrays' shapes follow from."""

    max_num_seqs: int
    vocab_size: int
    max_model_len: int = 0  # only what writes a row must know it

    @property
    def num_words(self) -> int:
        """int32 words of a grammar's mask."""
        return -(-self.vocab_size // 32)

    @property
    def neutral(self) -> int:
        """Index of the row that changes nothing."""
        return self.max_num_seqs

    @property
    def num_bytes(self) -> int:
        """Device memory of the state."""
        row = 2 * self.vocab_size + 4 * self.num_words
        return (self.max_num_seqs + 1) * (row + 8 * MAX_LOGIT_BIASES + 4 * MAX_END_IDS + 20)

    def make(self) -> LogitState:
        """The state before any request."""
        slots = self.max_num_seqs + 1
        return LogitState(
            counts=jnp.zeros((slots, self.vocab_size), jnp.uint16),
            bias_ids=jnp.full((slots, MAX_LOGIT_BIASES), self.vocab_size, jnp.int32),
            biases=jnp.zeros((slots, MAX_LOGIT_BIASES), jnp.float32),
            end_ids=jnp.full((slots, MAX_END_IDS), self.vocab_size, jnp.int32),
            first_end=jnp.zeros(slots, jnp.int32),
            scalars=jnp.tile(jnp.asarray([[1.0, 0.0, 0.0, 0.0]], jnp.float32), (slots, 1)),
            mask=jnp.full((slots, self.num_words), -1, jnp.int32),
        )

    @property
    def _offsets(self) -> list[int]:
        # slot, first_end, prompt tokens, known tokens; scalars; biases; end tokens; tokens
        sizes = (4, 4, MAX_LOGIT_BIASES, MAX_LOGIT_BIASES, MAX_END_IDS, self.max_model_len)
        return np.cumsum(sizes).tolist()

    def no_row(self) -> np.ndarray:
        """What `write_request` takes, of no request: nothing is written."""
        packed = np.zeros(self._offsets[-1], np.int32)
        packed[0] = self.neutral + 1
        return packed

    def pack(self, slot: int, request: Request) -> np.ndarray:
        """A request's row for `write_request`, packed."""
        p = request.params
        packed = self.no_row()
        head, scalars, ids, biases, ends, tokens = np.split(packed, self._offsets[:-1])
        known = request.prompt_ids + request.output_ids
        first_end = len(request.prompt_ids) + p.min_tokens
        head[:] = slot, first_end, len(request.prompt_ids), len(known)
        penalties = (p.repetition_penalty, p.frequency_penalty, p.presence_penalty, p.min_p)
        scalars[:] = np.asarray(penalties, np.float32).view(np.int32)
        ids[:] = ends[:] = self.vocab_size
        ids[: len(p.logit_bias)] = list(p.logit_bias)
        bias = np.asarray(list(p.logit_bias.values()), np.float32)
        biases[: len(bias)] = bias.view(np.int32)
        end_ids = sorted(request.stop_ids)
        ends[: len(end_ids)] = end_ids
        tokens[: len(known)] = known
        return packed

    def write_request(self, state: LogitState, packed: Int[Array, "M"]) -> LogitState:
        """Program: the row of a request that starts, or starts again."""
        head, scalars, ids, biases, ends, tokens = jnp.split(packed, self._offsets[:-1])
        slot, first_end, num_prompt, num_known = head
        place = jnp.arange(len(tokens), dtype=jnp.int32)
        outside = self.vocab_size  # dropped
        prompt = jnp.where(place < num_prompt, tokens, outside)
        output = jnp.where((place >= num_prompt) & (place < num_known), tokens, outside)
        zeros = jnp.zeros(self.vocab_size, jnp.int32)
        count = jnp.minimum(zeros.at[output].add(1, mode="drop"), _MAX_COUNT)
        count = count | zeros.at[prompt].set(_IN_PROMPT, mode="drop")

        def floats(x: jax.Array) -> jax.Array:
            return jax.lax.bitcast_convert_type(x, jnp.float32)

        return LogitState(
            counts=state.counts.at[slot].set(count.astype(jnp.uint16), mode="drop"),
            bias_ids=state.bias_ids.at[slot].set(ids, mode="drop"),
            biases=state.biases.at[slot].set(floats(biases), mode="drop"),
            end_ids=state.end_ids.at[slot].set(ends, mode="drop"),
            first_end=state.first_end.at[slot].set(first_end, mode="drop"),
            scalars=state.scalars.at[slot].set(floats(scalars), mode="drop"),
            mask=state.mask.at[slot].set(-1, mode="drop"),
        )


def write_masks(
    state: LogitState, slots: Int[Array, "K"], masks: Int[Array, "K words"]
) -> LogitState:
    """Program: grammar masks of some slots; a slot that does not exist is dropped."""
    return state._replace(mask=state.mask.at[slots].set(masks, mode="drop"))


@jax.named_scope("change_logits")
def change(
    state: LogitState,
    rows: Int[Array, "S"],
    positions: Int[Array, "S"],
    logits: Float[Array, "S V"],
) -> Float[Array, "S V"]:
    """Penalties, biases, end tokens too early and grammar masks, in this order.

    rows: of the state. positions: of the new tokens.
    """
    counts = state.counts[rows].astype(jnp.int32)
    in_output = (counts & _MAX_COUNT).astype(jnp.float32)
    repetition, frequency, presence, _ = jnp.split(state.scalars[rows], 4, axis=1)  # [S, 1]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(counts > 0, repeated, logits)
    logits = logits - frequency * in_output - presence * jnp.minimum(in_output, 1.0)
    row = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
    logits = logits.at[row, state.bias_ids[rows]].add(state.biases[rows], mode="drop")
    is_early = positions < state.first_end[rows]
    ends = jnp.where(is_early[:, None], state.end_ids[rows], logits.shape[-1])
    logits = logits.at[row, ends].set(-jnp.inf, mode="drop")
    bits = state.mask[rows][:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]
    allowed = (bits & 1).reshape(len(rows), -1)[:, : logits.shape[-1]]
    return jnp.where(allowed == 1, logits, -jnp.inf)


def min_p(state: LogitState, rows: Int[Array, "S"]) -> Float[Array, "S"]:
    """The min_p of each row."""
    return state.scalars[rows, 3]


def count(state: LogitState, rows: Int[Array, "S"], tokens: Int[Array, "S"]) -> LogitState:
    """Add the new tokens to their rows' counts, which stay at 32767 once there."""
    neutral, vocab_size = len(state.first_end) - 1, state.counts.shape[1]
    written = (rows < neutral) & (tokens >= 0)
    at = jnp.clip(tokens, 0, vocab_size - 1)
    old = state.counts[rows, at]
    new = jnp.where((old & _MAX_COUNT) == _MAX_COUNT, old, old + jnp.uint16(1))
    to = jnp.where(written, rows, neutral + 1)
    return state._replace(counts=state.counts.at[to, at].set(new, mode="drop"))
