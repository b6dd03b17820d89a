"""What changes logits, against numpy in float64 over random shapes and histories."""

from __future__ import annotations

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from neojax.runner import logit_state, sampling, scores
from neojax.runner.logit_rows import LogitRows
from neojax.runner.logit_state import LogitStateSizes
from neojax.sampling_params import SamplingParams
from neojax.scheduler.plan import Row
from neojax.scheduler.request import Placement, Progress, Request

SIZES = LogitStateSizes(max_num_seqs=4, vocab_size=70, max_model_len=48)
V = SIZES.vocab_size
KEEPER = LogitRows(SIZES)
change = jax.jit(logit_state.change)
count = jax.jit(logit_state.count)
score = jax.jit(scores.score)


class Mask:
    def __init__(self, allowed):
        bits = np.zeros(32 * SIZES.num_words, np.uint8)
        bits[list(allowed)] = 1
        self.mask = np.packbits(bits, bitorder="little").view(np.int32)


def row_of(slot, prompt, output, params, constraint=None):
    request = Request(
        request_id=str(slot),
        prompt_ids=prompt,
        params=params,
        max_tokens=40,
        stop_ids=frozenset(params.stop_token_ids),
        seed=0,
        arrival=slot,
        constraint=constraint,
        output_ids=output,
    )
    stop = len(prompt) + len(output)
    return Row(request, Progress(stop - 1, 0), 1, True, slot, Placement.DEVICE, 0, ())


def reference(logits, row, tokens):
    """Logits after penalties, bias, min_tokens and mask; tokens: the output so far."""
    p, x = row.request.params, logits.astype(np.float64).copy()
    prompt = row.request.prompt_ids
    for token in range(V):
        if token in prompt or token in tokens:
            x[token] = (
                x[token] / p.repetition_penalty
                if x[token] > 0
                else (x[token] * p.repetition_penalty)
            )
        times = tokens.count(token)
        x[token] -= p.frequency_penalty * times + p.presence_penalty * (times > 0)
    for token, bias in p.logit_bias.items():
        x[token] += bias
    if len(tokens) < p.min_tokens:
        x[list(p.stop_token_ids)] = -np.inf
    if row.request.constraint is not None:
        words = row.request.constraint.mask.view(np.uint8)
        x[np.unpackbits(words, bitorder="little")[:V] == 0] = -np.inf
    return x


tokens = st.integers(0, V - 1)
penalty = st.sampled_from([0.0, -2.0, 0.5, 2.0])
params = st.builds(
    SamplingParams,
    max_tokens=st.just(40),
    min_tokens=st.integers(0, 6),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.5]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=5),
    stop_token_ids=st.lists(tokens, min_size=1, max_size=5).map(tuple),
)


@settings(max_examples=30, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    requests=st.lists(
        st.tuples(
            st.lists(tokens, min_size=1, max_size=20),
            st.lists(tokens, max_size=5),
            params,
            st.none() | st.sets(tokens, min_size=1),
        ),
        min_size=1,
        max_size=4,
    ),
    num_new=st.integers(0, 4),
)
def test_logits_change_as_the_reference_says(seed, requests, num_new):
    rng = np.random.default_rng(seed)
    slots = rng.permutation(SIZES.max_num_seqs)[: len(requests)].tolist()
    rows = [
        row_of(slot, prompt, output, p, None if allowed is None else Mask(allowed))
        for slot, (prompt, output, p, allowed) in zip(slots, requests, strict=True)
    ]
    state, read_rows = KEEPER.prepare(KEEPER.make(), rows)
    # Always as many rows: one compilation.
    index = np.full(SIZES.max_num_seqs, SIZES.neutral, np.int32)
    index[: len(rows)] = read_rows
    history = [list(row.request.output_ids) for row in rows]
    for _ in range(num_new):  # tokens that only the device has seen
        new = rng.integers(0, V, len(index)).astype(np.int32)
        state = count(state, index, new)
        for past, token in zip(history, new.tolist(), strict=False):
            past.append(token)
    logits = (rng.normal(size=(len(index), V)) * 5).astype(np.float32)
    positions = np.zeros(len(index), np.int32)
    positions[: len(rows)] = [
        len(row.request.prompt_ids) + len(past) for row, past in zip(rows, history, strict=True)
    ]
    got = np.asarray(change(state, index, positions, logits))
    for i, (row, past) in enumerate(zip(rows, history, strict=True)):
        changes = row.request.params.changes_logits or row.request.constraint is not None
        expected = reference(logits[i], row, past) if changes else logits[i]
        np.testing.assert_allclose(got[i], expected, rtol=1e-5, atol=1e-4)


def test_a_row_without_wishes_is_left_bit_for_bit_and_never_written():
    busy = row_of(0, [1, 2], [3], SamplingParams(repetition_penalty=2.0))
    plain = row_of(1, [1, 2], [3], SamplingParams())
    state, rows = KEEPER.prepare(KEEPER.make(), [busy, plain])
    assert rows == [0, SIZES.neutral]
    index = np.asarray(rows, np.int32)
    state = count(state, index, np.asarray([5, 5], np.int32))
    assert not np.asarray(state.counts)[SIZES.neutral].any()
    logits = np.random.default_rng(0).normal(size=(2, V)).astype(np.float32)
    got = np.asarray(change(state, index, np.asarray([3, 3], np.int32), logits))
    assert (got[1] == logits[1]).all()
    assert (got[0] != logits[0]).any()


def test_the_next_owner_of_a_slot_inherits_nothing():
    first = row_of(2, [1], [3, 3], SamplingParams(frequency_penalty=2.0, logit_bias={4: 9.0}))
    state, _ = KEEPER.prepare(KEEPER.make(), [first])
    second = row_of(2, [7], [], SamplingParams(presence_penalty=1.0))
    state, (row,) = KEEPER.prepare(state, [second])
    logits = np.zeros((1, V), np.float32)
    got = change(state, np.asarray([row], np.int32), np.asarray([1], np.int32), logits)
    assert not np.asarray(got).any()


def test_counts_stay_where_they_are_once_full():
    row = row_of(0, [6], [], SamplingParams(frequency_penalty=1.0))
    state, (index,) = KEEPER.prepare(KEEPER.make(), [row])
    state = state._replace(counts=state.counts.at[0, 6].set((1 << 15) | 32766))
    for _ in range(3):
        state = count(state, np.asarray([index], np.int32), np.asarray([6], np.int32))
    assert int(state.counts[0, 6]) == (1 << 15) | 32767
    assert int(state.counts[0, 5]) == 0


def test_the_state_takes_the_memory_it_says():
    assert SIZES.num_bytes == sum(array.nbytes for array in SIZES.make())


@settings(max_examples=20, derandomize=True)
@given(seed=st.integers(0, 2**31), min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]))
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(seed, min_p):
    logits = (np.random.default_rng(seed).normal(size=(3, V)) * 3).astype(np.float32)
    kept = np.asarray(sampling.keep_min_p(jnp.asarray(logits), jnp.full(3, min_p, jnp.float32)))
    ratio = np.exp(logits - logits.max(axis=-1, keepdims=True))
    clear = np.abs(ratio - min_p) > 1e-6
    assert (kept == (ratio >= min_p))[clear].all()
    assert kept[np.arange(3), logits.argmax(axis=-1)].all()


@settings(max_examples=20, derandomize=True)
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 1.0, 50.0]))
def test_scores_are_the_log_softmax_with_rank_and_the_likeliest(seed, scale):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(5, V)) * scale).astype(np.float32)
    tokens = rng.integers(0, V, 5).astype(np.int32)
    got = scores.read(score(logits, tokens), [(i, 4) for i in range(5)])
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    expected = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    for i, found in enumerate(got):
        assert found.token_id == tokens[i]
        assert found.logprob == approx(expected[i, tokens[i]], scale)
        assert found.rank == 1 + (logits[i] > logits[i, tokens[i]]).sum()
        assert found.top_ids == np.argsort(-logits[i], kind="stable")[:4].tolist()
        assert found.top_logprobs == approx(np.sort(expected[i])[::-1][:4], scale)


def approx(value, scale):
    return pytest.approx(value, abs=1e-5 * max(1.0, scale))


def test_infinite_logprobs_are_told_as_a_finite_number():
    logits = np.full((1, V), -np.inf, np.float32)
    logits[0, 2] = 0.0
    (found,) = scores.read(score(logits, np.asarray([3], np.int32)), [(0, 3)])
    assert found.logprob == -9999.0
    assert found.top_ids[0] == 2
    assert found.top_logprobs[1:] == [-9999.0, -9999.0]


def test_rows_that_are_not_finite_have_no_token():
    logits = np.zeros((4, V), np.float32)
    logits[1, 3], logits[2, 3], logits[3, :] = np.nan, np.inf, -np.inf
    likeliest = sampling.greedy(jnp.asarray(logits))
    got = sampling.checked(likeliest, jnp.asarray(logits), likeliest)
    assert got.tolist() == [0, -1, -1, -1]
