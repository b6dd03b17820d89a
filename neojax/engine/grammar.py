"""Text held to a JSON schema: which tokens may come next, by llguidance.

A schema is compiled by a thread of its own while other requests run; its request is queued when
that is done. A token's mask is computed when the token before it is read, while the next step
runs: so other requests never wait for a grammar, but a constrained request cannot be in two steps
at once, and gets its tokens in every second step while others run.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from neojax.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance


WHITESPACE = r"[ \n\r\t]{1,20}"
"""Between the parts of the JSON. Bounded: a weak model would go on with nothing else for ever."""


class Grammar:
    """The state of one request's text: a `Constraint` of the scheduler."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros(-(-vocab_size // 32), np.int32)
        self._fill()

    @property
    def mask(self) -> npt.NDArray[np.int32]:
        """One bit per token, the lowest first: whether it may come next."""
        return self._mask

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole, and nothing but its end could follow."""
        return self._matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        """Go on by a token. Raises ValueError for one that the mask does not allow."""
        if not self._matcher.consume_token(token_id):
            raise ValueError(f"the grammar does not allow token {token_id} here")
        if not self.is_complete:
            self._fill()

    def _fill(self) -> None:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if error := self._matcher.get_error():
            raise ValueError(f"json_schema: {error}")
        # The tokenizer's vocabulary may be smaller than the model's padded one.
        shared = min(len(words), len(self._mask))
        self._mask[:shared] = words[:shared]


class GrammarCompiler:
    """Makes grammars of JSON schemas, in a thread of its own."""

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: int) -> None:
        """tokenizer: asked for at the first schema. vocab_size: the model's."""
        self._load = tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "grammar")

    def compile(self, json_schema: str) -> concurrent.futures.Future[Grammar]:
        """Begin to compile. The result raises ValueError saying what is wrong with the schema."""
        return self._thread.submit(self._compile, json_schema)

    def close(self) -> None:
        """End the thread after what it compiles now."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, json_schema: str) -> Grammar:
        # Here, because most engines never need it, and a large vocabulary takes a second to read.
        import llguidance

        if self._tokenizer is None:
            tokenizer = self._load()
            if not tokenizer.eos_ids:
                raise ValueError("json_schema needs a model with an end-of-sequence token")
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer.to_json(),
                n_vocab=max(self._vocab_size, tokenizer.vocab_size),
                eos_token=sorted(tokenizer.eos_ids),
            )
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(
                json_schema, defaults={"whitespace_pattern": WHITESPACE}
            )
        except ValueError as error:
            raise ValueError(f"json_schema: {error}") from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"json_schema: {matcher.get_error().splitlines()[0]}")
        return Grammar(matcher, self._vocab_size)
