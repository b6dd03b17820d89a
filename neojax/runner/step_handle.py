"""A step in flight: its tokens and log probabilities, once it has run."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from neojax.kv.host_pool import HostPool
from neojax.logprobs import TokenLogprobs
from neojax.runner import scores
from neojax.runner.lanes import Sampled
from neojax.runner.step_meta import scored_rows
from neojax.scheduler.plan import Plan, Row


class HostLaneError(RuntimeError):
    """A worker of the host lane reported an error; the step's tokens are void."""


class StepHandle:
    """A step in flight.

    sampled: none where a plan has nothing but swaps. swaps: ready once the device has made them.
    """

    def __init__(
        self,
        plan: Plan,
        sampled: Sequence[Sampled],
        host: HostPool | None,
        swaps: Sequence[jax.Array] = (),
    ) -> None:
        self._sampled = sampled
        batches = plan.sub_batches if sampled else ()
        # Rows of the sub-batches, or of all that a ROLLING step completes.
        groups = [plan.rows] if len(sampled) == 1 else [batch.rows for batch in batches]
        self._rows = [[row for row in group if row.samples] for group in groups]
        self._scored = [list(scored_rows(batch)) for batch in batches]
        self._host = host
        self._swaps = swaps
        self._num_swaps_out = host.num_swaps_out if host is not None and swaps else 0
        for result in sampled:
            result.tokens.copy_to_host_async()
        if any(wants_logprobs(row) for row in plan.rows):
            for result in sampled:
                for scores in (result.scores, *result.prompt_scores):
                    if scores is not None:
                        scores.start_copy()

    def tokens(self) -> list[int]:
        """Wait for the step; one token per `plan.sampled_rows`, in that order.

        A row whose logits are not finite has sampling.NOT_FINITE. Raises HostLaneError when a
        worker failed.
        """
        tokens: list[int] = []
        for sampled, rows in zip(self._sampled, self._rows, strict=True):
            tokens += np.asarray(sampled.tokens)[: len(rows)].tolist()
        if self._host is not None and self._swaps:
            jax.block_until_ready(self._swaps)
            self._host.await_swaps_out(self._num_swaps_out)
        if self._host is not None and (error := self._host.error()):
            raise HostLaneError(error)
        return tokens

    def logprobs(self) -> dict[Row, TokenLogprobs]:
        """Of the new tokens of the rows that ask for it."""
        found: dict[Row, TokenLogprobs] = {}
        for rows, sampled in zip(self._rows, self._sampled, strict=True):
            wanted = [
                (i, row.request.params.logprobs)
                for i, row in enumerate(rows)
                if row.request.params.logprobs is not None
            ]
            if wanted:
                assert sampled.scores is not None
                values = scores.read(sampled.scores, wanted)
                found |= zip((rows[i] for i, _ in wanted), values, strict=True)
        return found

    def prompt_logprobs(self) -> dict[Row, list[TokenLogprobs]]:
        """Of the prompt tokens at row.start + 1 and on, for the chunks that ask for it."""
        found: dict[Row, list[TokenLogprobs]] = {}
        for wanted, sampled in zip(self._scored, self._sampled, strict=True):
            if not wanted:
                continue
            size = len(sampled.prompt_scores[0].token_id)
            values: list[TokenLogprobs] = []
            for first, part in zip(range(0, len(wanted), size), sampled.prompt_scores, strict=True):
                pairs = [
                    (i, scored.row.request.params.prompt_logprobs or 0)
                    for i, scored in enumerate(wanted[first : first + size])
                ]
                values += scores.read(part, pairs)
            for scored, value in zip(wanted, values, strict=True):
                found.setdefault(scored.row, []).append(value)
        return found

    def logits(self) -> np.ndarray:
        """Logits [rows, V] float32 of the sampled rows; ValueError if `enqueue` was not told."""
        if any(sampled.logits is None for sampled in self._sampled):
            raise ValueError("this step was enqueued without wants_logits")
        return np.concatenate(
            [
                np.asarray(sampled.logits)[: len(rows)]
                for sampled, rows in zip(self._sampled, self._rows, strict=True)
            ]
        )


def wants_logprobs(row: Row) -> bool:
    """Whether a row's request asks for log probabilities of its tokens or its prompt."""
    params = row.request.params
    return params.logprobs is not None or params.prompt_logprobs is not None
