"""The step loop: schedule, enqueue, read the tokens of the step before.

Two steps are in flight at most: while one runs, the next is scheduled, packed and launched.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import NamedTuple

import jax

from neojax.engine.grammar import Grammar, GrammarCompiler
from neojax.engine.history import History, StepRecord
from neojax.engine.meters import Meters
from neojax.engine.outputs import Reading, message_of
from neojax.engine.report import EngineStats, RequestTokens
from neojax.engine.request_log import RequestLog
from neojax.kv.host_pool import HostWork
from neojax.runner.runner import Runner
from neojax.runner.sampling import NOT_FINITE
from neojax.runner.step_handle import HostLaneError, StepHandle
from neojax.sampling_params import SamplingParams
from neojax.scheduler.plan import Mode, Plan
from neojax.scheduler.policy import load_policy
from neojax.scheduler.request import Placement, Request, RequestState
from neojax.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

MAX_STEPS_IN_FLIGHT = 2
STEPS_SHOWN = 8
"""Steps before a failed one that the log shows."""
GRAMMAR_WAIT_S = 0.02
STEPS_BETWEEN_FAILURES = 10
"""A second failed step within so many ends the engine: what fails twice in a row stays broken."""

_NOT_FINITE = (
    "the model's logits were not finite: its activations overflow this dtype; "
    "try --dtype bfloat16 or float32"
)


class EngineDead(RuntimeError):
    """The device cannot be used any more; the process should end with a non-zero code."""


class StepResult(NamedTuple):
    """What one call of `step` did."""

    plan: Plan | None  # the step that was launched
    completed: Plan | None  # the step whose tokens were read
    outputs: list[RequestTokens]


class EngineCore:
    """Scheduler and runner, stepped by one thread."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, eos_ids: frozenset[int], vocab_size: int,
        seed: int, request_log: RequestLog | None = None, grammars: GrammarCompiler | None = None,
    ) -> None:  # fmt: skip
        """grammars: None refuses requests with a json_schema."""
        self.scheduler = scheduler
        self.runner = runner
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self._grammars = grammars
        self._compiling: dict[str, tuple[Request, Future[Grammar]]] = {}
        self._arrivals = itertools.count()
        self._seeds = random.Random(seed)
        self._in_flight: deque[tuple[Plan, StepHandle]] = deque()
        self._launched_s: dict[int, float] = {}  # by step in flight
        self._history = History()
        self._meters = Meters(runner.geometry.token_bytes)
        self._request_log = request_log or RequestLog()
        self._steps = dict.fromkeys(Mode, 0)
        self._steps_since_failure = STEPS_BETWEEN_FAILURES
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._num_not_finite = 0
        self._last_mode: Mode | None = None  # of the newest completed step
        self._last_step_s = time.time()

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output."""
        return self.scheduler.limits.max_model_len

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_requests or bool(self._in_flight or self._compiling)

    def add_request(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        """Queue a request. Raises ValueError when it cannot be served.

        max_tokens is clamped to what the context leaves.
        """
        bad = next((i for i in prompt_ids if not 0 <= i < self.vocab_size), None)
        if bad is not None:
            raise ValueError(f"prompt token {bad} is outside the vocabulary of {self.vocab_size}")
        self._check(params)
        room = max(1, self.max_model_len - len(prompt_ids))
        wanted = room if params.max_tokens is None else max(1, params.max_tokens)
        stop_ids = frozenset(params.stop_token_ids)
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            max_tokens=min(wanted, room),
            stop_ids=stop_ids if params.ignore_eos else stop_ids | self.eos_ids,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            arrival=next(self._arrivals),
        )
        if params.json_schema is None:
            self.scheduler.add(request)
            self._request_log.arrived(request)
        elif self._grammars is None:
            raise ValueError("json_schema is not possible: this engine has no tokenizer")
        else:
            grammar = self._grammars.compile(params.json_schema)
            self._compiling[request_id] = request, grammar
        self._meters.arrived(request_id)
        self._prompt_tokens += len(prompt_ids)

    def abort(self, request_id: str) -> None:
        """Forget a request, if known. Its blocks are freed after the step in flight."""
        self._meters.ended(request_id)
        if self._compiling.pop(request_id, None) is not None:
            return
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._request_log.finished(request)

    def step(self) -> StepResult:
        """Launch the next step if one can run, and read the oldest in flight when due.

        Raises EngineDead after a second failure in quick succession.
        """
        refused = self._queue_compiled()
        if refused or not (self.scheduler.has_requests or self._in_flight):
            return StepResult(None, None, refused)
        plan = None
        if len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            plan = self.scheduler.schedule()
        try:
            if plan is not None:
                self._steps[plan.mode] += 1
                self._launched_s[plan.step] = time.perf_counter()
                for move in plan.moves:
                    self._request_log.moved(move, plan.step)
                self._meters.launched(plan)
                self._in_flight.append((plan, self.runner.enqueue(plan)))
            if plan is not None and len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
                return StepResult(plan, None, [])
            if not self._in_flight and self.scheduler.has_requests:
                raise EngineDead("requests wait, nothing runs and nothing can be scheduled")
            return StepResult(plan, *self._complete_oldest())
        # XLA turns an FFI error into ValueError where it runs the program on this thread.
        except (jax.errors.JaxRuntimeError, ValueError, HostLaneError) as error:
            return StepResult(plan, None, self._recover(error, plan))
        except BaseException:
            # Ctrl-C, wherever it struck: no half-launched step may stay behind.
            self._void_steps()
            raise

    def set_policy(self, name: str) -> None:
        """Change the offload policy. Raises RuntimeError unless idle, ValueError for a bad name."""
        self._require_idle("policy")
        policy = load_policy(name)
        check_policy(policy.placements, name, self.scheduler)
        self.scheduler.set_policy(policy)

    def set_block_limit(self, limit: int | None) -> None:
        """Change how many device blocks may be in use. Raises RuntimeError unless idle."""
        self._require_idle("block limit")
        self.scheduler.pools[Placement.DEVICE].set_limit(limit)

    def explain(self, num_steps: int | None = None) -> list[StepRecord]:
        """The last completed steps, oldest first: mode, times by term, who moved and why."""
        return self._history.last(num_steps)

    def stats(self) -> EngineStats:
        """A snapshot for metrics and logs."""
        pools, running = self.scheduler.pools, self.scheduler.running
        on_host = sum(r.placement is Placement.HOST for r in running)
        host = self.runner.host.work() if self.runner.host is not None else HostWork(0.0, 0)
        return EngineStats(
            num_running_device=len(running) - on_host,
            num_running_host=on_host,
            num_waiting=len(self.scheduler.waiting),
            device_kv_usage=pools[Placement.DEVICE].usage,
            host_kv_usage=pools[Placement.HOST].usage,
            num_preemptions=self.scheduler.num_preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            steps_device_only=self._steps[Mode.DEVICE_ONLY],
            steps_pipelined=self._steps[Mode.PIPELINED],
            steps_rolling=self._steps[Mode.ROLLING],
            num_compiles_after_ready=self.runner.num_compiles,
            requests_placed_device=self.scheduler.num_placed[Placement.DEVICE],
            requests_placed_host=self.scheduler.num_placed[Placement.HOST],
            last_step_unix_s=self._last_step_s,
            host_attention_busy_s=host.busy_s,
            host_attention_bytes=host.num_bytes,
            num_not_finite=self._num_not_finite,
            requests_swapped_in=self.scheduler.num_swapped[Placement.DEVICE],
            requests_swapped_out=self.scheduler.num_swapped[Placement.HOST],
            steps_lost=self._history.num_lost_steps,
            steps_lost_s=self._history.lost_s,
            totals=self._meters.totals(),
            **self._corrections(),
        )

    def close(self) -> None:
        """Wait for the steps in flight and stop the workers."""
        if self._grammars is not None:
            self._grammars.close()
        self.runner.close()
        self._request_log.close()

    def _complete_oldest(self) -> tuple[Plan | None, list[RequestTokens]]:
        if not self._in_flight:
            return None, []
        plan, handle = self._in_flight[0]
        reading = Reading.of(handle)
        self._in_flight.popleft()
        self._last_step_s = time.time()
        self._steps_since_failure += 1
        self._observe(plan)
        reading.keep_prompt_logprobs()
        running = {r.request for r in plan.rows if r.request.state is not RequestState.FINISHED}
        advanced = set(self.scheduler.update(plan, reading.tokens))
        outputs: list[RequestTokens] = []
        for row, token in zip(plan.sampled_rows, reading.tokens, strict=True):
            if row.request in advanced:
                message = self._advance_grammar(row.request, token)
                outputs.append(
                    reading.output(row)
                    if message is None
                    else message_of(row.request, row.placement, [], message)
                )
            elif token == NOT_FINITE and row.request in running:
                self._num_not_finite += 1
                outputs.append(message_of(row.request, row.placement, [], _NOT_FINITE))
        if not self.has_work:
            self.scheduler.check_integrity()
        self._generation_tokens += sum(len(output.token_ids) for output in outputs)
        for row in plan.sampled_rows:
            self._request_log.advanced(row.request)
        return plan, outputs

    def _observe(self, plan: Plan) -> None:
        """Measure the step that has just completed, and let the scheduler learn from it.

        Only from steps among their like: launching a PIPELINED step takes so long that the end of
        a short step before it is seen late, which would be charged to the short step's mode.
        """
        busy_s = 0.0 if self.runner.host is None else self.runner.host.work().busy_s
        record = self._history.add(plan, self._launched_s.pop(plan.step), busy_s)
        self._meters.completed(plan, record)
        modes = {self._last_mode, plan.mode, *(after.mode for after, _ in self._in_flight)}
        self._last_mode = plan.mode
        if len(modes) == 1:
            self.scheduler.observe(plan, record.step_s, record.host_attention_s)

    def _corrections(self) -> dict[str, float]:
        if self.scheduler.predictor is None:
            return {}
        corrections = self.scheduler.predictor.corrections
        return {
            "correction_device_only": corrections.step[Mode.DEVICE_ONLY],
            "correction_pipelined": corrections.step[Mode.PIPELINED],
            "correction_rolling": corrections.step[Mode.ROLLING],
            "correction_host_attention": corrections.host_attention,
        }

    def _queue_compiled(self) -> list[RequestTokens]:
        """Queue the requests whose grammar is ready; those that cannot be served are refused.

        Waits a moment when there is nothing else to do.
        """
        if not self._compiling:
            return []
        if not (self.scheduler.has_requests or self._in_flight):
            wait([grammar for _, grammar in self._compiling.values()], GRAMMAR_WAIT_S)
        refused: list[RequestTokens] = []
        for request_id, (request, grammar) in list(self._compiling.items()):
            if not grammar.done():
                continue
            del self._compiling[request_id]
            try:
                request.constraint = grammar.result()
                self.scheduler.add(request)
                self._request_log.arrived(request)
            # llguidance raises whatever it likes; a request's schema must not end the engine.
            except Exception as error:
                self._meters.ended(request_id)
                refused.append(RequestTokens(request_id, [], "rejected", message=str(error)))
        return refused

    def _advance_grammar(self, request: Request, token: int) -> str | None:
        """Tell a constrained request's grammar of its token; the end of the text ends it.

        Returns what is wrong when the grammar cannot go on, which ends the request too.
        """
        grammar = request.constraint
        if request.state is RequestState.FINISHED or not isinstance(grammar, Grammar):
            return None
        try:
            grammar.accept(token)
        except ValueError as error:
            self.scheduler.abort(request.request_id, "error")
            return str(error)
        if grammar.is_complete:
            self.scheduler.abort(request.request_id, "stop")
        return None

    def _recover(self, error: Exception, launched: Plan | None) -> list[RequestTokens]:
        """After a failed step: void what is in flight, make new pools, compute again.

        A worker's error fails the host rows of the steps in flight, and those between the layers;
        everything else is retried.
        """
        last = "".join(f"\n  {record}" for record in self._history.last(STEPS_SHOWN))
        log.error("a step failed: %s; the steps before:%s", error, last, exc_info=error)
        if self._steps_since_failure < STEPS_BETWEEN_FAILURES:
            raise EngineDead(f"two steps failed in quick succession; the last: {error}") from error
        self._steps_since_failure = 0
        plans = [plan for plan, _ in self._in_flight]
        if launched is not None and launched not in plans:
            plans.append(launched)
        under_way = {row.request for row in self.scheduler.rows_under_way}
        self._void_steps()
        if not isinstance(error, HostLaneError):
            return []
        failed = {r.request for p in plans for r in p.rows if r.placement is Placement.HOST}
        failed |= under_way
        outputs = []
        for request in failed:
            if request.state is not RequestState.FINISHED:
                self.scheduler.abort(request.request_id, "error")
                self._request_log.finished(request)
                message = f"host attention failed: {error}"
                outputs.append(message_of(request, Placement.HOST, [], message))
        return outputs

    def _void_steps(self) -> None:
        """Forget the steps in flight, once the device and the workers are done with them."""
        for _, handle in self._in_flight:
            # The error that matters is known already; these steps' results are void.
            with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError, HostLaneError):
                handle.tokens()
        self._in_flight.clear()
        self._launched_s.clear()
        self.runner.recover()
        self.scheduler.rollback()

    def _check(self, params: SamplingParams) -> None:
        if params.n != 1:
            raise ValueError(f"the engine gives one answer to a request, asked were {params.n}")
        for name, ids in (
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            bad = next((i for i in ids if not 0 <= i < self.vocab_size), None)
            if bad is not None:
                raise ValueError(f"{name}: token {bad} is not in 0..{self.vocab_size - 1}")

    def _require_idle(self, what: str) -> None:
        if self.has_work:
            raise RuntimeError(f"the {what} can change only while no request waits or runs")


def check_policy(placements: tuple[Placement, ...], name: str, scheduler: Scheduler) -> None:
    """Raises ValueError when a policy needs a pool that this engine does not have."""
    if not any(scheduler.pools[p].num_blocks for p in placements):
        raise ValueError(
            f"offload_policy {name!r} needs host KV memory and this engine has none; "
            "start it with --cpu-kv-gib above 0 and another policy than device-only"
        )
