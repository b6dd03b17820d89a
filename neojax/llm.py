"""`LLM`: the engine in this process, for scripts and notebooks. Mirrors vLLM's class."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tqdm import tqdm

from neojax import hub
from neojax.config import EngineConfig
from neojax.engine.build import build_engine
from neojax.engine.history import StepRecord
from neojax.engine.report import RequestTokens
from neojax.logprobs import TokenLogprobs
from neojax.outputs import CompletionOutput, Logprob, Logprobs, RequestOutput
from neojax.sampling_params import MAX_SEED, SamplingParams
from neojax.text.chat_template import render_chat
from neojax.text.detokenizer import Detokenizer
from neojax.text.token_bytes import shown
from neojax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]


class LLM:
    """A model, ready to generate.

    Takes the fields of `EngineConfig` as keyword arguments. `engine` is open to researchers:
    `llm.engine.step()` advances one step and returns its plan and outputs.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = model
        self.config = EngineConfig(**settings)
        checkpoint = hub.resolve_checkpoint(self.config.model)
        self.tokenizer = Tokenizer.from_checkpoint(checkpoint)
        self.engine = build_engine(self.config, checkpoint)
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids); one output per prompt, in their order.

        Raises ValueError when a prompt cannot be served; then none of them runs.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]  # type: ignore[list-item]
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        runs: dict[str, _Run] = {}
        outputs: list[RequestOutput] = []
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                output = self._new_output(prompt)  # type: ignore[arg-type]
                outputs.append(output)
                for index in range(params.n):
                    seed = None if params.seed is None else (params.seed + index) % (MAX_SEED + 1)
                    one = dataclasses.replace(params, n=1, seed=seed)
                    request_id = f"{output.request_id}-{index}"
                    self.engine.add_request(request_id, output.prompt_token_ids, one)
                    runs[request_id] = _Run(output, one, self.tokenizer)
            self._run(runs, use_tqdm)
        finally:
            # Also after Ctrl-C: nothing of this call stays behind in the engine.
            for request_id, run in runs.items():
                if not run.is_finished:
                    self.engine.abort(request_id)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template."""
        template = self.tokenizer.chat_template
        if template is None:
            raise ValueError(f"{self.config.model} has no chat template; use generate()")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        prompts = [
            self.tokenizer.encode(
                render_chat(
                    template,
                    conversation,
                    add_generation_prompt=add_generation_prompt,
                    bos_token=self.tokenizer.bos_token,
                    eos_token=self.tokenizer.eos_token,
                    **template_kwargs,
                ),
                add_special_tokens=False,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def set_policy(self, name: str) -> None:
        """Change the offload policy while nothing runs."""
        self.engine.set_policy(name)

    def set_block_limit(self, limit: int | None) -> None:
        """Change how many device blocks may be in use, while nothing runs."""
        self.engine.set_block_limit(limit)

    def explain(self, num_steps: int | None = None) -> list[StepRecord]:
        """The last steps, oldest first: mode, predicted and measured times, who moved and why."""
        return self.engine.explain(num_steps)

    def close(self) -> None:
        """Stop the host workers and free their memory."""
        self.engine.close()

    def _new_output(self, prompt: Prompt) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return RequestOutput(f"llm-{next(self._ids)}", text, ids, [])

    def _run(self, runs: dict[str, _Run], use_tqdm: bool) -> None:
        num_running = len(runs)
        num_tokens = 0
        with tqdm(total=num_running, desc="Processed prompts", disable=not use_tqdm) as bar:
            while self.engine.has_work:
                for step_output in self.engine.step().outputs:
                    run = runs.get(step_output.request_id)
                    if run is None or run.is_finished:
                        continue
                    if step_output.finish_reason == "rejected":
                        raise ValueError(step_output.message)
                    num_tokens += len(step_output.token_ids)
                    if run.push(step_output):
                        self.engine.abort(step_output.request_id)
                    if run.is_finished:
                        bar.update()
                seconds = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{num_tokens / max(seconds, 1e-9):.1f} tok/s", refresh=False)


class _Run:
    """One answer on its way."""

    def __init__(self, output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, params, output.prompt_token_ids)
        self._output = output
        self._completion = CompletionOutput("", [], len(output.outputs))
        if params.logprobs is not None:
            self._completion.logprobs = []
        output.outputs.append(self._completion)

    @property
    def is_finished(self) -> bool:
        """Whether nothing more of it will come."""
        return self._completion.finish_reason is not None

    def push(self, step: RequestTokens) -> bool:
        """Take in new tokens; True when a stop string asks for the request's end."""
        completion = self._completion
        completion.token_ids += step.token_ids
        if step.prompt_logprobs is not None:
            self._output.prompt_logprobs = [
                None if scores is None else self._logprobs(scores, self._params.prompt_logprobs)
                for scores in step.prompt_logprobs
            ]
        if completion.logprobs is not None:
            completion.logprobs += [
                self._logprobs(scores, self._params.logprobs) for scores in step.logprobs or ()
            ]
        is_finished = step.finish_reason is not None
        # The token that ended the request is part of the text only if it was asked for.
        last = step.token_ids[-1] if step.token_ids else None
        is_hidden = step.finish_reason == "stop" and (
            last in self._tokenizer.eos_ids
            if step.stop_reason is None
            else not self._params.include_stop_str_in_output
        )
        shown = step.token_ids[:-1] if is_hidden else step.token_ids
        self._detokenizer.push(shown, finished=is_finished)
        completion.text = self._detokenizer.text
        if self._detokenizer.matched_stop is not None:
            completion.finish_reason = "stop"
            completion.stop_reason = self._detokenizer.matched_stop
            return not is_finished
        if is_finished:
            completion.finish_reason = step.finish_reason  # type: ignore[assignment]
            completion.stop_reason = step.stop_reason
            if step.message is not None:
                log.error("request %s: %s", step.request_id, step.message)
        return False

    def _logprobs(self, scores: TokenLogprobs, number: int | None) -> Logprobs:
        ranked = [(scores.token_id, scores.logprob, scores.rank)]
        top = zip(scores.top_ids[:number], scores.top_logprobs, itertools.count(1), strict=False)
        return {
            token_id: Logprob(logprob, rank, shown(self._tokenizer.token_bytes(token_id)))
            for token_id, logprob, rank in (*top, *ranked)
        }
