"""An engine process without a model: speaks the engine's protocol and says what the prompt asks.

A prompt may hold a script, a JSON object in double square brackets:
    [[{"say": "text", "delay": 0.01}]]
say: text to generate, then EOS; without it letters for ever. delay: seconds per token. wait:
seconds before the first. until: after the first, nothing before this file exists. per: tokens per
message. die/fail/error: after so many tokens, exit at once, send Failed, or end the request with an
error. reject: end it as one that could never run. host: placed on the host. tag: tells prompts
apart.

Started by tests in place of `python -m neojax.engine`; options of its own come before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import zmq

from neojax.engine.messages import (
    Abort,
    AddRequest,
    Failed,
    Ready,
    Shutdown,
    Stats,
    ToEngine,
    Tokens,
)
from neojax.engine.report import Distribution, EngineStats, RequestTokens, StepTotals
from neojax.logprobs import TokenLogprobs
from tests.tiny_checkpoint import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS_ID = TOKENIZER.token_to_id(EOS)
TOTALS = StepTotals(
    seconds={"device_only": 3.0, "pipelined": 1.0},
    host_idle_s=0.25,
    swap_bytes={"in": 10, "out": 20},
    tokens=Distribution([1, 8], [4, 2, 1], 30),
    queue_s=Distribution([1], [3, 1], 2.5),
    prefill_s=Distribution([1], [4, 0], 0.5),
    relative_error=Distribution([0.1], [5, 1], 0.7),
    predicted_gain=1.5,
    measured_gain=1.25,
)
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass
class Script:
    """What one prompt asks for."""

    say: str | None = None
    delay: float = 0.0
    wait: float = 0.0
    until: str | None = None
    per: int = 1
    die: int | None = None
    fail: int | None = None
    error: int | None = None
    reject: bool = False
    host: bool = False
    tag: str = ""

    @classmethod
    def of(cls, prompt: str) -> Script:
        found = re.findall(r"\[\[(\{.*?\})\]\]", prompt, re.DOTALL)
        return cls(**json.loads(found[-1])) if found else cls()


@dataclass
class Request:
    """A request in the fake's batch or queue."""

    message: AddRequest
    script: Script
    tokens: list[int] = field(default_factory=list)
    num_sent: int = 0
    due_s: float = 0.0

    def token(self, position: int) -> int:
        return self.tokens[position % len(self.tokens)]


def likelihood(token: int, number: int) -> TokenLogprobs:
    """The token is the second likeliest, after the one of the next id."""
    others = [(token + 1 - i) % EOS_ID for i in range(number)]
    return TokenLogprobs(token, -1.5, 2, others, [-0.5 - i for i in range(number)])


class FakeEngine:
    """The engine's side of both sockets."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        start = json.loads(sys.stdin.readline())
        self.config = start["config"]
        self.context = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.outbox = self.context.socket(zmq.PUSH)
        self.inbox.connect(start["endpoint_in"])
        self.outbox.connect(start["endpoint_out"])
        self.requests: dict[str, Request] = {}
        self.num_prompt = self.num_generated = self.num_steps = self.num_device = self.num_host = 0
        self.last_step_s = time.time()
        self.last_stats_s = 0.0
        threading.Thread(target=self.end_with_parent, daemon=True).start()

    def end_with_parent(self) -> None:
        sys.stdin.read()
        os._exit(0)

    def log(self, event: str, **fields: object) -> None:
        if self.options.log:
            with open(self.options.log, "a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **fields}) + "\n")

    def run(self) -> None:
        if self.options.fail_start:
            self.fail("no memory left: 3 GiB asked, 1 GiB there", 3)
        env = {name: os.environ[name] for name in os.environ if name.startswith("XLA_")}
        self.log("start", pid=os.getpid(), config=self.config, env=env)
        while self.options.ready_when and not self.options.ready_when.exists():
            time.sleep(0.02)
        context_length = self.config["max_model_len"] or 512
        self.send(Ready(context_length, TOKENIZER.get_vocab_size(), "fake", 100, 50, 16, 0.0))
        poller = zmq.Poller()
        poller.register(self.inbox, zmq.POLLIN)
        while True:
            now = time.time()
            timeout_s = min([0.05, *(r.due_s - now for r in self.running())])
            if poller.poll(max(0, timeout_s * 1000)):
                while self.inbox.poll(0):
                    self.receive(msgspec.msgpack.decode(self.inbox.recv(), type=ToEngine))
            self.step()
            self.send_stats()

    def running(self) -> list[Request]:
        return list(self.requests.values())[: self.config["max_num_seqs"]]

    def receive(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                prompt = TOKENIZER.decode(message.prompt_ids, skip_special_tokens=False)
                self.log("add", id=message.request_id, prompt=prompt, params=message.params)
                script = Script.of(prompt)
                text = LETTERS if script.say is None else script.say + EOS
                request = Request(message, script, TOKENIZER.encode(text).ids)
                request.due_s = time.time() + script.wait
                self.requests[message.request_id] = request
                self.num_prompt += len(message.prompt_ids)
                self.num_host += script.host
                self.num_device += not script.host
            case Abort():
                self.log("abort", id=message.request_id)
                self.requests.pop(message.request_id, None)
            case Shutdown():
                self.log("shutdown")
                os._exit(0)

    def step(self) -> None:
        now = time.time()
        outputs = [self.advance(r, now) for r in self.running() if r.due_s <= now]
        outputs = [output for output in outputs if output is not None]
        if outputs:
            self.num_steps += 1
            self.last_step_s = time.time()
            self.send(Tokens(outputs))

    def advance(self, request: Request, now: float) -> RequestTokens | None:
        script, message = request.script, request.message
        ids: list[int] = []
        reason: str | None = None
        stop_reason = None
        if request.num_sent and script.until and not os.path.exists(script.until):
            request.due_s = now + 0.02
            return None
        for _ in range(script.per):
            if script.reject:
                del self.requests[message.request_id]
                return RequestTokens(message.request_id, [], "rejected", message="never fits")
            if request.num_sent == script.die:
                os._exit(9)
            if request.num_sent == script.fail:
                self.fail("the device fell off the bus", 4)
            if request.num_sent == script.error:
                del self.requests[message.request_id]
                self.log("error", id=message.request_id)
                return RequestTokens(message.request_id, [], "error", message="NaN in the logits")
            if not request.num_sent:
                self.log("first", id=message.request_id)
            token = request.token(request.num_sent)
            request.num_sent += 1
            self.num_generated += 1
            ids.append(token)
            if token in message.params["stop_token_ids"]:
                reason, stop_reason = "stop", token
            elif token == EOS_ID and not message.params["ignore_eos"]:
                reason = "stop"
            elif request.num_sent == message.params["max_tokens"]:
                reason = "length"
            if reason is not None:
                del self.requests[message.request_id]
                break
        request.due_s = now + script.delay
        placement = "host" if script.host else "device"
        output = RequestTokens(message.request_id, ids, reason, stop_reason, placement)
        number, of_prompt = message.params["logprobs"], message.params["prompt_logprobs"]
        if number is not None:
            output.logprobs = [likelihood(token, number) for token in ids]
        if of_prompt is not None and request.num_sent <= len(ids):
            later = [likelihood(token, of_prompt) for token in message.prompt_ids[1:]]
            output.prompt_logprobs = [None, *later]
        if message.params["max_tokens"] == 0:
            output.token_ids, output.logprobs, output.finish_reason = [], None, "length"
            self.requests.pop(message.request_id, None)
        return output

    def send_stats(self) -> None:
        now = time.time()
        if now - self.last_stats_s < (0.1 if self.requests else 0.3):
            return
        self.last_stats_s = now
        running = self.running()
        on_host = sum(r.script.host for r in running)
        self.send(
            Stats(
                EngineStats(
                    num_running_device=len(running) - on_host,
                    num_running_host=on_host,
                    num_waiting=len(self.requests) - len(running),
                    device_kv_usage=min(1.0, len(running) / 10),
                    host_kv_usage=min(1.0, on_host / 10),
                    num_preemptions=0,
                    prompt_tokens=self.num_prompt,
                    generation_tokens=self.num_generated,
                    steps_device_only=self.num_steps,
                    steps_pipelined=0,
                    steps_rolling=0,
                    num_compiles_after_ready=0,
                    requests_placed_device=self.num_device,
                    requests_placed_host=self.num_host,
                    last_step_unix_s=self.last_step_s,
                    totals=TOTALS,
                )
            )
        )

    def fail(self, message: str, code: int) -> NoReturn:
        """Say what is wrong and end, once it has been said."""
        self.send(Failed(message))
        self.outbox.close()
        self.inbox.close(linger=0)
        self.context.term()
        os._exit(code)

    def send(self, message: msgspec.Struct) -> None:
        self.outbox.send(msgspec.msgpack.encode(message))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--log")
    parser.add_argument("--ready-when", type=Path, help="not before this file exists")
    parser.add_argument("--fail-start", action="store_true")
    FakeEngine(parser.parse_args()).run()
