"""Sends a `Traffic` to an OpenAI server, streaming, and notes when each piece of text comes.

A request is sent when it is due, whatever the server still has to do: a slow server does not slow
down its own load. Needs the `openai` package (the `bench` extra).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from typing import Any

import numpy as np
from tqdm import tqdm

from neojax.bench.arrivals import Traffic
from neojax.bench.driver import Run
from neojax.bench.metrics import RequestRecord


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """The server and what it is asked for."""

    base_url: str
    api_key: str
    model: str | None  # None: the first that /v1/models names
    max_token_id: int
    timeout_s: float
    extra_body: dict[str, Any]


async def send_traffic(
    target: Target, traffic: Traffic, *, seed: int, progress: str | None = None
) -> Run:
    """Serve all of the traffic: token ids as prompts, greedy, EOS ignored.

    A request that fails is a record with an error; only an unreachable server raises
    (openai.APIConnectionError).
    """
    import openai

    async with openai.AsyncOpenAI(
        base_url=target.base_url,
        api_key=target.api_key,
        timeout=target.timeout_s,
        max_retries=0,
        # One connection per request in flight: a bounded pool would queue in the client.
        http_client=openai.DefaultAsyncHttpxClient(limits=_no_limits()),
    ) as client:
        model = target.model or (await client.models.list()).data[0].id
        rng = np.random.default_rng(seed)
        prompts = [
            rng.integers(0, target.max_token_id + 1, lengths.input).tolist()
            for lengths in traffic.lengths
        ]
        start_s = time.perf_counter()
        records: list[RequestRecord] = []
        with tqdm(total=len(prompts), desc=progress, disable=progress is None, leave=False) as bar:

            async def complete(index: int, sent_s: float) -> None:
                lengths = traffic.lengths[index]
                record = RequestRecord(index, lengths.input, sent_s)
                records.append(record)
                try:
                    await _stream(client, target, model, prompts[index], lengths.output, record)
                    record.is_finished = True
                except openai.OpenAIError as error:
                    record.error = str(error)
                bar.update()

            await _send_all(traffic, start_s, complete)
    return Run(start_s, sorted(records, key=lambda record: record.index))


async def _send_all(traffic: Traffic, start_s: float, complete: Any) -> None:
    if traffic.at_s is not None:
        async with asyncio.TaskGroup() as tasks:
            for index, at_s in enumerate(traffic.at_s):
                await asyncio.sleep(start_s + at_s - time.perf_counter())
                tasks.create_task(complete(index, start_s + at_s))
        return
    left = deque(range(len(traffic.lengths)))

    async def client_loop() -> None:
        while left:
            await complete(left.popleft(), time.perf_counter())

    await asyncio.gather(*(client_loop() for _ in range(traffic.clients or 1)))


async def _stream(
    client: Any, target: Target, model: str, prompt: list[int], output_tokens: int,
    record: RequestRecord,
) -> None:  # fmt: skip
    """One request. Each token gets the time of the piece it came in.

    A piece may hold several tokens or none (half a character, or text held back for a stop
    string), and only the usage at the end says how many tokens there were: they are laid evenly
    over the pieces.
    """
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=output_tokens,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, **target.extra_body},
    )
    piece_s: list[float] = []
    num_tokens = None
    async for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        if chunk.choices:
            piece_s.append(time.perf_counter())
    if not piece_s or num_tokens == 0:
        record.error = "the stream ended without a token"
        return
    count = len(piece_s) if num_tokens is None else num_tokens
    last = len(piece_s) - 1
    record.token_s = [piece_s[round(i * last / max(1, count - 1))] for i in range(count)]


def _no_limits() -> Any:
    import httpx

    return httpx.Limits(max_connections=None, max_keepalive_connections=None)
