"""What a completed step tells each of its requests."""

from __future__ import annotations

from typing import NamedTuple

from neojax.engine.report import RequestTokens
from neojax.logprobs import TokenLogprobs
from neojax.runner.step_handle import StepHandle
from neojax.scheduler.plan import Row
from neojax.scheduler.request import Placement, Request


class Reading(NamedTuple):
    """What a step gave."""

    tokens: list[int]  # one per sampled row
    logprobs: dict[Row, TokenLogprobs]
    prompt_logprobs: dict[Row, list[TokenLogprobs]]

    @classmethod
    def of(cls, handle: StepHandle) -> Reading:
        """Wait for a step. Raises what its handle raises."""
        return cls(handle.tokens(), handle.logprobs(), handle.prompt_logprobs())

    def keep_prompt_logprobs(self) -> None:
        """Note them in their requests; a prompt may take several steps, or be computed twice."""
        for row, found in self.prompt_logprobs.items():
            known = row.request.prompt_logprobs
            del known[row.start.token + 1 :]
            known += found if known else [None, *found]

    def output(self, row: Row) -> RequestTokens:
        """The new token of a sampled row, with what was asked for beside it."""
        request, params = row.request, row.request.params
        output = message_of(request, row.placement, request.output_ids[-1:])
        if params.prompt_logprobs is not None and len(request.output_ids) == 1:
            output.prompt_logprobs = request.prompt_logprobs or [None]
        if params.max_tokens == 0:
            # The token only stood for the end of the prompt.
            output.token_ids, output.finish_reason, output.stop_reason = [], "length", None
        elif params.logprobs is not None:
            output.logprobs = [self.logprobs[row]]
        return output


def message_of(
    request: Request, placement: Placement, token_ids: list[int], message: str | None = None
) -> RequestTokens:
    """Tokens of a request and how it stands."""
    stop_id = request.stop_reason
    return RequestTokens(
        request_id=request.request_id,
        token_ids=token_ids,
        finish_reason=request.finish_reason,
        stop_reason=stop_id if stop_id in request.params.stop_token_ids else None,
        placement=placement.value,
        message=message,
    )
