"""`LLM`: the engine in this process, for scripts and notebooks. Mirrors vLLM's class."""

from __future__ import annotations

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
from neojax.outputs import CompletionOutput, RequestOutput
from neojax.sampling_params import SamplingParams
from neojax.text.chat_template import render_chat
from neojax.text.detokenizer import Detokenizer
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
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                run = _Run(f"llm-{next(self._ids)}", prompt, params, self.tokenizer)  # type: ignore[arg-type]
                self.engine.add_request(run.output.request_id, run.output.prompt_token_ids, params)
                runs[run.output.request_id] = run
            self._run(runs, use_tqdm)
        finally:
            # Also after Ctrl-C: nothing of this call stays behind in the engine.
            for request_id, run in runs.items():
                if not run.output.finished:
                    self.engine.abort(request_id)
        return [run.output for run in runs.values()]

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

    def _run(self, runs: dict[str, _Run], use_tqdm: bool) -> None:
        num_running = len(runs)
        num_tokens = 0
        with tqdm(total=num_running, desc="Processed prompts", disable=not use_tqdm) as bar:
            while self.engine.has_work:
                for step_output in self.engine.step().outputs:
                    run = runs.get(step_output.request_id)
                    if run is None or run.output.finished:
                        continue
                    num_tokens += len(step_output.token_ids)
                    if run.push(step_output):
                        self.engine.abort(step_output.request_id)
                    if run.output.finished:
                        bar.update()
                seconds = bar.format_dict["elapsed"]
                bar.set_postfix_str(f"{num_tokens / max(seconds, 1e-9):.1f} tok/s", refresh=False)


class _Run:
    """One prompt on its way."""

    def __init__(
        self, request_id: str, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        text = prompt if isinstance(prompt, str) else None
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, params, ids)
        self._completion = CompletionOutput("", [])
        self.output = RequestOutput(request_id, text, ids, [self._completion])

    def push(self, step: RequestTokens) -> bool:
        """Take in new tokens; True when a stop string asks for the request's end."""
        completion = self._completion
        completion.token_ids += step.token_ids
        is_finished = step.finish_reason is not None
        # The token that ended the request is part of the text only if it was asked for.
        is_hidden = step.finish_reason == "stop" and not (
            self._params.include_stop_str_in_output and step.stop_reason is not None
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
