"""One JSON line for each request, when it ends: when it came, where its KV cache was, its times."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from neojax.scheduler.plan import Move
from neojax.scheduler.request import Request


@dataclasses.dataclass(slots=True)
class _Entry:
    arrival_unix_s: float
    first_token_s: float | None = None
    moves: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])


class RequestLog:
    """Appends to a file, or with path None keeps nothing.

    Times of a line are seconds since the request's arrival. Raises OSError when the file cannot
    be opened.
    """

    def __init__(self, path: Path | None = None) -> None:
        # Line buffered: who follows the file sees each request as it ends.
        self._file = None if path is None else path.open("a", encoding="utf-8", buffering=1)
        self._entries: dict[Request, _Entry] = {}

    def arrived(self, request: Request) -> None:
        """A request was accepted."""
        if self._file is not None:
            self._entries[request] = _Entry(time.time())

    def moved(self, move: Move, step: int) -> None:
        """It started somewhere, was moved, or gave up its blocks."""
        if (entry := self._entries.get(move.request)) is not None:
            entry.moves.append(
                {
                    "step": step,
                    "time_s": round(time.time() - entry.arrival_unix_s, 6),
                    "placement": move.placement,
                    "reason": move.reason,
                }
            )

    def advanced(self, request: Request) -> None:
        """It got a token; ends its line if that was the last."""
        entry = self._entries.get(request)
        if entry is not None and entry.first_token_s is None:
            entry.first_token_s = time.time() - entry.arrival_unix_s
        if request.finish_reason is not None:
            self.finished(request)

    def finished(self, request: Request) -> None:
        """It has ended, for whatever reason."""
        entry = self._entries.pop(request, None)
        if entry is None or self._file is None:
            return
        first = entry.first_token_s
        line = {
            "request_id": request.request_id,
            "arrival_unix_s": round(entry.arrival_unix_s, 6),
            "placement": next(
                (m["placement"] for m in reversed(entry.moves) if m["placement"]), None
            ),
            "moves": entry.moves,
            "first_token_s": None if first is None else round(first, 6),
            "finished_s": round(time.time() - entry.arrival_unix_s, 6),
            "prompt_tokens": len(request.prompt_ids),
            "output_tokens": len(request.output_ids),
            "preemptions": request.num_preemptions,
            "finish_reason": request.finish_reason,
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """End the file; requests still running leave no line."""
        if self._file is not None:
            self._file.close()
