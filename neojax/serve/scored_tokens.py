"""Log probabilities as a client sees them: tokens as text, and where each stands in the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from neojax.logprobs import TokenLogprobs
from neojax.sampling_params import SamplingParams
from neojax.serve.text_model import TextModel
from neojax.text.token_bytes import shown


class Alternative(NamedTuple):
    """A token that might have stood here."""

    token: str
    data: bytes
    logprob: float


class ScoredToken(NamedTuple):
    """A token that does. logprob: None for the first token of a prompt."""

    token: str
    data: bytes
    logprob: float | None
    offset: int  # characters of the answer's text before it
    top: list[Alternative]  # the likeliest, in descending order


class ScoredTokens:
    """The tokens of one choice, in their order. With an echo, the prompt's come first."""

    def __init__(
        self,
        text_model: TextModel,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        echo: str | None,
    ) -> None:
        self._text_model = text_model
        self._params = dataclasses.replace(params, stop=())
        self._prompt_ids = prompt_ids
        self._offset = len(echo or "")
        self._decoder = text_model.detokenizer(self._params, prompt_ids)

    def prompt(self, scores: Sequence[TokenLogprobs | None]) -> list[ScoredToken]:
        """The echoed prompt's tokens."""
        decoder, offset = self._text_model.detokenizer(self._params, ()), 0
        found: list[ScoredToken] = []
        for token_id, score in zip(self._prompt_ids, scores, strict=True):
            found.append(self._scored(token_id, score, min(offset, self._offset)))
            offset += len(decoder.push([token_id]))
        return found

    def output(
        self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs]
    ) -> list[ScoredToken]:
        """New tokens."""
        found: list[ScoredToken] = []
        for token_id, score in zip(token_ids, scores, strict=True):
            found.append(self._scored(token_id, score, self._offset))
            self._offset += len(self._decoder.push([token_id]))
        return found

    def _scored(self, token_id: int, score: TokenLogprobs | None, offset: int) -> ScoredToken:
        data = self._text_model.token_bytes(token_id)
        if score is None:
            return ScoredToken(shown(data), data, None, offset, [])
        top: list[Alternative] = []
        number = self._params.logprobs
        for other, logprob in zip(score.top_ids[:number], score.top_logprobs, strict=False):
            bytes_of_other = self._text_model.token_bytes(other)
            top.append(Alternative(shown(bytes_of_other), bytes_of_other, logprob))
        return ScoredToken(shown(data), data, score.logprob, offset, top)
