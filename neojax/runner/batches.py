"""A plan's sub-batches as the programs take them: padded to a bucket, packed, with their head.

What a sub-batch asks of others is asked here: a place in the lane's ring of plans, the rows of the
logit state, the turn of ROLLING groups. Launches nothing but writes of that state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from neojax.kv.host_pool import HostPool
from neojax.runner.lanes import Batch, DeviceState
from neojax.runner.logit_rows import LogitRows
from neojax.runner.program_set import DEEP, ProgramSet
from neojax.runner.programs import Head
from neojax.runner.rolling import Register
from neojax.runner.shapes import AttentionShape, Buckets, Shape
from neojax.runner.step_handle import wants_logprobs
from neojax.scheduler.plan import Mode, Plan, Row, SubBatch


class Batches:
    """Makes batches for the programs of one runner."""

    def __init__(
        self,
        programs: ProgramSet,
        buckets: Buckets,
        state: DeviceState,
        logit_rows: LogitRows,
        register: Register,
        host: HostPool | None,
    ) -> None:
        self._programs = programs
        self._buckets = buckets
        self._state = state
        self._logit_rows = logit_rows
        self._register = register
        self._host = host

    def of(self, plan: Plan) -> list[Batch]:
        """The batches of a DEVICE_ONLY or PIPELINED plan, b0 first."""
        return [
            self._filled(
                plan.mode,
                batch,
                self._buckets.shape(
                    plan.mode,
                    batch.num_device_tokens,
                    len(batch.host_decodes),
                    has_chunks=bool(batch.chunks),
                ),
                index,
                completes=batch.rows,
            )
            for index, batch in enumerate(plan.sub_batches)
        ]

    def rolling(self, plan: Plan) -> Batch:
        """The batch of a ROLLING plan; the groups move on by a layer."""
        b0, (entering, leaving) = plan.b0, (plan.rolling.entering, plan.rolling.leaving)
        tokens = self._buckets.padded(
            Mode.ROLLING, b0.num_device_tokens, has_chunks=bool(b0.chunks)
        )
        shape = Shape(tokens, self._register.num_rows)
        rows = dataclasses.replace(b0, host_decodes=entering)
        batch = self._filled(Mode.ROLLING, rows, shape, DEEP, completes=plan.rows, leaving=leaving)
        meta = batch.programs.stages.layout.views(batch.packed)
        self._register.advance(entering, int(meta["scalars"][0]))
        self._register.write(meta["rolling"])
        return batch

    def empty(
        self,
        shape: Shape,
        index: int,
        head: Head,
        attention_shape: AttentionShape | None = None,
    ) -> Batch:
        """Padding only: every slot dropped, no host row, no chunk.

        attention_shape: None for sub-batches without device tokens.
        """
        programs = self._programs[shape, index]
        packed = programs.stages.layout.empty()
        neutral = self._logit_rows.sizes.neutral
        return Batch(
            programs,
            packed,
            attention_shape or AttentionShape(0, False),
            head,
            has_host_chunks=bool(programs.attend),
            sample_rows=programs.stages.layout.sample_rows(packed, [], neutral),
        )

    def _filled(
        self,
        mode: Mode,
        batch: SubBatch,
        shape: Shape,
        index: int,
        *,
        completes: Iterable[Row],
        leaving: Sequence[Row] = (),
    ) -> Batch:
        """A sub-batch packed for the programs of a shape; the host lane gets its part.

        completes: the rows that may sample. leaving: of a ROLLING step.
        """
        completes = list(completes)
        has_chunks = bool(batch.chunks)
        num_blocks = max((len(row.blocks) for row in batch.decodes), default=0)
        programs = self._programs[shape, index]
        plan_index = 0 if self._host is None else self._host.next_plan
        packed, host_plan = programs.stages.layout.pack(batch, plan_index, leaving)
        if host_plan is not None:
            assert self._host is not None
            self._host.put_plan(host_plan, len(self._state.layers))
        made = Batch(
            programs,
            packed,
            self._buckets.attention(mode, shape, num_blocks, has_chunks=has_chunks),
            head_of(completes),
            has_host_chunks=bool(batch.host_chunks),
        )
        return self._with_full_head(made, batch, completes)

    def _with_full_head(self, made: Batch, batch: SubBatch, rows: Iterable[Row]) -> Batch:
        """With what a full head needs, if it is one. rows: all that the step completes."""
        if made.head is not Head.FULL:
            return made
        layout, neutral = made.programs.stages.layout, self._logit_rows.sizes.neutral
        sampling = [row for row in rows if row.samples]
        self._state.logit_state, states = self._logit_rows.prepare(
            self._state.logit_state, sampling
        )
        return made._replace(
            sample_rows=layout.sample_rows(made.packed, states, neutral),
            prompt_rows=tuple(layout.prompt_rows(batch, neutral)),
        )


def head_of(rows: Iterable[Row]) -> Head:
    """The cheapest head that does what the rows ask for."""
    rows = list(rows)
    if any(wants_logprobs(row) or row.request.params.changes_logits for row in rows):
        return Head.FULL
    is_greedy = all(not row.samples or row.request.params.is_greedy for row in rows)
    return Head.GREEDY if is_greedy else Head.SAMPLE
