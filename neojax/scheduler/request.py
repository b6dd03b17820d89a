"""A request as the scheduler sees it: tokens, progress, blocks."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from neojax.logprobs import TokenLogprobs
from neojax.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Placement(enum.StrEnum):
    """Which side holds all of a request's KV cache."""

    DEVICE = "device"
    HOST = "host"


class RequestState(enum.Enum):
    """WAITING also after a preemption; blocks and slot are held only while RUNNING."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Progress(NamedTuple):
    """How far a request's computation has been enqueued.

    Between steps `layer` is 0 in DEVICE_ONLY and PIPELINED mode; the ROLLING mode will advance a
    row by one layer per step (design: rows with progress (token, layer)).
    """

    token: int  # tokens whose K and V are computed in every layer
    layer: int  # layers already done of the next token


START = Progress(0, 0)


class Constraint(Protocol):
    """What limits a request's next token by those before it: a grammar.

    So its next step cannot be launched before the last one's token is known here.
    """

    @property
    def mask(self) -> npt.NDArray[np.int32]:
        """One bit per token, the lowest first: whether it may come next."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """One prompt and what has become of it.

    A step computes `num_tokens - progress.token` tokens or fewer; the step that reaches the last
    known token samples the next one. That token counts as pending until its step has been read.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int]  # tokens that end it: its own and, unless ignored, the model's
    seed: int
    arrival: int  # order of arrival; ties in age do not exist
    constraint: Constraint | None = None
    output_ids: list[int] = dataclasses.field(default_factory=list[int])
    state: RequestState = RequestState.WAITING
    placement: Placement | None = None
    slot: int | None = None
    blocks: list[int] = dataclasses.field(default_factory=list[int])
    progress: Progress = START
    num_resident: int = 0  # tokens whose K and V a completed step has left in the blocks
    num_pending: int = 0
    num_preemptions: int = 0
    served_step: int = 0  # newest step with a row of it; before that, the first that could have one
    moved_step: int | None = None  # newest step that moved it to the other pool
    decoding_since: int = 0  # step at which it was first seen decoding, where requests take turns
    prompt_logprobs: list[TokenLogprobs | None] = dataclasses.field(
        default_factory=list["TokenLogprobs | None"]
    )
    """By position, as far as it is known and was asked for; the first token's is None."""
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_tokens: int = dataclasses.field(init=False)
    """Prompt, outputs read, and outputs sampled by steps still in flight."""
    most_tokens: int = dataclasses.field(init=False)
    """What `num_tokens` may grow to."""
    order: tuple[int, int] = dataclasses.field(init=False)
    """Place in the queues: by priority, the lower first, then by arrival."""

    def __post_init__(self) -> None:
        self.num_tokens = len(self.prompt_ids) + len(self.output_ids) + self.num_pending
        self.most_tokens = len(self.prompt_ids) + self.max_tokens
        self.order = self.params.priority, self.arrival

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.num_tokens - self.progress.token

    @property
    def wants_more(self) -> bool:
        """Whether another token may still be sampled now."""
        if self.constraint is not None and self.num_pending:
            return False
        return self.num_tokens < self.most_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the newest token is missing from the KV cache."""
        computed = self.progress.token
        return computed > 0 and self.num_tokens == computed + 1

    def expect_token(self) -> None:
        """A step that samples its next token was enqueued."""
        self.num_pending += 1
        self.num_tokens += 1

    def receive(self, token: int | None) -> None:
        """The oldest token expected has been read; None: it is void."""
        self.num_pending -= 1
        if token is None:
            self.num_tokens -= 1
        else:
            self.output_ids.append(token)

    def expect_nothing(self) -> None:
        """No step in flight will be read."""
        self.num_tokens -= self.num_pending
        self.num_pending = 0

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Ids of positions [start, stop); -1 where the token is still on the device."""
        # Not from the sum of both lists: a decode step asks every request for one token.
        num_prompt = len(self.prompt_ids)
        ids = self.prompt_ids[start:stop]
        if stop > num_prompt:
            ids = ids + self.output_ids[max(start - num_prompt, 0) : stop - num_prompt]
        return ids + [-1] * (stop - start - len(ids))
