"""From the engine's tokens to the text of each choice: stop strings, counts and latencies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from neojax.engine.report import RequestTokens
from neojax.logprobs import TokenLogprobs
from neojax.sampling_params import SamplingParams
from neojax.serve.engine_client import Arrival, Generation
from neojax.serve.errors import ApiError
from neojax.serve.metrics import Metrics
from neojax.serve.scored_tokens import ScoredToken, ScoredTokens
from neojax.serve.text_model import TextModel

# rejected: the request as it stands can never run, which is the client's to change.
_FAILURE_STATUS = {"rejected": 400, "error": 500, "abort": 503}


class TextDelta(NamedTuple):
    """New text of one choice. The last one of a choice carries its finish_reason."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    tokens: Sequence[ScoredToken] = ()  # where logprobs were asked for
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None  # in a choice's first


class Choice(NamedTuple):
    """What one choice was asked for."""

    prompt_ids: list[int]
    params: SamplingParams
    echo: str | None = None  # text that the answer begins with


class TextGeneration:
    """The text of all choices of one HTTP request. Use as a context manager."""

    def __init__(
        self,
        generation: Generation,
        choices: Sequence[Choice],
        text_model: TextModel,
        metrics: Metrics,
        arrival_s: float,
        admit: Callable[[], None],
    ) -> None:
        """admit: raises ApiError when there is no room; asked in the moment of entering."""
        self._generation = generation
        self._admit = admit
        self._choices = choices
        self._metrics = metrics
        self._texts = [
            _ChoiceText(choice, text_model, metrics, arrival_s, index)
            for index, choice in enumerate(choices)
        ]
        self._num_running = len(choices)
        self._failure: ApiError | None = None

    def __enter__(self) -> TextGeneration:
        # Here, where the requests begin to count: requests that arrive together must not all see
        # the same room.
        self._admit()
        self._metrics.admitted(
            len(self._texts), (choice.params.max_tokens for choice in self._choices)
        )
        self._generation.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._generation.__exit__(*exc)
        for text in self._texts:
            text.finish("abort")

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return self._num_running == 0

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(text.num_tokens for text in self._texts)

    async def deltas(self) -> list[TextDelta]:
        """Wait for the next text of any choice. Raises ApiError when the engine gives up.

        What came before that is returned first, also when both came at once.
        """
        if self._failure is not None:
            raise self._failure
        deltas: list[TextDelta] = []
        while not deltas:
            for arrival in await self._generation.arrivals():
                text = self._texts[arrival.index]
                if text.is_finished:  # a stop string ended it
                    continue
                try:
                    delta = text.take(arrival)
                except ApiError as error:
                    if not deltas:
                        raise
                    self._failure = error
                    break
                if delta.finish_reason is not None:
                    self._num_running -= 1
                    self._generation.abort(arrival.index)
                deltas.append(delta)
        return deltas


class _ChoiceText:
    """One choice: its detokenizer and what the metrics want to know of it."""

    def __init__(
        self,
        choice: Choice,
        text_model: TextModel,
        metrics: Metrics,
        arrival_s: float,
        index: int,
    ) -> None:
        self._choice = choice
        self._detokenizer = text_model.detokenizer(choice.params, choice.prompt_ids)
        self._eos_ids = text_model.tokenizer.eos_ids
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._first_token_s = self._last_token_s = 0.0
        self._echo = choice.echo
        self._scored: ScoredTokens | None = None
        if choice.params.logprobs is not None:
            self._scored = ScoredTokens(text_model, choice.params, choice.prompt_ids, choice.echo)
        self._index = index
        self.num_tokens = 0
        self.is_finished = False

    def take(self, arrival: Arrival) -> TextDelta:
        """The text that an arrival of tokens releases."""
        tokens = arrival.tokens
        if tokens.finish_reason in _FAILURE_STATUS:
            self.finish("abort" if tokens.finish_reason == "abort" else "error")
            status = _FAILURE_STATUS[tokens.finish_reason]
            raise ApiError(status, tokens.message or "the request was aborted by the server")
        if tokens.token_ids:
            self._observe(arrival)
        before = self.num_tokens
        text = self._push(tokens.token_ids, tokens.finish_reason, tokens.stop_reason)
        scored = self._score(tokens, self.num_tokens - before)
        if self._echo is not None:
            text, self._echo = self._echo + text, None
        finish_reason: str | None = tokens.finish_reason
        stop_reason: str | int | None = tokens.stop_reason
        if self._detokenizer.matched_stop is not None:
            finish_reason, stop_reason = "stop", self._detokenizer.matched_stop
        if finish_reason is not None:
            self.finish(finish_reason)
        return TextDelta(
            self._index, text, finish_reason, stop_reason, scored, tokens.prompt_logprobs
        )

    def finish(self, finish_reason: str) -> None:
        """Count the choice, once."""
        if self.is_finished:
            return
        self.is_finished = True
        self._metrics.finished(
            finish_reason,
            prompt_tokens=len(self._choice.prompt_ids),
            generation_tokens=self.num_tokens,
            latency_s=time.monotonic() - self._arrival_s,
            decode_s=self._last_token_s - self._first_token_s,
        )

    def _score(self, tokens: RequestTokens, num_counted: int) -> list[ScoredToken]:
        """The new tokens that count, after the prompt's if it is echoed."""
        if self._scored is None:
            return []
        found: list[ScoredToken] = []
        if self._echo is not None and tokens.prompt_logprobs is not None:
            found += self._scored.prompt(tokens.prompt_logprobs)
        new = (tokens.logprobs or [])[:num_counted]
        return found + self._scored.output(tokens.token_ids[: len(new)], new)

    def _push(
        self, token_ids: Sequence[int], finish_reason: str | None, stop_reason: int | None
    ) -> str:
        shown = list(token_ids)
        params = self._choice.params
        if (
            finish_reason == "stop"
            and shown
            and not params.include_stop_str_in_output
            and (shown[-1] == stop_reason or shown[-1] in self._eos_ids)
        ):
            shown.pop()  # the token that ended the request is counted, not shown
        if not params.stop:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(shown, finish_reason is not None)
        # One at a time: usage must not depend on how the tokens were grouped on their way.
        pieces: list[str] = []
        for token_id in shown:
            self.num_tokens += 1
            pieces.append(self._detokenizer.push([token_id]))
            if self._detokenizer.matched_stop is not None:
                return "".join(pieces)
        self.num_tokens += len(token_ids) - len(shown)
        if finish_reason is not None:
            pieces.append(self._detokenizer.push([], True))
        return "".join(pieces)

    def _observe(self, arrival: Arrival) -> None:
        if not self._last_token_s:
            self._first_token_s = arrival.time_s
            self._metrics.time_to_first_token.observe(arrival.time_s - self._arrival_s)
        else:
            self._metrics.inter_token_latency.observe(arrival.time_s - self._last_token_s)
        self._last_token_s = arrival.time_s
