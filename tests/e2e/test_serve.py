"""The default model through `python -m neojax.serve`: sensible answers, wherever the KV lives."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serve.running_server import RunningServer, is_running, sent, wait_for

# Fewer shapes to compile than by default; the first run on a machine compiles them all.
CONTEXT = 256
FLAGS = ("--max-model-len", f"{CONTEXT}", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
READY_TIMEOUT_S = 400
# One block holds 16 tokens: one of the questions below fits, the others go to the host. A limit of
# the allocator, not of the arrays: then the programs are those of the other servers here.
TINY_DEVICE_POOL = ("--num-gpu-blocks-limit", "6")

QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "Name a primary color.",
    "How many days are in a week?",
    "What do bees make?",
    "Which planet do we live on?",
    "What is the opposite of hot?",
    "What is frozen water called?",
)


def start(*flags: str) -> RunningServer:
    """A server over the real engine, still loading."""
    return RunningServer([sys.executable, "-m", "neojax.serve", *FLAGS, *flags])


@contextlib.contextmanager
def real_server(*flags: str) -> Iterator[RunningServer]:
    """A ready server over the real engine, which must end cleanly."""
    server = start(*flags)
    try:
        yield server.wait_ready(READY_TIMEOUT_S)
        assert server.stop() == 0, server.stderr
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server(default_checkpoint: object) -> Iterator[RunningServer]:
    """One server with a device pool that is large enough for all."""
    with real_server() as running:
        yield running


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def messages(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


def answers(server: RunningServer) -> list[str]:
    """Greedy answers to all questions, asked at the same time."""
    with client_of(server) as client, ThreadPoolExecutor(len(QUESTIONS)) as pool:

        def ask(question: str) -> str:
            reply = client.chat.completions.create(
                model="SmolLM2-135M-Instruct",
                messages=messages(question),
                temperature=0,
                max_tokens=24,
            )
            return reply.choices[0].message.content or ""

        return list(pool.map(ask, QUESTIONS))


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> list[str]:
    """What the server with room for all answers."""
    return answers(server)


def num_placed(server: RunningServer, placement: str) -> float:
    return server.metric("requests_placed_total", placement=placement)


def is_idle(server: RunningServer) -> bool:
    """Whether no request is left and both pools are empty."""
    names = ("num_requests_running", "kv_cache_usage_perc")
    lines = [
        line
        for line in server.get("/metrics").text.splitlines()
        if line.startswith(tuple(f"neojax:{name}{{" for name in names))
    ]
    return len(lines) == 4 and all(line.endswith(" 0.0") for line in lines)


def test_a_stream_tells_the_capital_of_france(server: RunningServer):
    with client_of(server) as client:
        stream = client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=messages(QUESTIONS[0]),
            temperature=0,
            max_tokens=40,
            stream=True,
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Paris" in text
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert len(chunks) > 4
    assert "<|im_end|>" not in text


def test_eight_concurrent_chats_answer_as_alone(server: RunningServer, expected: list[str]):
    assert "Paris" in expected[0]
    assert "7 days" in expected[3]
    assert "cold" in expected[6]
    with client_of(server) as client:
        for question, answer in zip(QUESTIONS[:3], expected, strict=False):
            alone = client.chat.completions.create(
                model="SmolLM2-135M-Instruct",
                messages=messages(question),
                temperature=0,
                max_tokens=24,
            )
            assert alone.choices[0].message.content == answer
    wait_for(lambda: is_idle(server), "the pools are not empty")
    assert server.metric("compiles_after_ready_total") == 0


def test_a_tiny_device_pool_overflows_to_the_host_with_the_same_answers(expected: list[str]):
    with real_server(*TINY_DEVICE_POOL) as tiny:
        assert answers(tiny) == expected
        # The statistics come a moment after the tokens.
        wait_for(
            lambda: num_placed(tiny, "host") + num_placed(tiny, "device") == len(QUESTIONS),
            "not all requests were counted",
        )
        assert num_placed(tiny, "host") > 0  # how many, measured costs decide
        assert tiny.metric("iterations_total", mode="pipelined") > 0
        assert tiny.metric("lane_busy_seconds_total", lane="host_attention") > 0
        assert tiny.metric("host_attention_bytes_total") > 0
        wait_for(lambda: is_idle(tiny), "the pools are not empty")
        assert tiny.metric("compiles_after_ready_total") == 0


def test_seeded_sampling_is_reproducible_whatever_else_runs(server: RunningServer):
    with client_of(server) as client, ThreadPoolExecutor(4) as pool:

        def draw(seed: int) -> str:
            reply = client.completions.create(
                model="SmolLM2-135M-Instruct", prompt="Once upon", seed=seed, max_tokens=12
            )
            return reply.choices[0].text

        alone = [draw(seed) for seed in (1, 2)]
        crowd = list(pool.map(draw, [1, 3, 2, 4]))
    assert [crowd[0], crowd[2]] == alone
    assert len(set(crowd)) == 4


def test_a_client_that_leaves_frees_the_pools(server: RunningServer):
    with client_of(server) as client:
        stream = client.completions.create(
            model="SmolLM2-135M-Instruct",
            prompt="One, two,",
            max_tokens=CONTEXT,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        wait_for(lambda: not is_idle(server), "the pools stay empty")
        stream.close()
    wait_for(lambda: is_idle(server), "the pools are not empty")


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_hang_up_in_any_state_free_every_block(server: RunningServer, stream: bool):
    def ended() -> tuple[float, float]:
        reasons = ("abort", "length")
        return tuple(server.metric("request_success_total", finished_reason=r) for r in reasons)

    before, arrived = ended(), server.metric("request_params_n_count")
    body = {"prompt": [5] * 60, "max_tokens": 190, "ignore_eos": True, "stream": stream}
    sockets = [sent(server, body) for _ in range(64)]
    wait_for(lambda: server.metric("request_params_n_count") == arrived + 64, "not all arrived")
    for sock in sockets:
        sock.close()
    wait_for(lambda: is_idle(server), "requests or blocks are left")
    assert server.metric("num_requests_waiting") == 0
    aborted, finished = (after - b for after, b in zip(ended(), before, strict=True))
    assert aborted + finished == 64
    assert aborted > 20


def test_huge_outputs_in_parallel_end_by_length_and_starve_nobody(server: RunningServer):
    def ask(length: int, max_tokens: int) -> tuple[int, str]:
        reply = server.complete([9] * length, max_tokens=max_tokens, ignore_eos=True).json()
        return reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]

    room = 20
    with ThreadPoolExecutor(5) as pool:
        long = [pool.submit(ask, CONTEXT - room, 10_000) for _ in range(4)]
        assert pool.submit(ask, 3, 4).result() == (4, "length")
        assert [future.result() for future in long] == [(room, "length")] * 4
    wait_for(lambda: is_idle(server), "the pools are not empty")


def test_a_bad_request_changes_nothing_for_its_neighbours(server: RunningServer):
    def text(prompt: list[int]) -> str:
        reply = server.complete(prompt, temperature=0, max_tokens=16, ignore_eos=True)
        return reply.json()["choices"][0]["text"]

    prompts = [[i] * 9 for i in range(100, 103)]
    alone = [text(prompt) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(text, prompt) for prompt in prompts]
        for bad in ({"prompt": [10**6]}, {"prompt": "a", "logit_bias": {"191222": -100}}):
            assert server.post("/v1/completions", bad).status_code == 400
        assert [future.result() for future in futures] == alone


def test_no_feature_or_length_that_comes_late_compiles_anything(server: RunningServer):
    for length in (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, CONTEXT - 2, CONTEXT - 1):
        assert server.complete([7] * length, max_tokens=1).status_code == 200
    for fields in (
        *({"temperature": 0}, {"temperature": 0.7, "seed": 1}, {"top_k": 5}, {"top_p": 0.5}),
        *({"n": 3}, {"stop": "x"}, {"stop_token_ids": [3]}, {"ignore_eos": True}),
        *({"kv_placement": "host"}, {"kv_placement": "device"}),
    ):
        assert server.complete([7] * 20, max_tokens=3, **fields).status_code == 200, fields
    wait_for(lambda: is_idle(server), "the pools are not empty")
    assert server.metric("compiles_after_ready_total") == 0


def test_a_bad_request_leaves_the_engine_serving(server: RunningServer):
    vocab_size = 49152
    assert server.complete([vocab_size]).status_code == 400
    assert server.complete([1] * CONTEXT).status_code == 400
    assert server.complete([vocab_size - 1], max_tokens=1).status_code == 200
    assert server.complete([1] * (CONTEXT - 1)).json()["usage"]["completion_tokens"] == 1
    wait_for(lambda: is_idle(server), "the pools are not empty")


def test_neither_process_outlives_the_other(tiny_checkpoint: Path):
    def engine_of(running: RunningServer) -> int:
        children = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children")
        return int(wait_for(lambda: children.read_text().split(), "no engine")[0])

    tiny = (str(tiny_checkpoint), "--load-format", "dummy")
    running = start(*tiny, "--enforce-eager")
    try:
        running.wait_ready(READY_TIMEOUT_S)
        os.kill(engine_of(running), signal.SIGKILL)
        assert running.wait() == 1
        assert "SIGKILL" in running.stderr
    finally:
        running.kill()

    running = start(*tiny)
    engine = engine_of(running)
    time.sleep(2)  # somewhere in loading or compiling
    running.kill()
    wait_for(lambda: not is_running(engine), "the engine lives on")
