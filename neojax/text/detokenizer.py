"""Turns the tokens of one request into text that is safe to send, as they come.

Withholds what later tokens may still change: bytes of an unfinished character, and anything that
may turn out to be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from neojax.sampling_params import SamplingParams
from neojax.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Invalid bytes, or special tokens, without end must not be decoded again and again. Four bytes are
# enough for two decoders that began at different ones to agree: no character is longer.
_MAX_WINDOW_TOKENS = 32
_SYNC_TOKENS = 8
_SYNC_CHARACTERS = 4
_MAX_CONTEXT_TOKENS = 16


class Detokenizer:
    """Text of one request. Joined, what `push` returns is the decoded text up to the stop."""

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_ids: Sequence[int] = ()
    ):
        """prompt_ids: when given, the text is what follows the prompt's text, including a space
        that sentencepiece decoders drop at the beginning of a text."""
        self._decoder = _IncrementalDecoder(tokenizer, params.skip_special_tokens, prompt_ids)
        self._stops = params.stop
        self._keep_stop = params.include_stop_str_in_output
        self._withheld = ""
        self._released: list[str] = []
        self.matched_stop: str | None = None

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._released)

    def push(self, ids: Sequence[int], finished: bool = False) -> str:
        """Take new tokens; return the new text that nothing to come can change.

        finished: no more will come, so that everything is released. After a stop string nothing
        is.
        """
        if self.matched_stop is not None:
            return ""
        self._withheld += self._decoder.push(ids)
        if finished:
            self._withheld += self._decoder.flush()
        if not self._stops:
            return self._release(len(self._withheld))
        match = _first_match(self._withheld, self._stops)
        if match is not None:
            self.matched_stop, start = match
            end = start + len(self.matched_stop) if self._keep_stop else start
            return self._release(end)
        if finished:
            return self._release(len(self._withheld))
        return self._release(len(self._withheld) - _longest_start(self._withheld, self._stops))

    def _release(self, end: int) -> str:
        text, self._withheld = self._withheld[:end], self._withheld[end:]
        self._released.append(text)
        return text


def _first_match(text: str, stops: Sequence[str]) -> tuple[str, int] | None:
    """The stop string that is complete first (of those the longest), and where it begins.

    Not the one that begins first: the answer must not depend on how many tokens come at a time.
    """
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    _, start, stop = min(found)
    return stop, start


def _longest_start(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0


class _IncrementalDecoder:
    """Decodes a window of the last tokens: from the one before last that was whole on.

    A window, because decoders look at neighbours (bytes of a character, the space of a word), and
    only the last tokens, so that the cost of a token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = self._context(prompt_ids)
        self._whole = len(self._window)  # tokens of the window whose text is complete
        # Characters of the window's text that are out.
        self._emitted = len(self._decode(self._window))

    def push(self, ids: Sequence[int]) -> str:
        """New text, without characters that are not complete yet.

        Token by token, so that the text does not depend on how many come at a time.
        """
        return "".join([self._push_one(token) for token in ids])

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        complete = len(text.rstrip(REPLACEMENT))
        if complete == len(text):
            return self._advance(text)
        new = self._emit(text, complete)
        if len(self._window) - self._whole > _MAX_WINDOW_TOKENS:
            new += self._give_up_bytes(text)
        return new

    def flush(self) -> str:
        """What is left, when no more tokens come."""
        text = self._decode(self._window)
        return self._emit(text, len(text))

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The shortest end of a prompt that is text and ends with a whole character."""
        for length in range(1, min(len(prompt_ids), _MAX_CONTEXT_TOKENS) + 1):
            ids = list(prompt_ids[-length:])
            text = self._decode(ids)
            if text and not text.endswith(REPLACEMENT):
                return ids
        return []

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)

    def _emit(self, text: str, end: int) -> str:
        new = text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return new

    def _advance(self, text: str) -> str:
        """Emit a text that ends with a whole character, and drop what is before the last one."""
        new = self._emit(text, len(text))
        if new:
            self._window = self._window[self._whole :]
            self._whole = len(self._window)
            self._emitted = self._tokenizer.text_length(self._window, self._skip_special_tokens)
        elif len(self._window) - self._whole > _MAX_WINDOW_TOKENS:
            # Skipped special tokens: no text, no context.
            del self._window[self._whole : -_SYNC_TOKENS]
        return new

    def _give_up_bytes(self, text: str) -> str:
        """Emit a long run of invalid bytes but for the last, which may begin a character."""
        tail = self._window[-_SYNC_TOKENS:]
        tail_text = self._decode(tail)
        if not text.endswith(tail_text) or not tail_text.endswith(REPLACEMENT * _SYNC_CHARACTERS):
            return ""
        new = self._emit(text, len(text) - 1)
        self._window, self._whole, self._emitted = tail, 0, len(tail_text) - 1
        return new
